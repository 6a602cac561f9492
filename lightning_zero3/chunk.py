"""Chunks: this rank's slices of a layer's parameters, and the segments of them that optimizers see."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero3 import compat
from lightning_zero3.access import ParkedParameter
from lightning_zero3.checkpoints.boxes import FlatRange
from lightning_zero3.comm import Communicator
from lightning_zero3.errors import Zero3Error
from lightning_zero3.layout import Layout
from lightning_zero3.weights import arrived, read, waiting_for

__all__ = ["Chunk", "PrecisionPolicy", "Segment"]


@dataclass(frozen=True)
class PrecisionPolicy:
    """Which dtypes parameters take on their way.

    Attributes:
        param_dtype: of gathered floating-point matrices; default as stored, as vectors always travel. The chunk is then
            the master copy: it is cast once per fetch, before it travels.
        reduce_dtype: of gradients while they are reduced; default as the chunk is stored. They land in the chunk's.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


_BLOCK = 1 << 21  # elements read from a file at a time: copied while they are in the cache, and next to no memory


class Segment(NamedTuple):
    """The part of a trainable chunk that belongs to one optimizer parameter group.

    `param` is a view of chunk elements [lo, hi). `indices` are the consecutive parameters (spans of the layout) of
    which it holds elements.
    """

    param: nn.Parameter
    lo: int
    hi: int
    indices: tuple[int, ...]


