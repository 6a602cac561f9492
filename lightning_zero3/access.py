"""Parameters that are read outside of their layer's forward, in two ways, while a model computes.

`F.linear(x, self.embedding.weight)` uses the weight of a module that is not called. So every module that owns sharded
parameters looks them up through `WatchedParameters`: when one is read and is not there, its layer is fetched and stays
until the pass ends.

`sum(p.square().sum() for p in self.parameters())` asks no module for them. So a parameter that is sharded is a
`ParkedParameter`: before a torch operation on it, its layer is fetched, and stays until it is another layer's turn.

At any other time a sharded parameter is the placeholder, which reads as NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero3.errors import Zero3Error

if TYPE_CHECKING:
    from lightning_zero3.engine import Engine
    from lightning_zero3.layer import Zero3Layer

__all__ = ["ParkedParameter", "WatchedParameters", "as_they_are", "disown", "layer_of", "own"]

# Parameter -> the layer that shards it. Weakly: the layer holds its parameters, and would hold itself for ever.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def own(layer: Zero3Layer, param: Tensor) -> None:
    """Note that `layer` shards `param`."""
    _owners[param] = ref(layer)


def disown(param: Tensor) -> None:
    """Note that no layer shards `param` any more."""
    _owners.pop(param, None)


def layer_of(param: Tensor) -> Zero3Layer | None:
    """The layer that shards `param`, if any."""
    layer = _owners.get(param)
    return layer() if layer is not None else None


class WatchedParameters(dict):
    """A module's `_parameters`, as `nn.Module` keeps them, and the layer of each."""

    layers: dict[str, Zero3Layer]

    @classmethod
    def watch(cls, module: nn.Module, mine: set[int], layer: Zero3Layer) -> bool:
        """Watch those of a module's own parameters whose id() is in `mine`; whether there are any."""
        names = [name for name, p in module._parameters.items() if p is not None and id(p) in mine]
        if not names:
            return False
        if not isinstance(module._parameters, cls):
            watched = cls(module._parameters)
            watched.layers = {}
            module.__dict__["_parameters"] = watched
        module._parameters.layers.update(dict.fromkeys(names, layer))  # type: ignore[attr-defined]
        return True

    def __getitem__(self, name: str) -> Any:
        layer = self.layers.get(name)
        if layer is not None and layer.depth == 0:
            layer.engine.read(layer)
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Put a parameter in, or back: torch's parametrizations take it out for a while and set it to itself.

        That counts as a write without being one. `peft` does so in the forward of adapters of bare parameters.
        """
        super().__setitem__(name, value)
        layer = self.layers.get(name)
        for chunk in layer.chunks if layer is not None and layer.depth else ():
            chunk._versions = [
                p._version if p is value else v for p, v in zip(chunk.params, chunk._versions, strict=True)
            ]


# Looks at a parameter that need no values: all attributes but a few, and these functions.
_NAMES = """
    size stride dim ndimension nelement numel element_size storage_offset get_device data_ptr type has_names
    is_contiguous is_floating_point is_complex is_signed is_inference is_same_size is_shared untyped_storage storage
    requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like
    new_empty new_zeros new_ones new_full new_tensor
    __hash__ __len__ __repr__ __dir__ __reduce_ex__
"""
_NO_VALUES = frozenset(_NAMES.split())
_VALUES = {getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}


class ParkedParameter(nn.Parameter):
    """A parameter's class while it is sharded."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with as_they_are():
            name = getattr(func, "__name__", "")
            if name in _NO_VALUES or (name in ("__get__", "__set__", "__delete__") and func not in _VALUES):
                return func(*args, **kwargs)
            layers = {layer_of(p): None for p in _parameters((args, kwargs))}
            by_engine: dict[Engine, list[Zero3Layer]] = {}
            for layer in layers:
                if layer is not None:
                    by_engine.setdefault(layer.engine, []).append(layer)
            for engine, of_it in by_engine.items():
                engine.before_operation(of_it)
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        layer = layer_of(self)
        raise Zero3Error(
            f"a parameter of shape {list(self.shape)}{f' of layer {layer.name!r}' if layer else ''} is sharded over "
            "ranks, a copy of it would be NaN. Copy the module before it is sharded, or the parameter inside `with "
            "gather_parameters(module):`. For averages of weights there is lightning_zero3.WeightAveraging."
        )


def as_they_are() -> Any:
    """Inside, nothing is fetched for looks at sharded parameters, which also cost less. For the engine's own."""
    return torch._C.DisableTorchFunctionSubclass()


def _parameters(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parameters(item)
    elif isinstance(value, dict):
        yield from _parameters(list(value.values()))
