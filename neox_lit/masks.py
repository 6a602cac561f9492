"""Which key each query may attend to. Masks are bool, True where it may; queries are the last tokens of the keys."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(n_new: int, n_total: int, device: torch.device | str | None = None) -> Tensor:
    """`[n_new, n_total]`: each of the last `n_new` tokens sees itself and all before it."""
    return torch.ones(n_new, n_total, dtype=torch.bool, device=device).tril(n_total - n_new)


def document_mask(documents: Tensor, n_new: int | None = None) -> Tensor:
    """Causal attention that stays inside a document.

    Rotary attention depends only on the distance of two tokens, so this mask is all that packed documents need (their
    positions need not restart), and all that left-padded prompts need (the padding is one more document).

    Args:
        documents: `[batch, n_total]`, any integer per token that tells its document.
        n_new: How many of the last tokens are queries; all by default.

    Returns:
        bool `[batch, n_new, n_total]`. Every token sees at least itself.
    """
    n_total = documents.shape[1]
    n_new = n_total if n_new is None else n_new
    same = documents[:, n_total - n_new :, None] == documents[:, None, :]
    return same & causal_mask(n_new, n_total, documents.device)
