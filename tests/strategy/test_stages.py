"""fit, validate, test and predict, one after another, on the same and on other Trainers."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from lightning_zero3 import Zero3Error, full_state_dict
from tests.harness import assert_same, distributed
from tests.harness.models import MLP, Block, Pairs, Task, adamw, loader
from tests.strategy.runs import WIDTHS, mlp_task, trainer, weights_of, zero3

STRATEGIES = [zero3, lambda: "ddp"]


def data(n=48, seed=0):
    return loader(Pairs(n, WIDTHS[0], seed=seed))


@distributed(world=[1, 2, 3])
def test_every_stage_on_one_trainer_gives_ddps_values(tmp_path):
    """L10."""
    results = []
    for number, strategy in enumerate(STRATEGIES):
        best = ModelCheckpoint(tmp_path / str(number), monitor="val_loss", save_last=True)
        t = trainer(strategy(), max_epochs=2, callbacks=[best])
        module = mlp_task()
        before = t.validate(module, data(seed=1), verbose=False)
        t.fit(module, data(), data(seed=1))
        after = t.validate(module, data(seed=1), verbose=False)
        tested = t.test(module, data(seed=2), verbose=False)
        at_best = t.test(module, data(seed=2), ckpt_path="best", verbose=False)
        predicted = t.predict(module, data(seed=3))
        results.append([before, after, tested, at_best, predicted, t.callback_metrics])
        t.fit_loop.max_epochs = 3
        t.fit(module, data(), data(seed=1))
        results[-1] += [t.global_step, t.validate(module, data(seed=1), verbose=False), weights_of(module)]
    assert_same(results[0], results[1], rtol=1e-4)


@distributed(world=2)
def test_a_second_trainer_goes_on_with_the_same_module():
    results = []
    for strategy in STRATEGIES:
        module = mlp_task()
        for seed in (0, 1):
            trainer(strategy(), max_epochs=1).fit(module, data(seed=seed))
        scores = trainer(strategy(), max_epochs=1).validate(module, data(seed=3), verbose=False)
        results.append([scores, weights_of(module)])
    assert_same(results[0], results[1], rtol=1e-4)


@distributed(world=2)
def test_layers_and_engine_survive_other_stages():
    """Sharding happens once: a later stage neither wraps a layer again nor forgets its weights."""
    strategy = zero3()
    t, module = trainer(strategy, max_epochs=1), mlp_task()
    t.fit(module, data(), data())
    engine, hooks = strategy.engine, [len(m._forward_pre_hooks) for m in module.modules()]
    t.test(module, data(), verbose=False)
    t.predict(module, data())
    t.validate(module, data(), verbose=False)
    assert strategy.engine is engine
    assert [len(m._forward_pre_hooks) for m in module.modules()] == hooks


class Late(LightningModule):
    """Makes its layers in `configure_model`, as the docs ask of large models, from "pretrained" weights; L11."""

    def __init__(self, source: Path) -> None:
        super().__init__()
        self.source, self.calls, self.net = source, 0, None

    def configure_model(self):
        self.calls += 1
        if self.net is None:
            self.net = MLP(*WIDTHS, seed=5)
            self.net.load_state_dict(torch.load(self.source))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return adamw(self.net)


@distributed(world=2)
def test_layers_made_in_configure_model_are_sharded_once(tmp_path):
    source = tmp_path / "pretrained.pt"
    torch.save(MLP(*WIDTHS, seed=9).state_dict(), source)
    results = []
    for strategy in STRATEGIES:
        module = Late(source)
        t = trainer(strategy(), max_epochs=1)
        t.fit(module, data())
        scores = t.validate(module, data(seed=3), verbose=False)
        assert module.calls == 2
        results.append([scores, weights_of(module)])
    assert_same(results[0], results[1], rtol=1e-4)


class Meta(Late):
    """Makes its layers without memory; they get it layer by layer, initialised by `reset_parameters`."""

    def configure_model(self):
        if self.net is None:
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))


@distributed(world=2)
def test_a_model_on_the_meta_device_is_initialised_in_shards():
    module = Meta(Path())
    t = trainer(zero3(nn.Linear), max_epochs=1)
    t.fit(module, data())
    weights = full_state_dict(module, rank0_only=False)
    assert all(w.isfinite().all() and w.std() > 0.01 for w in weights.values())
    assert_same(weights, t.strategy.broadcast(weights), rtol=0, atol=0)  # the same on every rank


@distributed(world=[1, 2])
def test_evaluation_in_inference_mode_leaves_the_module_trainable():
    """Lightning uses inference mode except on gloo: the CPU must not hide what becomes of slots made in it."""
    results = []
    for strategy in STRATEGIES:
        module, modes = mlp_task(), []
        module.on_validation_batch_start = lambda *_, modes=modes: modes.append(torch.is_inference_mode_enabled())
        t = trainer(strategy(), max_epochs=2, limit_val_batches=3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning.pytorch.loops.utilities._distributed_is_initialized", lambda: False)
            first = t.validate(module, data(seed=1), verbose=False)
            t.fit(module, data())
            scores = t.validate(module, data(seed=1), verbose=False)
            predicted = [p.clone() for p in t.predict(module, data(seed=3))]
            t.fit_loop.max_epochs = 3
            t.fit(module, data(seed=4))
        assert modes == [True] * 6
        results.append([first, scores, predicted, weights_of(module)])
    assert_same(results[0], results[1], rtol=1e-4)


@distributed(world=2)
def test_a_model_made_without_memory_takes_its_weights_from_a_checkpoint(tmp_path):
    path = tmp_path / "a.ckpt"
    module, t = mlp_task(), trainer(zero3(), max_epochs=1)
    t.fit(module, data())
    t.save_checkpoint(path)
    other = trainer(zero3())
    with other.init_module(empty_init=True):
        empty = mlp_task()
    assert all(p.is_meta for p in empty.parameters())
    scores = other.validate(empty, data(seed=1), ckpt_path=path, verbose=False)
    assert_same(weights_of(empty), weights_of(module), rtol=0, atol=0)
    assert_same(scores, t.validate(module, data(seed=1), verbose=False))


@pytest.mark.parametrize(
    "options",
    [{"fast_dev_run": 2}, {"overfit_batches": 2, "max_epochs": 3}, {"limit_train_batches": 3, "max_epochs": 2}],
    ids=lambda options: next(iter(options)),
)
@distributed(world=2)
def test_shortened_runs_are_ddps(options):
    results = []
    for strategy in STRATEGIES:
        module, t = mlp_task(), trainer(strategy(), **options)
        t.fit(module, data(), data(seed=1))
        results.append([t.global_step, weights_of(module)])
    assert_same(results[0], results[1], rtol=1e-4)


@distributed(world=[1, 2])
def test_a_model_that_nobody_holds_is_freed_with_its_shards_and_process_groups(world):
    """Notebooks and sweeps make many. (torch keeps hooks of parameters where the garbage collector does not look.)"""

    def fit():
        module, t = mlp_task(), trainer(zero3(), max_epochs=1)
        t.fit(module, data(), data(seed=1))
        return weakref.ref(t.strategy.engine), weakref.ref(t.strategy.engine.layers[0].chunks[0].params[0])

    held = fit()
    gc.collect()
    assert [ref() for ref in held] == [None, None]


class Frozen(Task):
    def configure_optimizers(self):
        return None


@distributed(world=2)
def test_a_model_without_trainable_parameters_can_be_evaluated():
    results = []
    for strategy in STRATEGIES:
        module = Frozen(MLP(*WIDTHS)).requires_grad_(False)
        t = trainer(strategy())
        results.append([t.validate(module, data(), verbose=False), t.predict(module, data())])
    assert_same(results[0], results[1])


@distributed(world=2)
def test_a_module_sharded_in_one_precision_is_not_used_in_another():
    module = mlp_task()
    trainer(zero3(), max_epochs=1).fit(module, data())
    for other in ("bf16-mixed", "bf16-true", "64-true"):
        with pytest.raises(Zero3Error, match="Task was sharded by an earlier Trainer in another precision"):
            trainer(zero3(), max_epochs=1, precision=other).fit(module, data())


@distributed(world=2)
def test_hooks_of_the_module_see_full_shapes():
    class Looking(Task):
        def on_fit_start(self):
            self.shapes = {n: tuple(p.shape) for n, p in self.named_parameters()}

    module = Looking(MLP(*WIDTHS))
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
    trainer(zero3(), max_steps=1).fit(module, data())
    assert module.shapes == shapes
    assert isinstance(module.net.blocks[0], Block)
