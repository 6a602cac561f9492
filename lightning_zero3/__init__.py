"""ZeRO stage 3 for PyTorch Lightning. One file for each idea:

- `layout`: where each parameter lies in a flat space. `chunk`: this rank's slices, and segments for optimizers.
- `slots`: the buffers that layers take turns in. `comm`: collectives, and the watch over ranks that part ways.
- `state`, `layer`: the life of a layer. `collect`: its gradients on their way. `engine`: which layer when.
- `order`: what is recorded to prefetch by.
- `saved`: weights in autograd's graph. `access`: parameters that are read outside of their layer.
- `wrap`: what becomes a layer. `shard`: from a model to a sharded one and back.
- `meta`: models without memory. `weights`: from files straight into shards.
- `boxes`, `sharded_checkpoint`, `durable`, `background`, `loading`: checkpoints that are directories.
- `plan`, `plan_command`: what a run will take. `timeline`: what it does when.
- `optim`, `clip`, `precision`, `scaler`, `strategy`, `evenly`, `report`, `callbacks`, `averaging`: the rest of a run.
"""

from lightning_zero3.averaging import EMAWeightAveraging, WeightAveraging
from lightning_zero3.callbacks import GradientNorms, MemoryReport
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
from lightning_zero3.timeline import Timeline
from lightning_zero3.weights import empty_parameters, load_weights, until_sharded

__version__ = "0.1.0"

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
    "shard_module",
    "trainable_chunks",
    "until_sharded",
]
