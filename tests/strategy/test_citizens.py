"""Every callback that Lightning has, and its loggers: each works under `Zero3Strategy`, or is refused with a reason."""

import csv
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_zero3 import Zero3Error
from tests.harness import distributed
from tests.harness.models import Pairs, Task, loader
from tests.strategy.runs import make_mlp, trainer, zero3

C = callbacks


class Predictions(C.BasePredictionWriter):
    def __init__(self):
        super().__init__("batch")
        self.shapes = []

    def write_on_batch_end(self, trainer, module, prediction, *_):
        self.shapes.append(tuple(prediction.shape))


class Bar(C.ProgressBar):
    """The base class leaves these to its heirs."""

    def disable(self):
        pass

    enable = disable


class Noticed(C.Callback):
    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *_):
        self.batches += 1


class Backbone(Task):
    @property
    def backbone(self):
        return self.net.blocks


class Head(C.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net.blocks)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks, optimizer, lr=1e-3)


class Fails(Task):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


def logged(t):
    """Names of the columns in the CSV file."""
    t.logger.save()
    with open(t.logger.experiment.metrics_file_path) as file:
        return set(next(csv.reader(file)))


def groups(t, _):
    return len(t.optimizers[0].param_groups) > 2


# name -> (how to make it, what holds after two epochs)
WORKS = {
    "BackboneFinetuning": (lambda _: C.BackboneFinetuning(unfreeze_backbone_at_epoch=1), groups),
    "BaseFinetuning": (lambda _: Head(), groups),
    "BasePredictionWriter": (
        lambda _: Predictions(),
        lambda t, c: t.predict(t.lightning_module, loader(Pairs(8, 7))) is not None and c.shapes == [(4, 3)],
    ),
    "Callback": (lambda _: Noticed(), lambda t, c: c.batches == t.global_step),
    "Checkpoint": (lambda _: C.Checkpoint(), lambda t, c: c in t.checkpoint_callbacks),
    "DeviceStatsMonitor": (
        lambda _: C.DeviceStatsMonitor(cpu_stats=True),
        lambda t, _: t.global_rank > 0 or any("cpu_percent" in name for name in logged(t)),
    ),
    "EarlyStopping": (
        lambda _: C.EarlyStopping("train_loss", patience=0, min_delta=10.0),
        lambda t, c: c.stopped_epoch == 1 and t.should_stop,
    ),
    "GradientAccumulationScheduler": (
        lambda _: C.GradientAccumulationScheduler({0: 1, 1: 2}),
        lambda t, _: t.global_step == 4 + 2,
    ),
    "LambdaCallback": (
        lambda _: C.LambdaCallback(on_train_end=lambda t, m: setattr(m, "was_told", True)),
        lambda t, _: t.lightning_module.was_told,
    ),
    "LearningRateFinder": (
        lambda _: C.LearningRateFinder(num_training_steps=8, update_attr=False),
        lambda t, c: len(c.optimal_lr.results["lr"]) > 2,
    ),
    "LearningRateMonitor": (lambda _: C.LearningRateMonitor("step"), lambda t, c: len(c.lrs) == 2),
    "ModelCheckpoint": (
        lambda path: C.ModelCheckpoint(path, save_last=True),
        lambda t, c: "state_dict" in torch.load(c.last_model_path, weights_only=True),
    ),
    "ModelSummary": (
        lambda _: C.ModelSummary(max_depth=2),
        lambda t, c: (
            c._summary(t, t.lightning_module).total_parameters == sum(p.numel() for p in make_mlp().parameters())
        ),
    ),
    "ProgressBar": (lambda _: Bar(), lambda t, c: c.total_train_batches == 4),
    "RichModelSummary": (lambda _: C.RichModelSummary(), lambda t, _: True),
    "RichProgressBar": (
        lambda _: C.RichProgressBar(),
        lambda t, c: c.train_progress_bar_id is not None or t.global_rank,
    ),
    "SpikeDetection": (lambda _: C.SpikeDetection(), lambda t, _: t.global_step == 8),
    "ThroughputMonitor": (
        lambda _: C.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2),
        lambda t, _: t.global_rank > 0 or any("batches_per_sec" in name for name in logged(t)),
    ),
    "Timer": (
        lambda _: C.Timer(timedelta(hours=1)),
        lambda t, c: 0 < c.time_elapsed("train") < 3600,
    ),
    "TQDMProgressBar": (lambda _: C.TQDMProgressBar(), lambda t, c: c.total_train_batches == 4),
}

# name -> (how to make it, the error, its text)
REFUSED = {
    "BatchSizeFinder": (
        lambda: C.BatchSizeFinder(),
        MisconfigurationException,
        "not supported with distributed strategies",
    ),
    "EMAWeightAveraging": (lambda: C.EMAWeightAveraging(), Zero3Error, "EMAWeightAveraging does not work"),
    "ModelPruning": (lambda: C.ModelPruning("l1_unstructured", amount=0.5), Zero3Error, "ModelPruning does not work"),
    "StochasticWeightAveraging": (
        lambda: C.StochasticWeightAveraging(1e-2),
        Zero3Error,
        "StochasticWeightAveraging does not work",
    ),
    "WeightAveraging": (lambda: C.WeightAveraging(), Zero3Error, "WeightAveraging does not work"),
}

ELSEWHERE = {"OnExceptionCheckpoint"}  # below


def test_the_table_has_every_callback():
    assert {*WORKS, *REFUSED, *ELSEWHERE} == set(callbacks.__all__)


@pytest.mark.parametrize("name", WORKS)
@distributed(world=2)
def test_callbacks_work(tmp_path, name):
    make, holds = WORKS[name]
    callback = make(tmp_path / "kept")
    bar = isinstance(callback, C.ProgressBar)
    summary = isinstance(callback, C.ModelSummary)
    t = trainer(
        zero3(),
        max_epochs=2,
        callbacks=[callback],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        default_root_dir=tmp_path,
        enable_progress_bar=bar,
        enable_checkpointing=isinstance(callback, C.Checkpoint),
        enable_model_summary=summary,
    )
    t.fit(Backbone(make_mlp()), loader(Pairs(32, 7)))
    assert holds(t, callback)
    assert t.strategy.engine.pool.taken == 0


@pytest.mark.parametrize("name", REFUSED)
@distributed(world=2)
def test_callbacks_that_cannot_work_are_refused(name):
    make, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        trainer(zero3(), max_epochs=1, callbacks=[make()]).fit(Task(make_mlp()), loader(Pairs(32, 7)))


@distributed(world=2)
def test_on_exception_checkpoint_saves_when_all_ranks_fail_together(tmp_path):
    t = trainer(zero3(), max_epochs=1, callbacks=[C.OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    with pytest.raises(ZeroDivisionError):
        t.fit(Fails(make_mlp()), loader(Pairs(32, 7)))
    dist.barrier()
    (found,) = tmp_path.glob("*.ckpt")
    assert torch.load(found, weights_only=True)["global_step"] == 2
