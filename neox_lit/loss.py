"""Next-token cross entropy."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a label that is no target


class TokenLoss(NamedTuple):
    """Loss of a batch as what can be added up over batches and ranks."""

    total: Tensor  # scalar float32, nats summed over targets
    n_targets: Tensor  # scalar int64

    @property
    def mean(self) -> Tensor:
        """Nats per target; 0 without targets."""
        return self.total / self.n_targets.clamp(min=1)


def token_loss(logits: Tensor, labels: Tensor) -> TokenLoss:
    """Cross entropy in float32 of logits `[..., n_vocab]` against labels `[...]`, those equal to `IGNORE` left out."""
    total = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return TokenLoss(total, (labels != IGNORE).sum())
