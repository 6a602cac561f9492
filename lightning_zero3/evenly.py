"""Steps and batches when ranks have different numbers of them.

Under DDP a rank that evaluates more batches than another just does. Here every forward needs every rank. So where ranks
may have different numbers of batches, each says before a step that it takes one, and a rank that is through stays to
take part in the others' steps without data: it repeats the fetches of its own last one. In training, where gradients
need every rank too, all stop when the first has no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset

from lightning_zero3.comm import Communicator
from lightning_zero3.engine import Engine
from lightning_zero3.errors import Zero3Error

__all__ = ["EvenSteps", "evaluation_batches", "even_training_batches"]

_END = object()


class EvenSteps:
    """Evaluation steps of one run over the data, kept together on all ranks.

    Args:
        engine: whose layers the steps use.
        loop: Lightning's loop, which knows how many batches there are and which is the last.
    """

    def __init__(self, engine: Engine, loop: Any) -> None:
        self._engine = engine
        self._loop = loop
        lengths = [_length(loader) for loader in loop._combined_loader.flattened]
        mine = None if None in lengths else list(loop.max_batches)
        said = engine.comm.all_objects(mine)
        self._even = mine is not None and all(other == mine for other in said)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds each step. After this rank's last one, returns when all ranks are through."""
        comm = self._engine.comm
        if not self._even:
            comm.all_objects(True)
        yield
        if not self._even and self._loop._data_fetcher.done:
            while any(comm.all_objects(False)):
                self._engine.shadow_forward()


class _Batches:
    """A data loader whose length is not told, so that Lightning asks for batches until there are no more.

    Everything else is the loader's own.
    """

    def __init__(self, loader: Any, iterate: Callable[[Iterable], Iterator]) -> None:
        self.__dict__.update(_loader=loader, _iterate=iterate)

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:  # a copy in the making
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


def even_training_batches(loader: Any, comm: Communicator) -> Any:
    """`loader` itself if all ranks have equally many batches, else wrapped: to end with the first rank's last batch."""
    lengths = comm.all_objects(_length(loader))
    if comm.world_size == 1 or (lengths[0] is not None and lengths.count(lengths[0]) == len(lengths)):
        return loader

    def iterate(loader: Iterable) -> Iterator[Any]:
        batches = iter(loader)
        while True:
            batch = next(batches, _END)
            if not all(comm.all_objects(batch is not _END)):
                return
            yield batch

    return _Batches(loader, iterate)


def evaluation_batches(loader: Any, comm: Communicator) -> Any:
    """`loader` itself if its length is known, else wrapped: to raise if it is empty on this rank."""
    if comm.world_size == 1 or _length(loader) is not None:
        return loader

    def iterate(loader: Iterable) -> Iterator[Any]:
        batch = _END
        for batch in loader:
            yield batch
        if batch is _END:
            raise Zero3Error(
                f"rank {comm.rank} has no batch to evaluate, and would not know how to take part in the others' steps; "
                "give every rank at least one"
            )

    return _Batches(loader, iterate)


def _length(loader: Any) -> int | None:
    """Number of batches, if it can be relied on."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
