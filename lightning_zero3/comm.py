"""Collectives: what ZeRO-3 says to other ranks, on any backend.

gloo has no fast single-tensor all-gather and reduce-scatter on the CPU; composed of one broadcast from, or one reduce
to, every rank they are two to three times faster, and bit-equal to DDP's all-reduce on two ranks. NCCL has both.
"""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero3 import compat
from lightning_zero3.errors import Zero3Error

__all__ = ["Communicator", "Pending", "Traffic"]

_PATIENCE = timedelta(seconds=5)  # how long a wait lasts before this rank compares its steps with the others'
_NO_STREAM = nullcontext()
_LOG = 64  # collectives remembered for that comparison


@dataclass
class Traffic:
    """What was sent since the counters were last reset. Elements and bytes as one rank sends or receives them."""

    fetches: int = 0
    fetch_elements: int = 0
    fetch_bytes: int = 0
    reduces: int = 0
    reduce_elements: int = 0
    reduce_bytes: int = 0
    agreements: int = 0

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


class Pending(NamedTuple):
    """A collective in flight. On gloo `works` are waited for; on CUDA `ready` orders the streams and nobody waits."""

    what: str
    works: list[Any]
    ready: torch.cuda.Event | None


class _Steps:
    """This rank's last collectives on one set of groups, numbered from the first."""

    def __init__(self) -> None:
        self.count = 0
        self.meetings = 0
        self.last: deque[tuple[int, str]] = deque(maxlen=_LOG)

    def add(self, what: str) -> None:
        self.count += 1
        self.last.append((self.count, what))


class _Groups(NamedTuple):
    """Process groups of one communicator: fetches never queue behind reductions, and agreements behind neither."""

    parent: dist.ProcessGroup
    timeout: timedelta
    fetch: dist.ProcessGroup
    reduce: dist.ProcessGroup
    control: dist.ProcessGroup  # always gloo: messages of a few bytes between hosts
    steps: _Steps


_groups: list[_Groups] = []  # making groups is itself a collective: once for each process group and timeout


def _groups_of(parent: dist.ProcessGroup, timeout: timedelta) -> _Groups:
    for groups in _groups:
        if groups.parent is parent and groups.timeout == timeout:
            return groups
    _groups[:] = [g for g in _groups if g.parent in dist.distributed_c10d._world.pg_map]  # drop destroyed ones
    ranks = dist.get_process_group_ranks(parent)
    backend = dist.get_backend(parent)
    fetch, reduce, control = (dist.new_group(ranks, timeout=timeout, backend=b) for b in (backend, backend, "gloo"))
    _groups.append(_Groups(parent, timeout, fetch, reduce, control, _Steps()))
    return _groups[-1]


