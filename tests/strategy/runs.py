"""What the tests of the strategy share: the strategy with small layers, and the models' runs compared."""

import functools
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_zero3 import Zero3Strategy, full_state_dict
from tests.harness import assert_same
from tests.harness.models import MLP, Block, Task, tiny_gpt_neox
from tests.harness.oracles import Run

WIDTHS = (7, 15, 16, 17)

make_mlp = functools.partial(MLP, *WIDTHS)
make_plain_mlp = functools.partial(MLP, *WIDTHS, awkward=False)


def mlp_task(**options: Any) -> Task:
    return Task(make_mlp(), **options)


def plain_mlp_task(**options: Any) -> Task:
    return Task(make_plain_mlp(), **options)


def neox_task(**options: Any) -> Task:
    return Task(tiny_gpt_neox(), **options)


def zero3(*blocks: type, **options: Any) -> Zero3Strategy:
    """The strategy with every block its own layer; "auto" would not cut models this small."""
    return Zero3Strategy(**{"auto_wrap_policy": set(blocks or (Block,)), **options})


def zero3_neox(**options: Any) -> Zero3Strategy:
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

    return zero3(GPTNeoXLayer, **options)


def same_run(ours: Run, theirs: Run, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Equal losses, weights and optimizer state."""
    __tracebackhide__ = True
    assert_same(ours.losses, theirs.losses, rtol, atol, what="losses")
    assert_same(ours.weights, theirs.weights, rtol, atol, what="weights")
    assert_same(ours.optimizer_state, theirs.optimizer_state, rtol, atol, what="optimizer state")


def trainer(strategy: Any, **options: Any) -> Trainer:
    """A quiet Trainer on the ranks of this job."""
    quiet = {
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in options.get("callbacks", ())),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{"strategy": strategy, "accelerator": "cpu", "devices": dist.get_world_size(), **quiet, **options})


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Full weights on every rank, whoever trained them."""
    return full_state_dict(module, rank0_only=False)
