"""Packed training windows over one long stream of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from neox_lit.loss import IGNORE


def count_windows(n_tokens: int, seq_len: int) -> int:
    """Windows that hold every target of a stream.

    A stream of T tokens has T - 1 targets (each token but the first). Window i has the targets from `i seq_len + 1` to
    `(i + 1) seq_len`, so it takes `ceil((T - 1) / seq_len)` windows, each of `seq_len + 1` tokens, one shared with the
    next. The last may be short, and is when T is a multiple of `seq_len`; dropping it would lose its targets.
    """
    return -(-(n_tokens - 1) // seq_len)


class PackedWindows(Dataset[dict[str, Tensor]]):
    """Some windows of a token file.

    Args:
        path: `.npy` file of the stream, memory-mapped: processes share its pages.
        seq_len: Targets per window.
        indices: Which windows. An index past the last window is a blank one, without targets.

    Items are `input_ids` and `labels`, int64 `[seq_len]` each: `labels[t]` is the token after `input_ids[t]`, or
    `IGNORE` past the end of the stream.
    """

    def __init__(self, path: Path, seq_len: int, indices: Sequence[int]) -> None:
        self.path = path
        self.seq_len = seq_len
        self.indices = indices
        self._tokens = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        start = self.indices[item] * self.seq_len
        window = torch.from_numpy(self._tokens[start : start + self.seq_len + 1].astype(np.int64))
        n_targets = max(len(window) - 1, 0)
        input_ids = torch.zeros(self.seq_len, dtype=torch.int64)
        labels = torch.full((self.seq_len,), IGNORE)
        input_ids[:n_targets] = window[:n_targets]
        labels[:n_targets] = window[1:]
        return {"input_ids": input_ids, "labels": labels}

    def __getstate__(self) -> dict[str, Any]:
        """Pickled for a loader's worker as the path; a memory map would be pickled as its bytes."""
        return {**self.__dict__, "_tokens": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = np.load(self.path, mmap_mode="r")
