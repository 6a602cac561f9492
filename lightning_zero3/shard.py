"""From a model to a sharded model, and back to full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero3.checkpoints import sharded_checkpoint
from lightning_zero3.checkpoints.boxes import FlatRange
from lightning_zero3.checkpoints.sharded_checkpoint import Stored, StoredState
from lightning_zero3.chunk import PrecisionPolicy
from lightning_zero3.comm import Communicator
from lightning_zero3.engine import Engine
from lightning_zero3.errors import Zero3Error
from lightning_zero3.layer import Zero3Layer, layer_of
from lightning_zero3.state import LayerState
from lightning_zero3.wrap import AutoWrapPolicy, check_memory, plan_layers

__all__ = [
    "engine_of",
    "full_state_dict",
    "gather_parameters",
    "load_full_state_dict",
    "shard_module",
    "sharded_state_dict",
    "trainable_chunks",
    "unshard_module",
]


def shard_module(
    module: nn.Module,
    auto_wrap_policy: AutoWrapPolicy = "auto",
    *,
    comm: Communicator | None = None,
    device: torch.device | str | None = None,
    precision: PrecisionPolicy | None = None,
    prefetch: int = 1,
    broadcast_buffers: bool = True,
) -> Engine:
    """Shard a model in place: every rank keeps 1/N of each layer. Called on every rank.

    The module is then used as before. Build its optimizer from `trainable_chunks(module)`, or through `Zero3Strategy`
    from its parameters.

    Args:
        module: the whole model. The first rank's parameters and buffers are everyone's.
        auto_wrap_policy: which modules become layers, see `plan_layers`.
        comm: the ranks; default all.
        device: where chunks and slots live; default the CPU.
        precision: dtypes to compute and reduce in.
        prefetch: how many layers ahead to fetch; each costs one slot.
        broadcast_buffers: overwrite buffers with the first rank's before each forward pass in training, as DDP does.

    Raises:
        Zero3Error: no parameters, no such policy, or already sharded.
    """
    if engine_of(module) is not None:
        raise Zero3Error(f"{type(module).__name__} is sharded already")
    device = torch.device(device or "cpu")
    check_memory(module)
    plans, top = plan_layers(module, auto_wrap_policy)
    engine = Engine(comm or Communicator(device=device), device, precision, prefetch)
    for plan in plans:
        Zero3Layer(
            plan.entries[0], device=device, engine=engine, name=plan.name, owned=plan.owned, entries=plan.entries
        )
    engine.root = Zero3Layer(module, device=device, engine=engine, name="root", owned=top.owned, entries=top.entries)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
    engine.buffers = [(m._buffers, name) for m in module.modules() for name in m._buffers]
    engine.broadcast_buffers()
    if not broadcast_buffers:
        engine.buffers.clear()
    return engine


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that shards `module` or a part of it, if any."""
    layers = (layer_of(p) for p in module.parameters())
    return next((layer.engine for layer in layers if layer is not None), None)


def trainable_chunks(module: nn.Module) -> list[nn.Parameter]:
    """What to build an optimizer of a sharded module from: this rank's chunks."""
    return [p for layer in _layers(module) for p in layer.get_trainable_chunk()]


def _layers(module: nn.Module) -> list[Zero3Layer]:
    """The layers that own parameters of `module`, in the engine's order."""
    layers = {layer for p in module.parameters() if (layer := layer_of(p)) is not None}
    return sorted(layers, key=lambda layer: layer.index)


def _bare_state_dict(module: nn.Module, engine: Engine) -> dict[str, Any]:
    """The module's own state dict, with the parameters themselves in it, sharded as they are."""
    engine.bare_state_dicts = True
    try:
        return module.state_dict(keep_vars=True)
    finally:
        engine.bare_state_dicts = False


@contextmanager
def gather_parameters(module: nn.Module, writeback: bool = False) -> Iterator[nn.Module]:
    """Full parameters of `module`, as stored, for as long as the context lasts. Entered on every rank.

    Args:
        module: a sharded model or a part of it. Layers that it shares with other parts are gathered as a whole.
        writeback: afterwards, let the first rank's values be everyone's. Without it changes are lost.

    Raises:
        Zero3Error: not sharded; some rank does not come; the layers are in use.

    Example::

        with gather_parameters(model.head, writeback=True):
            torch.nn.init.zeros_(model.head.weight)
    """
    layers = _layers(module)
    if not layers:
        raise Zero3Error(f"{type(module).__name__} has no sharded parameters; use them as they are")
    layers[0].engine.comm.together("gather_parameters()")
    held = []
    for layer in layers:
        if layer.depth:
            raise Zero3Error(f"gather_parameters() of layer {layer.name!r} while it computes; its parameters are there")
        if layer.state in (LayerState.RESIDENT, LayerState.GATHERED):
            continue  # full already
        layer.release()
        full = layer.gather(layer.chunks)
        layer.hold(full)
        held.append((layer, full))
    try:
        yield module
    except BaseException:
        for layer, _ in held:
            layer.let_go()
        raise
    for layer, full in held:
        layer.let_go()
        if writeback:
            for chunk, flat in zip(layer.chunks, full, strict=True):
                for lo, hi in chunk.layout.gaps(chunk.total):
                    flat[lo:hi].zero_()
                layer.engine.comm.scatter(flat.view(torch.uint8), chunk.data.detach().view(torch.uint8))
            layer.updates += 1


