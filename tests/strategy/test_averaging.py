"""Averages of weights are those of Lightning's callbacks under "ddp", each rank holding its own part; L17."""

import functools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_avg_fn

import lightning_zero3
from lightning_zero3 import Zero3Error
from lightning_zero3.callbacks.averaging import lightnings
from lightning_zero3.layer import Zero3Layer
from lightning_zero3.layout import ALIGN
from tests.harness import assert_same, distributed, run
from tests.harness.models import Block, Pairs, Task, adamw, loader
from tests.strategy.runs import WIDTHS, make_mlp, trainer, weights_of, zero3

HOMES = {"zero3": lightning_zero3, "sharded": lightning_zero3, "ddp": callbacks}


def ema(home, **options):
    return home.EMAWeightAveraging(**{"decay": 0.8, **options})


def averaging(home, **options):
    """SWA: the mean after some epochs."""

    class Stochastic(home.WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return epoch_idx is not None and epoch_idx >= 1

    return Stochastic(**options)


KINDS = {
    "every step": ema,
    "every second step": functools.partial(ema, update_every_n_steps=2),
    "from a step on": functools.partial(ema, update_starting_at_step=5),
    "by epoch": functools.partial(ema, update_every_n_steps=0, update_starting_at_epoch=1),
    "never": functools.partial(ema, update_every_n_steps=0),
    "buffers left alone": functools.partial(ema, use_buffers=False),
    "mean of epochs": functools.partial(averaging, avg_fn=get_swa_avg_fn()),
    "mean of epochs by default": averaging,
    "many at once": functools.partial(averaging, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
}


class Net(nn.Module):
    """Blocks, one of them frozen where asked for, and a norm with statistics."""

    def __init__(self, frozen=()):
        super().__init__()
        self.mlp = make_mlp()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.first = nn.Linear(7, 7, bias=False)  # the norm takes a bias out: its gradient is rounding
        self.norm = nn.BatchNorm1d(7)
        for i in frozen:
            self.mlp.blocks[i].requires_grad_(False)

    def forward(self, x):
        return self.mlp(self.norm(self.first(x)))


class Validation(Callback):
    """The losses of validation, and of training."""

    def __init__(self):
        self.losses, self.training = [], []

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.losses.append(trainer.callback_metrics["val_loss"].item())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.training.append(outputs["loss"].item())


def pairs(seed=0):
    return loader(Pairs(48, WIDTHS[0], seed=seed))


def sgd(net):
    """A rate at which weights and their averages differ well."""
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def fit(name, kind, epochs=3, frozen=(), ckpt_path=None, save=None, make_optimizer=sgd, home=None, **options):
    """Fit with a callback of one home, under one strategy. Returns what was seen, and the callback and trainer."""
    seen, average = Validation(), KINDS[kind](home or HOMES[name])
    options["callbacks"] = [average, seen, *options.get("callbacks", ())]
    t = trainer(zero3(Block) if name == "zero3" else name, max_epochs=epochs, **options)
    module = Task(Net(frozen), make_optimizer)
    t.fit(module, pairs(), pairs(1), ckpt_path=ckpt_path)
    if save:
        t.save_checkpoint(save)
    return [seen.losses, seen.training, weights_of(module)], average, t


def content(path):
    """A checkpoint's weights and what the callback keeps; all of it plain."""
    saved = torch.load(path, weights_only=True)
    assert {type(v) for v in saved["state_dict"].values()} == {torch.Tensor}
    keys = "state_dict", "current_model_state", "averaging_state"
    assert not any("lightning_zero3" in key for key in saved["callbacks"])
    return {**{key: dict(saved[key]) for key in keys}, "callbacks": [k for k in saved["callbacks"] if "Averag" in k]}


@pytest.mark.parametrize("kind", KINDS)
@distributed(world=2)
def test_every_kind_validates_ends_and_saves_as_under_ddp(tmp_path, kind):
    results = []
    for name in ("zero3", "ddp"):
        every = ModelCheckpoint(tmp_path / name, "{step}", every_n_train_steps=8)
        result, _, _ = fit(name, kind, callbacks=[every])
        assert [p.name for p in (tmp_path / name).iterdir()] == ["step=16.ckpt"]
        results.append([*result, content(tmp_path / name / "step=16.ckpt")])
    assert_same(results[0], results[1], rtol=1e-4, atol=1e-5)
    saved = results[0][-1]
    differ = not torch.allclose(
        saved["state_dict"]["net.first.weight"], saved["current_model_state"]["net.first.weight"]
    )
    assert differ or kind == "every second step"


@distributed(world=[1, 2, 3])
def test_worlds_optimizers_and_frozen_parameters(tmp_path):
    for frozen in ((), (0, 2)):
        results = []
        for name in ("zero3", "ddp"):
            path = tmp_path / f"{name}-{len(frozen)}.ckpt"
            every = ModelCheckpoint(path.parent, path.stem, every_n_train_steps=7, enable_version_counter=False)
            result, _, _ = fit(name, "every step", frozen=frozen, make_optimizer=adamw, callbacks=[every])
            results.append([*result, content(path)])
        assert_same(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
@distributed(world=2)
def test_the_average_is_of_what_is_stored(precision):
    (ours, average, _), (ddp, _, _) = (fit(name, "every step", precision=precision) for name in ("zero3", "ddp"))
    dtype = torch.float64 if precision == "64-true" else torch.float32
    assert {p.dtype for p in average._average_model.parameters()} == {dtype}
    tolerance = {"64-true": 1e-6}.get(precision, 0.05)
    assert_same(ours, ddp, rtol=tolerance, atol=tolerance)


@distributed(world=[1, 2, 3])
def test_memory_is_this_ranks_part_of_what_trains_and_updates_move_nothing(world):
    moved = {}

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            moved[kind] = (trainer.strategy.engine.comm.traffic.fetches, trainer.strategy.engine.comm.traffic.reduces)

    for kind in ("every step", "never"):
        _, average, t = fit("zero3", kind, frozen=(1,), callbacks=[Watch()], limit_val_batches=0)
    assert moved["every step"] == moved["never"]
    chunks = [c for layer in t.strategy.engine.layers for c in layer.trainable]
    held = sum(p.nbytes for p in average._average_model.parameters())
    assert held == sum(c.data.nbytes for c in chunks)
    trainable = sum(p.numel() for c in chunks for p in c.params)
    assert held <= 4 * (trainable / world + ALIGN * (sum(len(c.params) for c in chunks) + len(chunks)))
    assert not any(isinstance(m, Zero3Layer | Block) for m in average._average_model.modules())


def common():
    return torch.utils.data.DataLoader(Pairs(24, WIDTHS[0]), batch_size=8)


def train_common(name, epochs, save=None, ckpt_path=None, frozen=()):
    seen, average = Validation(), ema(HOMES[name])
    options = {"callbacks": [average, seen], "use_distributed_sampler": False}
    strategies = {"zero3": zero3(Block), "sharded": zero3(Block, state_dict_type="sharded")}
    t = trainer(strategies.get(name, name), max_epochs=epochs, **options)
    module = Task(Net(frozen), sgd)
    every = ModelCheckpoint(save, "half", every_n_train_steps=6) if save else None
    t.callbacks += [every] if every else []
    t.fit(module, common(), common(), ckpt_path=ckpt_path)
    return seen.losses, seen.training, weights_of(module)


@pytest.mark.parametrize(
    ("first", "then", "worlds"),
    [
        ("zero3", "zero3", (2, 3)),
        ("zero3", "zero3", (3, 1)),
        ("zero3", "zero3", (1, 2)),
        ("ddp", "zero3", (2, 3)),
        ("zero3", "ddp", (3, 2)),
        ("sharded", "sharded", (2, 3)),
        ("sharded", "ddp", (3, 2)),
        ("ddp", "sharded", (1, 2)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_training_and_averaging_go_on_as_if_never_interrupted(tmp_path, first, then, worlds):
    whole = run(train_common, worlds[1], then, 4)[0]
    half = run(train_common, worlds[0], first, 2, tmp_path)[0]
    assert (tmp_path / "half.ckpt").is_dir() == (first == "sharded")
    rest = run(train_common, worlds[1], then, 4, None, tmp_path / "half.ckpt")[0]
    assert_same(half[0] + rest[0], whole[0], rtol=1e-4, what="validation losses")
    assert_same(half[1] + rest[1], whole[1], rtol=1e-4, what="losses")
    assert_same(rest[2], whole[2], rtol=1e-4, atol=1e-5, what="weights")


@pytest.mark.parametrize("saved", ["zero3", "sharded"])
def test_what_is_frozen_only_since_the_checkpoint_keeps_its_average(tmp_path, saved):
    run(train_common, 2, saved, 2, tmp_path)
    results = [run(go_on, 2, name, tmp_path / "half.ckpt")[0] for name in ("zero3", "ddp")]
    assert_same(results[0], results[1], rtol=1e-4, atol=1e-5)


class NewOptimizer(Task):
    """Resumes with weights only: the optimizer has other parameters now."""

    def on_load_checkpoint(self, checkpoint):
        checkpoint["optimizer_states"] = [self.make_optimizer(Net((0, 1))).state_dict()]


class Thawing(NewOptimizer):
    def on_train_epoch_start(self):
        if self.current_epoch == 3:
            self.net.mlp.blocks[0].linear.weight.requires_grad_(True)  # the layer's bias stays where it is


def plain_sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


def go_on(name, path, make_task=NewOptimizer, make_optimizer=sgd):
    """Three epochs more, of a net of which two blocks are frozen now."""
    seen, average = Validation(), ema(HOMES[name])
    options = {"callbacks": [average, seen], "use_distributed_sampler": False}
    t = trainer(zero3(Block) if name == "zero3" else name, max_epochs=5, **options)
    module = make_task(Net((0, 1)), make_optimizer)
    t.fit(module, common(), common(), ckpt_path=path)
    return seen.losses, weights_of(module)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_averages_of_what_is_unfrozen_again_move_with_it(tmp_path, world):
    run(train_common, 2, "zero3", 2, tmp_path)
    results = [run(go_on, world, name, tmp_path / "half.ckpt", Thawing, plain_sgd)[0] for name in ("zero3", "ddp")]
    assert_same(results[0], results[1], rtol=1e-4, atol=1e-5)


class Backbone(Task):
    @property
    def backbone(self):
        return self.net.mlp.blocks


@pytest.mark.parametrize("kind", ["every step", "mean of epochs", "never"])
@distributed(world=[1, 2, 3])
def test_backbones_are_averaged_from_their_unfreezing_on(tmp_path, kind):
    """DDP does not reduce what is unfrozen in mid-training, so all ranks have the same batches."""
    results = []
    for name in ("zero3", "ddp"):
        seen, average = Validation(), KINDS[kind](HOMES[name])
        unfreeze = callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.5)
        every = ModelCheckpoint(tmp_path / f"{name}-{dist.get_world_size()}", "{step}", every_n_train_steps=7)
        options = {"callbacks": [unfreeze, average, seen, every], "use_distributed_sampler": False}
        t = trainer(zero3(Block) if name == "zero3" else name, max_epochs=4, **options)
        module = Backbone(Net(), plain_sgd_of_what_trains)
        t.fit(module, common(), common())
        results.append([seen.losses, seen.training, weights_of(module), content(every.best_model_path)])
    assert_same(results[0], results[1], rtol=1e-4, atol=1e-5)


def plain_sgd_of_what_trains(net):
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)


@distributed(world=2)
def test_sharded_modules_resume_and_are_fitted_again(tmp_path):
    """The module is sharded when the checkpoint comes; the average begins anew with each fit."""
    results = []
    for name in ("zero3", "ddp"):
        seen = Validation()
        every = ModelCheckpoint(tmp_path / name, "{step}", every_n_train_steps=8, save_top_k=-1)
        options = {"max_epochs": 3, "callbacks": [ema(HOMES[name]), seen, every]}
        t = trainer(zero3(Block) if name == "zero3" else name, **options)
        module = Task(Net(), sgd)
        t.fit(module, pairs(), pairs(1))
        scores = [t.validate(module, pairs(1), verbose=False)]  # of the average, by the same trainer
        for path in (None, tmp_path / name / "step=8.ckpt"):
            options = {"max_epochs": 2, "callbacks": [ema(HOMES[name]), seen]}
            t = trainer(zero3(Block) if name == "zero3" else name, **options)
            t.fit(module, pairs(), pairs(1), ckpt_path=path)
            scores.append(trainer(zero3(Block) if name == "zero3" else name).validate(module, pairs(1), verbose=False))
        results.append([seen.losses, seen.training, scores, weights_of(module)])
    assert_same(results[0], results[1], rtol=1e-4, atol=1e-5)


def warned(text):
    """The first rank warns for all."""
    return nullcontext() if dist.get_rank() else pytest.warns(UserWarning, match=text)


@distributed(world=2)
def test_checkpoints_without_an_average_begin_one_and_averages_can_be_evaluated(tmp_path):
    results = []
    for name in ("zero3", "ddp"):
        strategy = functools.partial(zero3, Block) if name == "zero3" else lambda: "ddp"
        plain = tmp_path / f"{name}-plain.ckpt"
        t = trainer(strategy(), max_epochs=1)
        t.fit(Task(Net(), sgd), pairs())
        t.save_checkpoint(plain)
        with warned("not created with WeightAveraging"):
            result, average, t = fit(name, "every step", epochs=2, ckpt_path=plain, save=tmp_path / f"{name}.ckpt")
        fresh = trainer(strategy(), callbacks=[ema(HOMES[name])])
        with warned("outside the 'fit' stage"):
            scores = fresh.validate(Task(Net(), sgd), pairs(1), ckpt_path=tmp_path / f"{name}.ckpt", verbose=False)
        results.append([result, scores, average._latest_update_step])
    assert_same(results[0], results[1], rtol=1e-4, atol=1e-5)


@distributed(world=2)
def test_under_other_strategies_they_are_lightnings():
    (ours, average, _), (theirs, _, _) = (fit("ddp", "every step", home=home) for home in (lightning_zero3, callbacks))
    assert_same(ours, theirs, rtol=0, atol=0)
    assert any(isinstance(m, Block) for m in average._average_model.modules())


def test_older_versions_of_lightning_do_without_them():
    before = SimpleNamespace(Callback=Callback)
    with pytest.raises(Zero3Error, match="EMAWeightAveraging needs Lightning 2.6 or later"):
        lightnings(before, "EMAWeightAveraging")(decay=0.9)


@distributed(world=2)
def test_pytorch_lightning_has_them_too():
    import pytorch_lightning as pl

    from lightning_zero3.pytorch_lightning import EMAWeightAveraging, Zero3Strategy

    class Plain(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_mlp()

        def training_step(self, batch, batch_idx):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return sgd(self.net)

    results = []
    for strategy, home in (
        (Zero3Strategy(auto_wrap_policy={Block}), EMAWeightAveraging),
        ("ddp", pl.callbacks.EMAWeightAveraging),
    ):
        t = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_epochs=2,
            callbacks=[home(decay=0.8)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        module = Plain()
        t.fit(module, pairs())
        results.append(weights_of(module))
    assert dist.get_world_size() == 2
    assert_same(results[0], results[1], rtol=1e-4, atol=1e-5)
