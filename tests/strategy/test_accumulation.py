"""E18: gradients of several micro-batches, reduced one by one or once; the counts are those promised."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.nn import functional as F

from lightning_zero3 import LayerState, Zero3Error, shard_module, trainable_chunks
from lightning_zero3.optim import ShardedOptimizers
from tests.harness import assert_same, distributed
from tests.harness.models import MLP, AdamW, Block, Pairs, Task, batches, default_loss, loader
from tests.harness.oracles import fit
from tests.strategy.runs import make_mlp, mlp_task, same_run, weights_of, zero3


class Reductions(Callback):
    """How many reductions each batch brought."""

    def __init__(self):
        self.counts = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self._before = trainer.strategy.engine.comm.traffic.reduces

    def on_train_batch_end(self, trainer, module, *_):
        self.counts.append(trainer.strategy.engine.comm.traffic.reduces - self._before)


@pytest.mark.parametrize("accumulation", ["sharded", "full"])
@distributed(world=[1, 2, 3])
def test_four_micro_batches_train_like_ddp(world, accumulation):
    """10 batches: two full windows of 4, and a last one of 2."""
    data = loader(Pairs(40 * world, 7))
    count = Reductions()
    options = {"accumulate_grad_batches": 4, "max_epochs": 2, "steps": -1}
    ours = fit(zero3(accumulation=accumulation), mlp_task, data, callbacks=[count], **options)
    same_run(ours, fit("ddp", mlp_task, data, **options))
    engine = ours.trainer.strategy.engine
    each = sum(len(layer.trainable) for layer in engine.layers)
    if accumulation == "full" and world > 1:
        assert count.counts == [0, 0, 0, each, 0, 0, 0, each, 0, each] * 2
    else:
        assert count.counts == [each] * 20
    assert all(layer.state in (LayerState.SHARDED, LayerState.RESIDENT) for layer in engine.layers)
    assert engine.pool.taken == 0


class Skipping(Task):
    """Leaves a block out of the last micro-batch of each window."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        blocks = list(self.net.blocks)
        x = blocks[0](x)
        if batch_idx % 3 < 2:
            x = x + blocks[1](x)
        return F.mse_loss(self.net.head(x), y)


def square():
    return MLP(7, 7, 7, awkward=False)


@pytest.mark.parametrize("accumulation", ["sharded", "full"])
@distributed(world=2)
def test_a_block_that_the_last_micro_batch_leaves_out_keeps_its_gradient(accumulation):
    data = loader(Pairs(96, 7))
    ours, ddp = (
        fit(s, lambda: Skipping(square()), data, steps=4, accumulate_grad_batches=3)
        for s in (zero3(accumulation=accumulation), "ddp_find_unused_parameters_true")
    )
    same_run(ours, ddp)


class ByHand(Task):
    """Manual optimization: synchronises in every third step, and throws the first window's gradients away."""

    def __init__(self):
        super().__init__(make_mlp())
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        last = batch_idx % 3 == 2
        with optimizer.toggle_model(sync_grad=last):
            loss = default_loss(self.net, batch)
            self.manual_backward(loss / 3)
            if last:
                optimizer.step()
                optimizer.zero_grad()
            elif batch_idx == 1:
                optimizer.zero_grad()
        return {"loss": loss.detach()}


@pytest.mark.parametrize("accumulation", ["sharded", "full"])
@distributed(world=2)
def test_manual_optimization_says_when_to_synchronise(accumulation):
    data = loader(Pairs(96, 7))
    ours, ddp = (fit(s, ByHand, data, steps=4) for s in (zero3(accumulation=accumulation), "ddp"))
    same_run(ours, ddp)


class StepsTooEarly(ByHand):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(default_loss(self.net, batch))
            optimizer.step()


@distributed(world=2)
def test_a_step_with_gradients_that_are_held_back_is_refused():
    with pytest.raises(Zero3Error, match="gradients of layer .* are still held back"):
        fit(zero3(accumulation="full"), StepsTooEarly, loader(Pairs(32, 7)), steps=1)


@distributed(world=[2, 3])
def test_the_engine_alone_and_an_exception_in_between(world):
    model, plain = MLP(7, 15, 16), MLP(7, 15, 16)
    engine = shard_module(model, {Block})
    optimizer = AdamW(trainable_chunks(model), lr=1e-2)
    oracle = AdamW(plain.parameters(), lr=1e-2)
    batch = batches(Pairs(64 * world, 7), world=world)
    for step in range(3):
        with engine.no_sync():
            for micro in (0, 1):
                default_loss(model, batch(dist.get_rank(), 3 * step + micro)).backward()
                if micro == 0:
                    with pytest.raises(ZeroDivisionError):
                        model.blocks[0].register_forward_hook(lambda *_: 1 / 0)
                        default_loss(model, batch(0, 0))
                    model.blocks[0]._forward_hooks.popitem()
        default_loss(model, batch(dist.get_rank(), 3 * step + 2)).backward()
        for micro in range(3):
            for rank in range(world):
                (default_loss(plain, batch(rank, 3 * step + micro)) / world).backward()
        for o in (optimizer, oracle):
            o.step()
            o.zero_grad()
    assert_same(weights_of(model), dict(plain.state_dict()))
    assert engine.pool.taken == 0


@pytest.mark.parametrize("held", [True, False], ids=["still held back", "synchronised"])
@distributed(world=[2, 3])
def test_unfreezing_and_freezing_between_micro_batches_lose_no_gradient(world, held):
    """The second of three micro-batches finds a block unfrozen and another frozen; the first brought gradients."""
    model, plain = (MLP(7, 7, 7, awkward=False) for _ in range(2))
    for net in (model, plain):
        net.blocks[0].linear.weight.requires_grad_(False)
    engine = shard_module(model, {Block})
    groups = [list(net.parameters()) for net in (model, plain)]
    optimizer, oracle = (torch.optim.SGD(params, lr=0.1) for params in groups)
    sharded = ShardedOptimizers([optimizer], engine)
    batch = batches(Pairs(64 * world, 7), world=world)
    for micro in range(3):
        if micro == 1:
            for net in (model, plain):
                net.blocks[0].linear.weight.requires_grad_(True)
                net.blocks[1].requires_grad_(False)
        with engine.no_sync() if micro == 0 or (micro == 1 and held) else nullcontext():
            sharded.stand_ins.remove()
            default_loss(model, batch(dist.get_rank(), micro)).backward()
            sharded.stand_ins.place()
        for rank in range(world):
            (default_loss(plain, batch(rank, micro)) / world).backward()
    for o in (optimizer, oracle):
        o.step()
    assert_same(weights_of(model), dict(plain.state_dict()))
    assert engine.pool.taken == 0


def test_unknown_kinds_are_named():
    with pytest.raises(Zero3Error, match="accumulation='later': choose 'sharded' or 'full'"):
        zero3(accumulation="later")
