"""What GPT-NeoX is trained with: AdamW with two groups, warm-up, cosine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay, vectors (biases and norms) do not. Frozen parameters are in neither."""
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def warmup_cosine(step: int, *, warmup: int, total: float, floor: float) -> float:
    """Factor on the learning rate at optimizer step `step` (from 0).

    Rises in a line over `warmup` steps, then falls along half a cosine to `floor` at step `total`, and stays there. If
    `total` is infinite it stays at 1.
    """
    if step < warmup:
        return (step + 1) / warmup
    if math.isinf(total):
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
