"""Lightning's callbacks, samplers and logging, with what they need from a strategy; L9 and L16."""

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
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanSquaredError

from tests.harness import assert_same, distributed
from tests.harness.models import Pairs, Task, adamw, loader
from tests.strategy.runs import WIDTHS, make_mlp, trainer, weights_of, zero3

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
