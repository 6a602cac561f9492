"""Steps and batches when ranks have different numbers of them.

Under DDP a rank that evaluates more batches than another just does. Here every forward needs every rank. So where ranks
may have different numbers of batches, each says before a step that it takes one, and a rank that is through with a data
loader stays to take part in the others' steps without data: it repeats the fetches of its own last one. In training,
where gradients need every rank too, all stop when the first has no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset

from lightning_zero3.comm import Communicator
from lightning_zero3.engine import Engine
from lightning_zero3.errors import Zero3Error

__all__ = ["EvenSteps", "evaluation_batches", "training_batches"]

_END = object()


class EvenSteps:
    """The steps of one evaluation, kept together on all ranks.

    Args:
        engine: whose layers the steps use.
        loop: Lightning's loop, which knows the data loaders and after how many batches of each it stops.
    """

    def __init__(self, engine: Engine, loop: Any) -> None:
        self._engine, self._loop = engine, loop
        self._loaders = loop._combined_loader.flattened
        self._in_turn = loop._combined_loader._mode == "sequential"
        self._at = 0  # which loader
        self._taken = 0  # batches of it
        known = not any(isinstance(loader, _Batches) for loader in self._loaders)
        mine = list(loop.max_batches) if known else None
        said = engine.comm.all_objects(mine)
        self._even = known and all(other == mine for other in said)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds each step. After this rank's last one on a loader, returns when all ranks are through with it."""
        if self._even:
            yield
            return
        comm = self._engine.comm
        comm.all_objects(True)
        yield
        self._taken += 1
        if self._through():
            while any(comm.all_objects(False)):
                self._engine.shadow_forward()
            self._at, self._taken = self._at + 1, 0

    def _through(self) -> bool:
        if not self._in_turn:
            return self._loop._data_fetcher.done
        loader = self._loaders[self._at]
        ends = (self._loop.max_batches[self._at], loader.count if isinstance(loader, _Batches) else None)
        return self._taken in ends


class _Batches:
    """A data loader of unreliable length. The length is not told, so that Lightning asks for batches until none comes.

    All else is the loader's own.

    Attributes:
        count: how many batches there are; known when the last is handed out.
    """

    def __init__(self, loader: Any, comm: Communicator, training: bool) -> None:
        self.__dict__.update(_loader=loader, _comm=comm, _training=training, count=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:  # a copy in the making
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    def __iter__(self) -> Iterator[Any]:
        return self._train() if self._training else self._evaluate()

    def _train(self) -> Iterator[Any]:
        for batch in self._loader:
            if not all(self._comm.all_objects(True)):
                return
            yield batch
        self._comm.all_objects(False)

    def _evaluate(self) -> Iterator[Any]:
        self.__dict__["count"] = None
        batches = iter(self._loader)
        batch, taken = next(batches, _END), 0
        if batch is _END:
            raise Zero3Error(
                f"rank {self._comm.rank} has no batch to evaluate, and would not know how to take part in the others' "
                "steps; give every rank at least one"
            )
        while batch is not _END:
            ahead, taken = next(batches, _END), taken + 1
            if ahead is _END:
                self.__dict__["count"] = taken
            yield batch
            batch = ahead


def training_batches(loader: Any, comm: Communicator) -> Any:
    """`loader` itself if all ranks have equally many batches, else wrapped: to end with the first rank's last batch."""
    lengths = comm.all_objects(_length(loader))
    even = lengths[0] is not None and lengths.count(lengths[0]) == len(lengths)
    return loader if even or comm.world_size == 1 else _Batches(loader, comm, training=True)


def evaluation_batches(loader: Any, comm: Communicator) -> Any:
    """`loader` itself if its length is known, else wrapped: to know the last batch, and to raise if there is none."""
    known = _length(loader) is not None
    return loader if known or comm.world_size == 1 else _Batches(loader, comm, training=False)


def _length(loader: Any) -> int | None:
    """Number of batches, if it can be relied on."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
