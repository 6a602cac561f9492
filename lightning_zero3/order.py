"""The order in which layers are fetched and reduced: recorded in one pass, followed in the next.

A `Path` serves two purposes. It says what to prefetch. And it lets ranks skip asking each other what comes next: while
a rank does what it did in a pass that all ranks have been through, its collectives match the others'; as soon as it
does anything else, it asks first (`Communicator.agree`). A rank that leaves the path alone is then found out by name,
where mismatched collectives would hang, crash or, worse, mix up the weights of two layers of the same size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

__all__ = ["Event", "Path"]

_REMEMBERED = 8  # passes; alternating steps (a GAN's two, accumulation's first and last) each find theirs again


class Event(NamedTuple):
    """One thing that happens to a layer in a pass."""

    what: str  # "fetch" for a use, "read" or "operation" for a parameter outside of its layer's use, or "reduce"
    layer: int


class Path:
    """The events of the current pass, and the earlier pass that it seems to repeat."""

    def __init__(self) -> None:
        self._known: list[list[Event]] = []  # most recent first
        self._current: list[Event] = []
        self._guess: list[Event] = []

    def begin(self) -> None:
        """Start a pass. The guess is that it repeats the last one."""
        self._current = []
        self._guess = self._known[0] if self._known else []

    def advance(self, event: Event) -> bool:
        """Record `event`; whether it was expected. If not, another remembered pass that fits becomes the guess."""
        at = len(self._current)
        expected = at < len(self._guess) and self._guess[at] == event
        self._current.append(event)
        if not expected:
            self._guess = next((k for k in self._known if k[: at + 1] == self._current), [])
        return expected

    def ahead(self, count: int) -> list[int]:
        """The next `count` different layers that the guess fetches."""
        layers: list[int] = []
        for event in self._rest():
            if len(layers) == count:
                break
            if event.what != "reduce" and event.layer not in layers:
                layers.append(event.layer)
        return layers

    def _rest(self) -> Iterator[Event]:
        """What the guess has still to come."""
        return islice(self._guess, len(self._current), None)

    def latest(self) -> list[Event]:
        """The pass that ended last."""
        return self._known[0] if self._known else []

    def repeats(self) -> bool:
        """Whether the guess is that the layer just fetched is fetched again at once."""
        at = len(self._current)
        return 0 < at < len(self._guess) and self._guess[at] == self._current[-1]

    def last_fetch(self) -> bool:
        """Whether the guess ends here: no further fetch follows."""
        return bool(self._guess) and not any(e.what != "reduce" for e in self._rest())

    def end(self) -> bool:
        """End the pass and remember it; whether it ended where the guess did."""
        expected = self._current == self._guess
        if self._current:
            if self._current in self._known:
                self._known.remove(self._current)
            self._known.insert(0, self._current)
            del self._known[_REMEMBERED:]
        self._current, self._guess = [], []
        return expected
