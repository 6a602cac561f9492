"""A SLURM job that is told to go back into the queue: saved by all ranks together, between two steps.

Lightning saves inside the signal's handler, on every rank wherever it happens to be. Saving is something that ranks do
together, so there they would wait for each other for ever. Here the signal is only noted. After each step the ranks ask
each other whether any of them was signalled, and do then what Lightning's handler does: save `hpc_ckpt_N.ckpt`, and let
`scontrol` requeue the job. Training goes on until SLURM ends it.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

__all__ = ["requeue_between_steps"]

_log = logging.getLogger(__name__)


class _Requeue:
    """Part of a callback, which runs after those that save checkpoints."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._signal: int | None = None

    def note(self, signum: int, _: Any) -> None:
        """The signal's handler."""
        self._signal = signum
        if not self._strategy.lightning_module.trainer.training:
            _log.warning(
                f"signal {signum}: this job saves and goes back into the queue after a step of training. "
                "It is not in one now."
            )

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        strategy = self._strategy
        if not strategy.engine.comm.any(self._signal is not None):
            return
        signum, self._signal = self._signal, None
        connector = trainer._signal_connector
        in_background, strategy.save_async = strategy.save_async, False  # the job ends soon
        try:
            strategy.wait_for_checkpoint()
            type(connector)._slurm_sigusr_handler_fn(connector, signum, None)
        finally:
            strategy.save_async = in_background


def requeue_between_steps(trainer: Any, strategy: Any, pl: str) -> None:
    """Take the place of Lightning's handler, where there is one. Before it is registered.

    Args:
        pl: the name of Lightning's package.
    """
    if not getattr(strategy.cluster_environment, "auto_requeue", False):
        return
    found = [callback for callback in trainer.callbacks if isinstance(callback, _Requeue)]
    if not found:
        found = [type("Requeue", (_Requeue, import_module(pl).Callback), {})(strategy)]
        trainer.callbacks += found
    trainer._signal_connector._slurm_sigusr_handler_fn = found[0].note
