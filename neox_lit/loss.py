"""Next-token cross entropy, from logits or, chunk by chunk, from what the readout reads.

The logits of a batch, `[tokens, n_vocab]`, are the largest tensor of a training step: 4,096 tokens of GPT-NeoX-20B's
vocabulary take 788 MiB in float32, and the softmax and its gradient as much again each. `chunked_loss` never has more
of them than a chunk: it takes a chunk's logits to its loss and, at once, to its gradients, so that nothing needs to be
computed again in backward. The idea is that of Liger Kernel's fused linear cross entropy (Hsu et al. 2024,
arXiv:2410.10989, section 3.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a label that is no target


class TokenLoss(NamedTuple):
    """Loss of a batch as what can be added up over batches and ranks."""

    total: Tensor  # scalar float32 (float64 of a model in float64), nats summed over targets
    n_targets: Tensor  # scalar int64

    @property
    def mean(self) -> Tensor:
        """Nats per target; 0 without targets."""
        return self.total / self.n_targets.clamp(min=1)


def token_loss(logits: Tensor, labels: Tensor) -> TokenLoss:
    """Cross entropy of logits `[..., n_vocab]` against labels `[...]`, those equal to `IGNORE` left out.

    Computed in float32 at least.
    """
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return TokenLoss(total, (labels != IGNORE).sum())


def chunked_loss(x: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> TokenLoss:
    """The same as `token_loss(x @ weight.T, labels)` with the logits of `chunk` tokens at a time.

    Args:
        x: `[..., n_hidden]`.
        weight: `[n_vocab, n_hidden]`, of the readout. Cast to autocast's dtype where there is one, as a linear is.
        labels: int `[...]`, `IGNORE` or in [0, n_vocab).
        chunk: Tokens at a time, at least 1. Each adds once to the weight's gradient, which is summed in float32.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    x, weight = x.flatten(0, -2).to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        total = _ChunkedLoss.apply(x, weight, labels.flatten(), chunk, torch.is_grad_enabled())
    return TokenLoss(total, (labels != IGNORE).sum())


class _ChunkedLoss(torch.autograd.Function):
    """Summed loss whose gradients are computed in forward; backward multiplies them by the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, chunk: int, grad: bool) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=x.device)
        dx = torch.empty_like(x) if grad and ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight, dtype=wide) if grad and ctx.needs_input_grad[1] else None
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            x_part, is_target = x[part], (labels[part] != IGNORE)[:, None]
            target = labels[part, None].where(is_target, 0)
            log_p = torch.log_softmax(x_part @ weight.T, -1, dtype=wide)
            total -= (log_p.gather(-1, target) * is_target).sum()
            if dx is None and dw is None:
                continue
            # The gradient of the logits: probabilities, less 1 at the target; zero where there is none.
            d = log_p.exp_().scatter_add_(-1, target, torch.full_like(target, -1, dtype=wide)).mul_(is_target)
            d = d.to(x.dtype)
            if dx is not None:
                torch.mm(d, weight, out=dx[part])
            if dw is not None and dw.dtype == d.dtype:
                dw.addmm_(d.T, x_part)
            elif dw is not None:
                dw += d.T @ x_part
            del log_p, d  # before the next chunk's
        ctx.save_for_backward(dx, dw)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        # Not in place: a second backward (retain_graph) needs them again.
        return (
            None if dx is None else (dx * grad).to(dx.dtype),
            None if dw is None else (dw * grad).to(ctx.weight_dtype),
            None,
            None,
            None,
        )
