"""Every callback that Lightning has, and its loggers: each works under `Zero3Strategy`, or is refused with a reason."""

import csv
import json
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_zero3 import Zero3Error
from tests.harness import assert_same, distributed
from tests.harness.models import Block, Pairs, Task, adamw, default_loss, loader
from tests.strategy.runs import make_mlp, trainer, weights_of, zero3

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
    def __init__(self, net):
        super().__init__(net)
        self.example_input_array = torch.zeros(2, 7)

    def forward(self, x):
        return self.net(x)

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


def true_sizes(t, callback):
    """Of the model itself: from placeholders, and from a forward on all ranks."""
    summary = callback._summary(t, t.lightning_module)
    shapes = dict(zip(summary.layer_names, zip(summary.in_sizes, summary.out_sizes, strict=True), strict=True))
    return (
        summary.total_parameters == sum(p.numel() for p in make_mlp().parameters())
        and shapes["net"] == ([2, 7], [2, 3])
        and callback.shown == (t.global_rank == 0)
    )


def shows(summary):
    """A summary that knows whether it was shown."""

    class Shown(summary):
        shown = False

        def summarize(self, *args, **kwargs):
            self.shown = True
            super().summarize(*args, **kwargs)

    return Shown(max_depth=2)


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
    "ModelSummary": (lambda _: shows(C.ModelSummary), true_sizes),
    "ProgressBar": (lambda _: Bar(), lambda t, c: c.total_train_batches == 4),
    "RichModelSummary": (lambda _: shows(C.RichModelSummary), true_sizes),
    "RichProgressBar": (
        lambda _: C.RichProgressBar(),
        lambda t, c: c.train_progress_bar_id is not None or t.global_rank,
    ),
    "ThroughputMonitor": (
        lambda _: C.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2),
        lambda t, _: t.global_rank > 0 or any("batches_per_sec" in name for name in logged(t)),
    ),
    "Timer": (lambda _: C.Timer(timedelta(microseconds=1)), lambda t, c: t.global_step == 1 and t.should_stop),
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

ELSEWHERE = {"OnExceptionCheckpoint", "SpikeDetection"}  # below


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


class Spiky(Task):
    """On the last rank, the loss jumps at batch 4."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1e3 if (batch_idx, self.global_rank) == (4, self.trainer.world_size - 1) else loss


@distributed(world=2)
def test_spike_detection_stops_all_ranks_when_one_has_a_spike(tmp_path):
    spikes = C.SpikeDetection(warmup=2, exclude_batches_path=tmp_path)
    t = trainer(zero3(), max_epochs=1, callbacks=[spikes], default_root_dir=tmp_path)
    with pytest.raises(TrainingSpikeException):
        t.fit(Spiky(make_mlp()), loader(Pairs(64, 7)))
    assert spikes.bad_batches == [3, 4]
    dist.barrier()
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [3, 4]


def columns(logger):
    """What the first rank wrote to a logger, by name and step; without times."""
    if isinstance(logger, CSVLogger):
        with open(logger.experiment.metrics_file_path) as file:
            rows = list(csv.DictReader(file))
        return {(k, row["step"]): float(v) for row in rows for k, v in row.items() if v and k != "step"}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir).Reload()
    return {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}


@pytest.mark.parametrize("make", [CSVLogger, TensorBoardLogger])
@distributed(world=2)
def test_loggers_get_what_they_get_under_ddp(tmp_path, make):
    if make is TensorBoardLogger:
        pytest.importorskip("tensorboard", reason="TensorBoardLogger needs tensorboard")
    results = []
    for name, strategy in (("zero3", zero3()), ("ddp", "ddp")):
        logger = make(tmp_path, name=name)
        monitor = C.LearningRateMonitor("step")
        t = trainer(strategy, max_epochs=2, callbacks=[monitor], logger=logger, log_every_n_steps=1)
        module = Task(make_mlp())
        module.save_hyperparameters({"width": 17})
        t.fit(module, loader(Pairs(32, 7)), loader(Pairs(16, 7, seed=1)))
        logger.save()
        results.append(columns(logger) if t.is_global_zero else {})
        assert (tmp_path / name / "version_0" / "hparams.yaml").read_text() == "width: 17\n" or t.global_rank
    assert len(results[0]) > 20 or dist.get_rank()
    assert_same(results[0], results[1], rtol=1e-4)


@distributed(world=2)
def test_a_graph_that_the_first_rank_would_trace_alone_is_refused(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoardLogger needs tensorboard")
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    with pytest.raises(Zero3Error, match=r"TensorBoardLogger\(log_graph=True\) runs the model on the first rank alone"):
        trainer(zero3(), max_epochs=1, logger=logger).fit(Backbone(make_mlp()), loader(Pairs(32, 7)))


@distributed(world=2)
def test_callbacks_of_pytorch_lightning_work_and_are_refused_too(tmp_path):
    import pytorch_lightning as pl

    from lightning_zero3.pytorch_lightning import Zero3Strategy

    class Plain(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_mlp()

        def training_step(self, batch, batch_idx):
            loss = default_loss(self.net, batch)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return adamw(self.net)

    def fit(strategy, *chosen):
        t = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_epochs=5,
            callbacks=list(chosen),
            logger=pl.loggers.CSVLogger(tmp_path),
            log_every_n_steps=1,
            enable_progress_bar=False,
        )
        module = Plain()
        t.fit(module, loader(Pairs(32, 7)))
        return t.global_step, weights_of(module)

    P = pl.callbacks
    results = []
    for name, strategy in (("zero3", Zero3Strategy(auto_wrap_policy={Block})), ("ddp", "ddp")):
        keep = P.ModelCheckpoint(tmp_path / name, save_last=True)
        stop = P.EarlyStopping("train_loss", patience=1, min_delta=0.1)
        rates, batches = P.LearningRateMonitor(), P.GradientAccumulationScheduler({0: 1, 1: 2})
        result = fit(strategy, keep, stop, rates, batches, P.ModelSummary(2), P.Timer({"hours": 1}))
        saved = torch.load(keep.last_model_path, weights_only=True)["state_dict"]
        results.append([*result, stop.stopped_epoch, rates.lrs, saved])
    assert_same(results[0], results[1], rtol=1e-4, atol=1e-5)
    assert results[0][0] < 4 + 4 * 2  # stopped, and two batches a step
    for refused in (P.ModelPruning("l1_unstructured"), P.EMAWeightAveraging(), P.StochasticWeightAveraging(0.1)):
        with pytest.raises(Zero3Error, match=f"{type(refused).__name__} does not work with Zero3Strategy"):
            fit(Zero3Strategy(auto_wrap_policy={Block}), refused)
