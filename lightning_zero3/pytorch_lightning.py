"""`Zero3Strategy` and callbacks for those who `import pytorch_lightning`: the same over the other package's classes.

`strategy="zero3"` works there after `import lightning_zero3`, too; this module is for its arguments and for callbacks.
"""

from __future__ import annotations

from pytorch_lightning import callbacks
from pytorch_lightning.plugins import precision as _lightning
from pytorch_lightning.strategies import StrategyRegistry
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.strategies.parallel import ParallelStrategy

from lightning_zero3.callbacks.averaging import ShardedAveragingMixin, lightnings
from lightning_zero3.checkpoints.loading import let_lightning_load_directories
from lightning_zero3.precision import MixedPrecisionMixin, TruePrecisionMixin
from lightning_zero3.registry import register_strategies
from lightning_zero3.strategy import LauncherMixin, Zero3StrategyMixin

__all__ = ["EMAWeightAveraging", "MixedPrecision", "Precision", "WeightAveraging", "Zero3Strategy"]


class Precision(TruePrecisionMixin, _lightning.Precision):  # type: ignore[misc]
    """`TruePrecisionMixin` for `pytorch_lightning`."""


class MixedPrecision(MixedPrecisionMixin, _lightning.MixedPrecision):  # type: ignore[misc]
    """`MixedPrecisionMixin` for `pytorch_lightning`."""


class Launcher(LauncherMixin, _MultiProcessingLauncher):  # type: ignore[misc]
    """`LauncherMixin` for `pytorch_lightning`."""


class Zero3Strategy(Zero3StrategyMixin, ParallelStrategy):  # type: ignore[misc]
    __doc__ = Zero3StrategyMixin.__doc__
    _pl = "pytorch_lightning"
    _fabric = "lightning_fabric"
    _precision_class = Precision
    _mixed_precision_class = MixedPrecision
    _launcher_class = Launcher


class WeightAveraging(ShardedAveragingMixin, lightnings(callbacks, "WeightAveraging")):  # type: ignore[misc]
    """`lightning_zero3.WeightAveraging` for `pytorch_lightning`."""


class EMAWeightAveraging(WeightAveraging, lightnings(callbacks, "EMAWeightAveraging")):  # type: ignore[misc]
    """`lightning_zero3.EMAWeightAveraging` for `pytorch_lightning`."""


register_strategies(Zero3Strategy, StrategyRegistry)
let_lightning_load_directories("pytorch_lightning", "lightning_fabric")
