"""Ranks with different numbers of batches: nothing hangs, and the values are those of "ddp"; L21."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from tests.harness import DistributedError, assert_same, distributed, run
from tests.harness.models import Pairs, Task, loader
from tests.strategy.runs import WIDTHS, make_mlp, mlp_task, trainer, weights_of, zero3

STRATEGIES = [zero3, lambda: "ddp"]


class Stream(IterableDataset):
    """So many samples for this rank, of unknown number to everyone."""

    def __init__(self, sizes: list[int], seed: int = 0) -> None:
        self.size = sizes[dist.get_rank()]
        self.pairs = Pairs(64, WIDTHS[0], seed=seed)

    def __iter__(self):
        yield from (self.pairs[i] for i in range(self.size))


class KnownStream(Stream):
    """The same, and it says how many; wrongly."""

    def __len__(self):
        return self.size + 8


def stream(*sizes: int, of=Stream, seed: int = 0) -> DataLoader:
    return DataLoader(of(list(sizes), seed), batch_size=4)


class Counting(Task):
    """Remembers what this rank saw."""

    def __init__(self):
        super().__init__(make_mlp())
        self.seen: list[Tensor] = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.seen.append(loss)
        self.log("val_loss", loss, sync_dist=True)

    def on_validation_epoch_end(self):
        self.log("count", float(len(self.seen)), sync_dist=True, reduce_fx="sum")


def validate(strategy, loaders, **options):
    module = Counting()
    t = trainer(strategy, **options)
    scores = t.validate(module, loaders, verbose=False)
    return [scores, module.seen]


LOADERS = {
    "unknown": lambda: stream(12, 4, 28),
    "only the last has more": lambda: stream(4, 4, 5),
    "wrong length told": lambda: stream(9, 4, 16, of=KnownStream),
    "several": lambda: [stream(4, 12, 8), loader(Pairs(31, 7)), stream(16, 8, 4, seed=1)],
    "sampler of the user's own": lambda: DataLoader(Pairs(8 * (1 + dist.get_rank()), 7), batch_size=4),
    "even": lambda: [loader(Pairs(24, 7)), loader(Pairs(13, 7))],
}


@pytest.mark.parametrize("options", [{}, {"limit_val_batches": 2}], ids=["all", "limited"])
@pytest.mark.parametrize("name", LOADERS)
@distributed(world=3, timeout=20)
def test_validation_waits_for_the_rank_with_most_batches(name, options):
    options = {"use_distributed_sampler": False, **options}
    ours, ddp = (validate(s(), LOADERS[name](), **options) for s in STRATEGIES)
    assert_same(ours, ddp)


class Reading(Counting):
    """Reads a weight, goes on with other layers, and then calls the layer that the weight belongs to."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x = batch[0] * (1 + self.net.blocks[1].linear.weight.mean())
        loss = F.mse_loss(self.net(x), batch[1])
        self.seen.append(loss)


@distributed(world=3, timeout=20)
def test_a_weight_that_is_read_before_its_layer_is_used():
    seen = []
    for strategy in STRATEGIES:
        module = Reading()
        trainer(strategy()).validate(module, stream(12, 4, 28), verbose=False)
        seen.append(module.seen)
    assert_same(*seen)


@distributed(world=3, timeout=20)
def test_training_goes_on_after_uneven_validation():
    results = []
    for strategy in STRATEGIES:
        module = Counting()
        t = trainer(strategy(), max_epochs=2, num_sanity_val_steps=2, val_check_interval=2, limit_val_batches=5)
        t.fit(module, loader(Pairs(48, 7)), [stream(12, 4, 40), stream(4, 12, 8)])
        results.append([module.seen, t.callback_metrics, weights_of(module)])
    assert_same(results[0], results[1], rtol=1e-4)


