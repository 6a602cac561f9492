"""Manual optimization: several optimizers, each with its own part of the model, as under "ddp"."""

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F

from tests.harness import distributed
from tests.harness.models import MLP, AdamW, Pairs, loader
from tests.harness.oracles import fit
from tests.strategy.runs import same_run, zero3

DDP = "ddp_find_unused_parameters_true"


class Gan(LightningModule):
    """Generator and discriminator take turns in every step.

    The discriminator judges what the generator made, so that the generator's loss reaches its weights: unless it is
    toggled off, it gathers gradients that are not meant for it.
    """

    def __init__(self, turn: str = "toggle_optimizer", zero_first: bool = True, clip: float | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = MLP(7, 15, 16, seed=1)
        self.discriminator = MLP(3, 9, 10, seed=2)
        self.turn, self.zero_first, self.clip = turn, zero_first, clip

    def configure_optimizers(self):
        g = AdamW(self.generator.parameters(), lr=1e-2)
        d = torch.optim.SGD(self.discriminator.parameters(), lr=5e-2, momentum=0.9)
        return [g, d], [torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5) for o in (g, d)]

    def _turn(self, optimizer):
        if self.turn == "toggle_model":
            return optimizer.toggle_model()
        return self.toggled_optimizer(optimizer) if self.turn == "toggle_optimizer" else nullcontext()

    def _update(self, optimizer, loss):
        if self.zero_first:
            optimizer.zero_grad()
        self.manual_backward(loss)
        if self.clip:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
        optimizer.step()
        if not self.zero_first:
            optimizer.zero_grad()

    def training_step(self, batch, batch_idx):
        x, real = batch
        g, d = self.optimizers()
        with self._turn(g):
            judged = self.discriminator(self.generator(x))
            g_loss = F.softplus(-judged).mean()
            self._update(g, g_loss)
        with self._turn(d):
            fake = self.generator(x).detach()
            d_loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
            self._update(d, d_loss)
        for schedule in self.lr_schedulers():
            schedule.step()
        return {"loss": (g_loss + d_loss).detach()}


@pytest.mark.parametrize("zero_first", [True, False], ids=["zero first", "zero after"])
@pytest.mark.parametrize("turn", ["toggle_optimizer", "toggle_model", "neither"])
@distributed(world=2)
def test_two_optimizers_take_turns_like_ddp(turn, zero_first):
    """L4, L5: two `manual_backward` in a step, each with an optimizer and a schedule of its own."""
    data = loader(Pairs(64, 7))
    ours, ddp = (fit(s, lambda: Gan(turn, zero_first), data, steps=12) for s in (zero3(), DDP))
    assert len(ours.losses) == 6
    same_run(ours, ddp)


@distributed(world=3)
def test_each_optimizer_clips_its_own_gradients():
    data = loader(Pairs(64, 7))
    ours, ddp = (fit(s, lambda: Gan(clip=0.01), data, steps=8) for s in (zero3(), DDP))
    same_run(ours, ddp)


@distributed(world=2)
def test_both_optimizers_and_schedules_are_saved_and_resumed(tmp_path):
    """L5."""
    data = loader(Pairs(64, 7))
    resumed = []
    for number, (first, then) in enumerate([(DDP, DDP), (zero3(), DDP), (DDP, zero3()), (zero3(), zero3())]):
        path = tmp_path / f"{number}.ckpt"
        fit(first, Gan, data, steps=8).trainer.save_checkpoint(path)
        resumed.append(fit(then, Gan, data, steps=14, ckpt_path=str(path)))
    assert len(resumed[0].losses) == 3
    for other in resumed[1:]:
        same_run(other, resumed[0])


class Accumulating(LightningModule):
    """One optimizer, a step every third batch, two backward passes in each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = MLP(7, 15, 16)

    def configure_optimizers(self):
        return AdamW(self.net.parameters(), lr=1e-2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        loss = F.mse_loss(self.net(x), y)
        self.manual_backward(loss)
        other = F.l1_loss(self.net(x), y)
        self.manual_backward(other)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": (loss + other).detach()}


@distributed(world=2)
def test_several_backward_passes_accumulate_until_the_step():
    data = loader(Pairs(96, 7))
    ours, ddp = (fit(s, Accumulating, data, steps=3) for s in (zero3(), "ddp"))
    assert len(ours.losses) == 9
    same_run(ours, ddp)
