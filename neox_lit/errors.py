"""The one exception of this package's own."""

from __future__ import annotations


class NeoXError(ValueError):
    """A setting, a file or an input is wrong. The message names it, its value, and what to do.

    Args:
        message: That.
        on_all_ranks: Every rank raises the same, so rank 0 alone need say it.
    """

    def __init__(self, message: str, *, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks
