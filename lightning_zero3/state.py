"""The states of a layer."""

from enum import Enum, auto

__all__ = ["LayerState"]


class LayerState(Enum):
    """Where a layer's full parameters are.

    In training a layer goes SHARDED -> FETCHING -> FETCHED -> SHARDED, once in forward and once in backward. The root
    layer stays FETCHED from the one to the other, and so does the last one before the loss, as soon as a first pass
    has shown which that is.
    """

    SHARDED = auto()  # only this rank's chunks exist
    FETCHING = auto()  # an all-gather into the slot is in flight
    FETCHED = auto()  # parameters are views of the slot
    GATHERED = auto()  # parameters are full tensors outside of any slot, inside `gather_parameters`
    RESIDENT = auto()  # always there: nothing to fetch, or one rank that casts nothing, whose chunks are the parameters
