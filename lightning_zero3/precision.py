"""What Lightning's `precision=` means for chunks, slots and reductions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_zero3.chunk import PrecisionPolicy
from lightning_zero3.clip import clip_grad_norm_
from lightning_zero3.errors import Zero3Error

if TYPE_CHECKING:
    from lightning_zero3.engine import Engine
    from lightning_zero3.optim import ShardedOptimizers

__all__ = ["PRECISIONS", "Zero3PrecisionMixin"]

PRECISIONS = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
}
"""Supported precisions and the dtype that the model computes in."""


class Zero3PrecisionMixin:
    """Precision plugin of `Zero3Strategy`, whatever plugin Lightning made for the same `precision`.

    True precisions keep chunks, gradients and optimizer state in their dtype. In mixed precision the chunk is the
    float32 master: it is cast once per fetch and travels in the compute dtype; gradients reduce and land in float32;
    autocast chooses the dtype of operations as it does under DDP.

    Args:
        precision: one of `PRECISIONS`.
    """

    def __init__(self, precision: str) -> None:
        if precision not in PRECISIONS:
            more = (
                " It needs a gradient scaler that all ranks agree on; use 'bf16-mixed'."
                if precision == "16-mixed"
                else ""
            )
            raise Zero3Error(
                f"precision={precision!r} is not supported by Zero3Strategy; choose from {', '.join(PRECISIONS)}.{more}"
            )
        super().__init__()
        self.precision = precision
        self.dtype = PRECISIONS[precision]
        self.mixed = precision.endswith("-mixed")
        self.policy = PrecisionPolicy(param_dtype=self.dtype if self.mixed else None)
        self.engine: Engine | None = None
        self.optimizers: ShardedOptimizers | None = None

    # -- dtypes -------------------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module if self.mixed else module.to(dtype=self.dtype)

    @contextmanager
    def _default_dtype(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(before if self.mixed else self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def tensor_init_context(self) -> Any:
        return self._default_dtype()

    def module_init_context(self) -> Any:
        return self._default_dtype()

    def forward_context(self) -> Any:
        if not self.mixed:
            return self._default_dtype()
        # Autocast would cache casts of float32 parameters for the whole step: full copies of what we shard.
        device = self.engine.device.type if self.engine is not None else "cpu"
        return torch.autocast(device, dtype=self.dtype, cache_enabled=False)

    def convert_input(self, data: Any) -> Any:
        if self.mixed or self.dtype is torch.float32:
            return data
        return tree_map_only(Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t, data)

    def convert_output(self, data: Any) -> Any:
        if self.mixed or self.dtype is torch.float32:
            return data
        default = torch.get_default_dtype()
        return tree_map_only(Tensor, lambda t: t.to(default) if t.is_floating_point() else t, data)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        assert self.engine is not None
        assert self.optimizers is not None
        self.optimizers.before_backward()
        with self.engine.backward_scope():  # gradients are complete, on all ranks, when on_after_backward runs
            super().backward(tensor, model, optimizer, *args, **kwargs)  # type: ignore[misc]
        self.optimizers.after_backward()

    def main_params(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """What to clip by value."""
        assert self.optimizers is not None
        return self.optimizers.segments(getattr(optimizer, "optimizer", optimizer))  # of a LightningOptimizer

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self.engine is not None
        clip_grad_norm_(self.main_params(optimizer), self.engine.comm, float(clip_val))
