"""A flat range of a tensor as boxes: how a chunk becomes plain entries of `torch.distributed.checkpoint`.

That format stores boxes of tensors: offsets and sizes in each dimension. A range of a row-major tensor's elements is at
most 2 * ndim - 1 of them: part of a row, whole rows, part of a row, and the parts the same again one dimension down. So
each rank can write what it has and read what it keeps, whoever wrote it and whatever the tensor was divided by.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["Box", "FlatRange", "boxes", "copied"]


class Box(NamedTuple):
    """A box of a tensor, and at which element of the flat range it starts."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes(shape: tuple[int, ...], lo: int, hi: int) -> list[Box]:
    """Elements [lo, hi) of a row-major tensor as boxes, in order."""
    if lo >= hi:
        return []
    if not shape:
        return [Box((), (), 0)]
    row = math.prod(shape[1:])
    first, last = lo // row, hi // row  # `last` is cut off, or beyond the range

    def inside(index: int, start: int, stop: int) -> list[Box]:
        found = boxes(shape[1:], start - index * row, stop - index * row)
        return [Box((index, *b.offsets), (1, *b.sizes), start - lo + b.start) for b in found]

    if first == last:
        return inside(first, lo, hi)
    head = inside(first, lo, (first + 1) * row) if lo % row else []
    whole = first + bool(lo % row)
    middle = [Box((whole, *(0 for _ in shape[1:])), (last - whole, *shape[1:]), whole * row - lo)]
    return head + (middle if last > whole else []) + (inside(last, last * row, hi) if hi % row else [])


class FlatRange(Tensor):
    """Part of a tensor, as `torch.distributed.checkpoint` writes and reads it (its protocol `_Checkpointable`).

    It has the whole tensor's shape, and no other use.

    Args:
        shape: of the whole tensor.
        stride: its dense strides; dimensions are flattened from the largest to the smallest.
        start: the first element, counted in that order, of which
        flat: `[n]` holds n. Reading fills it.
    """

    flat: Tensor
    place: tuple[torch.Size, tuple[int, ...], int]
    _parts: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(cls, shape: torch.Size, stride: tuple[int, ...], start: int, flat: Tensor) -> FlatRange:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=flat.dtype, device=flat.device)
        order = sorted(range(len(shape)), key=lambda i: stride[i], reverse=True)
        back = [order.index(i) for i in range(len(order))]
        made.flat, made.place = flat, (shape, stride, start)
        made._parts = {}
        for box in boxes(tuple(shape[i] for i in order), start, start + flat.numel()):
            part = flat[box.start : box.start + math.prod(box.sizes)].view(box.sizes).permute(back)
            made._parts[tuple(box.offsets[i] for i in back)] = part
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{func} on a part of a sharded tensor, which is for torch.distributed.checkpoint only")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatRange({self.flat.numel()} elements of {list(self.shape)}, {self.dtype})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in self._parts.items()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.flat.detach())
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=box, properties=properties, size=self.shape),
            )
            for box in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._parts[tuple(index.offset)]


def copied(value: Any) -> Any:
    """An entry of a state dict with a copy of its elements on the host."""
    if isinstance(value, FlatRange):
        return FlatRange(*value.place, value.flat.detach().to("cpu", copy=True))
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
