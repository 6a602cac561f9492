"""Callbacks and loggers that cannot work on shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_zero3.errors import Zero3Error

__all__ = ["refuse_callbacks", "refuse_loggers"]

_REFUSED = {
    "ModelPruning": "it rewrites parameters, of which each rank has only a part",
    "StochasticWeightAveraging": "it averages full parameters, of which each rank has only a part",
    "WeightAveraging": "it averages full parameters, of which each rank has only a part",
}
_INSTEAD = {
    "StochasticWeightAveraging": "Use lightning_zero3.WeightAveraging(avg_fn=get_swa_avg_fn()), with should_update() "
    "true for the epochs to average, and the scheduler SWALR (both of torch.optim.swa_utils).",
    "WeightAveraging": "Use the class of the same name in lightning_zero3.",
}


def refuse_callbacks(callbacks: Iterable[Any]) -> None:
    """Raise for callbacks of Lightning, or derived from them, that would do nothing or harm without saying so.

    Raises:
        Zero3Error: with the reason.
    """
    for callback in callbacks:
        for base in type(callback).__mro__:
            if base.__module__.startswith("lightning_zero3."):
                break  # ours, which makes what it is derived from work
            if base.__name__ in _REFUSED:
                raise Zero3Error(
                    f"callback {type(callback).__name__} does not work with Zero3Strategy: {_REFUSED[base.__name__]}. "
                    f"{_INSTEAD.get(base.__name__, 'Leave it out.')}"
                )


def refuse_loggers(loggers: Iterable[Any]) -> None:
    """Raise for a logger that would run the model on the first rank alone.

    Raises:
        Zero3Error: with the reason.
    """
    for logger in loggers:
        if getattr(logger, "_log_graph", False):
            raise Zero3Error(
                f"{type(logger).__name__}(log_graph=True) runs the model on the first rank alone, which has a part of "
                "it only. Leave log_graph out, or log the graph before the fit."
            )
