"""The one error class of the engine."""

__all__ = ["Zero3Error"]


class Zero3Error(RuntimeError):
    """Something the engine cannot do, or was asked to do at the wrong time. The message names it and the remedy."""
