"""What `parameter.grad` is when gradients are sharded: a stand-in.

The gradient itself is on the segments, a part of it on each rank. Were `parameter.grad` simply None, much code would
quietly do nothing: `module.zero_grad()`, `clip_grad_norm_(module.parameters())`, Lightning's `grad_norm`. So between
backward passes each trainable parameter's gradient is a `ShardedGrad`. It can be zeroed, or set to None, which is then
done to the parameter's part of the segments; all else raises an error that names the way to do it.

A backward pass finds them removed, but for the first gradient that arrives, which is how the engine learns of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_zero3 import compat
from lightning_zero3.access import as_they_are
from lightning_zero3.chunk import Chunk
from lightning_zero3.engine import Engine
from lightning_zero3.errors import Zero3Error

if TYPE_CHECKING:
    from lightning_zero3.layer import Zero3Layer

__all__ = ["ShardedGrad", "StandIns"]


class ShardedGrad(Tensor):
    """The gradient of a sharded parameter: its shape, dtype and device, and no memory."""

    placed: bool  # is, or was until the user changed it, some parameter's gradient
    zeroed: bool
    arrived: Tensor | None = None  # what autograd has added, until the layer takes it

    @staticmethod
    def __new__(cls, param: Tensor) -> ShardedGrad:
        return Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.zero_.default):
            args[0].zeroed = args[0].zeroed or func is torch.ops.aten.zero_.default
            return args[0]
        if func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor) and compat.current_graph_task() != -1:
            args[0].arrived = args[1].clone()  # others may have the same memory as their gradient
            return args[0]
        raise Zero3Error(
            f"{func} on a parameter's gradient, which is sharded over ranks. To clip: Trainer(gradient_clip_val=...), "
            "or self.trainer.strategy.clip_grad_norm_(optimizer, ...) in manual optimization. Norms: GradientNorms() "
            "among the Trainer's callbacks, or self.trainer.strategy.grad_norms()."
        )

    def take_arrived(self) -> Tensor | None:
        """The gradient that has arrived, once."""
        arrived, self.arrived = self.arrived, None
        return arrived

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGrad({list(self.shape)}, {self.dtype})"


class StandIns:
    """The stand-ins of one model.

    Args:
        engine: whose layers' parameters get them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.before_backward, engine.after_backward = self.remove, self.place
        self._made: dict[nn.Parameter, ShardedGrad] = {}

    def place(self) -> None:
        """After a backward pass."""
        with as_they_are():
            for param in (p for _, _, chunk in self._chunks() for p in chunk.params):
                stand_in = self._made.get(param)
                if stand_in is None or stand_in.dtype != param.dtype:  # mixed precision, while the layer is in use
                    stand_in = self._made[param] = ShardedGrad(param)
                param.grad = stand_in
                stand_in.placed, stand_in.zeroed = True, False

    def remove(self) -> None:
        """Before a backward pass: autograd wants gradients to be None."""
        self.settle()
        with as_they_are():
            for param, stand_in in self._made.items():
                param.grad = None
                stand_in.placed = False

    @torch.no_grad()
    def settle(self) -> None:
        """Before gradients are used: do to the segments what was done to stand-ins.

        Raises:
            Zero3Error: one was replaced by something else. On every rank, whoever holds the parameter.
        """
        for layer, place, chunk in self._chunks() if self._made else ():
            with as_they_are():
                fates = [self._fate(name, param) for name, param in zip(chunk.names, chunk.params, strict=True)]
            if not any(fates):
                continue
            chunk.split(fates.__getitem__)
            for index in (i for i, fate in enumerate(fates) if fate):
                layer.grads.forget(place, index)
            for segment in chunk.segments:
                fate = fates[segment.indices[0]] if segment.indices else None
                if fate == "removed":
                    segment.param.grad = None
                elif fate == "zeroed" and segment.param.grad is not None:
                    segment.param.grad.zero_()
        with as_they_are():
            for param, stand_in in self._made.items():
                stand_in.placed, stand_in.zeroed = param.grad is stand_in, False

    def _fate(self, name: str, param: nn.Parameter) -> str | None:
        """What was done to a parameter's stand-in, if anything."""
        stand_in = self._made.get(param)
        if stand_in is None or not stand_in.placed:
            return None
        if param.grad is None:
            return "removed"
        if param.grad is not stand_in:
            raise Zero3Error(
                f"the gradient of parameter {name!r} was replaced, but the real one is sharded over ranks. Change the "
                "loss instead, or each rank's gradient by a hook (parameter.register_hook) before it is reduced."
            )
        return "zeroed" if stand_in.zeroed else None

    def _chunks(self) -> Iterator[tuple[Zero3Layer, int, Chunk]]:
        return ((layer, place, chunk) for layer in self._engine.layers for place, chunk in enumerate(layer.trainable))
