"""Gradient norms over all ranks' segments."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_zero3.comm import Communicator
from lightning_zero3.errors import Zero3Error

__all__ = ["clip_grad_norm_", "grad_norm"]


@torch.no_grad()
def grad_norm(segments: Iterable[Tensor], comm: Communicator, norm_type: float = 2.0) -> Tensor:
    """Norm of the gradients of all ranks' segments, the same on every rank; a float64 scalar.

    Computed in float32, or in float64 for gradients in it; partial norms are added up in float64.

    Args:
        segments: this rank's. Those without gradients do not count.
        comm: the ranks that hold the rest.
        norm_type: p of the p-norm; `inf` for the largest absolute value.

    Raises:
        Zero3Error: `norm_type` is not positive.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise Zero3Error(f"norm_type={norm_type}: give a positive number, or 'inf' for the largest absolute value")
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in (s.grad for s in segments if s.grad is not None):
        by_dtype.setdefault(torch.promote_types(grad.dtype, torch.float32), []).append(grad)
    mine = [torch.zeros((), dtype=torch.float64, device=comm.device)]  # a rank may hold none of this optimizer's
    for dtype, grads in by_dtype.items():
        mine += [norm.double() for norm in torch._foreach_norm(grads, norm_type, dtype)]
    norms = torch.stack(mine)
    if norm_type == float("inf"):
        return comm.max(norms.max())
    return comm.sum(norms.pow(norm_type).sum()).pow(1.0 / norm_type)


@torch.no_grad()
def clip_grad_norm_(
    segments: Iterable[Tensor],
    comm: Communicator,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that the norm over all ranks is at most `max_norm`. Returns the norm before.

    What `torch.nn.utils.clip_grad_norm_` does to unsharded gradients, also to those that are not finite: the norm is
    infinite or NaN on every rank then, and so is the factor that all gradients are multiplied by (0 or NaN).

    Raises:
        Zero3Error: the norm is not finite and `error_if_nonfinite`; on every rank. Gradients are as they were.
    """
    segments = list(segments)
    norm = grad_norm(segments, comm, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise Zero3Error(
            f"the gradients' norm of order {float(norm_type)} is {norm.item()}, so they cannot be clipped. Look for "
            "the loss or layer that overflows (Trainer(detect_anomaly=True)), or clip with error_if_nonfinite=False."
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in (s.grad for s in segments if s.grad is not None):
        grad.mul_(scale.to(grad.dtype))
    return norm
