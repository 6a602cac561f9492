"""Parameters that are read outside of their layer's forward.

`F.linear(x, self.embedding.weight)` uses the weight of a module that is not called. So every module that owns
sharded parameters looks them up through `WatchedParameters`: when one is read while a model computes and is not there,
its layer is fetched and stays until the pass ends. Read at any other time it is the placeholder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from lightning_zero3.layer import Zero3Layer

__all__ = ["WatchedParameters"]


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
