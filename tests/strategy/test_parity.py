"""Training through Lightning equals "ddp" and FSDP2: losses, weights and optimizer state."""

import pytest
import torch
from torch import nn

from tests.harness import distributed
from tests.harness.models import Pairs, Tokens, adamw, loader
from tests.harness.oracles import fit
from tests.strategy.runs import (
    mlp_task,
    neox_task,
    plain_mlp_task,
    same_run,
    zero3,
    zero3_neox,
)

WORLDS = [1, 2, 3, 4]


def pairs(n: int = 400):
    return loader(Pairs(n, 7))


def with_schedule(net: nn.Module) -> dict:
    optimizer = adamw(net)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=10)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def scheduled(task, **options):
    return lambda: task(make_optimizer=with_schedule, **options)


@distributed(world=WORLDS)
def test_awkward_shapes_train_like_ddp():
    """E14: at world 3 the shapes are (7, 15), (16, 17), scalars, and a parameter smaller than the world."""
    ours, ddp = (fit(s, scheduled(mlp_task), pairs()) for s in (zero3(), "ddp"))
    assert len(ours.losses) == 10
    same_run(ours, ddp)


@distributed(world=WORLDS)
def test_training_equals_fsdp2():
    ours, fsdp2 = (fit(s, scheduled(plain_mlp_task), pairs()) for s in (zero3(), "fsdp2"))
    same_run(ours, fsdp2)


@distributed(world=WORLDS)
def test_hugging_face_gpt_neox_trains_like_ddp():
    ours, ddp = (fit(s, scheduled(neox_task), loader(Tokens(400))) for s in (zero3_neox(), "ddp"))
    same_run(ours, ddp, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"gradient_clip_algorithm": "value"}], ids=["norm", "value"])
@distributed(world=[2, 3])
def test_gradients_are_clipped_like_ddp(options):
    """L3."""
    clip = {"gradient_clip_val": 0.02, **options}
    ours, ddp = (fit(s, mlp_task, pairs(), **clip) for s in (zero3(), "ddp"))
    same_run(ours, ddp)


@distributed(world=[1, 3])
def test_gradients_accumulate_like_ddp():
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05, "steps": 4}
    ours, ddp = (fit(s, mlp_task, pairs(), **options) for s in (zero3(), "ddp"))
    assert len(ours.losses) == 12
    same_run(ours, ddp)


OPTIMIZERS = {
    "sgd momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=1e-2, momentum=0.5, centered=True),
    "named": lambda net: torch.optim.AdamW(net.named_parameters(), lr=1e-2),
    "foreach": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True, amsgrad=True),
    "fused": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True),
    "nadam": lambda net: torch.optim.NAdam(net.parameters(), lr=1e-2),
    "asgd": lambda net: torch.optim.ASGD(net.parameters(), lr=1e-2),
    "rprop": lambda net: torch.optim.Rprop(net.parameters(), lr=1e-2),
    "adadelta": lambda net: torch.optim.Adadelta(net.parameters()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world=2)
def test_elementwise_optimizers_give_ddps_weights_and_state(name):
    options = {"steps": 4, "precision": "64-true"}  # some go by the sign of the gradient
    ours, ddp = (
        fit(s, lambda: mlp_task(make_optimizer=OPTIMIZERS[name]), pairs(), **options) for s in (zero3(), "ddp")
    )
    same_run(ours, ddp)
