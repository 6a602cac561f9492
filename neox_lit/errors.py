"""The one exception of this package's own."""

from __future__ import annotations


class NeoXError(ValueError):
    """A setting, a file or an input is wrong. The message names it, its value, and what to do."""
