"""Buffers: the first rank's at the start and before each step, as under "ddp"; E21."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_zero3 import Zero3Error
from tests.harness import assert_same, distributed
from tests.harness.models import Pairs, Task, loader
from tests.harness.oracles import fit
from tests.strategy.runs import same_run, trainer, weights_of, zero3


class Norms(nn.Module):
    """Blocks with BatchNorm, and one outside of them, whose buffers may differ between ranks at first."""

    def __init__(self, own_mean: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.Sequential(
                *(nn.Sequential(nn.Linear(n, 15), nn.BatchNorm1d(15), nn.Tanh()) for n in (7, 15))
            )
            self.norm = nn.BatchNorm1d(15, affine=False)
            self.head = nn.Linear(15, 3)
        self.norm.running_mean += dist.get_rank() if own_mean else 0

    def forward(self, x):
        return self.head(self.norm(self.blocks(x)))


def task(own_mean=False):
    return Task(Norms(own_mean), lambda net: torch.optim.SGD(net.parameters(), lr=0.1))


@distributed(world=[1, 2, 3])
def test_running_statistics_are_ddps():
    ours, ddp = (
        fit(s, lambda: task(own_mean=True), loader(Pairs(96, 7)), steps=6) for s in (zero3(nn.Sequential), "ddp")
    )
    assert ours.weights["net.norm.num_batches_tracked"] == 6
    same_run(ours, ddp)


@distributed(world=2)
def test_buffers_can_be_left_to_each_rank():
    results = []
    for strategy in (zero3(nn.Sequential, broadcast_buffers=False), DDPStrategy(broadcast_buffers=False)):
        t, module = trainer(strategy, max_steps=4), task()
        t.fit(module, loader(Pairs(64, 7)))
        results.append(dict(module.named_buffers()))
    assert_same(results[0], results[1], rtol=1e-4)
    means = [None, None]
    dist.all_gather_object(means, results[0]["net.norm.running_mean"])
    assert not torch.equal(*means)


@pytest.mark.parametrize("validate_first", [False, True])
@distributed(world=2)
def test_sync_batchnorm_is_honoured(validate_first):
    """Its kernel exists on GPUs only: that it refuses the CPU shows that it was called."""
    for strategy in (zero3(nn.Sequential), "ddp"):
        t, module = trainer(strategy, max_steps=1, sync_batchnorm=True), task()
        if validate_first:
            t.validate(module, loader(Pairs(16, 7)), verbose=False)
        with pytest.raises(ValueError, match="SyncBatchNorm .* GPU"):
            t.fit(module, loader(Pairs(16, 7)))


@distributed(world=2)
def test_layers_cannot_be_synchronised_once_sharded():
    module = task()
    trainer(zero3(nn.Sequential), max_steps=1).fit(module, loader(Pairs(16, 7)))
    with pytest.raises(Zero3Error, match="sync_batchnorm.*sharded by an earlier Trainer without it"):
        trainer(zero3(nn.Sequential), max_steps=1, sync_batchnorm=True).fit(module, loader(Pairs(16, 7)))


@distributed(world=2)
def test_a_second_fit_keeps_the_statistics():
    results = []
    for strategy in (zero3(nn.Sequential), "ddp"):
        t, module = trainer(strategy, max_epochs=1), task()
        t.fit(module, loader(Pairs(64, 7)), loader(Pairs(32, 7, seed=1)))
        scores = dict(t.callback_metrics)
        t.fit_loop.max_epochs = 2
        t.fit(module, loader(Pairs(64, 7)))
        results.append([weights_of(module), scores])
    assert_same(results[0], results[1], rtol=1e-4)


class Counter(nn.Module):
    """Buffers of all kinds: replaced by assignment, changed in place, transposed, boolean, empty, counted in."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.head = nn.Linear(7, 3)
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("changed", torch.zeros(2, 2, dtype=torch.float64).t())
        self.register_buffer("mask", torch.ones(3, 4, dtype=torch.bool))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("none", None)
        self.register_buffer("evaluated", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.replaced = self.replaced + x.detach()[0, :3]
            self.changed += x.detach()[0, 0]
        else:
            self.evaluated += x.sum()
        return self.head(x) + self.replaced * self.mask[0, 0]


class Watched(Task):
    """Keeps copies of the buffers after each evaluation."""

    def __init__(self) -> None:
        super().__init__(Counter(), lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
        self.seen: list[dict] = []

    def on_validation_epoch_end(self) -> None:
        self.seen.append({name: buffer.clone() for name, buffer in self.net.named_buffers()})


@distributed(world=2)
def test_buffers_that_ranks_change_are_ddps_in_training_and_evaluation():
    """In training the first rank's count. In evaluation each rank keeps its own, until the next stage or step."""
    results = []
    for strategy in (zero3(nn.Linear), "ddp"):
        module, t = Watched(), trainer(strategy, max_epochs=2)
        t.fit(module, loader(Pairs(24, 7)), loader(Pairs(32, 7, seed=1)))
        t.validate(module, loader(Pairs(32, 7, seed=2)), verbose=False)
        results.append([module.seen, weights_of(module)["net.head.weight"]])
    assert len(results[0][0]) == 4
    assert_same(results[0], results[1], rtol=1e-4)
