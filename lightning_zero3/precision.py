"""What Lightning's `precision=` means for chunks, slots and reductions.

Lightning has its classes twice (`lightning.pytorch`, `pytorch_lightning`): here are mixins, bound to both homes.
"""

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
from lightning_zero3.scaler import Zero3GradScaler

if TYPE_CHECKING:
    from typing import Any as _Base  # it has a precision plugin's attributes, of one home or the other

    from lightning_zero3.engine import Engine
    from lightning_zero3.optim import ShardedOptimizers
else:
    _Base = object

__all__ = ["PRECISIONS", "MixedPrecisionMixin", "TruePrecisionMixin", "Zero3PrecisionMixin"]

PRECISIONS = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
}
"""Supported precisions and the dtype that the model computes in."""


class Zero3PrecisionMixin(_Base):
    """Precision plugin of `Zero3Strategy`, over the one that Lightning has for the same `precision`.

    Args:
        precision: one of `PRECISIONS`.
        options: what Lightning's plugin is made with.
    """

    def __init__(self, precision: str, *options: Any) -> None:
        if precision not in PRECISIONS:
            raise Zero3Error(
                f"precision={precision!r} is not supported by Zero3Strategy; choose from {', '.join(PRECISIONS)}."
            )
        super().__init__(*options)
        self.precision = precision
        self.dtype = PRECISIONS[precision]
        self.mixed = precision.endswith("-mixed")
        self.policy = PrecisionPolicy(param_dtype=self.dtype if self.mixed else None)
        self.engine: Engine | None = None
        self.optimizers: ShardedOptimizers | None = None

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        assert self.engine is not None
        with self.engine.backward_scope():  # gradients are complete, on all ranks, when on_after_backward runs
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def main_params(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """What to clip by value."""
        assert self.optimizers is not None
        return self.optimizers.segments(getattr(optimizer, "optimizer", optimizer))  # of a LightningOptimizer

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self.engine is not None
        clip_grad_norm_(self.main_params(optimizer), self.engine.comm, float(clip_val))


class TruePrecisionMixin(Zero3PrecisionMixin):
    """True precisions: chunks, gradients, optimizer state and all that is computed have one dtype.

    But "32-true", the default, leaves every dtype as it is, as it does in Lightning.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module if self.dtype is torch.float32 else module.to(dtype=self.dtype)

    @contextmanager
    def _default_dtype(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def tensor_init_context(self) -> Any:
        return self._default_dtype()

    def module_init_context(self) -> Any:
        return self._default_dtype()

    def forward_context(self) -> Any:
        return self._default_dtype()

    def convert_input(self, data: Any) -> Any:
        return data if self.dtype is torch.float32 else _cast(data, self.dtype)

    def convert_output(self, data: Any) -> Any:
        return data if self.dtype is torch.float32 else _cast(data, torch.get_default_dtype())


class MixedPrecisionMixin(Zero3PrecisionMixin):
    """Mixed precisions: the chunk is the float32 master, cast once per fetch, and travels in the compute dtype.

    Gradients reduce and land in float32. Autocast chooses the dtype of operations, and the loss is scaled in float16,
    as Lightning's MixedPrecision has it.

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: type of the device to compute on.
        scaler: of "16-mixed"; its settings and state are taken over. The scaler in use is `trainer.scaler`.
    """

    scaler: Zero3GradScaler | None

    def __init__(self, precision: str, device: str, scaler: torch.amp.GradScaler | None = None) -> None:
        ours = Zero3GradScaler(device, like=scaler) if precision == "16-mixed" else None
        super().__init__(precision, precision, device, ours)

    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        if self.scaler is not None:
            self.scaler.optimizers = self.optimizers
        return super().connect(model, optimizers, lr_schedulers)


def _cast(data: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, data)
