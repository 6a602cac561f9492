"""Precision "16-mixed": the loss scale, its checks and its steps are the same on all ranks, and DDP's."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from lightning_zero3 import Zero3Strategy
from lightning_zero3.scaler import Zero3GradScaler
from tests.harness import assert_same, distributed
from tests.harness.models import AdamW, Pairs, Task, adamw, loader
from tests.harness.oracles import fit
from tests.strategy.runs import WIDTHS, make_mlp, trainer, weights_of, zero3

STRATEGIES = [zero3, lambda: "ddp"]


def half(**scaling):
    """Trainer options: on the CPU `precision="16-mixed"` would become "bf16-mixed"."""
    return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **scaling) if scaling else None)}


def data():
    return loader(Pairs(96, WIDTHS[0]))


class Overflowing(Task):
    """In the given batches the gradient of one small parameter, and no other, is infinite on rank 0."""

    def __init__(self, batches=(), make_optimizer=adamw):
        super().__init__(make_mlp(), make_optimizer)
        self.batches = batches

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx in self.batches and self.global_rank == 0:
            loss = loss + 3e38 * (self.net.shift - self.net.shift.detach()).float().sum()
        return loss


class Watch(Callback):
    """After each step: the scale, the weights, and on how many ranks the gradients in hand were not finite."""

    def __init__(self):
        self.scales, self.weights, self.ranks = [], [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        params = trainer.precision_plugin.main_params(optimizer)
        bad = any(not p.grad.isfinite().all() for p in params if p.grad is not None)
        everyone = [None] * trainer.world_size
        dist.all_gather_object(everyone, bad)
        self.ranks.append(sum(everyone))

    def on_train_batch_end(self, trainer, module, *_):
        self.scales.append(trainer.scaler.get_scale())
        self.weights.append(weights_of(module))


def only_shift(net):
    return torch.optim.SGD([net.shift], lr=0.1)


def fused(net):
    return AdamW(net.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("make_optimizer", [adamw, only_shift, fused])
@distributed(world=[2, 3])
def test_an_overflow_on_one_rank_makes_all_ranks_skip_the_step_and_halve_the_scale(make_optimizer):
    watch = Watch()
    fit(zero3(), lambda: Overflowing((2,), make_optimizer), data(), steps=5, callbacks=[watch], **half(init_scale=64.0))
    assert watch.ranks == [0, 0, 1, 0, 0]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, watch.scales)
    assert everyone == [[64.0, 64.0, 32.0, 32.0, 32.0]] * dist.get_world_size()
    assert_same(watch.weights[2], watch.weights[1], rtol=0, atol=0)
    for before, after in ((0, 1), (2, 3)):
        assert not torch.equal(watch.weights[before]["net.shift"], watch.weights[after]["net.shift"])


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}],
    ids=["plain", "accumulated", "clipped by value"],
)
@pytest.mark.parametrize("batches", [(), (1, 4)], ids=["finite", "overflows"])
@distributed(world=2)
def test_it_trains_like_ddp_within_rounding(options, batches):
    runs = []
    for strategy in STRATEGIES:
        module = lambda: Overflowing(batches, momentum)  # noqa: E731
        run = fit(strategy(), module, data(), steps=4, **half(init_scale=1024.0, growth_interval=3), **options)
        runs.append([run.losses, run.weights, run.optimizer_state, run.trainer.scaler.state_dict()])
    assert_same(runs[0][3], runs[1][3], rtol=0, atol=0)
    assert_same(runs[0][:3], runs[1][:3], rtol=2e-3, atol=2e-3)


def momentum(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


@distributed(world=3)
def test_clipping_acts_on_gradients_without_the_scale():
    """With lr 1, and a norm that is surely reached, the first step is as long as the norm allows."""
    sgd = lambda net: torch.optim.SGD(net.parameters(), lr=1.0)  # noqa: E731
    watch = Watch()
    fit(zero3(), lambda: Overflowing((), sgd), data(), steps=1, callbacks=[watch], gradient_clip_val=0.01, **half())
    start = {f"net.{k}": v for k, v in make_mlp().state_dict().items()}
    step = torch.cat([(watch.weights[0][k] - start[k]).flatten() for k in start])
    assert_same(step.norm(), 0.01, rtol=1e-3)


@distributed(world=2)
def test_fused_optimizers_step_like_ddps_and_refuse_clipping_like_lightning():
    runs = [fit(s(), lambda: Overflowing((1,), fused), data(), steps=5, **half(init_scale=64.0)) for s in STRATEGIES]
    assert {k: v["step"].item() for k, v in runs[0].optimizer_state.items()} == {
        k: v["step"].item() for k, v in runs[1].optimizer_state.items()
    }
    assert_same(runs[0].weights, runs[1].weights, rtol=2e-2, atol=5e-3)
    with pytest.raises(RuntimeError, match="AdamW, does not allow for gradient clipping"):
        fit(zero3(), lambda: Overflowing((), fused), data(), steps=1, gradient_clip_val=1.0, **half())


@distributed(world=2)
def test_the_scale_is_saved_and_resumed_under_either_strategy(tmp_path):
    resumed = []
    for first in STRATEGIES:
        for then in STRATEGIES:
            path = tmp_path / f"{len(resumed)}.ckpt"
            options = half(init_scale=64.0, growth_interval=4)
            run = fit(first(), lambda: Overflowing((0,), momentum), data(), steps=3, **options)
            run.trainer.save_checkpoint(path)
            saved = torch.load(path, weights_only=True)["MixedPrecision"]
            assert saved == {
                "scale": 32.0,
                "growth_factor": 2.0,
                "backoff_factor": 0.5,
                "growth_interval": 4,
                "_growth_tracker": 2,
            }
            run = fit(then(), lambda: Overflowing((), momentum), data(), steps=5, ckpt_path=str(path), **half())
            resumed.append([run.trainer.scaler.state_dict(), run.weights])
    assert resumed[0][0]["scale"] == 64.0  # grew in the fourth step without an overflow
    for other in resumed[1:]:
        assert other[0] == resumed[0][0]
        assert_same(other[1], resumed[0][1], rtol=2e-3, atol=2e-3)


def test_a_given_scaler_gives_its_settings_and_state():
    given = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    given.scale(torch.ones(()))
    given.update(16.0)
    for plugin in (
        Zero3Strategy(precision_plugin=MixedPrecision("16-mixed", "cpu", given)).precision_plugin,
        trainer_of(MixedPrecision("16-mixed", "cpu", given)).precision_plugin,
    ):
        assert isinstance(plugin.scaler, Zero3GradScaler)
        assert isinstance(plugin, MixedPrecision)
        assert plugin.scaler.state_dict() == given.state_dict()
    off = Zero3Strategy(precision_plugin=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False)))
    assert not off.precision_plugin.scaler.is_enabled()


def trainer_of(plugin):
    from lightning.pytorch import Trainer

    return Trainer(strategy=Zero3Strategy(), accelerator="cpu", devices=1, plugins=plugin, logger=False)


@distributed(world=2)
def test_pytorch_lightning_has_it_too():
    pl = pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.plugins.precision import MixedPrecision as Theirs

    from lightning_zero3 import pytorch_lightning as zero3_pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_mlp()

        def training_step(self, batch, batch_idx):
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            if batch_idx == 1 and self.global_rank == 0:
                loss = loss + 3e38 * (self.net.shift - self.net.shift.detach()).float().sum()
            return loss

        def configure_optimizers(self):
            return adamw(self.net)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    t = pl.Trainer(
        strategy=zero3_pl.Zero3Strategy(),
        accelerator="cpu",
        devices=2,
        max_steps=3,
        plugins=Theirs("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0)),
        **quiet,
    )
    t.fit(Module(), data())
    assert isinstance(t.precision_plugin, Theirs)
    assert t.scaler.get_scale() == 32.0


class Manual(Task):
    """Clips by `strategy.clip_grad_norm_` before the step, when gradients are still scaled."""

    def __init__(self, max_norm):
        super().__init__(make_mlp(), lambda net: torch.optim.SGD(net.parameters(), lr=1.0))
        self.automatic_optimization = False
        self.max_norm = max_norm

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.norm = self.trainer.strategy.clip_grad_norm_(optimizer, self.max_norm)
        optimizer.step()


@distributed(world=2)
def test_clipping_in_manual_optimization_does_not_mind_the_scale():
    module = Manual(0.01)
    trainer(zero3(), max_steps=1, **half(init_scale=256.0)).fit(module, data())
    plain = Manual(0.01)
    trainer(zero3(), max_steps=1).fit(plain, data())
    assert_same(module.norm, plain.norm, rtol=1e-2)
    start = make_mlp().state_dict()
    now = weights_of(module)
    assert_same(torch.cat([(now[f"net.{k}"] - start[k]).flatten() for k in start]).norm(), 0.01, rtol=1e-3)
