"""Tensors that stay in their files until a part of them is asked for.

A part is read with plain reads of just its bytes into its own memory. Nothing is mapped: pages of a mapped file count
as the process's memory for as long as the mapping lives, which would make a 40 GB file cost 40 GB.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from neox_lit.errors import NeoXError
from neox_lit.merging import Rule, merge, merged_shape


class LazyTensor(Protocol):
    """A tensor whose elements can be read by range."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def where(self) -> str:
        """File and key, for messages."""

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in row-major order: a flat tensor on the CPU, not to be written to."""


def whole(tensor: LazyTensor) -> Tensor:
    """All of it, in its shape."""
    return tensor.read(0, tensor.shape.numel()).view(tensor.shape)


@dataclass(frozen=True)
class InFile:
    """A contiguous tensor at a place of a file."""

    path: str
    key: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int  # of its first byte

    def __post_init__(self) -> None:
        end = self.offset + self.shape.numel() * self.dtype.itemsize
        if end > os.path.getsize(self.path):
            raise NeoXError(f"{self.where} ends at byte {end}, beyond the end of the file: it is truncated")

    @property
    def where(self) -> str:
        return f"{self.path}: {self.key!r}"

    def read(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, dtype=self.dtype)
        wanted = memoryview(out.view(torch.uint8).numpy())  # type: ignore[arg-type]
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset + start * self.dtype.itemsize)
            while wanted:
                n = file.readinto(wanted)
                if not n:
                    raise NeoXError(f"{self.where}: the file ends early; it has changed since it was opened")
                wanted = wanted[n:]
        return out


@dataclass(frozen=True)
class InMemory:
    """A tensor that is there already."""

    tensor: Tensor
    where: str

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:
        return self.tensor.detach().reshape(-1)[start:stop].cpu()


class Once:
    """Warns the first time only: drift shows in every norm of a model."""

    def __init__(self) -> None:
        self._done = False

    def __call__(self, message: str) -> None:
        if not self._done:
            warnings.warn(f"{message}. The same is done for others of this checkpoint, without a warning")
        self._done = True


@dataclass(frozen=True)
class Merged:
    """A parameter in tensor-parallel shards, merged as it is read."""

    rule: Rule
    shards: Sequence[LazyTensor]
    warn: Once = field(default_factory=Once)

    def __post_init__(self) -> None:
        if len({shard.dtype for shard in self.shards}) > 1:
            told = ", ".join(str(shard.dtype) for shard in self.shards)
            raise NeoXError(f"{self.where} and the same key of the other shards have dtypes {told}; they must have one")
        merged_shape(self.rule, [shard.shape for shard in self.shards], self.where)

    @property
    def where(self) -> str:
        return self.shards[0].where

    @property
    def shape(self) -> torch.Size:
        return merged_shape(self.rule, [shard.shape for shard in self.shards], self.where)

    @property
    def dtype(self) -> torch.dtype:
        return self.shards[0].dtype

    def read(self, start: int, stop: int) -> Tensor:
        if len(self.shards) == 1:
            return self.shards[0].read(start, stop)
        if self.rule is Rule.ROWS:
            return self._read_rows(start, stop)
        if self.rule is Rule.COLUMNS:
            return self._read_columns(start, stop)
        # Vectors: all of them, for how far copies may differ is a matter of the whole.
        return merge(self.rule, [whole(shard) for shard in self.shards], self.where, self.warn).reshape(-1)[start:stop]

    def _read_rows(self, start: int, stop: int) -> Tensor:
        """One shard after the other."""
        out, first = torch.empty(stop - start, dtype=self.dtype), 0
        for shard in self.shards:
            size = shard.shape.numel()
            lo, hi = max(start, first), min(stop, first + size)
            if lo < hi:
                out[lo - start : hi - start] = shard.read(lo - first, hi - first)
            first += size
        return out

    def _read_columns(self, start: int, stop: int) -> Tensor:
        """A part of each row from each shard: those rows that the range touches, then what it wants of them."""
        width = self.shape[1]
        top, bottom = start // width, -(-stop // width)
        rows = torch.empty(max(0, bottom - top), width, dtype=self.dtype)
        left = 0
        for shard in self.shards:
            n = shard.shape[1]
            rows[:, left : left + n] = shard.read(top * n, bottom * n).view(-1, n)
            left += n
        return rows.view(-1)[start - top * width : stop - top * width]
