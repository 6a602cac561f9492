"""Packed training windows over one long stream of words (see `encode`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from neox_lit.encode import ID, READ_ONLY, START, Words, open_words
from neox_lit.loss import IGNORE

Documents = Literal["joined", "apart", "whole"]


def count_windows(n_tokens: int, seq_len: int) -> int:
    """Windows that hold every target of a stream.

    A stream of T tokens has T - 1 targets (each token but the first). Window i has the targets from `i seq_len + 1` to
    `(i + 1) seq_len`, so it takes `ceil((T - 1) / seq_len)` windows, each of `seq_len + 1` tokens, one shared with the
    next. The last may be short, and is when T is a multiple of `seq_len`; dropping it would lose its targets.
    """
    return -(-(n_tokens - 1) // seq_len)


def cuts(words: Words, seq_len: int, documents: Documents) -> npt.NDArray[np.int64]:
    """Window i has the targets after `cuts[i]`, up to and with `cuts[i + 1]`, at most `seq_len`; none is lost.

    'whole' ends a window early rather than cut a document that the next can hold; longer ones are cut all the same.
    """
    last = len(words) - 1
    if documents != "whole":
        return np.minimum(np.arange(count_windows(len(words), seq_len) + 1) * seq_len, last)
    ends = np.append(_starts(words) - 1, last)  # the last token of each document
    result = [0]
    while result[-1] < last:
        limit = result[-1] + seq_len
        end = int(ends[np.searchsorted(ends, limit, side="right") - 1])
        result.append(end if end > result[-1] else limit)
    return np.array(result)


def _starts(words: Words, block: int = 1 << 24) -> npt.NDArray[np.int64]:
    """Indices of the first words of documents; by blocks, for the file may be larger than memory."""
    blocks = range(0, len(words), block)
    return np.concatenate([start + np.flatnonzero(words[start : start + block] & START) for start in blocks])


def window(words: Words, seq_len: int, documents: Documents) -> dict[str, Tensor]:
    """One item of `PackedWindows` from its words, at most `seq_len + 1`."""
    n_targets = max(len(words) - 1, 0)
    input_ids = torch.zeros(seq_len, dtype=torch.int64)
    labels = torch.full((seq_len,), IGNORE)
    item = {"input_ids": input_ids, "labels": labels}
    ids = torch.from_numpy((words & ID).astype(np.int64))
    input_ids[:n_targets] = ids[:n_targets]
    learnt = torch.from_numpy((words[1:] & READ_ONLY) == 0)
    labels[:n_targets] = torch.where(learnt, ids[1:], IGNORE)
    if documents != "joined":
        item["documents"] = torch.zeros(seq_len, dtype=torch.int64)
        if n_targets:
            item["documents"][:n_targets] = torch.from_numpy(np.cumsum((words[1:] & START) != 0))
            item["documents"][n_targets:] = -1
    return item


class PackedWindows(Dataset[dict[str, Tensor]]):
    """Some windows of a file of words.

    Args:
        path: The file.
        seq_len: Targets per window.
        indices: Which windows. -1 is a blank one, without targets.
        documents: 'joined': a window is a piece of one text. 'apart': items have `documents` too, for
            `masks.document_mask`. 'whole': the same, and windows end early rather than cut a document.

    Items are `input_ids` and `labels`, int64 `[seq_len]` each: `labels[t]` is the token after `input_ids[t]`, or
    `IGNORE` past the end of the window and where that token is not to be learnt. `documents`, int64 `[seq_len]`, tells
    the document of the *label*: the end-of-text token that closes one document is, as an input, what the next begins
    with. It attends to nothing before itself, as when a text is generated from nothing, and no target is lost.
    """

    def __init__(
        self, path: Path, seq_len: int, indices: Sequence[int] | npt.NDArray[np.int64], documents: Documents = "joined"
    ) -> None:
        self.path = path
        self.seq_len = seq_len
        self.indices = indices
        self.documents = documents
        self._words: Words = open_words(path)
        self._cuts = cuts(self._words, seq_len, documents)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        index = self.indices[item]
        start, end = self._cuts[index : index + 2] if index >= 0 else (0, -1)
        return window(self._words[start : end + 1], self.seq_len, self.documents)

    def __getstate__(self) -> dict[str, Any]:
        """Pickled for a loader's worker as the path; a memory map would be pickled as its bytes."""
        return {**self.__dict__, "_words": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._words = open_words(self.path)
