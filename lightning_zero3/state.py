"""The states of a layer."""

from enum import Enum, auto

__all__ = ["LayerState"]


class LayerState(Enum):
    """Where a layer's full parameters are.

    In training a layer goes SHARDED -> FETCHING -> FETCHED -> SHARDED, once in forward and once in backward. The root
    layer, and the last one before the loss, stay FETCHED from the one to the other.
    """

    SHARDED = auto()  # only this rank's chunks exist
    FETCHING = auto()  # an all-gather into the slot is in flight
    FETCHED = auto()  # parameters are views of the slot
    GATHERED = auto()  # parameters are full tensors outside of any slot, inside `gather_parameters`
    RESIDENT = auto()  # a world of one: parameters are views of the chunks, always
