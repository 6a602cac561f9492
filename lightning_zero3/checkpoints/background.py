"""Checkpoints written while training goes on.

What is to be written is copied to the host's memory; that is all that training waits for. The ranks then write together
in the background, over a process group of their own.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from lightning_zero3.checkpoints import durable, sharded_checkpoint
from lightning_zero3.checkpoints.boxes import copied
from lightning_zero3.comm import Communicator

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """Writes sharded checkpoints, one at a time. Made on every rank."""

    def __init__(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._comm = Communicator(dist.new_group(backend="gloo")) if several else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None

    def write(self, path: str, entries: dict[str, Any], extra: dict[str, Any]) -> None:
        """Start writing. Waits for the one before."""
        self.wait()
        copies = {key: copied(value) for key, value in entries.items()}
        content = durable.saved(extra)
        self._pending = self._thread.submit(sharded_checkpoint.write, path, copies, content, self._comm)

    def check(self, comm: Communicator) -> None:
        """Raise what went wrong in the background, if a rank knows by now: on all ranks here, at the same step."""
        if self._pending is not None and comm.any(self._pending.done()):
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written. Raises what went wrong."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finish."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
