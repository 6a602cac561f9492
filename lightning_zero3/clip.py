"""Gradient norms over all ranks' segments."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_zero3.comm import Communicator

__all__ = ["clip_grad_norm_", "grad_norm"]


@torch.no_grad()
def grad_norm(segments: Iterable[Tensor], comm: Communicator, norm_type: float = 2.0) -> Tensor:
    """Norm of the gradient of the whole model, the same on every rank; a float32 scalar.

    Args:
        segments: this rank's, with gradients.
        comm: the ranks that hold the rest.
        norm_type: p of the p-norm; `inf` for the largest absolute value.
    """
    norms = torch._foreach_norm([s.grad.float() for s in segments if s.grad is not None], norm_type)
    # A rank may have no segments at all: the sum's dtype must not depend on them.
    mine = torch.stack(list(norms)).double() if norms else torch.zeros(1, dtype=torch.float64, device=comm.device)
    if norm_type == float("inf"):
        return comm.max(mine.max()).float()
    return comm.sum(mine.pow(norm_type).sum()).pow(1.0 / norm_type).float()


@torch.no_grad()
def clip_grad_norm_(segments: Iterable[Tensor], comm: Communicator, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients so that the whole model's norm is at most `max_norm`. Returns the norm before.

    Equal to `torch.nn.utils.clip_grad_norm_` on the unsharded gradients. A norm that is not finite is so on every rank,
    and makes all gradients NaN, as there.
    """
    segments = list(segments)
    norm = grad_norm(segments, comm, norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for segment in segments:
        if segment.grad is not None:
            segment.grad.mul_(scale.to(segment.grad.dtype))
    return norm
