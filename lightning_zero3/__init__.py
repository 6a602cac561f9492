"""ZeRO stage 3 for PyTorch Lightning. One file for each idea; here the engine, which needs no Lightning:

- `layout`: where each parameter lies in a flat space. `chunk`: this rank's slices, and segments for optimizers.
- `slots`: the buffers that layers take turns in. `comm`: collectives, and the watch over ranks that part ways.
- `state`, `layer`: the life of a layer. `collect`: its gradients on their way. `engine`: which layer when.
- `order`: what is recorded to prefetch by.
- `saved`: weights in autograd's graph. `access`: parameters that are read outside of their layer.
- `wrap`: what becomes a layer. `shard`: from a model to a sharded one and back. `sequential`: without Lightning.
- `meta`: models without memory. `weights`: from files straight into shards.
- `optim`: optimizers over segments. `gradients`: what `parameter.grad` is meanwhile. `clip`: norms over ranks.
- `checkpointing`: activations that are computed again.

And what the Trainer wants of it: `strategy`, `precision`, `scaler`, `evenly`, `report`, `requeue`, `registry`,
`pytorch_lightning`. Around both:

- `checkpoints`: directories in which every rank writes its part, and the files that they become.
- `callbacks`: averages of weights, norms of gradients, a time line.
- `tools`: `zero3` from the shell: plan a run, consolidate and inspect checkpoints.
"""

# Names are imported when they are first used: `zero3 --help` need not wait for torch and Lightning.

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_zero3.registry import register_when_imported

if TYPE_CHECKING:
    from lightning_zero3.callbacks.averaging import EMAWeightAveraging, WeightAveraging
    from lightning_zero3.callbacks.gradient_norms import GradientNorms
    from lightning_zero3.callbacks.memory_report import MemoryReport
    from lightning_zero3.callbacks.timeline import Timeline
    from lightning_zero3.checkpoints.loading import newest_checkpoint
    from lightning_zero3.chunk import PrecisionPolicy
    from lightning_zero3.errors import Zero3Error
    from lightning_zero3.layer import Zero3Layer
    from lightning_zero3.report import Report
    from lightning_zero3.sequential import Zero3Sequential
    from lightning_zero3.shard import (
        full_state_dict,
        gather_parameters,
        load_full_state_dict,
        shard_module,
        trainable_chunks,
    )
    from lightning_zero3.state import LayerState
    from lightning_zero3.strategy import Zero3Strategy
    from lightning_zero3.weights import empty_parameters, load_weights, until_sharded

__version__ = "0.1.0"

_HOMES = {
    "callbacks.averaging": ("EMAWeightAveraging", "WeightAveraging"),
    "callbacks.gradient_norms": ("GradientNorms",),
    "callbacks.memory_report": ("MemoryReport",),
    "callbacks.timeline": ("Timeline",),
    "checkpoints.loading": ("newest_checkpoint",),
    "chunk": ("PrecisionPolicy",),
    "errors": ("Zero3Error",),
    "layer": ("Zero3Layer",),
    "report": ("Report",),
    "sequential": ("Zero3Sequential",),
    "shard": ("full_state_dict", "gather_parameters", "load_full_state_dict", "shard_module", "trainable_chunks"),
    "state": ("LayerState",),
    "strategy": ("Zero3Strategy",),
    "weights": ("empty_parameters", "load_weights", "until_sharded"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "EMAWeightAveraging",
    "GradientNorms",
    "LayerState",
    "MemoryReport",
    "PrecisionPolicy",
    "Report",
    "Timeline",
    "WeightAveraging",
    "Zero3Error",
    "Zero3Layer",
    "Zero3Sequential",
    "Zero3Strategy",
    "empty_parameters",
    "full_state_dict",
    "gather_parameters",
    "load_full_state_dict",
    "load_weights",
    "newest_checkpoint",
    "shard_module",
    "trainable_chunks",
    "until_sharded",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_when_imported("lightning.pytorch", "lightning_zero3.strategy")
register_when_imported("pytorch_lightning", "lightning_zero3.pytorch_lightning")
