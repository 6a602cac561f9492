"""Weights that go from files straight into shards."""

import pytest
import torch
from torch import nn

from lightning_zero3 import Zero3Error, empty_parameters, full_state_dict, load_weights, shard_module, until_sharded
from tests.harness import assert_same, distributed
from tests.harness.models import Task
from tests.strategy.runs import trainer, zero3
from tests.strategy.test_checkpoints import common_batches

STRATEGIES = ["ddp", zero3]


class Lazy:
    """A tensor whose reads are counted."""

    def __init__(self, tensor, log=None, broken=False):
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype
        self.log, self.broken = log if log is not None else [], broken

    def read(self, start, stop):
        if self.broken:
            raise OSError("weights.bin is damaged")
        self.log.append(stop - start)
        return self.tensor.reshape(-1)[start:stop].clone()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(3))
        self.readout = nn.Linear(6, 11, bias=False)
        self.readout.weight = self.embed.weight
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, x):
        x = self.embed(x.abs().long().sum(-1) % 11) * self.scale + self.table
        for block in self.blocks:
            x = block(x)
        return self.readout(x)


def stored():
    torch.manual_seed(5)
    net = Net()
    net.scale.mul_(1.5)
    return {name: value.detach().clone() for name, value in net.state_dict().items() if name != "readout.weight"}


class FromFiles(Task):
    def __init__(self, tensors):
        super().__init__(None, loss=lambda net, batch: net(batch[0]).square().mean())
        self.tensors = tensors

    def configure_model(self):
        if self.net is None:
            with empty_parameters():
                self.net = Net()
            load_weights(self.net, self.tensors)


@distributed(world=[1, 2, 3])
def test_each_rank_reads_its_part_and_trains_like_ddp(world):
    weights, log = stored(), []
    results = []
    for strategy in STRATEGIES:
        log.clear()
        module = FromFiles({name: Lazy(value, log) for name, value in weights.items()})
        chosen = strategy(nn.Sequential) if strategy is zero3 else strategy
        t = trainer(chosen, max_epochs=1)
        t.fit(module, common_batches())
        results.append({k: v.cpu().clone() for k, v in full_state_dict(module, rank0_only=False).items()})
    total = sum(v.numel() for v in weights.values())
    part = sum(log) - 6  # the buffer is read by all
    assert part <= (total - 6) / world + 16 * 5  # aligned parts of five chunks
    assert sum(torch.tensor(part).item() for part in t.strategy.engine.comm.all_objects(part)) == total - 6
    assert_same(*results, rtol=1e-5)
    assert not torch.equal(results[0]["net.embed.weight"], weights["embed.weight"])


@distributed(world=2)
def test_what_is_missing_is_initialised_and_dtypes_are_the_models():
    weights = stored()
    del weights["blocks.1.0.weight"], weights["blocks.2.1.bias"]
    with empty_parameters():
        net = Net().double()
        net.blocks[0].requires_grad_(False)
    with until_sharded():
        load_weights(net, {name: value.half() for name, value in weights.items()}, strict=False)
    assert all(p.is_meta for p in net.parameters())
    shard_module(net, {nn.Sequential})
    found = full_state_dict(net, rank0_only=False)
    for name, value in weights.items():
        assert_same(found[name], value.half().double(), rtol=0, atol=0)
    assert found["blocks.1.0.weight"].std() > 0.05
    assert not found["blocks.2.1.bias"].any()
    assert found["readout.weight"].equal(found["embed.weight"])


def test_loading_at_once_without_zero3():
    weights = stored()
    with empty_parameters():
        net = Net()
    assert not net.table.is_meta
    load_weights(net, {name: Lazy(value) for name, value in weights.items()})
    assert net.readout.weight is net.embed.weight
    assert_same({k: v for k, v in net.state_dict().items() if k in weights}, weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("blocks.0.0.bias"), "missing: 'blocks.0.0.bias'"),
        (lambda w: w.update(other=torch.zeros(1)), "unexpected: 'other'"),
        (lambda w: w.update({"embed.weight": torch.zeros(12, 6)}), r"shape of 'embed.weight': \[12, 6\] in the file"),
    ],
)
def test_mistakes_are_named_before_anything_is_read(change, message):
    weights = stored()
    change(weights)
    net = Net()
    before = net.blocks[0][0].weight.clone()
    with pytest.raises(Zero3Error, match=message):
        load_weights(net, weights)
    assert net.blocks[0][0].weight.equal(before)


@distributed(world=2)
def test_a_rank_that_cannot_read_is_an_error_on_all(world):
    import torch.distributed as dist

    weights = {name: Lazy(value) for name, value in stored().items()}
    weights["blocks.1.1.bias"].broken = dist.get_rank() == 1
    with pytest.raises(Zero3Error, match=r"layer 'net.blocks.1': rank 1: weights.bin is damaged"):
        trainer(zero3(nn.Sequential), max_epochs=1).fit(FromFiles(weights), common_batches())
