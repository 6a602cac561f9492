"""A layer's gradients on their way from autograd to the reduction: collected into one flat gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_zero3.slots import Slot, SlotViews, Views

if TYPE_CHECKING:
    from lightning_zero3.layer import Zero3Layer

__all__ = ["GradientCollector"]


class GradientCollector:
    """A layer's flat gradient while it is collected: which parameters' have arrived, and where they are put.

    Args:
        layer: whose.
    """

    def __init__(self, layer: Zero3Layer) -> None:
        self._layer = layer
        self._all = {(place, i) for place, c in enumerate(layer.trainable) for i in range(len(c.params))}
        self._views = SlotViews([(c, c.reduce_dtype) for c in layer.trainable])
        self._gaps = [list(c.layout.gaps(c.total)) for c in layer.trainable]
        self._world_size = layer.engine.comm.world_size
        self._held: tuple[Slot | None, set[tuple[int, int]], Views] | None = None
        self._reset()

    def _reset(self) -> None:
        self._arrived: set[tuple[int, int]] = set()
        self._missing: set[tuple[int, int]] = set()
        self._slot: Slot | None = None
        self._into: Views | None = None

    @property
    def begun(self) -> bool:
        """Whether any gradient has arrived since the last reduction."""
        return self._into is not None

    def waits_for_only(self, place: int, index: int) -> bool:
        """Whether one parameter's gradient is the last of those that are wanted now."""
        if not self._arrived:
            trainable = self._layer.trainable
            self._missing = {(at, i) for at, i in self._all if trainable[at].params[i].requires_grad}
        return self._missing == {(place, index)}

    def put(self, place: int, index: int, grad: Tensor) -> None:
        """Take in one parameter's gradient."""
        again = (place, index) in self._arrived  # nested passes bring gradients in parts
        if not again and self._is_flat(grad):
            self._into = Views([grad.as_strided((grad.numel(),), (1,))], [[grad]])
            self._arrived.add((place, index))
            self._missing.clear()
            return
        if self._into is None:
            self._take_memory()
            assert self._into is not None
        target = self._into.params[place][index]
        if grad.is_sparse:
            grad = grad.to_dense()
        scale = 1.0 / self._world_size if self._layer.trainable[place].scales_early else 1.0
        if again:
            target.add_(grad, alpha=scale)
        elif scale != 1.0:
            torch.mul(grad, scale, out=target)
        else:
            target.copy_(grad)
        self._arrived.add((place, index))
        self._missing.discard((place, index))

    def _is_flat(self, grad: Tensor) -> bool:
        """Whether a gradient needs no copy: it is all of the layer's, without padding, and laid out as it travels.

        So it is for the largest parameters there are, embeddings and readouts.
        """
        if len(self._all) != 1 or self._world_size == 1 or self._layer.trainable[0].scales_early:
            return False
        if grad.is_cuda:
            return False  # autograd's memory, on another stream: freed before the reduction has read it
        chunk = self._layer.trainable[0]
        return (
            chunk.total == grad.numel()
            and grad.dtype == chunk.reduce_dtype
            and grad.layout is torch.strided
            and grad.stride() == chunk.layout.spans[0].stride
        )

    def complete(self) -> tuple[Slot | None, set[tuple[int, int]], list[Tensor]]:
        """End the collection: what was held back is added, and what no gradient arrived for is zero, as all padding.

        Returns:
            The slot that they lie in, if any; which gradients arrived; the flat gradients, one `[total]` per trainable
            chunk.
        """
        held, self._held = self._held, None
        if self._into is None:
            assert held is not None
            return held[0], held[1], held[2].flats
        flats, views = self._into
        slot, arrived = self._slot, self._arrived
        for place, index in self._all - arrived:
            views[place][index].zero_()
        for flat, gaps in zip(flats, self._gaps, strict=True):
            for lo, hi in gaps:
                flat[lo:hi].zero_()
        if held is not None:
            arrived = arrived | held[1]
            torch._foreach_add_(flats, held[2].flats)
            if held[0] is not None:
                self._layer.engine.pool.give(held[0])
        self._reset()
        return slot, arrived, flats

    @property
    def held(self) -> bool:
        """Whether gradients of earlier passes are held back."""
        return self._held is not None

    def hold_back(self) -> None:
        """Keep the flat gradients, to be added to those of the next pass."""
        into = self._into
        slot, arrived, flats = self.complete()
        assert into is not None
        self._held = slot, arrived, Views(flats, into.params)

    def forget(self, place: int, index: int) -> None:
        """Let what is held back of one parameter's gradient be zero."""
        if self._held is not None:
            self._held[2].params[place][index].zero_()
            self._held[1].discard((place, index))

    def drop(self) -> None:
        """Forget what has arrived."""
        if self._slot is not None:
            self._layer.engine.pool.give(self._slot)
        self._reset()

    def _take_memory(self) -> None:
        engine, trainable = self._layer.engine, self._layer.trainable
        if self._world_size == 1:  # nothing travels: the gradient is what the optimizer gets
            flats = [torch.empty(c.total, dtype=c.reduce_dtype, device=c.data.device) for c in trainable]
            self._into = Views(flats, [c.views(f) for c, f in zip(trainable, flats, strict=True)])
        else:
            self._slot = engine.grad_slot(self._layer, self._views.nbytes)
            self._into = self._views.of(self._slot)
