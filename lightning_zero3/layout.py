"""The arithmetic of flat spaces: which element of which parameter lies where. Pure; the same for every world size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ALIGN", "Layout", "Span", "round_up"]

ALIGN = 16
"""Every parameter and every chunk starts at a multiple of this many elements.

16 elements are 64 bytes in float32 (one cache line, one AVX-512 register) and 16 bytes in int8, the least that vector
loads, cuBLAS and NCCL want. It is counted in elements, not bytes, so that offsets do not change with the dtype.
"""


def round_up(n: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if its elements fill one piece of memory in some order, else the contiguous ones.

    Keeping them lets channels_last and transposed parameters come back from the flat space as they were.
    """
    order = sorted((i for i in range(tensor.ndim) if tensor.size(i) != 1), key=tensor.stride)
    step = 1
    for i in order:
        if tensor.stride(i) != step:
            return torch.empty(tensor.shape, device="meta").stride()
        step *= tensor.size(i)
    return tensor.stride()


@dataclass(frozen=True)
class Span:
    """One parameter's place in a layer's flat space. `start` and `numel` in elements."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def view(self, flat: Tensor) -> Tensor:
        """This parameter as a view of `flat`, the whole 1-d flat space."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)

    def flatten(self, tensor: Tensor) -> Tensor:
        """`tensor` (of this parameter's shape) as `[numel]`, in the order of the flat space; a view where possible."""
        order = sorted(range(len(self.shape)), key=lambda i: self.stride[i], reverse=True)
        return tensor.permute(order).reshape(-1)

    def overlap(self, lo: int, hi: int) -> slice:
        """The part of this parameter, flattened, that lies in flat range [lo, hi). Empty if none does."""
        start = min(max(lo - self.start, 0), self.numel)
        return slice(start, max(start, min(hi - self.start, self.numel)))


@dataclass(frozen=True)
class Layout:
    """A layer's flat space: spans in order of `start`, matrices first, then vectors and scalars.

    The usual weight decay groups (matrices decay, biases and norms do not) are then two unbroken runs.
    """

    spans: tuple[Span, ...]
    numel: int

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> Layout:
        """Lay out parameters: matrices (2 or more dimensions) first, each group in the given order."""
        spans, start = [], 0
        for name, tensor in sorted(named, key=lambda item: item[1].ndim < 2):  # sorted() is stable
            spans.append(Span(name, tensor.shape, dense_strides(tensor), start, tensor.numel()))
            start = round_up(start + tensor.numel(), ALIGN)
        return cls(tuple(spans), start)

    def chunk_size(self, world_size: int) -> int:
        """Elements of each rank's chunk: an equal part of the flat space, padded."""
        return round_up(math.ceil(self.numel / world_size), ALIGN)

    def gaps(self, total: int) -> Iterator[tuple[int, int]]:
        """Ranges of padding in a flat buffer of `total` elements."""
        at = 0
        for span in self.spans:
            if span.start > at:
                yield at, span.start
            at = span.stop
        if total > at:
            yield at, total
