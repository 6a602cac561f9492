"""Clipping: norms over all ranks' segments, against `torch.nn.utils.clip_grad_norm_` in one process."""

import copy
import math

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_zero3 import Zero3Error
from lightning_zero3.clip import clip_grad_norm_
from lightning_zero3.shard import shard_module
from tests.engine.runs import full_grads
from tests.harness import assert_same, distributed
from tests.harness.models import Pairs, loader
from tests.strategy.runs import WIDTHS, make_mlp, trainer, zero3

NORMS = [2.0, 1, 3.5, "inf"]


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def backward(model, dtype, scale=1.0):
    """The same batch on every rank, so that the mean over ranks is one process's gradient."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(5, WIDTHS[0], generator=g).to(dtype)
    (model(x).square().mean() * scale).backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_type", NORMS)
@distributed(world=[1, 3])
def test_it_is_torchs(norm_type, dtype):
    plain, ours = make_mlp().to(dtype), make_mlp().to(dtype)
    backward(plain, dtype)
    # What torch gives in float64 for the same gradients: half precision there is too coarse for an oracle.
    exact = copy.deepcopy(plain).double()
    for wide, narrow in zip(exact.parameters(), plain.parameters(), strict=True):
        wide.grad = narrow.grad.double()
    expected = nn.utils.clip_grad_norm_(exact.parameters(), 0.01, float(norm_type))
    engine = shard_module(ours, "auto")
    backward(ours, dtype)
    norm = clip_grad_norm_(segments_of(engine), engine.comm, 0.01, norm_type)
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert norm.dtype is torch.float64
    assert_same(norm, expected, rtol=rounding)
    atol = 1e-14 if dtype is torch.float64 else 1e-6
    assert_same(full_grads(ours), gradients_of(exact), rtol=rounding, atol=atol)


def segments_of(engine):
    return [s.param for layer in engine.layers for chunk in layer.trainable for s in chunk.segments]


class Tiny(nn.Module):
    """Fewer elements than three ranks have room for."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0]))

    def forward(self, x):
        return self.weight * x.sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("norm_type", NORMS)
@distributed(world=3)
def test_ranks_that_hold_nothing_take_part(norm_type, dtype):
    model = Tiny().to(dtype)
    engine = shard_module(model, None)
    model(torch.full((1,), 4.0, dtype=dtype)).backward()
    chunk = engine.layers[0].trainable[0]
    held = [s.param for s in chunk.segments if engine.comm.rank == 0]
    assert engine.comm.rank == 0 or not any(chunk.pieces())
    assert_same(clip_grad_norm_(held, engine.comm, 1.0, norm_type), 4.0)
    assert_same([p.grad[:1] for p in held], [torch.ones(1)] * len(held))


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, "inf"])
@distributed(world=3)
def test_norms_that_are_not_finite_do_what_torchs_do_on_every_rank(norm_type, value):
    """The bad element lies on one rank only."""
    plain, ours = make_mlp(), make_mlp()
    backward(plain, torch.float32)
    plain.shift.grad[1] = value
    before = {k: g.clone() for k, g in gradients_of(plain).items()}
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01, float(norm_type))
    engine = shard_module(ours, "auto")
    backward(ours, torch.float32)
    for layer in engine.layers:
        for chunk in layer.trainable:
            for segment in chunk.segments:
                for index, elements, here in chunk.pieces(segment):
                    if chunk.names[index] == "shift" and elements.stop == 2:
                        segment.param.grad[here][-1] = value
    with pytest.raises(Zero3Error, match=f"norm of order .* is {value}, so they cannot be clipped"):
        clip_grad_norm_(segments_of(engine), engine.comm, 0.01, norm_type, error_if_nonfinite=True)
    assert_same(full_grads(ours), before)
    clip_grad_norm_(segments_of(engine), engine.comm, 0.01, norm_type)
    assert_same(full_grads(ours), gradients_of(plain))


@pytest.mark.parametrize("norm_type", [0, -1.0, "nan"])
@distributed(world=1)
def test_a_norm_that_is_none_is_refused(norm_type):
    model = Tiny()
    with pytest.raises(Zero3Error, match="norm_type.*give a positive number"):
        clip_grad_norm_([], shard_module(model, None).comm, 1.0, norm_type)


class TwoOptimizers(LightningModule):
    """One optimizer with two groups for the blocks, another for the rest, each with a clip of its own."""

    def __init__(self, norm_type):
        super().__init__()
        self.automatic_optimization = False
        self.net, self.norm_type, self.norms = make_mlp(), norm_type, []

    def configure_optimizers(self):
        blocks = list(self.net.blocks.parameters())
        rest = [p for name, p in self.net.named_parameters() if not name.startswith("blocks.")]
        groups = [
            {"params": [p for p in blocks if p.ndim > 1]},
            {"params": [p for p in blocks if p.ndim < 2], "lr": 0.3},
        ]
        return torch.optim.SGD(groups, lr=0.5), torch.optim.SGD(rest, lr=0.5)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        self.norms.append([self.clip(first, 0.02), self.clip(second, 10.0)])
        for optimizer in (first, second):
            optimizer.step()

    def clip(self, optimizer, max_norm):
        if hasattr(self.trainer.strategy, "clip_grad_norm_"):
            return self.trainer.strategy.clip_grad_norm_(optimizer, max_norm, self.norm_type)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return nn.utils.clip_grad_norm_(params, max_norm, float(self.norm_type))


@pytest.mark.parametrize("norm_type", NORMS)
@distributed(world=3)
def test_each_of_two_optimizers_is_clipped_by_its_own_norm(norm_type):
    results = []
    for strategy in (zero3(), "ddp"):
        module = TwoOptimizers(norm_type)
        trainer(strategy, max_steps=8).fit(module, loader(Pairs(64, WIDTHS[0])))
        weights = module.trainer.strategy.lightning_module_state_dict()
        results.append([module.norms, weights if module.global_rank == 0 else {}])
    assert len(results[0][0]) == 4
    assert_same(results[0], results[1], rtol=1e-4)


class Exploding(TwoOptimizers):
    def training_step(self, batch, batch_idx):
        self.manual_backward((self.net.shift * torch.inf).sum() + self.net(batch[0]).sum())
        self.trainer.strategy.clip_grad_norm_(self.optimizers()[1], 1.0, error_if_nonfinite=True)


@distributed(world=2)
def test_error_if_nonfinite_raises_on_all_ranks_together():
    with pytest.raises(Zero3Error, match="norm of order 2.0 is inf"):
        trainer(zero3(), max_steps=2).fit(Exploding(2.0), loader(Pairs(8, WIDTHS[0])))