LIMITS = [
    {"limit_train_batches": 2, "limit_val_batches": 1},
    {"limit_val_batches": 0, "limit_test_batches": 1},
    {"limit_val_batches": 0.5, "limit_test_batches": 3, "limit_predict_batches": 2},
    {"num_sanity_val_steps": -1, "val_check_interval": 3, "check_val_every_n_epoch": None},
    {"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2},
]


@pytest.mark.parametrize("options", LIMITS, ids=" ".join)
@distributed(world=3, timeout=20)
def test_limits_are_ddps(options):
    """L21: an IterableDataset to train on, several loaders to validate on, with last batches that differ in size."""
    results = []
    for strategy in STRATEGIES:
        module = Counting()
        t = trainer(strategy(), max_epochs=2, use_distributed_sampler=False, **options)
        uneven = DataLoader(Pairs(9 * (1 + dist.get_rank()), 7), batch_size=4)
        t.fit(module, stream(14, 15, 16), [uneven, loader(Pairs(31, 7))])
        results.append([t.global_step, module.seen, t.callback_metrics, weights_of(module)])
        results[-1] += [t.test(module, stream(12, 20, 16), verbose=False), t.predict(module, uneven)]
    assert_same(results[0], results[1], rtol=1e-4)


@distributed(world=3, timeout=20)
def test_predictions_of_uneven_last_batches_are_all_there():
    """Lightning's sampler for prediction repeats no sample, so that some ranks have a batch less."""
    results = []
    for strategy in STRATEGIES:
        data = Pairs(14, 7)  # 5, 5 and 4 samples
        predicted = trainer(strategy()).predict(mlp_task(), DataLoader(data, batch_size=4))
        assert sum(len(p) for p in predicted) == len(range(dist.get_rank(), 14, 3))
        results.append(predicted)
    assert_same(results[0], results[1])


@distributed(world=2, timeout=20)
def test_test_and_predict_on_streams():
    results = []
    for strategy in STRATEGIES:
        module, t = mlp_task(), trainer(strategy())
        results.append([t.test(module, stream(20, 4), verbose=False), t.predict(module, stream(4, 20))])
    assert_same(results[0], results[1])


class Iterated(Counting):
    """Fetches its own batches."""

    def validation_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        super().validation_step(batch, batch_idx)


@distributed(world=2, timeout=20)
def test_steps_that_take_the_iterator_are_kept_together_too():
    module = Iterated()
    trainer(zero3()).validate(module, loader(Pairs(22, 7)), verbose=False)
    assert len(module.seen) == 3


@pytest.mark.parametrize("sizes", [(12, 28, 40), (28, 12, 12)])
@distributed(world=3, timeout=20)
def test_training_stops_with_the_shortest_stream(sizes):
    module, t = mlp_task(), trainer(zero3(), max_epochs=2)
    t.fit(module, stream(*sizes))
    assert t.global_step == 2 * 3
    module_ddp = mlp_task()
    trainer("ddp", max_epochs=2).fit(module_ddp, stream(12, 12, 12))
    assert_same(weights_of(module), weights_of(module_ddp), rtol=1e-4)


@distributed(world=2, timeout=20)
def test_training_stops_with_the_shortest_loader_of_known_length():
    t = trainer(zero3(), max_epochs=1, use_distributed_sampler=False)
    t.fit(mlp_task(), DataLoader(Pairs(8 * (1 + dist.get_rank()), 7), batch_size=4))
    assert t.global_step == 2


@distributed(world=2, timeout=20)
def test_seeds_reach_the_workers_of_a_wrapped_loader():
    data = stream(8, 12)
    seed_everything(3, workers=True, verbose=False)
    trainer(zero3(), max_epochs=1).fit(mlp_task(), data)
    assert data.worker_init_fn is not None


def test_a_rank_without_any_batch_is_an_error_that_names_it():
    with pytest.raises(DistributedError, match="rank 1 has no batch to evaluate.*give every rank at least one"):
        run(validate_stream, 2)


def validate_stream():
    validate(zero3(), stream(8, 0))


@distributed(world=2, timeout=20)
def test_equal_lengths_cost_nothing():
    """One question per run; no agreement per batch."""
    strategy = zero3()
    t = trainer(strategy, max_epochs=1)
    asked = []
    module = mlp_task()

    def count(*_):
        comm = strategy.engine.comm
        original = comm.all_objects
        comm.all_objects = lambda obj: asked.append(obj) or original(obj)

    module.on_fit_start = count
    t.fit(module, loader(Pairs(64, 7)), loader(Pairs(64, 7)))
    assert len(asked) == 1 + 2  # training data; the sanity check and the epoch's validation
    assert torch.isfinite(weights_of(module)["net.scale"])
