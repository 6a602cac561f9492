"""The order of training samples: a function of seed, epoch and how many samples all ranks have taken together.

An epoch is a permutation of the samples. The ranks take the next `world x batch_size` of it in each step, dealt out
like cards, so the number of samples taken is all that a run needs to go on, with as many ranks as it likes: it sees
what has not been seen, each sample once. The last step of an epoch has what is left over. Every rank then has an equal
share up to one sample, and a blank one in place of that, so all ranks have equally many batches of equal sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Position:
    """A place in training, the same on all ranks.

    Args:
        epoch: Which one.
        samples: Taken in it, by all ranks together.
        batches: Taken in it by each rank; not a function of `samples` once the number of ranks has changed.
    """

    epoch: int = 0
    samples: int = 0
    batches: int = 0


@dataclass(frozen=True)
class Share:
    """Which part of every step a rank takes."""

    batch_size: int
    rank: int = 0
    world: int = 1

    @property
    def step(self) -> int:
        """Samples that all ranks take in a step."""
        return self.batch_size * self.world

    def after(self, position: Position, n_samples: int) -> Position:
        """The position one step on, in an epoch of `n_samples`."""
        samples = min(position.samples + self.step, n_samples)
        return replace(position, samples=samples, batches=position.batches + 1)

    def steps(self, position: Position, n_samples: int) -> int:
        """Batches of an epoch that goes on from `position`, those before it included."""
        return position.batches + -(-(n_samples - position.samples) // self.step)


class EpochOrder:
    """The batches of a data loader (its `batch_sampler`): lists of indices into `n_samples` samples.

    Args:
        blank: Index of a blank sample.
        shuffle: A permutation by `seed` and epoch, else 0, 1, 2, ... in each epoch.
    """

    def __init__(self, n_samples: int, share: Share, seed: int, *, blank: int, shuffle: bool = True) -> None:
        self.n_samples = n_samples
        self.share = share
        self.seed = seed
        self.blank = blank
        self.shuffle = shuffle
        self.begin = Position()  # of the epoch at hand: not its first sample, if it was resumed

    def samples(self, epoch: int) -> np.ndarray:
        """All samples of an epoch, in order."""
        if not self.shuffle:
            return np.arange(self.n_samples)
        return np.random.default_rng((self.seed, epoch)).permutation(self.n_samples)

    def __len__(self) -> int:
        return self.share.steps(self.begin, self.n_samples) - self.begin.batches

    def __iter__(self) -> Iterator[list[int]]:
        share, order = self.share, self.samples(self.begin.epoch)
        for start in range(self.begin.samples, self.n_samples, share.step):
            step = order[start : start + share.step].tolist()
            step += [self.blank] * (-len(step) % share.world)
            yield step[share.rank :: share.world]


class ResumableLoader:
    """A data loader that knows its position, and can go on from another.

    It is no `DataLoader`, so Lightning leaves it as it is: the share of each rank is settled already.

    Args:
        loader: Its batches are those of one epoch from `order.begin` on.
        begin: Where the first epoch begins.
        in_mid_epoch: Whether it does begin there, whatever epoch it is said to be. (Lightning counts an epoch as done
            in which `max_steps` stopped a run, but goes on in it if the run that is resumed has `max_steps`, too.)
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        order: Any,
        begin: Position | None = None,
        in_mid_epoch: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loader = loader
        self._order = order
        self._epoch = begin.epoch if begin else 0
        self._in_mid_epoch = in_mid_epoch
        self._first = True
        self._begun = False  # the epoch that `_order.begin` says
        order.begin = begin or Position()
        self.position: Position = order.begin

    @property
    def sampler(self) -> ResumableLoader:
        """Where Lightning looks for something that has a `set_epoch`."""
        return self

    @property
    def seed(self) -> int:
        """Of the order."""
        return self._order.seed

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch. One that was resumed goes on if it is the same, and is given up if not."""
        self._epoch = epoch
        self._first = self._first and not self._begun

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is in the data module's state. Without this method Lightning warns in mid-epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""

    def __len__(self) -> int:
        """Batches of the epoch, also those before it was resumed: Lightning counts them too."""
        return self._order.share.steps(self._next_begin(same=True), self._order.n_samples)

    def __iter__(self) -> Iterator[Any]:
        # A generator, so nothing of this happens before the first batch is asked for: Lightning makes iterators early.
        self._order.begin = self.position = self._next_begin(same=not self._begun)
        self._begun = True
        for batch in self._loader:
            self.position = self._order.share.after(self.position, self._order.n_samples)
            yield batch

    def _next_begin(self, same: bool) -> Position:
        begin: Position = self._order.begin
        goes_on = begin.epoch == self._epoch or (self._first and self._in_mid_epoch())
        return begin if same and goes_on else Position(self._epoch)
