"""Plans against the runs that they plan."""

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_zero3 import Zero3Error
from lightning_zero3.tools.plan import LiveBytes, Rehearsal, largest_micro_batch, plan
from tests.harness import distributed
from tests.harness.models import Task
from tests.strategy.runs import trainer, zero3


class Text(nn.Module):
    """Large enough for activations to count."""

    def __init__(self, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(500, 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(4))
        self.readout = nn.Linear(64, 500)
        self.blocks[0].requires_grad_(not frozen)
        self.register_buffer("offset", torch.ones(64))

    def forward(self, ids):
        x = self.embed(ids) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.readout(x)


def text_loss(net, ids):
    return nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


class Measure(Callback):
    """Live bytes over whole steps, the optimizer's and its temporaries included."""

    def on_fit_start(self, trainer, module):
        self.live = LiveBytes()
        self.live.__enter__()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.traffic = trainer.strategy.engine.comm.traffic
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.traffic.reset()

    def on_fit_end(self, trainer, module):
        self.live.__exit__(None, None, None)


CASES = {
    "plain": ({}, {}, {}),
    "bf16-mixed": ({}, {}, {"precision": "bf16-mixed"}),
    "bf16-true": ({}, {}, {"precision": "bf16-true"}),
    "frozen": ({"frozen": True}, {}, {}),
    "checkpointed": ({}, {"activation_checkpointing_policy": {nn.TransformerEncoderLayer}}, {}),
    "prefetch": ({}, {"prefetch": 3}, {}),
    "accumulated": ({}, {}, {"accumulate_grad_batches": 2}),
    "much accumulated": ({}, {}, {"accumulate_grad_batches": 5}),
    "much held": ({}, {"accumulation": "full"}, {"accumulate_grad_batches": 5}),
    "held": ({}, {"accumulation": "full"}, {"accumulate_grad_batches": 2}),
    "sgd": ({"optimizer": sgd}, {}, {}),
}


@pytest.mark.parametrize("case", CASES)
@distributed(world=2)
def test_a_run_takes_what_was_planned(case, world):
    model, options, run = CASES[case]
    model = dict(model)
    optimizer = {"make_optimizer": model.pop("optimizer")} if "optimizer" in model else {}

    def module():
        return Task(Text(**model), loss=text_loss, **optimizer)

    def strategy():
        return zero3(nn.TransformerEncoderLayer, nn.Embedding, **options)

    ids = torch.randint(500, (8, 64))
    planned = plan(
        module,
        lambda _: ids,
        world_size=world,
        strategy=strategy(),
        precision=run.get("precision", "32-true"),
        micro_batches=run.get("accumulate_grad_batches", 1),
    )

    measure = Measure()
    t = trainer(strategy(), max_steps=3, callbacks=[measure], **run)
    times = 3 * world * run.get("accumulate_grad_batches", 1)
    t.fit(module(), torch.utils.data.DataLoader(list(ids.repeat(times, 1)), batch_size=8))
    if t.global_rank == 0:  # whose part has the least padding
        assert planned.report == t.strategy.report()
    # What the mode saw in the run lacks the chunks, which were made before it was on.
    found = measure.live.peak + t.strategy.report().parameters[0]
    assert found == pytest.approx(planned.peak, rel=0.1)
    assert (planned.traffic.fetch_bytes, planned.traffic.reduce_bytes) == (
        measure.traffic.fetch_bytes,
        measure.traffic.reduce_bytes,
    )


@pytest.mark.parametrize("case", ["plain", "checkpointed", "bf16-mixed"])
def test_one_rehearsal_plans_any_batch_as_a_new_one_would(case):
    model, options, run = CASES[case]

    def rehearsal():
        return Rehearsal(
            lambda: Task(Text(**model), loss=text_loss),
            world_size=4,
            strategy=zero3(nn.TransformerEncoderLayer, nn.Embedding, **options),
            precision=run.get("precision", "32-true"),
        )

    used = rehearsal()
    for size in (8, 1, 3):
        batch = torch.zeros(size, 64, dtype=torch.long)
        assert used.plan(lambda _, batch=batch: batch) == rehearsal().plan(lambda _, batch=batch: batch)


def test_the_largest_micro_batch():
    rehearsal = Rehearsal(lambda: Task(Text(), loss=text_loss), world_size=4)

    def plan_of(size):
        return rehearsal.plan(lambda _: torch.zeros(size, 64, dtype=torch.long))

    budget = plan_of(3).peak
    assert largest_micro_batch(plan_of, budget) == 3
    assert largest_micro_batch(plan_of, budget - 1) == 2
    assert largest_micro_batch(plan_of, 1000) == 0


class Looks(Task):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else None


def test_a_step_that_looks_at_values_cannot_be_planned():
    with pytest.raises(Zero3Error, match=r"Looks.training_step looks at values .*Keep \.item\(\)"):
        plan(lambda: Looks(Text(), loss=text_loss), lambda _: torch.zeros(1, 8, dtype=torch.long), world_size=2)
