"""Every difference between supported torch versions (2.8 and later) that the engine meets, in one place."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = [
    "address",
    "all_gather_single",
    "current_graph_task",
    "enclosing_saved_tensor_hooks",
    "group_timeout",
    "in_functional_transform",
    "queue_end_of_backward",
    "readable",
    "reduce_scatter_single",
    "references",
    "saved_tensor_hooks_enabled",
]

# torch 2.13 renames the single-tensor collectives and warns about the old names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group's collectives on `device` may take."""
    return group._get_backend(device).options._timeout


def current_graph_task() -> int:
    """Number of the backward pass this thread is executing; -1 outside of backward. Nested passes have their own."""
    return torch._C._current_graph_task_id()


def enclosing_saved_tensor_hooks() -> tuple[Callable, Callable] | None:
    """The (pack, unpack) pair that autograd would use now, if any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def saved_tensor_hooks_enabled() -> bool:
    """Whether autograd takes saved-tensor hooks now; under torch.func transforms it does not."""
    return torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]


def in_functional_transform() -> bool:
    """Whether a torch.func transform is active."""
    return torch._C._functorch.maybe_current_level() is not None


def references(storage: torch.UntypedStorage) -> int:
    """How many tensors look into `storage`, and who else holds it."""
    return torch._C._storage_Use_Count(storage._cdata)


def address(tensor: Tensor) -> int:
    """Where the first element lies; 0 of a tensor without memory."""
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()


def readable(tensor: Tensor) -> bool:
    """Whether its values can be looked at for nothing: reading CUDA stalls it, and a plan's tensors have no values."""
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is executing now has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
