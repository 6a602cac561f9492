"""Lightning's callbacks, samplers and logging, with what they need from a strategy; L9 and L16."""

import csv

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanSquaredError

from lightning_zero3 import GradientNorms, Zero3Error
from tests.harness import assert_same, distributed
from tests.harness.models import AdamW, Pairs, Task, adamw, loader
from tests.harness.oracles import _model_parallel_strategy
from tests.strategy.runs import WIDTHS, make_mlp, make_plain_mlp, trainer, weights_of, zero3

STRATEGIES = [zero3, lambda: "ddp"]


def pairs(n=48, seed=0):
    return Pairs(n, WIDTHS[0], seed=seed)


class Measured(Task):
    """Logs with `sync_dist`, without it, and through a metric of torchmetrics that is a child of the module."""

    def __init__(self, make_optimizer=adamw):
        super().__init__(make_mlp(), make_optimizer)
        self.metric = MeanSquaredError()

    def validation_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.metric(out, batch[1])
        self.log("metric", self.metric)
        self.log("val_loss", F.mse_loss(out, batch[1]), sync_dist=True)
        self.log("rank", float(self.global_rank), sync_dist=True)
        self.log("sum", torch.tensor(float(self.global_rank)), sync_dist=True, reduce_fx="sum")
        self.log("mine", float(self.global_rank))


@distributed(world=3)
def test_logged_values_are_those_of_all_ranks():
    results = []
    for strategy in STRATEGIES:
        t = trainer(strategy(), max_epochs=1)
        t.fit(Measured(), loader(pairs()), loader(pairs(seed=1)))
        results.append(dict(t.callback_metrics))
    assert_same(results[0], results[1], rtol=1e-4)
    assert results[0]["rank"] == 1.0
    assert results[0]["sum"] == 3.0 * len(loader(pairs(seed=1)))
    assert results[0]["mine"] == dist.get_rank()


@distributed(world=2)
def test_samplers_are_distributed_and_shuffle_by_epoch():
    seen = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen[-1].append(batch[0][:, 0].clone())

    for strategy in STRATEGIES:
        seen.append([])
        t = trainer(strategy(), max_epochs=2, callbacks=[Watch()])
        t.fit(Task(make_mlp()), DataLoader(pairs(40), batch_size=4, shuffle=True), DataLoader(pairs(40), batch_size=4))
        assert isinstance(t.train_dataloader.sampler, DistributedSampler)
        assert t.val_dataloaders.sampler.num_replicas == 2
        assert t.distributed_sampler_kwargs == {"num_replicas": 2, "rank": dist.get_rank()}
    assert_same(seen[0], seen[1], rtol=0, atol=0)
    epochs = torch.cat(seen[0]).split(20)
    assert not torch.equal(*epochs)
    everyone = [None, None]
    dist.all_gather_object(everyone, epochs[0].tolist())
    assert sorted(everyone[0] + everyone[1]) == pytest.approx(sorted(pairs(40).x[:, 0].tolist()))


def plateau(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=0.05)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss", "name": "lr"}}


@distributed(world=2)
def test_early_stopping_plateau_and_rate_monitor_decide_as_under_ddp(tmp_path):
    results = []
    for number, strategy in enumerate(STRATEGIES):
        stop, rates = EarlyStopping("val_loss", patience=1, min_delta=0.02), LearningRateMonitor()
        logger = CSVLogger(tmp_path / str(number))
        t = trainer(strategy(), max_epochs=20, callbacks=[stop, rates], logger=logger, log_every_n_steps=1)
        module = Measured(plateau)
        t.fit(module, loader(pairs()), loader(pairs(seed=1)))
        results.append(
            [stop.stopped_epoch, stop.best_score, t.global_step, rates.lrs, t.optimizers[0].param_groups[0]["lr"]]
        )
    assert_same(results[0], results[1], rtol=1e-4)
    assert 0 < results[0][0] < 19
    assert results[0][-1] < 0.5


