"""Weights that go from files straight into shards: the model never exists whole, on any rank.

A model is built without memory, and told where its weights are; each rank reads its own part when it is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero3.errors import Zero3Error

__all__ = [
    "LazyTensor",
    "arrived",
    "empty_parameters",
    "hand_over",
    "is_rehearsal",
    "load_weights",
    "rehearsal",
    "until_sharded",
    "waiting_for",
]


@runtime_checkable
class LazyTensor(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the row-major tensor, flat, on the CPU."""


_waiting: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> the LazyTensor or Tensor it waits for
_deferring: ContextVar[bool] = ContextVar("deferring", default=False)
_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device: shapes without memory. Buffers are real.

    Unlike under `torch.device("meta")`, what a module computes when it is made (tables, masks) is there.
    """
    register = nn.Module.register_parameter

    def register_without_memory(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            attributes = {key: value for key, value in vars(param).items() if key != "requires_grad"}
            param = type(param)(param.detach().to("meta"), requires_grad=param.requires_grad)
            vars(param).update(attributes)
        register(module, name, param)

    nn.Module.register_parameter = register_without_memory  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def until_sharded() -> Iterator[None]:
    """`load_weights` inside leaves parameters on the meta device as they are, to be filled by `shard_module`.

    `Zero3Strategy` calls `configure_model` in it. Under other strategies weights are loaded at once.
    """
    token = _deferring.set(True)
    try:
        yield
    finally:
        _deferring.reset(token)


@contextmanager
def rehearsal() -> Iterator[None]:
    """What is built inside is only looked at, by a plan: weights will never be needed, nor their files."""
    token = _rehearsing.set(True)
    try:
        yield
    finally:
        _rehearsing.reset(token)


def is_rehearsal() -> bool:
    """Whether a model is built for a plan only, so that its files need not be there."""
    return _rehearsing.get()


def load_weights(module: nn.Module, tensors: Mapping[str, LazyTensor | Tensor], strict: bool = True) -> None:
    """Load weights from files. In `configure_model` under `Zero3Strategy` each rank reads its own part, later.

    Called on every rank.

    Args:
        module: a model; its parameters may be on the meta device (`empty_parameters`, `torch.device("meta")`).
        tensors: by the names of `module.state_dict()`. They are cast to the dtypes that the model has.
        strict: whether to raise for names that are missing or unexpected. Otherwise parameters that are missing keep
            the values that they have, or get those of `reset_parameters`.

    Raises:
        Zero3Error: missing or unexpected names, other shapes, before anything is read or changed.

    Example::

        def configure_model(self):
            with empty_parameters():
                self.model = Net()
            load_weights(self.model, open_checkpoint(path).tensors)
    """
    own: dict[str, Tensor] = dict(module.named_buffers())
    own = {name: value for name, value in own.items() if name in tensors or _is_persistent(module, name)}
    own.update(module.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, value in own.items():
        names.setdefault(id(value), []).append(name)
    problems = []
    if strict:
        problems += [f"missing: {same[0]!r}" for same in names.values() if not any(n in tensors for n in same)]
        problems += [f"unexpected: {name!r}" for name in tensors if name not in own]
    for name, value in own.items():
        if name in tensors and tuple(tensors[name].shape) != tuple(value.shape):
            problems.append(f"shape of {name!r}: {list(tensors[name].shape)} in the file, {list(value.shape)} here")
    if problems:
        raise Zero3Error(f"cannot load the weights into {type(module).__name__}: " + "; ".join(problems))

    for same in names.values():
        source = next((tensors[name] for name in same if name in tensors), None)
        value = own[same[0]]
        if source is None:
            continue
        if value.is_meta and isinstance(value, nn.Parameter) and _deferring.get():
            _waiting[value] = source
            continue
        with torch.no_grad():
            whole = read(source, 0, value.numel()).view(value.shape)
            if not value.is_meta:
                value.copy_(whole)
                continue
            whole = whole.to(value.dtype, copy=True)
        new = nn.Parameter(whole, value.requires_grad) if isinstance(value, nn.Parameter) else whole
        for name in same:
            prefix, _, last = name.rpartition(".")
            setattr(module.get_submodule(prefix), last, new)


def read(source: LazyTensor | Tensor, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of a row-major tensor, flat."""
    return source.detach().reshape(-1)[start:stop] if isinstance(source, Tensor) else source.read(start, stop)


def waiting_for(param: Any) -> LazyTensor | Tensor | None:
    """Where the values of a parameter without memory will be read from, if it was told."""
    return _waiting.get(param)


def arrived(param: nn.Parameter) -> None:
    """It waits no more."""
    _waiting.pop(param, None)


def hand_over(old: nn.Parameter, new: nn.Parameter) -> None:
    """Let `new` wait in place of `old`, if that did."""
    if (source := _waiting.pop(old, None)) is not None:
        _waiting[new] = source


def _is_persistent(module: nn.Module, name: str) -> bool:
    prefix, _, last = name.rpartition(".")
    return last not in module.get_submodule(prefix)._non_persistent_buffers_set
