"""Optimizers over segments, and their state as plain PyTorch would have it.

`configure_optimizers` runs unmodified, on the real parameters, and `param_groups` go on showing them: to schedulers,
callbacks and whoever adds a group. For the time of a step they hold segments instead: views of the chunks, one for each
unbroken run of a group's parameters in a layer. Whatever an optimizer does element by element it then does to this
rank's part of the model, and no more. Its state is kept under the segments.

In a checkpoint the state is per parameter again, in full shape, under the numbers that plain PyTorch gives parameters,
so that it can be resumed under any strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero3.checkpoints import sharded_checkpoint
from lightning_zero3.checkpoints.sharded_checkpoint import Stored, StoredState
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

_Place = tuple[Chunk, int]  # a parameter's chunk, and its index there


class ShardedOptimizers:
    """All optimizers of one sharded module.

    Args:
        optimizers: built from the module's parameters.
        engine: which shards the module.

    Raises:
        Zero3Error: an optimizer that does not work element by element, or a parameter in two optimizers.
    """

    def __init__(self, optimizers: list[Optimizer], engine: Engine) -> None:
        self.engine = engine
        self._optimizers = optimizers
        self.stand_ins = StandIns(engine)
        self._places: dict[int, _Place] = {}  # by id() of the parameter
        self._segments: dict[Optimizer, list[list[tuple[Chunk, Segment]]]] = {}  # of each group
        self._real: dict[Optimizer, list[list[nn.Parameter]]] = {}  # the groups' parameters while segments are shown
        self._seen: Any = None
        self._stepped: set[Optimizer] = set()
        for optimizer in optimizers:
            for name in (c.__name__ for c in type(optimizer).__mro__ if c.__name__ in _NOT_ELEMENTWISE):
                raise Zero3Error(
                    f"{name} cannot run on shards: {_NOT_ELEMENTWISE[name]}, and each rank has only a part of them. "
                    "Use an optimizer that works element by element (SGD, Adam, AdamW, RMSprop, Adagrad, ...)."
                )
        self._assign()
        for optimizer in optimizers:
            numbers = self._ids(optimizer)
            made = {numbers[id(p)]: optimizer.state.pop(p) for p in list(optimizer.state) if id(p) in numbers}
            if any(made.values()):  # optimizers that make state in their constructor (Adagrad)
                self._put_states(optimizer, made)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
            optimizer.register_state_dict_pre_hook(self._before_state_dict)
            optimizer.register_load_state_dict_pre_hook(self._before_state_dict)
        if any(s.param.grad is not None for o in optimizers for _, s in self._of(o)):
            self.stand_ins.place()  # gradients of an earlier fit, that `zero_grad` must find

    # -- steps --------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        given = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        self._show(optimizer)
        if given is None:
            self._check_synchronised(optimizer)
            return None

        def closure() -> Any:
            self._hide(optimizer)  # forward, backward and callbacks see parameters
            result = given()
            self._show(optimizer)
            self._check_synchronised(optimizer)
            return result

        return ((optimizer, closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})

    def _check_synchronised(self, optimizer: Optimizer) -> None:
        for layer in (layer for layer in self._layers(optimizer) if layer.grads.held):
            raise Zero3Error(
                f"{type(optimizer).__name__} is to step, but gradients of layer {layer.name!r} are still held back on "
                "each rank. Let the last backward before a step synchronise."
            )

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._hide(optimizer)
        self.engine.weights_changed(self._layers(optimizer))
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            for segment in (s for _, s in self._of(optimizer)):
                for key, value in optimizer.state.get(segment.param, {}).items():
                    if isinstance(value, Tensor) and value.shape != segment.param.shape and value.numel() > 1:
                        raise Zero3Error(
                            f"{type(optimizer).__name__} keeps {key!r} of shape {list(value.shape)} for "
                            f"{segment.param.numel()} elements: it does not work element by element, so not on shards"
                        )

    def _before_state_dict(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self._real:
            raise Zero3Error(
                f"the state of {type(optimizer).__name__} is sharded over ranks. Save it with "
                "trainer.save_checkpoint() or trainer.strategy.optimizer_state(optimizer), on every rank; load it with "
                "trainer.fit(ckpt_path=...)."
            )

    def grad_norms(self, norm_type: float) -> dict[str, Tensor]:
        """Norm of each trainable parameter's gradient, by name; the same on every rank."""
        self.stand_ins.settle()
        chunks = self.engine.trainable
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

    def params(self, optimizer: Optimizer) -> list[list[nn.Parameter]]:
        """The real parameters of each group."""
        return self._real.get(optimizer) or [group["params"] for group in optimizer.param_groups]

    def segments(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """What an optimizer updates on this rank, with gradients as they are to be used."""
        with self.showing_segments(optimizer):
            return [p for group in optimizer.param_groups for p in group["params"]]

    @contextmanager
    def showing_segments(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, `param_groups` hold segments, with their gradients, instead of parameters."""
        shown = optimizer in self._real
        if not shown:
            self._show(optimizer)
        try:
            yield
        finally:
            if not shown:
                self._hide(optimizer)

    def _show(self, optimizer: Optimizer) -> None:
        self._hide(optimizer)  # after an exception in a step
        self.stand_ins.settle()
        self._assign()
        self._real[optimizer] = self.params(optimizer)
        for group, found in zip(optimizer.param_groups, self._segments[optimizer], strict=True):
            group["params"] = [s.param for _, s in found] + [p for p in group["params"] if layer_of(p) is None]

    def _hide(self, optimizer: Optimizer) -> None:
        for group, params in zip(optimizer.param_groups, self._real.pop(optimizer, ()), strict=False):
            group["params"] = params

    def _assign(self) -> None:
        """Find each group's segments, after whatever was added, unfrozen or split since the last time."""
        chunks = self.engine.trainable
        groups = [params for optimizer in self._optimizers for params in self.params(optimizer)]
        seen = [[id(p) for p in params] for params in groups], [id(s.param) for c in chunks for s in c.segments]
        if seen == self._seen:
            return
        self._places = {id(p): (chunk, i) for chunk in chunks for i, p in enumerate(chunk.params)}
        group_of: dict[int, int] = {}
        for number, params in enumerate(groups):
            for param in params:
                if id(param) in group_of:
                    raise Zero3Error(f"parameter {_name(param)} is in two optimizers; give it to one")
                group_of[id(param)] = number
        found: list[list[tuple[Chunk, Segment]]] = [[] for _ in groups]
        for chunk in chunks:
            chunk.followed = True
            chunk.split([group_of.get(id(p)) for p in chunk.params].__getitem__)
            for segment in chunk.segments:
                owner = group_of.get(id(chunk.params[segment.indices[0]])) if segment.indices else None
                segment.param.requires_grad_(owner is not None)  # nobody's: no gradient
                if owner is not None:
                    found[owner].append((chunk, segment))
        before = {optimizer: self._of(optimizer) for optimizer in self._segments}
        numbers = iter(found)
        self._segments = {o: [next(numbers) for _ in self.params(o)] for o in self._optimizers}
        for optimizer, old in before.items():
            self._divide_state(optimizer, old)
        self._seen = seen[0], [id(s.param) for c in chunks for s in c.segments]

    def _divide_state(self, optimizer: Optimizer, before: list[tuple[Chunk, Segment]]) -> None:
        """Give to the parts of segments that were split since `before` what the whole had."""
        now = self._of(optimizer)
        there = {segment.param for _, segment in now}
        for chunk, old in before:
            if old.param in there or not (state := optimizer.state.pop(old.param, None)):
                continue
            for other, new in now:
                if other is chunk and old.lo <= new.lo and new.hi <= old.hi:
                    part = slice(new.lo - old.lo, new.hi - old.lo)
                    optimizer.state[new.param] = {
                        k: v[part].clone() if _per_element(v, old.param) else _clone(v) for k, v in state.items()
                    }

    def _of(self, optimizer: Optimizer) -> list[tuple[Chunk, Segment]]:
        return [pair for group in self._segments[optimizer] for pair in group]

    def _layers(self, optimizer: Optimizer) -> list[Zero3Layer]:
        layers = {layer_of(p) for params in self.params(optimizer) for p in params}
        return sorted((layer for layer in layers if layer is not None), key=lambda layer: layer.index)

    # -- state --------------------------------------------------------------------------------------------------------

    def _ids(self, optimizer: Optimizer) -> dict[int, int]:
        """id() of each parameter -> the number it has in a state dict."""
        return {id(p): i for i, p in enumerate(p for params in self.params(optimizer) for p in params)}

    def _groups(self, optimizer: Optimizer, by: Mapping[int, int | str]) -> list[dict[str, Any]]:
        """The groups as state dicts have them, with what `by` says of each id() for the parameters."""
        return [
            {**group, "params": [by[id(p)] for p in params]}
            for group, params in zip(optimizer.param_groups, self.params(optimizer), strict=True)
        ]

    def _outside(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Parameters that are not the module's; left as they are."""
        return [p for params in self.params(optimizer) for p in params if layer_of(p) is None]

    @torch.no_grad()
    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state dict in full, as plain PyTorch would write it. Called on every rank.

        Returns:
            On the first rank everything, tensors on the CPU. On the others the groups only.
        """
        self._assign()
        ids, comm = self._ids(optimizer), self.engine.comm
        param_groups = self._groups(optimizer, ids)

        # What each rank's segments hold, by parameter: the dtype of what is per element, and all else as it is.
        held: dict[int, dict[str, Any]] = {}
        for chunk, segment in self._of(optimizer):
            state = optimizer.state.get(segment.param, {})
            for index in segment.indices if state else ():
                held[ids[id(chunk.params[index])]] = {
                    key: value.dtype if _per_element(value, segment.param) else _on_cpu(value)
                    for key, value in state.items()
                }
        merged: dict[int, dict[str, Any]] = {}
        for part in comm.all_objects(held):
            for number, state in part.items():
                merged.setdefault(number, state)

        # Each parameter gets numbers of its own: a step count that two parameters share would count twice when resumed.
        states = {n: {k: _clone(v) for k, v in s.items()} for n, s in sorted(merged.items())}
        owned: dict[Chunk, dict[int, int]] = {}  # this optimizer's in each chunk, on all ranks in the same order
        for key_of_param, number in ids.items():
            if key_of_param in self._places:
                chunk, index = self._places[key_of_param]
                owned.setdefault(chunk, {})[number] = index
        for chunk, numbers in owned.items():
            keys = {k: v for n in numbers for k, v in merged.get(n, {}).items() if isinstance(v, torch.dtype)}
            for key, dtype in keys.items():
                flat = torch.zeros(chunk.total, dtype=dtype, device=chunk.data.device)
                for other, segment in self._of(optimizer):
                    if other is chunk and key in optimizer.state.get(segment.param, {}):
                        comm.own(flat)[segment.lo : segment.hi] = optimizer.state[segment.param][key]
                comm.wait(comm.gather(f"optimizer state {key!r} of layer {chunk.layer!r}", [flat]))
                for number, index in numbers.items() if comm.rank == 0 else ():
                    if key in states.get(number, {}):
                        states[number][key] = chunk.layout.spans[index].view(flat).clone().cpu()
        for param in self._outside(optimizer):
            if param in optimizer.state:
                states[ids[id(param)]] = dict(optimizer.state[param])
        return {"state": states if comm.rank == 0 else {}, "param_groups": param_groups}

    def sharded_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state for `sharded_checkpoint`, by parameter names. Called on every rank.

        Returns:
            "state": {name: {key: this rank's part, or on the first rank the whole of what is not per element}}, and
            "param_groups" with names.
        """
        self._assign()
        if outside := self._outside(optimizer):
            raise Zero3Error(
                f"{type(optimizer).__name__} has {len(outside)} parameters that are not the module's and "
                "have no name in a sharded checkpoint. Use state_dict_type='full'."
            )
        states: dict[str, dict[str, Any]] = {}
        other: dict[str, dict[str, Any]] = {}  # what is not per element
        for chunk, segment in self._of(optimizer):
            state = optimizer.state.get(segment.param, {})
            for index, part, here in chunk.pieces(segment) if state else ():
                name = chunk.names[index]
                for key, value in state.items():
                    if _per_element(value, segment.param):
                        states.setdefault(name, {})[key] = chunk.range_of(index, part.start, value[here])
                    else:
                        other.setdefault(name, {})[key] = _clone(_on_cpu(value))
        for found in reversed(self.engine.comm.all_objects(other)):
            for name, state in found.items() if self.engine.comm.rank == 0 else ():
                states.setdefault(name, {}).update(state)
        name_of = {
            id(p): n
            for layer in self.engine.layers
            for c in layer.chunks
            for n, p in zip(c.names, c.params, strict=True)
        }
        return {"state": states, "param_groups": self._groups(optimizer, name_of)}

    def load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Load a full state dict, whoever wrote it. Every rank takes its own part.

        Raises:
            Zero3Error: other groups than this optimizer has.
        """
        sizes = [len(params) for params in self.params(optimizer)]
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
        self._assign()
        ids = self._ids(optimizer)

        def signature(chunk: Chunk) -> Callable[[int], Any]:
            """Parameters share a segment only if their state differs in nothing but elements."""

            def of(index: int) -> Any:
                param = chunk.params[index]
                state = states.get(ids.get(id(param), -1))
                if state is None:
                    return None
                return [(k, None if _fits(k, v, param) else _plain(v)) for k, v in sorted(_raw(state).items())]

            return of

        for chunk in {chunk: None for chunk, _ in self._of(optimizer)}:
            chunk.split(signature(chunk))

        with self.showing_segments(optimizer):
            converted: dict[str, Any] = {"state": {}, "param_groups": []}
            first = 0
            for group, found, params in zip(
                param_groups or optimizer.param_groups,
                self._segments[optimizer],
                self.params(optimizer),
                strict=True,
            ):
                parts = [self._part_of(segment, chunk, states, ids) for chunk, segment in found]
                parts += [states.get(ids[id(p)], {}) for p in params if layer_of(p) is None]
                numbers = list(range(first, first + len(parts)))
                first += len(parts)
                converted["state"].update((n, part) for n, part in zip(numbers, parts, strict=True) if part)
                converted["param_groups"].append({**group, "params": numbers})
            optimizer.load_state_dict(converted)
        self._read_stored(optimizer, states, ids)

    def _read_stored(self, optimizer: Optimizer, states: dict[int, Any], ids: dict[int, int]) -> None:
        """Read what is still in a checkpoint into the segments' state. On every rank, whatever it holds."""
        paths = {v.path for state in states.values() for v in _raw(state).values() if isinstance(v, Stored)}
        for path in sorted(paths):
            entries = {}
            for chunk, segment in self._of(optimizer):
                for index, part, here in chunk.pieces(segment):
                    for key, value in _raw(states.get(ids[id(chunk.params[index])], {})).items():
                        if isinstance(value, Stored) and value.path == path:
                            mine = optimizer.state[segment.param][key][here]
                            entries[value.key] = chunk.range_of(index, part.start, mine)
            sharded_checkpoint.read(path, entries, self.engine.comm)

    def _part_of(
        self, segment: Segment, chunk: Chunk, states: dict[int, dict[str, Any]], ids: dict[int, int]
    ) -> dict[str, Any]:
        """The state of one segment, cut from its parameters' full states."""
        held = {i: _raw(states.get(ids[id(chunk.params[i])], {})) for i in segment.indices}
        first = segment.indices[0]  # they all have the same keys, and the same of what is not per element
        part = {
            key: torch.zeros(segment.hi - segment.lo, dtype=value.dtype, device=chunk.data.device)
            if _fits(key, value, chunk.params[first])
            else _clone(value)
            for key, value in held[first].items()
        }
        for index, elements, here in chunk.pieces(segment):
            for key, value in held[index].items():
                if _fits(key, value, chunk.params[index]) and not isinstance(value, Stored):
                    part[key][here] = chunk.layout.spans[index].flatten(value)[elements]
        return part


def _name(param: Tensor) -> str:
    layer = layer_of(param)
    names = [n for c in layer.chunks for n, p in zip(c.names, c.params, strict=True) if p is param] if layer else []
    return repr(names[0]) if names else f"of shape {list(param.shape)}"


def _per_element(value: Any, segment: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == segment.shape


def _fits(key: str, value: Any, param: Tensor) -> bool:
    return isinstance(value, (Tensor, Stored)) and value.shape == param.shape and key not in _SCALARS


def _raw(state: Any) -> dict[str, Any]:
    return state.data if isinstance(state, StoredState) else state


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
