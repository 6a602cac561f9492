"""What GPT-NeoX is trained with: AdamW with two groups, warm-up, and a fall of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

Schedule = Literal["cosine", "linear", "constant"]


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay, vectors (biases and norms) do not. Frozen parameters are in neither."""
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def lr_factor(step: int, schedule: Schedule, *, warmup: int, total: float, floor: float) -> float:
    """Factor on the learning rate at optimizer step `step` (from 0).

    Rises in a line over `warmup` steps, then falls along half a cosine or a line to `floor` at step `total`, and stays
    there. It stays at 1 if the schedule is constant or `total` infinite.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant" or math.isinf(total):
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * left
