"""What users do to gradients: parameters have stand-ins, which are zeroed like gradients and refuse the rest."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn import functional as F

from lightning_zero3 import Zero3Error
from tests.harness import assert_same, distributed
from tests.harness.models import MLP, Pairs, Task, loader
from tests.harness.oracles import fit
from tests.strategy.runs import WIDTHS, make_mlp, same_run, trainer, zero3

STRATEGIES = [zero3, lambda: "ddp"]


def data():
    return loader(Pairs(64, WIDTHS[0]))


class Manual(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = make_mlp()

    def configure_optimizers(self):
        matrices = [p for p in self.net.parameters() if p.ndim > 1]
        others = [p for p in self.net.parameters() if p.ndim < 2]
        return torch.optim.SGD([{"params": matrices}, {"params": others, "lr": 0.05}], lr=0.1, momentum=0.9)

    def loss(self, batch):
        return F.mse_loss(self.net(batch[0]), batch[1])


class ZeroedByModule(Manual):
    """The whole model, or a part of it, zeroed by `zero_grad` of a module, before and after backward."""

    def __init__(self, zero, after=False):
        super().__init__()
        self.zero, self.after = zero, after

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if not self.after:
            self.zero(self)
        loss = self.loss(batch)
        self.manual_backward(loss)
        if self.after:
            self.zero(self)
        optimizer.step()
        return {"loss": loss.detach()}


ZEROING = {
    "module": lambda m: m.zero_grad(),
    "module in place": lambda m: m.zero_grad(set_to_none=False),
    "net": lambda m: m.net.zero_grad(),
    "one block in place": lambda m: m.net.blocks[1].zero_grad(set_to_none=False),
    "one weight": lambda m: m.net.head.weight.grad is not None and m.net.head.weight.grad.zero_(),
    "optimizer": lambda m: m.optimizers().zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("how", ZEROING)
@distributed(world=3)
def test_zero_grad_of_modules_and_parameters_acts_on_the_shards(how, after):
    ours, ddp = (fit(s(), lambda: ZeroedByModule(ZEROING[how], after), data(), steps=5) for s in STRATEGIES)
    same_run(ours, ddp)


class Poking(Task):
    """Does something to gradients when they are complete."""

    def __init__(self, poke):
        super().__init__(make_mlp())
        self.poke = poke

    def on_before_optimizer_step(self, optimizer):
        self.poke(self)


def replace(module):
    module.net.head.weight.grad = torch.zeros_like(module.net.head.weight)


POKES = {
    "clip by norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip by value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "norms": lambda m: grad_norm(m, 2),
    "read": lambda m: m.net.head.weight.grad.abs().max(),
    "scale": lambda m: m.net.head.weight.grad.mul_(0.5),
}


@pytest.mark.parametrize("poke", POKES)
@distributed(world=[1, 2])
def test_using_a_parameters_gradient_is_an_error_that_says_how_to_do_it(poke):
    with pytest.raises(Zero3Error, match=r"sharded over ranks. To clip: Trainer\(gradient_clip_val.*grad_norms\(\)"):
        trainer(zero3(), max_steps=2).fit(Poking(POKES[poke]), data())


@distributed(world=2)
def test_replacing_a_gradient_is_an_error_that_names_the_parameter():
    with pytest.raises(Zero3Error, match=r"gradient of parameter 'net.head.weight' was replaced"):
        trainer(zero3(), max_steps=2).fit(Poking(replace), data())


class RawBackward(Manual):
    """`loss.backward()` here and there, of which the strategy is not told. The root's scale gets its gradient first."""

    def __init__(self, raw, zero):
        super().__init__()
        self.raw, self.zero = raw, zero

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        losses = [self.loss(batch), self.loss([batch[0], batch[1] * 2]) * self.net.scale]
        self.zero(self)
        for loss, raw in zip(losses, self.raw, strict=True):
            loss.backward() if raw and hasattr(self.trainer.strategy, "engine") else self.manual_backward(loss)
        optimizer.step()
        return {"loss": sum(losses).detach()}


@pytest.mark.parametrize("raw", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("how", ["module", "module in place", "one weight", "optimizer"])
@distributed(world=2)
def test_backward_without_the_strategy_accumulates_and_zeroes_likewise(how, raw):
    ours, ddp = (fit(s(), lambda: RawBackward(raw, ZEROING[how]), data(), steps=5) for s in STRATEGIES)
    same_run(ours, ddp)


class Norms(Task):
    def __init__(self, norm_type):
        super().__init__(make_mlp())
        self.norm_type, self.norms = norm_type, []

    def on_before_optimizer_step(self, optimizer):
        ours = hasattr(self.trainer.strategy, "grad_norms")
        self.norms.append(self.trainer.strategy.grad_norms(self.norm_type) if ours else grad_norm(self, self.norm_type))


@pytest.mark.parametrize("norm_type", [1, 2.0, "inf"])
@distributed(world=3)
def test_norms_for_logging_are_lightnings(norm_type):
    """L16."""
    results = []
    for strategy in STRATEGIES:
        module = Norms(norm_type)
        trainer(strategy(), max_steps=3, accumulate_grad_batches=2).fit(module, data())
        results.append(module.norms)
    assert_same(results[0], results[1], rtol=1e-4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@distributed(world=2)
def test_stand_ins_have_the_parameters_dtype_while_layers_are_in_use(precision):
    module = ZeroedByModule(ZEROING["module"])
    trainer(zero3(), max_steps=3, precision=precision).fit(module, data())
    assert all(p.grad is None for p in module.parameters())  # after training there are none


class Compiled(Task):
    def configure_model(self):
        for block in self.net.blocks:
            block.compile(backend="eager")


@distributed(world=2)
def test_compiled_blocks_do_not_mind():
    ours = fit(zero3(), lambda: Compiled(MLP(*WIDTHS)), data(), steps=3)
    same_run(ours, fit("ddp", lambda: Task(MLP(*WIDTHS)), data(), steps=3))
