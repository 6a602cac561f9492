"""What a run took, printed at its end."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_only

__all__ = ["MemoryReport"]


class MemoryReport(Callback):
    """Print `Zero3Strategy.report()` when training ends. Nothing under other strategies."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        report = getattr(trainer.strategy, "report", None)
        if report is not None:
            self._print(str(report()))

    @rank_zero_only
    def _print(self, text: str) -> None:
        print(f"\n{text}\n")
