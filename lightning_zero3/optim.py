"""Optimizers over segments, and their state as plain PyTorch would have it.

`configure_optimizers` runs unmodified, on the real parameters. Afterwards each parameter group's parameters are
replaced by segments: views of the chunks, one for each unbroken run of the group's parameters in a layer. Whatever an
optimizer does element by element it then does to this rank's part of the model, and no more.

In a checkpoint the state is per parameter again, in full shape, under the numbers that plain PyTorch gives parameters,
so that it can be resumed under any strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero3.chunk import Chunk, Segment
from lightning_zero3.engine import Engine
from lightning_zero3.errors import Zero3Error
from lightning_zero3.gradients import StandIns
from lightning_zero3.layer import Zero3Layer, layer_of

__all__ = ["ShardedOptimizers"]

_NOT_ELEMENTWISE = {
    "Adafactor": "it factors each matrix's second moment into rows and columns",
    "DAdaptAdam": "it estimates its step size from inner products over all parameters",
    "DAdaptSGD": "it estimates its step size from inner products over all parameters",
    "DistributedShampoo": "it preconditions whole matrices",
    "FusedLAMB": "it scales updates by each parameter's norm",
    "LAMB": "it scales updates by each parameter's norm",
    "LARS": "it scales updates by each parameter's norm",
    "LBFGS": "its line search takes inner products over all parameters",
    "Lamb": "it scales updates by each parameter's norm",
    "Lars": "it scales updates by each parameter's norm",
    "Muon": "it orthogonalises whole matrices",
    "NovoGrad": "it scales updates by each parameter's gradient norm",
    "Prodigy": "it estimates its step size from inner products over all parameters",
    "SOAP": "it preconditions whole matrices",
    "Shampoo": "it preconditions whole matrices",
    "SparseAdam": "it wants sparse gradients, and chunks are dense",
    "ZeroRedundancyOptimizer": "it divides the parameters among ranks itself",
}

_SCALARS = {"step", "mu_product", "eta", "mu"}  # per-parameter state that is one number, in torch.optim

_Run = tuple[int, ...]


@dataclass
class _Group:
    """One parameter group: the parameters it was given, and the runs of them that its segments cover."""

    params: list[nn.Parameter]
    runs: list[tuple[Chunk, _Run]] = field(default_factory=list)
    outside: list[nn.Parameter] = field(default_factory=list)  # not the module's; left as they are


class ShardedOptimizers:
    """All optimizers of one sharded module.

    Args:
        optimizers: built from the module's parameters. Their groups are changed in place.
        engine: which shards the module.

    Raises:
        Zero3Error: an optimizer that does not work element by element, or a parameter in two optimizers.
    """

    def __init__(self, optimizers: list[Optimizer], engine: Engine) -> None:
        self.engine = engine
        self._stand_ins = StandIns(engine)
        self._groups: dict[Optimizer, list[_Group]] = {}
        self._stepped: set[Optimizer] = set()
        self._places = {
            id(p): (chunk, i)
            for layer in engine.layers
            for chunk in layer.trainable
            for i, p in enumerate(chunk.params)
        }
        states: dict[Optimizer, dict[int, dict[str, Any]]] = {}
        seen: set[int] = set()
        self._check_frozen()
        for optimizer in optimizers:
            for name in (c.__name__ for c in type(optimizer).__mro__ if c.__name__ in _NOT_ELEMENTWISE):
                raise Zero3Error(
                    f"{name} cannot run on shards: {_NOT_ELEMENTWISE[name]}, and each rank has only a part of them. "
                    "Use an optimizer that works element by element (SGD, Adam, AdamW, RMSprop, Adagrad, ...)."
                )
            groups = []
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if id(param) in seen:
                        raise Zero3Error(f"parameter {_name(param)} is in two optimizers; give it to one")
                    seen.add(id(param))
                groups.append(self._group(group["params"]))
            self._groups[optimizer] = groups
            states[optimizer] = self._take_states(optimizer)
        self._cut()
        for optimizer, state in states.items():  # of optimizers that make state in their constructor (Adagrad)
            if state:
                self._put_states(optimizer, state)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    # -- steps --------------------------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Gradients of parameters become what autograd wants them to be."""
        self._check_frozen()
        self._stand_ins.remove()

    def after_backward(self) -> None:
        """Gradients of parameters become stand-ins."""
        self._stand_ins.place()

    def release(self) -> None:
        """Leave the module without stand-ins."""
        self._stand_ins.remove()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if len(optimizer.param_groups) != len(self._groups[optimizer]):
            raise Zero3Error(
                f"a parameter group was added to {type(optimizer).__name__} after set-up, when its parameters had "
                "become shards. Return all groups from configure_optimizers; one's learning rate may be 0 for a while."
            )
        self._stand_ins.settle()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.engine.weights_changed(self._layers(optimizer))
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            for segment in self.segments(optimizer):
                for key, value in optimizer.state.get(segment, {}).items():
                    if isinstance(value, Tensor) and value.shape != segment.shape and value.numel() > 1:
                        raise Zero3Error(
                            f"{type(optimizer).__name__} keeps {key!r} of shape {list(value.shape)} for "
                            f"{segment.numel()} elements: it does not work element by element, so not on shards"
                        )

    def _check_frozen(self) -> None:
        for chunk in (c for layer in self.engine.layers for c in layer.chunks if not c.trainable):
            for name in (n for n, p in zip(chunk.names, chunk.params, strict=True) if p.requires_grad):
                raise Zero3Error(
                    f"parameter {name!r} wants a gradient, but it was frozen when the module was sharded. Freeze and "
                    "unfreeze before the Trainer's first stage, or load the checkpoint into a new module."
                )

    def grad_norms(self, norm_type: float) -> dict[str, Tensor]:
        """Norm of each trainable parameter's gradient, by name; the same on every rank."""
        self._stand_ins.settle()
        chunks = [c for layer in self.engine.layers for c in layer.trainable]
        norms = torch.zeros(sum(len(c.params) for c in chunks), dtype=torch.float64, device=self.engine.device)
        largest = norm_type == float("inf")
        first = 0
        for chunk in chunks:
            for segment in chunk.segments:
                grad = segment.param.grad
                for index, _, here in chunk.pieces(segment) if grad is not None else ():
                    norm = grad[here].double().norm(norm_type)  # type: ignore[index]
                    norms[first + index] = norm if largest else norm**norm_type
            first += len(chunk.params)
        norms = self.engine.comm.max(norms) if largest else self.engine.comm.sum(norms) ** (1.0 / norm_type)
        return dict(zip((n for c in chunks for n in c.names), norms.float(), strict=True))

    # -- segments -----------------------------------------------------------------------------------------------------

    def _group(self, params: Iterable[nn.Parameter]) -> _Group:
        group = _Group(list(params))
        members: dict[Chunk, set[int]] = {}
        for param in group.params:
            if id(param) in self._places:
                chunk, index = self._places[id(param)]
                members.setdefault(chunk, set()).add(index)
            elif layer_of(param) is None:
                group.outside.append(param)
        group.runs = [(chunk, tuple(run)) for chunk, indices in members.items() for run in chunk.layout.runs(indices)]
        return group

    def _cut(self) -> None:
        """Cut all chunks as the groups' runs say, and let the optimizers see the segments."""
        by_chunk: dict[Chunk, list[_Run]] = {c: [] for layer in self.engine.layers for c in layer.trainable}
        for group in (g for groups in self._groups.values() for g in groups):
            for chunk, run in group.runs:
                by_chunk[chunk].append(run)
        segments: dict[tuple[Chunk, _Run], Segment] = {}
        for chunk, runs in by_chunk.items():
            for run, segment in zip(runs, chunk.cut(runs), strict=True):
                if segment is not None:
                    segments[chunk, run] = segment
        self._segments = segments
        for optimizer, groups in self._groups.items():
            kept = dict(optimizer.state)
            for param_group, group in zip(optimizer.param_groups, groups, strict=True):
                found = [segments[key].param for key in group.runs if key in segments]
                param_group["params"] = found + group.outside
            optimizer.state.clear()
            for param in (p for g in optimizer.param_groups for p in g["params"]):
                if param in kept:
                    optimizer.state[param] = kept[param]

    def _layers(self, optimizer: Optimizer) -> list[Zero3Layer]:
        layers = {layer_of(p) for g in self._groups[optimizer] for p in g.params}
        return sorted((layer for layer in layers if layer is not None), key=lambda layer: layer.index)

    def segments(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """This rank's segments of one optimizer, with their gradients as they are to be used."""
        self._stand_ins.settle()
        return [p for group in optimizer.param_groups for p in group["params"]]

    @contextmanager
    def showing_segments(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the optimizer's groups hold its segments, with their gradients as they are to be used."""
        self._stand_ins.settle()
        yield

    def parameters(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The parameters that an optimizer was built from."""
        return [p for group in self._groups[optimizer] for p in group.params]

    # -- state --------------------------------------------------------------------------------------------------------

    def _ids(self, optimizer: Optimizer) -> dict[int, int]:
        """id() of each parameter -> the number it has in a state dict."""
        return {id(p): i for i, p in enumerate(p for g in self._groups[optimizer] for p in g.params)}

    def _take_states(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        numbers = self._ids(optimizer)
        states = {numbers[id(p)]: optimizer.state.pop(p) for p in list(optimizer.state) if id(p) in numbers}
        return {number: state for number, state in states.items() if state}

    @torch.no_grad()
    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state dict in full, as plain PyTorch would write it. Called on every rank.

        Returns:
            On the first rank everything, tensors on the CPU. On the others the groups only.
        """
        ids, comm = self._ids(optimizer), self.engine.comm
        param_groups = [
            {**{k: v for k, v in param_group.items() if k != "params"}, "params": [ids[id(p)] for p in group.params]}
            for param_group, group in zip(optimizer.param_groups, self._groups[optimizer], strict=True)
        ]

        # What each rank's segments hold, by parameter: the dtype of what is per element, and all else as it is.
        held: dict[int, dict[str, Any]] = {}
        for group in self._groups[optimizer]:
            for chunk, run in group.runs:
                segment = self._segments.get((chunk, run))
                state = optimizer.state.get(segment.param, {}) if segment else {}
                for index in run if state else ():
                    held[ids[id(chunk.params[index])]] = {
                        key: value.dtype if _per_element(value, segment.param) else _on_cpu(value)  # type: ignore[union-attr]
                        for key, value in state.items()
                    }
        merged: dict[int, dict[str, Any]] = {}
        for part in comm.all_objects(held):
            for number, state in part.items():
                merged.setdefault(number, state)

        # Each parameter gets numbers of its own: a step count that two parameters share would count twice when resumed.
        states = {n: {k: _clone(v) for k, v in s.items()} for n, s in sorted(merged.items())}
        for chunk in dict.fromkeys(chunk for g in self._groups[optimizer] for chunk, _ in g.runs):
            runs = [run for g in self._groups[optimizer] for c, run in g.runs if c is chunk]
            owned = {ids[id(chunk.params[i])]: i for run in runs for i in run}
            keys = {k: v for n in owned for k, v in merged.get(n, {}).items() if isinstance(v, torch.dtype)}
            for key, dtype in keys.items():
                flat = torch.zeros(chunk.total, dtype=dtype, device=chunk.data.device)
                for run in runs:
                    segment = self._segments.get((chunk, run))
                    if segment is not None and key in optimizer.state.get(segment.param, {}):
                        comm.own(flat)[segment.lo : segment.hi] = optimizer.state[segment.param][key]
                comm.wait(comm.gather(f"optimizer state {key!r} of layer {chunk.layer!r}", [flat]))
                if comm.rank == 0:
                    for number, index in owned.items():
                        if key in states.get(number, {}):
                            states[number][key] = chunk.layout.spans[index].view(flat).clone().cpu()
        for param in (p for g in self._groups[optimizer] for p in g.outside):
            if param in optimizer.state:
                states[ids[id(param)]] = dict(optimizer.state[param])
        return {"state": states if comm.rank == 0 else {}, "param_groups": param_groups}

    def load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Load a full state dict, whoever wrote it. Every rank takes its own part.

        Raises:
            Zero3Error: other groups than this optimizer has.
        """
        groups = self._groups[optimizer]
        sizes = [len(g.params) for g in groups]
        given = [len(g["params"]) for g in state_dict["param_groups"]]
        if sizes != given:
            raise Zero3Error(
                f"the checkpoint's {type(optimizer).__name__} has parameter groups of {given} parameters, this one of "
                f"{sizes}: configure_optimizers or the model has changed"
            )
        numbers = [n for g in state_dict["param_groups"] for n in g["params"]]
        states = {i: state_dict["state"][n] for i, n in enumerate(numbers) if n in state_dict["state"]}
        self._put_states(optimizer, states, state_dict["param_groups"])

    @torch.no_grad()
    def _put_states(
        self, optimizer: Optimizer, states: dict[int, dict[str, Any]], param_groups: list[dict[str, Any]] | None = None
    ) -> None:
        ids = self._ids(optimizer)

        def signature(chunk: Chunk, index: int) -> Any:
            """Parameters share a segment only if their state differs in nothing but elements."""
            param = chunk.params[index]
            state = states.get(ids[id(param)])
            if state is None:
                return None
            return [(k, None if _fits(k, v, param) else _plain(v)) for k, v in sorted(state.items())]

        for group in self._groups[optimizer]:
            runs: list[tuple[Chunk, _Run]] = []
            members: dict[Chunk, list[int]] = {}
            for chunk, run in group.runs:
                members.setdefault(chunk, []).extend(run)
            for chunk, indices in members.items():
                for unbroken in chunk.layout.runs(indices):
                    part = [unbroken[0]]
                    for index in unbroken[1:]:
                        if signature(chunk, index) != signature(chunk, part[-1]):
                            runs.append((chunk, tuple(part)))
                            part = []
                        part.append(index)
                    runs.append((chunk, tuple(part)))
            group.runs = runs
        self._cut()

        converted: dict[str, Any] = {"state": {}, "param_groups": []}
        number = 0
        for i, group in enumerate(self._groups[optimizer]):
            numbers = []
            for key in group.runs:
                segment = self._segments.get(key)
                if segment is None:
                    continue
                state = self._part_of(segment, key[0], states, ids)
                if state:
                    converted["state"][number] = state
                numbers.append(number)
                number += 1
            for param in group.outside:
                if ids[id(param)] in states:
                    converted["state"][number] = states[ids[id(param)]]
                numbers.append(number)
                number += 1
            options = param_groups[i] if param_groups else optimizer.param_groups[i]
            converted["param_groups"].append({**{k: v for k, v in options.items() if k != "params"}, "params": numbers})
        optimizer.load_state_dict(converted)

    def _part_of(
        self, segment: Segment, chunk: Chunk, states: dict[int, dict[str, Any]], ids: dict[int, int]
    ) -> dict[str, Any]:
        """The state of one segment, cut from its parameters' full states."""
        held = {i: states.get(ids[id(chunk.params[i])], {}) for i in segment.indices}
        first = segment.indices[0]  # they all have the same keys, and the same of what is not per element
        part = {
            key: torch.zeros(segment.hi - segment.lo, dtype=value.dtype, device=chunk.data.device)
            if _fits(key, value, chunk.params[first])
            else _clone(value)
            for key, value in held[first].items()
        }
        for index, elements, here in chunk.pieces(segment):
            for key, value in held[index].items():
                if _fits(key, value, chunk.params[index]):
                    part[key][here] = chunk.layout.spans[index].flatten(value)[elements]
        return part


def _name(param: Tensor) -> str:
    layer = layer_of(param)
    names = [n for c in layer.chunks for n, p in zip(c.names, c.params, strict=True) if p is param] if layer else []
    return repr(names[0]) if names else f"of shape {list(param.shape)}"


def _per_element(value: Any, segment: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == segment.shape


def _fits(key: str, value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and key not in _SCALARS


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
