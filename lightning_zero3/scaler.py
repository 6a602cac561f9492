"""The gradient scaler of float16 training, when each rank sees only a part of the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_zero3.errors import Zero3Error

if TYPE_CHECKING:
    from lightning_zero3.optim import ShardedOptimizers

__all__ = ["Zero3GradScaler"]


class Zero3GradScaler(GradScaler):
    """`torch.amp.GradScaler` whose verdict, whether a gradient overflowed, is that of all ranks together.

    After the reduction an infinite gradient lies on one rank only. Were that rank alone to skip its step, and to halve
    its scale, the shards would no longer be parts of one model.

    Args:
        device: type of the device of losses and gradients, "cpu" or "cuda".
        like: a scaler with the settings and state to start from; default torch's.

    Raises:
        Zero3Error: `like` is of a class of its own, whose ways would be lost.
    """

    optimizers: ShardedOptimizers | None = None  # known once the model is sharded

    def __init__(self, device: str, like: GradScaler | None = None) -> None:
        if like is None:
            super().__init__(device)
            return
        if type(like) not in (GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler, Zero3GradScaler):
            raise Zero3Error(
                f"the gradient scaler {type(like).__name__} is not supported by Zero3Strategy, which takes settings "
                "and state from a torch.amp.GradScaler into one that all ranks agree on. Give that, or none."
            )
        super().__init__(device, enabled=like.is_enabled())
        if like.is_enabled():
            self.load_state_dict(like.state_dict())

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # The one place through which every verdict passes, of fused optimizers, too. It is private, but has been the
        # same from torch 2.8 to 2.13; FSDP's scaler overrides it as well.
        assert self.optimizers is not None
        with self.optimizers.showing_segments(optimizer):
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for here in found.values():  # empty on a rank that holds no part of this optimizer's gradients
            found_inf = found_inf + here.to(found_inf.device)
        # Exactly 0 or 1: fused optimizers subtract it from their step counts.
        return {found_inf.device: self.optimizers.engine.comm.sum(found_inf).clamp_(max=1.0)}

    def factor(self, optimizer: Optimizer) -> float:
        """What this optimizer's gradients are multiplied by now: the scale, or 1 once they are unscaled."""
        if not self.is_enabled():
            return 1.0
        state = self._per_optimizer_states.get(id(optimizer))
        return 1.0 if state is not None and state["stage"] is OptState.UNSCALED else self.get_scale()