def _poison(dtype: torch.dtype) -> float | int:
    """What a sharded parameter reads as: NaN, or for dtypes without one the lowest value."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype is torch.bool else torch.iinfo(dtype).min


class Chunk:
    """One flat space of a layer, its trainable or its fixed parameters of one dtype, of which this rank keeps one part.

    While the layer is sharded each parameter's `.data` is a *placeholder*: one NaN expanded to the full shape. It has
    the right shape, dtype and device for whoever builds an optimizer from it, takes a few bytes, and turns a forgotten
    gather into NaN instead of a plausible number. Writing to it is noticed at the next fetch.

    Args:
        named: names and parameters, all of one dtype.
        layer: name of the layer, for errors.
        trainable: whether gradients are wanted.
        comm: the ranks that share the flat space. The first one's values are used.
        device: where the chunk lives.
        policy: dtypes to compute and reduce in.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        *,
        layer: str,
        trainable: bool,
        comm: Communicator,
        device: torch.device,
        policy: PrecisionPolicy,
    ) -> None:
        self.layer = layer
        self.layout = Layout.of(named)
        self.names = [span.name for span in self.layout.spans]
        self.params = [dict(named)[name] for name in self.names]
        self.trainable = trainable
        self.dtype = self.params[0].dtype
        casts = policy.param_dtype is not None and self.dtype.is_floating_point
        self.compute_dtype = policy.param_dtype if casts and policy.param_dtype else self.dtype
        self.reduce_dtype = policy.reduce_dtype or self.dtype
        # The mean is the sum times 1/N: on this rank's part afterwards, 1/N of the work, unless a sum could overflow.
        self.scales_early = self.reduce_dtype is torch.float16
        self.size = self.layout.chunk_size(comm.world_size)
        self.total = self.size * comm.world_size  # elements of the padded flat space
        self.start = self.size * comm.rank  # where this rank's part of it begins
        self.data: Tensor = self._shard(comm, device)
        self.followed = False  # by optimizers that notice when segments are split
        self.segments: list[Segment] = []
        if trainable:
            self.data = nn.Parameter(self.data)
            self.segments = [Segment(self.data, 0, self.size, tuple(index for index, _, _ in self.pieces()))]

        self._scalars = torch.full((len(self.params),), _poison(self.dtype), dtype=self.dtype, device=device)
        self._placeholders = [scalar.expand(p.shape) for scalar, p in zip(self._scalars, self.params, strict=True)]
        self._pointed_to: list[Tensor] = []
        self._versions: list[int] = []  # of the parameters when they were parked
        self.park()

    def _shard(self, comm: Communicator, device: torch.device) -> Tensor:
        if all(waiting_for(p) is not None for p in self.params):
            return torch.empty(self.size, dtype=self.dtype, device=device)  # for `fill`
        flat = None
        if comm.rank == 0:
            flat = torch.zeros(self.total, dtype=self.dtype, device=device)
            for span, param in zip(self.layout.spans, self.params, strict=True):
                span.view(flat).copy_(param.detach())
            if comm.world_size == 1:
                return flat
        part = torch.zeros(self.size, dtype=self.dtype, device=device)
        comm.scatter(None if flat is None else flat.view(torch.uint8), part.view(torch.uint8))
        return part

    @torch.no_grad()
    def fill(self) -> None:
        """Read this rank's part of the parameters that wait for it from their files."""
        filled = 0
        for index, part, here in self.pieces():
            self.data[filled : here.start] = 0  # padding
            filled = here.stop
            source = waiting_for(self.params[index])
            if source is not None:
                for lo in range(part.start, part.stop, _BLOCK):
                    hi, at = min(lo + _BLOCK, part.stop), here.start + lo - part.start
                    self.data[at : at + hi - lo] = read(source, lo, hi)
        self.data[filled:] = 0
        for param in self.params:
            arrived(param)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def views(self, flat: Tensor) -> list[Tensor]:
        """Every parameter as a view of `flat`, `[total]`."""
        return [span.view(flat) for span in self.layout.spans]

    def point_to(self, views: list[Tensor]) -> None:
        """Let the parameters' data be `views`."""
        self.unpark()
        self._pointed_to = views
        for param, view in zip(self.params, views, strict=True):
            param.data = view

    def park(self) -> None:
        """Let the parameters' data be the placeholders."""
        self.point_to(self._placeholders)
        self._versions = [p._version for p in self.params]
        for param in self.params:
            if type(param) is nn.Parameter:
                param.__class__ = ParkedParameter  # type: ignore[assignment]

    def unpark(self) -> None:
        """Let the parameters be of their own class again."""
        for param in self.params:
            if type(param) is ParkedParameter:
                param.__class__ = nn.Parameter  # type: ignore[assignment]

    def check_parked(self) -> None:
        """Raise if someone wrote to, moved or cast a parameter since `park`."""
        self.check_in_place()
        wrong = next((i for i, p in enumerate(self.params) if p._version != self._versions[i]), None)
        if wrong is None and compat.readable(self._scalars):  # `.data` writes leave no version
            value = _poison(self.dtype)
            intact = self._scalars == value if value == value else self._scalars.isnan()
            wrong = None if intact.all() else int((~intact).nonzero()[0])
        if wrong is not None:
            raise Zero3Error(
                f"parameter {self.names[wrong]!r} of layer {self.layer!r} was written while sharded. Full parameters "
                "exist only inside `with gather_parameters(module, writeback=True):`."
            )

    def check_in_place(self) -> None:
        """Raise if someone replaced, moved or cast a parameter since `point_to`."""
        for name, param, view in zip(self.names, self.params, self._pointed_to, strict=True):
            if compat.address(param) != compat.address(view) or param.dtype != view.dtype:
                raise Zero3Error(
                    f"parameter {name!r} of layer {self.layer!r} was replaced, moved or cast while sharded "
                    f"(expected {self.dtype} on {self._scalars.device}). Call .to(), .half() or load weights before "
                    "sharding, or inside `with gather_parameters(module, writeback=True):`."
                )

    def check_unwritten(self) -> None:
        """Raise if someone wrote to a parameter since `park`, while it was full: the change would be lost."""
        for name, param, version in zip(self.names, self.params, self._versions, strict=True):
            if param._version != version:
                raise Zero3Error(
                    f"parameter {name!r} of layer {self.layer!r} was written while its layer was in use (set on the "
                    "first batch, max_norm of an embedding, an average by hand, ...). Gathered parameters are copies. "
                    "Do it before training or between steps, in `with gather_parameters(module, writeback=True):`."
                )

    # -- gradients ----------------------------------------------------------------------------------------------------

    def split(self, label: Callable[[int], Hashable]) -> None:
        """Divide segments so that `label` (of a parameter's index) is the same for all that one segment holds.

        Segments are never joined again: what optimizers keep for their parts may differ by then. Gradients are divided
        with them; optimizer state follows in `ShardedOptimizers`.
        """
        segments = []
        for segment in self.segments:
            runs = [tuple(run) for _, run in groupby(segment.indices, label)]
            for run in runs if len(runs) > 1 else ():
                lo = max(self.layout.spans[run[0]].start - self.start, segment.lo)
                hi = min(self.layout.spans[run[-1]].stop - self.start, segment.hi)
                part = Segment(nn.Parameter(self.data.detach()[lo:hi]), lo, hi, run)
                if segment.param.grad is not None:
                    part.param.grad = segment.param.grad[lo - segment.lo : hi - segment.lo]
                segments.append(part)
            if len(runs) <= 1:
                segments.append(segment)
        self.segments = segments

    def pieces(self, segment: Segment | None = None) -> Iterator[tuple[int, slice, slice]]:
        """Which elements of which parameters a segment (default the whole chunk) holds.

        Yields:
            The parameter's index, its elements (flattened as in the flat space), and where in the segment they are.
        """
        if segment is None:
            lo, hi, indices = 0, self.size, tuple(range(len(self.params)))
        else:
            _, lo, hi, indices = segment
        for index in indices:
            span = self.layout.spans[index]
            part = span.overlap(self.start + lo, self.start + hi)
            if part.start < part.stop:
                at = span.start + part.start - self.start - lo
                yield index, part, slice(at, at + part.stop - part.start)

    def range_of(self, index: int, start: int, values: Tensor) -> FlatRange:
        """`values` as elements of the whole parameter, flattened as in the flat space, from `start` on."""
        span = self.layout.spans[index]
        return FlatRange(span.shape, span.stride, start, values)

    @property
    def grad_nbytes(self) -> int:
        """Bytes of this rank's gradient, there now or not."""
        return self.size * self.dtype.itemsize if self.trainable else 0

    @torch.no_grad()
    def add_grad(self, part: Tensor, scale: float, keep: bool) -> set[int]:
        """Add this rank's part of a reduced gradient, `[size]`, times `scale`, to the segments' gradients.

        `keep`: they may keep `part` itself. Otherwise its memory serves others; segments without a gradient get copies,
        so that `zero_grad(set_to_none=True)` frees what it seems to free.

        Returns:
            The parameters that had none before.
        """
        new: set[int] = set()
        for segment in self.segments:
            if self.followed and not segment.param.requires_grad:
                continue
            piece = part[segment.lo : segment.hi]
            if segment.param.grad is not None:
                segment.param.grad.add_(piece, alpha=scale)
                continue
            new.update(segment.indices)
            if keep and piece.dtype == self.dtype:
                segment.param.grad = piece
            else:
                segment.param.grad = torch.mul(piece, scale).to(self.dtype)
        return new

    def drop_grad(self, unused: set[int]) -> None:
        """Let these parameters have no gradient: optimizers then pass over them."""
        if not self.followed or not unused:
            return
        self.split(lambda index: index in unused)
        for segment in self.segments:
            if not unused.isdisjoint(segment.indices):
                segment.param.grad = None