def full_state_dict(
    module: nn.Module, rank0_only: bool = True, only: Callable[[str], bool] | None = None
) -> dict[str, Any]:
    """The state dict that the plain, unsharded module would have, on the CPU. Called on every rank.

    Args:
        module: a sharded model or a part of it; a plain one gives its own state dict.
        rank0_only: give the other ranks an empty dict, so that only one host holds the whole model.
        only: which names to take (adapters, say); chunks without any of them are not gathered. The same on every rank.

    Layers are gathered one by one: besides its result, no rank holds more than one layer.

    Raises:
        Zero3Error: some rank does not come.
    """
    layers = _layers(module)
    take = only or (lambda name: True)
    if not layers:
        state = module.state_dict()
        return state if only is None else {key: value for key, value in state.items() if only(key)}
    engine = layers[0].engine
    engine.comm.together("full_state_dict()")
    state = _bare_state_dict(module, engine)
    for key in [key for key in state if not take(key)]:
        del state[key]
    asked = {id(value) for value in state.values()}
    wanted = engine.comm.rank == 0 or not rank0_only
    full: dict[int, Tensor] = {}
    for layer in layers:
        chunks = [chunk for chunk in layer.chunks if not asked.isdisjoint(map(id, chunk.params))]
        for chunk, flat in zip(chunks, layer.gather(chunks), strict=True):
            for param, view in zip(chunk.params, chunk.views(flat), strict=True) if wanted else ():
                full[id(param)] = view.clone(memory_format=torch.preserve_format).cpu()
    if not wanted:
        return {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            state[key] = full[id(value)] if id(value) in full else value.detach().cpu().clone()
    return state


def sharded_state_dict(module: nn.Module) -> dict[str, Any]:
    """The module's state dict for `sharded_checkpoint`: each rank's parts of parameters, to write or to read into.

    What is not sharded (buffers) is there on the first rank only, whose values count.
    """
    layers = _layers(module)
    engine = layers[0].engine
    parts: dict[int, FlatRange] = {}
    for layer in layers:
        layer.release()
        for chunk in layer.chunks:
            nothing = chunk.data.detach()[:0]
            for index, param in enumerate(chunk.params):
                parts[id(param)] = chunk.range_of(index, 0, nothing)
            for index, part, here in chunk.pieces():
                parts[id(chunk.params[index])] = chunk.range_of(index, part.start, chunk.data.detach()[here])
    state = _bare_state_dict(module, engine)
    return {
        key: parts.get(id(value), value.detach() if isinstance(value, Tensor) else value)
        for key, value in state.items()
        if id(value) in parts or engine.comm.rank == 0
    }


def load_full_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load what `full_state_dict` gave, or the plain module would have, into the chunks. Every rank takes its own part.

    Of a `StoredState`, every rank reads its own part only.

    Raises:
        Zero3Error: (strict) missing or unexpected keys; a shape that does not fit. Nothing has been changed then.
    """
    layers = _layers(module)
    state = state.data if isinstance(state, StoredState) else state
    if not layers:
        state = {key: value.read() if isinstance(value, Stored) else value for key, value in state.items()}
        module.load_state_dict(state, strict=strict)
        return
    engine = layers[0].engine
    mine = _bare_state_dict(module, engine)
    problems = []
    if strict:
        problems += [f"missing: {key!r}" for key in mine if key not in state]
        problems += [f"unexpected: {key!r}" for key in state if key not in mine]
    for key, value in mine.items():
        if key not in state or not isinstance(value, Tensor):
            continue
        if value.shape != state[key].shape:
            problems.append(f"shape of {key!r}: {list(state[key].shape)} in the state dict, {list(value.shape)} here")
        if layer_of(value) and state[key].dtype.is_floating_point and not value.dtype.is_floating_point:
            problems.append(
                f"dtype of {key!r}: {state[key].dtype} in the state dict, {value.dtype} here"
            )  # no rounding
    if problems:
        raise Zero3Error(f"cannot load the state dict into {type(module).__name__}: " + "; ".join(problems))

    name_of = {id(value): key for key, value in mine.items() if key in state}
    stored: dict[str, dict[str, Tensor]] = {}  # by checkpoint: what to read into
    with torch.no_grad():
        for layer in layers:
            layer.release()
            for chunk in layer.chunks:
                for index, part, here in chunk.pieces():
                    value = state.get(name_of.get(id(chunk.params[index]), ""))
                    if isinstance(value, Stored):
                        into = chunk.range_of(index, part.start, chunk.data.detach()[here])
                        stored.setdefault(value.path, {})[value.key] = into
                    elif value is not None:
                        chunk.data[here].copy_(chunk.layout.spans[index].flatten(value)[part])
            layer.updates += 1
        for key, old in mine.items():
            new = state.get(key)
            if key in state and not isinstance(old, Tensor):  # a module's extra state
                module.get_submodule(key.rpartition(".")[0]).set_extra_state(new)
            elif layer_of(old) is None and isinstance(new, Stored):
                stored.setdefault(new.path, {})[new.key] = old.detach()
            elif layer_of(old) is None and new is not None:
                old.copy_(new)
    for path in sorted({value.path for value in state.values() if isinstance(value, Stored)}):
        sharded_checkpoint.read(path, stored.get(path, {}), engine.comm)


def unshard_module(module: nn.Module) -> None:
    """Undo `shard_module` on the first rank: full parameters on the CPU, no engine. Called on every rank.

    On the other ranks the module is left behind as an empty shell; their processes are about to end.
    """
    engine = engine_of(module)
    if engine is None:
        return
    state = full_state_dict(module)
    engine.dissolve()
    for name, param in module.named_parameters():
        if name in state:
            param.data = state[name]
    for buffer in module.buffers():
        buffer.data = buffer.data.cpu()
