"""Every `precision`: results as "ddp" gives them, and where each dtype lives."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.nn import functional as F

from lightning_zero3 import Zero3Error, Zero3Strategy
from tests.harness import assert_same, distributed
from tests.harness.models import Pairs, Task, loader
from tests.harness.oracles import fit
from tests.strategy.runs import make_mlp, mlp_task, same_run, zero3

# In true half precision a flat chunk's update rounds differently from a parameter's own: allow two roundings.
TRUE = {"32-true": (1e-5, 1e-6), "64-true": (1e-12, 1e-12), "bf16-true": (2**-6, 2**-8), "16-true": (2**-9, 2**-10)}
DTYPES = {"32-true": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


def momentum(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


class Recording(Task):
    """Notes the dtypes that the model computes with."""

    def training_step(self, batch, batch_idx):
        self.seen = (batch[0].dtype, self.net.head.weight.dtype, self.net(batch[0]).dtype, torch.get_default_dtype())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("precision", TRUE)
@distributed(world=[1, 2])
def test_true_precisions_train_like_ddp(precision):
    rtol, atol = TRUE[precision]
    ours, ddp = (
        fit(s, lambda: Recording(make_mlp(), momentum), loader(Pairs(64, 7)), steps=8, precision=precision)
        for s in (zero3(), "ddp")
    )
    same_run(ours, ddp, rtol, atol)
    for name, weight in ours.weights.items():
        assert weight.dtype is ddp.weights[name].dtype is DTYPES[precision]
        assert ours.optimizer_state[name]["momentum_buffer"].dtype is DTYPES[precision]
    assert ours.trainer.lightning_module.seen == ddp.trainer.lightning_module.seen


@distributed(world=[1, 2])
def test_mixed_precision_is_ddps_within_rounding():
    ours, ddp = (
        fit(s, lambda: Task(make_mlp(), momentum), loader(Pairs(400, 7)), steps=20, precision="bf16-mixed")
        for s in (zero3(), "ddp")
    )
    assert_same(ours.losses, ddp.losses, rtol=0.02, atol=2e-3)
    assert_same(ours.weights, ddp.weights, rtol=0.02, atol=5e-3)
    assert {w.dtype for w in ours.weights.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("precision", "stored", "gathered", "reduced"),
    [
        ("32-true", torch.float32, torch.float32, torch.float32),
        ("64-true", torch.float64, torch.float64, torch.float64),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("16-true", torch.float16, torch.float16, torch.float16),
        ("bf16-mixed", torch.float32, torch.bfloat16, torch.float32),
    ],
)
@distributed(world=2)
def test_dtypes_of_parameter_gradient_and_optimizer_state(precision, stored, gathered, reduced):
    """L13."""
    strategy = zero3()
    fit(strategy, mlp_task, loader(Pairs(64, 7)), steps=2, precision=precision)
    chunks = [c for layer in strategy.engine.layers for c in layer.chunks]
    assert {c.dtype for c in chunks} == {c.data.dtype for c in chunks} == {stored}
    assert {c.compute_dtype for c in chunks} == {gathered}
    assert {c.reduce_dtype for c in chunks} == {reduced}
    (optimizer,) = strategy.optimizers
    for segment in strategy.segments(optimizer):
        assert segment.dtype is segment.grad.dtype is stored
        assert {v.dtype for k, v in optimizer.state[segment].items() if k != "step"} == {stored}


class Inside(Task):
    """Notes the dtypes that autocast chooses, and the weight's while it is gathered."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.seen = out.dtype, F.mse_loss(out, batch[1]).dtype, self.net.head.weight.dtype
        return super().training_step(batch, batch_idx)


@distributed(world=2)
def test_autocast_chooses_dtypes_and_weights_travel_small():
    module = Inside(make_mlp())
    fit(zero3(), lambda: module, loader(Pairs(64, 7)), steps=1, precision="bf16-mixed")
    assert module.seen == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert module.net.head.weight.dtype is torch.float32  # sharded, it says what is stored


def test_a_mixed_precision_that_the_cpu_lacks_becomes_the_one_it_has():
    trainer = Trainer(strategy=Zero3Strategy(), accelerator="cpu", devices=1, precision="16-mixed")
    assert trainer.precision == "bf16-mixed"


class Custom(Precision):
    precision = "32-true"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"plugins": MixedPrecision("16-mixed", "cuda")}, "16-mixed.*choose from 32-true.*gradient scaler.*bf16-mixed"),
        ({"plugins": Custom()}, "precision plugin Custom is not supported.*Trainer\\(precision"),
        ({"strategy": Zero3Strategy, "precision_plugin": Custom()}, "precision plugin Custom"),
    ],
    ids=["16-mixed", "custom plugin", "custom plugin of the strategy"],
)
def test_unsupported_precisions_are_refused_when_the_trainer_is_built(options, said):
    with pytest.raises(Zero3Error, match=said):
        if "strategy" in options:
            Zero3Strategy(precision_plugin=options["precision_plugin"])
        else:
            Trainer(strategy=Zero3Strategy(), accelerator="cpu", devices=2, **options)