@distributed(world=2)
def test_model_checkpoint_keeps_the_best_and_the_last(tmp_path):
    """L9."""
    results = []
    for number, strategy in enumerate(STRATEGIES):
        path = tmp_path / str(number)
        best = ModelCheckpoint(path, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
        steps = ModelCheckpoint(path, "at-{step}", every_n_train_steps=4, save_top_k=-1, save_weights_only=True)
        t = trainer(strategy(), max_epochs=4, callbacks=[best, steps])
        module = Measured()
        t.fit(module, loader(pairs()), loader(pairs(seed=1)))
        files = sorted(p.name for p in path.iterdir())
        contents = {name: torch.load(path / name, weights_only=True) for name in files}
        scores = {k.rsplit("/", 1)[1]: v for k, v in best.best_k_models.items()}
        loaded = {name: content["state_dict"] for name, content in contents.items()}
        results.append([files, best.best_model_path.rsplit("/", 1)[1], scores, loaded])
        assert "optimizer_states" not in contents["at-step=4.ckpt"]
    assert len(results[0][0]) == 2 + 1 + 6
    assert_same(results[0], results[1], rtol=1e-4)


@distributed(world=2)
def test_learning_rate_finder_suggests_ddps_rate(tmp_path):
    class Tunable(Measured):
        lr = 1e-3

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    results = []
    for strategy in STRATEGIES:
        module, finder = Tunable(), LearningRateFinder(num_training_steps=12, min_lr=1e-3, max_lr=1.0)
        t = trainer(strategy(), max_steps=3, callbacks=[finder], default_root_dir=tmp_path)
        t.fit(module, loader(pairs(96)))
        results.append([finder.optimal_lr.results, module.lr, weights_of(module)])
    assert_same(results[0], results[1], rtol=1e-4)


@distributed(world=2)
def test_accumulation_by_epoch_timer_and_summary_work():
    results = []
    for strategy in STRATEGIES:
        schedule, timer = GradientAccumulationScheduler({0: 1, 1: 3}), Timer(duration={"hours": 1})
        t = trainer(strategy(), max_epochs=2, callbacks=[schedule, timer, ModelSummary(max_depth=3)])
        module = Measured()
        t.fit(module, loader(pairs()))
        results.append([t.global_step, weights_of(module)])
    assert_same(results[0], results[1], rtol=1e-4)


@distributed(world=3)
def test_collectives_of_the_strategy_reach_all_ranks():
    class Collective(Task):
        def on_fit_start(self):
            strategy, rank = self.trainer.strategy, self.global_rank
            self.seen = [
                strategy.broadcast({"rank": rank}, src=2)["rank"],
                strategy.reduce(torch.tensor(float(rank))).item(),
                strategy.reduce(torch.tensor(float(rank)), reduce_op="sum").item(),
                strategy.reduce("text"),
                strategy.reduce_boolean_decision(rank == 1),
                strategy.reduce_boolean_decision(rank == 1, all=False),
                self.all_gather(torch.tensor([rank])).flatten().tolist(),
            ]
            self.trainer.strategy.barrier("here")

    module = Collective(make_mlp())
    trainer(zero3(), max_steps=1).fit(module, loader(pairs()))
    assert module.seen == [2, 1.0, 3.0, "text", False, True, [0, 1, 2]]


def logged(strategy, callback, path, module=None, **options):
    """What the logger wrote: by step, the columns of gradient norms."""
    logger = CSVLogger(path)
    t = trainer(strategy, max_steps=6, callbacks=[callback], logger=logger, log_every_n_steps=2, **options)
    t.fit(module or Task(make_plain_mlp()), loader(pairs(96)))
    if dist.get_rank():
        return {}
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    norms = {r["step"]: {k: float(v) for k, v in r.items() if k.startswith("grad_") and v} for r in rows}
    return {step: norm for step, norm in norms.items() if norm}


LAYERS = ["net.blocks.0", "net.blocks.1", "net.blocks.2", "net.head"]


@pytest.mark.parametrize("per", ["layer", "parameter"])
@pytest.mark.parametrize("norm_type", [2.0, 1, "inf"])
@distributed(world=2)
def test_gradient_norms_are_the_same_under_every_strategy(norm_type, per, tmp_path):
    options = {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2}
    rows = [
        logged(strategy(), GradientNorms(norm_type, per), tmp_path / str(number), **options)
        for number, strategy in enumerate(STRATEGIES)
    ]
    if dist.get_rank() == 0:
        assert list(rows[0]) == ["1", "3", "5"]
        names = LAYERS if per == "layer" else [name for name, _ in Task(make_plain_mlp()).named_parameters()]
        key = f"grad_{float(norm_type)}_norm"
        assert set(rows[0]["1"]) == {f"{key}/{name}" for name in names} | {f"{key}_total"}
        assert rows[0]["1"][f"{key}_total"] > 0.02  # not clipped
    assert_same(rows[0], rows[1], rtol=1e-4)


class Model(Task):
    """For FSDP2, whose oracle wants a module that it can subclass."""

    def __init__(self):
        super().__init__(make_plain_mlp())


@distributed(world=2)
def test_gradient_norms_under_fsdp2(tmp_path):
    rows = []
    for number in range(2):
        module = Model()
        strategy = zero3() if number == 0 else _model_parallel_strategy(module)
        rows.append(logged(strategy, GradientNorms(), tmp_path / str(number), module))
    assert_same(rows[0], rows[1], rtol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
@distributed(world=2)
def test_gradient_norms_are_without_the_loss_scale(fused, tmp_path):
    rows = []
    for number, plugins in enumerate(([], [MixedPrecision("16-mixed", "cpu")], [MixedPrecision("16-mixed", "cpu")])):
        module = Task(make_plain_mlp(), lambda net: AdamW(net.parameters(), lr=1e-3, fused=fused))
        strategy = "ddp" if number == 2 else zero3()
        rows.append(logged(strategy, GradientNorms(), tmp_path / str(number), module, plugins=plugins))
    assert_same(rows[1], rows[0], rtol=2e-2)
    assert_same(rows[1], rows[2], rtol=1e-3)


class Gan(Task):
    """Two optimizers, in turn, of which each logs its own parameters; one of them is never used in the loss."""

    def __init__(self):
        super().__init__(make_plain_mlp())
        self.automatic_optimization = False
        self.net.unused = torch.nn.Parameter(torch.ones(3))
        self.net.head.bias.requires_grad_(False)

    def configure_optimizers(self):
        rest = [p for name, p in self.net.named_parameters() if not name.startswith("blocks.")]
        return torch.optim.SGD(self.net.blocks.parameters(), lr=0.1), torch.optim.SGD(rest, lr=0.1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        optimizer = (first, second)[batch_idx > 2]
        self.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@distributed(world=2)
def test_gradient_norms_are_those_of_the_optimizer_that_steps(tmp_path):
    rows = [
        logged(strategy, GradientNorms(every_n_steps=1), tmp_path / str(number), Gan())
        for number, strategy in enumerate((zero3(), "ddp_find_unused_parameters_true"))
    ]
    if dist.get_rank() == 0:
        first = {f"grad_2.0_norm/{name}" for name in LAYERS[:3]} | {"grad_2.0_norm_total"}
        assert set(rows[0]["1"]) == first
        assert set(rows[0]["5"]) == first | {"grad_2.0_norm/net", "grad_2.0_norm/net.head"}
        assert rows[0]["5"]["grad_2.0_norm/net"] == 0 < rows[0]["5"]["grad_2.0_norm/net.head"]
    assert_same(rows[0], rows[1], rtol=1e-4)


@distributed(world=1)
def test_gradient_norms_every_so_many_steps(tmp_path):
    rows = logged(zero3(), GradientNorms(every_n_steps=4), tmp_path)
    assert list(rows) == ["3", "5"]
    assert rows["3"] == rows["5"]  # Lightning repeats the last value


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"norm_type": 0}, "norm_type=0: give a positive number"),
        ({"per": "block"}, "per='block': choose 'layer', 'parameter' or 'total'"),
        ({"every_n_steps": 0}, "every_n_steps=0: give 1 or more"),
    ],
)
def test_gradient_norms_that_cannot_be_meant_are_refused(options, said):
    with pytest.raises(Zero3Error, match=said):
        GradientNorms(**options)


# -- detect_anomaly ---------------------------------------------------------------------------------------------------


class Nan(Task):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return (
            loss + (loss * 0).sqrt() if batch_idx == 2 else loss
        )  # the root of zero: its gradient is infinite, times 0


@distributed(world=2)
def test_anomaly_detection_finds_a_nan_in_backward_on_all_ranks():
    t = trainer(zero3(), max_steps=5, detect_anomaly=True)
    with pytest.raises(RuntimeError, match="Function 'MulBackward0' returned nan values"):
        t.fit(Nan(make_mlp()), loader(pairs()))
    assert t.global_step == 2


@distributed(world=2)
def test_anomaly_detection_changes_nothing_in_a_clean_run():
    runs = []
    for detect in (True, False):
        module = Task(make_mlp())
        trainer(zero3(), max_steps=5, detect_anomaly=detect).fit(module, loader(pairs()))
        runs.append(weights_of(module))
    assert_same(runs[0], runs[1], rtol=0, atol=0)
