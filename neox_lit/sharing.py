"""Work that is dealt out to ranks which run a sharded model together.

The model gathers its layers in every forward, so ranks must make equally many. A rank that has nothing left joins in
with a blank forward. Without processes all of it is trivial: one rank has all the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def dealt(batches: Sequence[Sequence[T]]) -> list[Sequence[T]]:
    """This rank's batches, dealt out like cards. Every rank has equally many, the last of which may be empty."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return [batches[i] if i < len(batches) else () for i in range(rank, -(-len(batches) // world) * world, world)]


def any_rank(mine: bool, device: torch.device) -> bool:
    """Whether it is so on any rank. `device`: where the process group's tensors are."""
    if not dist.is_initialized():
        return mine
    flag = torch.tensor(float(mine), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def merged(mine: dict[int, T]) -> dict[int, T]:
    """What all ranks have found, by the number of the question."""
    if not dist.is_initialized():
        return mine
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {number: one for part in parts for number, one in part.items()}
