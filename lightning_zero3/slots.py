"""Slots: the flat buffers that gathered parameters and whole gradients take turns in.

A slot is allocated the first time it is needed and reused for ever, so that steady training allocates nothing for
parameters and its peak never creeps. A slot serves requests of about its own size only (at least half of it): a small
layer that borrowed the embedding's slot would force a second one of that size to be made.

A view of a weight may outlive its use: kept by a custom autograd function, put into an attribute, returned inside some
object. The slot that it looks into is then not given to another layer until the view is gone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_zero3 import compat
from lightning_zero3.layout import round_up

if TYPE_CHECKING:
    from lightning_zero3.chunk import Chunk
    from lightning_zero3.layer import Zero3Layer

__all__ = ["Slot", "SlotPool", "SlotViews", "Views"]

_ALIGN = 64  # bytes; where each flat space begins in a slot

_PATIENCE = 0.05  # seconds; a collective's thread may look into a slot for a moment after it is done


class Slot:
    """One reusable buffer of bytes."""

    def __init__(self, index: int, nbytes: int, device: torch.device) -> None:
        self.index = index
        with torch.inference_mode(False):  # an inference tensor could never be trained in later
            self.bytes: Tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.owner: Zero3Layer | None = None
        self.free_event: torch.cuda.Event | None = None  # CUDA: what read the slot last must end before it is refilled
        self._storage = self.bytes.untyped_storage()
        self._ours = 0
        self.version = 0  # of the weights in it

    def mark(self, version: int) -> None:
        """It takes in weights of this version. All views that there are now are the engine's."""
        self._ours, self.version = compat.references(self._storage), version

    @property
    def watched(self) -> bool:
        """Whether there are other views than when it was marked."""
        return self._ours > 0 and compat.references(self._storage) > self._ours

    def flat(self, dtype: torch.dtype, offset: int, numel: int) -> Tensor:
        """`[numel]` elements of `dtype` that start at byte `offset`."""
        return self.bytes[offset : offset + numel * dtype.itemsize].view(dtype)


class SlotPool:
    """All slots of one engine, free and taken."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots: list[Slot] = []
        self._free: list[Slot] = []
        self._aside: list[Slot] = []  # given back, but somebody still looks into them
        self._by_storage: dict[int, Slot] = {}

    def take(self, nbytes: int, owner: Zero3Layer) -> Slot:
        """The smallest free slot that fits, or a new one."""

        def fitting() -> list[Slot]:
            return [s for s in self._free if nbytes <= s.bytes.numel() <= 2 * nbytes]

        if self._aside:
            self._reclaim()
        found = fitting()
        deadline = time.monotonic() + _PATIENCE
        while not found and self._aside and time.monotonic() < deadline:
            time.sleep(_PATIENCE / 50)
            self._reclaim()
            found = fitting()
        if found:
            slot = min(found, key=lambda s: (s.bytes.numel(), s.index))
            self._free.remove(slot)
        else:
            slot = Slot(len(self.slots), nbytes, self.device)
            self.slots.append(slot)
            self._by_storage[slot.bytes.untyped_storage()._cdata] = slot
        slot.owner = owner
        return slot

    def give(self, slot: Slot) -> None:
        """Return a slot. On CUDA, whoever takes it next waits until the work queued so far is done."""
        if slot.bytes.is_cuda:
            slot.free_event = torch.cuda.current_stream().record_event()
        if slot.watched:
            self._aside.append(slot)
            return
        slot.owner, slot._ours = None, 0
        self._free.append(slot)

    def _reclaim(self) -> None:
        aside, self._aside = self._aside, []
        for slot in aside:
            self.give(slot)

    def outdated(self) -> set[Zero3Layer]:
        """Layers into whose weights somebody looks as they were before an update."""
        self._reclaim()
        return {s.owner for s in self._aside if s.owner is not None and s.owner.version != s.version}

    def of_tensor(self, tensor: Tensor) -> Slot | None:
        """The slot that `tensor` is a view of, if any."""
        try:
            return self._by_storage.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse tensors and other kinds that have no storage
            return None

    @property
    def nbytes(self) -> int:
        """Bytes of all slots ever made: the most that was ever needed at once."""
        return sum(s.bytes.numel() for s in self.slots)

    @property
    def taken(self) -> int:
        """How many slots are in use now."""
        return len(self.slots) - len(self._free) - len(self._aside)


class Views(NamedTuple):
    """A layer's flat spaces, `[total]` each, and every parameter in each of them."""

    flats: list[Tensor]
    params: list[list[Tensor]]


class SlotViews:
    """What a layer sees of a slot, whichever it gets: its flat spaces, one after another.

    Views are made once for each slot; after that the hot path only looks them up.

    Args:
        spaces: chunks, and the dtype in which the flat space of each lies in a slot.
    """

    def __init__(self, spaces: list[tuple[Chunk, torch.dtype]]) -> None:
        self.nbytes = 0
        self._places: list[tuple[Chunk, torch.dtype, int]] = []
        self._made: dict[int, Views] = {}
        for chunk, dtype in spaces:
            self._places.append((chunk, dtype, self.nbytes))
            self.nbytes += round_up(chunk.total * dtype.itemsize, _ALIGN)

    def of(self, slot: Slot) -> Views:
        """The views of one slot."""
        if slot.index not in self._made:
            with torch.inference_mode(False), torch.no_grad():
                flats = [slot.flat(dtype, offset, chunk.total) for chunk, dtype, offset in self._places]
                params = [chunk.views(flat) for (chunk, _, _), flat in zip(self._places, flats, strict=True)]
                self._made[slot.index] = Views(flats, params)
        return self._made[slot.index]