class Communicator:
    """All-gather of chunks, reduce-scatter of gradients, and agreement, for one group of ranks.

    Args:
        group: the ranks that share one copy of the parameters; default all. Not needed in a world of one.
        device: where flat buffers live.
        timeout: how long a collective may take; default the process group's.

    A communicator of one rank needs no process group and sends nothing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.traffic = Traffic()
        self.rank, self.world_size = 0, 1
        self._timeout = timeout or timedelta(minutes=30)
        if dist.is_initialized():
            parent = group or dist.group.WORLD
            assert parent is not None
            self.rank, self.world_size = dist.get_rank(parent), dist.get_world_size(parent)
            if self.world_size > 1:
                self._timeout = timeout or compat.group_timeout(parent, self.device)
                self._groups = _groups_of(parent, self._timeout)
                self._ranks = dist.get_process_group_ranks(parent)
                self._composed = dist.get_backend(parent) == "gloo"
        self._streams = (
            {name: torch.cuda.Stream(self.device) for name in ("fetch", "reduce")} if self.device.type == "cuda" else {}
        )

    # -- streams ------------------------------------------------------------------------------------------------------

    def on_stream(self, name: str) -> AbstractContextManager:
        """Context in which work is queued on the "fetch" or "reduce" stream; nothing on the CPU."""
        return torch.cuda.stream(self._streams[name]) if self._streams else _NO_STREAM

    def order_after(self, name: str, *events: torch.cuda.Event | None) -> None:
        """Let the named stream wait for what the current stream has queued so far, and for `events`."""
        if self._streams:
            self._streams[name].wait_stream(torch.cuda.current_stream(self.device))
            for event in events:
                if event is not None:
                    self._streams[name].wait_event(event)

    def join(self, name: str) -> None:
        """Let the current stream wait for the named one."""
        if self._streams:
            torch.cuda.current_stream(self.device).wait_stream(self._streams[name])

    # -- bulk collectives ---------------------------------------------------------------------------------------------

    def own(self, flat: Tensor) -> Tensor:
        """This rank's part of a flat buffer of `world_size` equal parts."""
        size = flat.numel() // self.world_size
        return flat[self.rank * size : (self.rank + 1) * size]

    def gather(self, what: str, flats: list[Tensor]) -> Pending:
        """All-gather in place: each of `flats` is `[world_size * chunk_size]`, this rank's own part filled in."""
        works: list[Any] = []
        self._log(f"fetch of {what}")
        for flat in flats:
            self.traffic.fetches += 1
            self.traffic.fetch_elements += flat.numel() * (self.world_size - 1) // self.world_size
            self.traffic.fetch_bytes += flat.nbytes * (self.world_size - 1) // self.world_size
            works += self._all_gather(flat)
        return self._pending(f"fetch of {what}", works)

    def reduce(self, what: str, flats: list[Tensor]) -> Pending:
        """Reduce-scatter (sum) in place: afterwards `own(flat)` holds the sum of that part over all ranks."""
        works: list[Any] = []
        self._log(f"reduction of {what}")
        for flat in flats:
            self.traffic.reduces += 1
            self.traffic.reduce_elements += flat.numel() * (self.world_size - 1) // self.world_size
            self.traffic.reduce_bytes += flat.nbytes * (self.world_size - 1) // self.world_size
            works += self._reduce_scatter(flat)
        return self._pending(f"reduction of {what}", works)

    def _all_gather(self, flat: Tensor) -> list[Any]:
        if self.world_size == 1:
            return []
        group = self._groups.fetch
        if not self._composed:
            return [compat.all_gather_single(flat, self.own(flat), group=group, async_op=True)]
        parts = zip(flat.chunk(self.world_size), self._ranks, strict=True)
        return [dist.broadcast(part, src, group=group, async_op=True) for part, src in parts]

    def _reduce_scatter(self, flat: Tensor) -> list[Any]:
        if self.world_size == 1:
            return []
        group = self._groups.reduce
        if not self._composed:
            return [compat.reduce_scatter_single(self.own(flat), flat, group=group, async_op=True)]
        parts = zip(flat.chunk(self.world_size), self._ranks, strict=True)
        return [dist.reduce(part, dst, group=group, async_op=True) for part, dst in parts]

    def _pending(self, what: str, works: list[Any]) -> Pending:
        if not self._streams:
            return Pending(what, works, None)
        for work in works:
            work.wait()  # orders the current stream after NCCL's; the host goes on
        return Pending(what, [], torch.cuda.current_stream(self.device).record_event())

    def wait(self, pending: Pending) -> None:
        """Return when the data is there (CPU), or order the current stream after it (CUDA)."""
        if pending.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(pending.ready)
        for work in pending.works:
            self._wait(work, pending.what)

    # -- small collectives --------------------------------------------------------------------------------------------

    def scatter(self, flat: Tensor | None, out: Tensor) -> None:
        """Fill each rank's `out` with its part of the first rank's `flat` (None on the others)."""
        if self.world_size == 1:
            assert flat is not None
            out.copy_(flat)
            return
        parts = list(flat.chunk(self.world_size)) if self.rank == 0 and flat is not None else None
        dist.scatter(out, parts, src=self._ranks[0], group=self._groups.fetch)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor` with the first rank's."""
        if self.world_size > 1:
            dist.broadcast(tensor, self._ranks[0], group=self._groups.fetch)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self._groups.reduce)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks, in place. NaN on any rank gives NaN on all."""
        if self.world_size > 1:
            any_nan = self.sum(tensor.isnan().to(torch.float32)) > 0
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._groups.reduce)
            tensor.masked_fill_(any_nan, float("nan"))
        return tensor

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank."""
        return self.any_of("a question to all ranks", [mine])[0]

    def any_of(self, what: str, mine: list[bool]) -> list[bool]:
        """Of each, whether it is so on any rank."""
        if self.world_size == 1:
            return mine
        self._log(what)
        flags = torch.tensor(mine, dtype=torch.uint8)
        self._wait(dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._groups.control, async_op=True), what)
        return [bool(flag) for flag in flags.tolist()]

    @property
    def control(self) -> dist.ProcessGroup:
        """The gloo group of these ranks, for messages between hosts."""
        return self._groups.control

    def all_objects(self, obj: Any) -> list[Any]:
        """Every rank's `obj`, by rank. For a few small plain objects."""
        if self.world_size == 1:
            return [obj]
        objects: list[Any] = [None] * self.world_size
        dist.all_gather_object(objects, obj, group=self._groups.control)
        return objects

    def together(self, what: str, timeout: timedelta | None = None) -> None:
        """Make sure that every rank is here. (A monitored barrier would name who is missing to the first rank only.)

        Raises:
            Zero3Error: some rank did not come within the timeout, by default a collective's. It names those ranks.
        """
        if self.world_size == 1:
            return
        timeout = timeout or self._timeout
        steps = self._groups.steps
        steps.meetings += 1
        places = [self._key(f"meeting {steps.meetings}", rank) for rank in range(self.world_size)]
        self._store.set(places[self.rank], "here")
        try:
            self._store.wait(places, timeout)
        except RuntimeError as error:
            missing = [rank for rank, place in enumerate(places) if not self._store.check([place])]
            raise Zero3Error(
                f"{what} must be called on every rank, but not all of {self.world_size} came within {timeout} "
                f"(this is rank {self.rank}; missing: {missing}). Call it outside of `if rank == 0`."
            ) from error

    def agree(self, what: str) -> None:
        """Make sure that every rank is about to do the same thing.

        Raises:
            Zero3Error: ranks are about to do different things, each of which it names.
        """
        if self.world_size == 1:
            return
        self.traffic.agreements += 1
        self._log(what)
        mine = torch.zeros(_WORD, dtype=torch.uint8)
        encoded = what.encode()[-_WORD:]
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        words = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._wait(dist.all_gather(words, mine, group=self._groups.control, async_op=True), what)
        said = [bytes(w.tolist()).rstrip(b"\0").decode(errors="replace") for w in words]
        if len(set(said)) > 1:
            raise Zero3Error(_diverged(dict(enumerate(said))))

    # -- the watch over ranks that part ways --------------------------------------------------------------------------

    @property
    def _store(self) -> dist.Store:
        return dist.distributed_c10d._get_default_store()

    def _key(self, what: str, rank: int) -> str:
        """Where this group of ranks keeps something in the store that all processes share."""
        return f"lightning_zero3/{self._groups.fetch.group_name}/{what}/{rank}"

    def _log(self, what: str) -> None:
        if self.world_size > 1:
            self._groups.steps.add(what)

    def _wait(self, work: Any, what: str) -> None:
        """Wait for gloo work. When it takes long, compare all ranks' steps: ranks that parted raise and do not hang."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            left = deadline - time.monotonic()
            try:
                work.wait(min(_PATIENCE, timedelta(seconds=max(left, 0.001))))
                return
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    raise Zero3Error(
                        f"rank {self.rank} lost another rank during {what}; the first error is that rank's. ({error})"
                    ) from error
                self._compare_steps()
                if time.monotonic() >= deadline:
                    raise Zero3Error(
                        f"rank {self.rank} waited {self._timeout} for {what}: another rank is stuck, gone, or does not "
                        "call the same layers. If the ranks are only slow, raise `timeout`."
                    ) from error

    def _compare_steps(self) -> None:
        """Publish this rank's last collectives and look for a rank that did something else at the same place."""
        self._store.set(self._key("steps", self.rank), json.dumps(list(self._groups.steps.last)))
        mine = dict(self._groups.steps.last)
        for rank in range(self.world_size):
            if rank == self.rank or not self._store.check([self._key("steps", rank)]):
                continue
            for count, what in json.loads(self._store.get(self._key("steps", rank))):
                if mine.get(count, what) != what:
                    raise Zero3Error(_diverged({self.rank: mine[count], rank: what}))


_WORD = 256  # bytes of an agreement


def _diverged(steps: dict[int, str]) -> str:
    told = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(steps.items()))
    return (
        f"the ranks went different ways ({told}). Every rank must call the same layers in the same order; where "
        "the data decide, let all ranks take both branches (multiply the unwanted one by zero); Hugging Face's "
        "generate() writes as long on every rank with synced_gpus=True."
    )
