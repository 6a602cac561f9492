"""Full checkpoints are those of "ddp", resumed by any strategy at any number of ranks; L1, L2, L7 to L9, L12."""

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3Error
from tests.harness import assert_same, distributed, run
from tests.harness.models import MLP, Pairs, Task, adamw, loader
from tests.strategy.runs import WIDTHS, make_mlp, mlp_task, trainer, weights_of, zero3


def with_schedule(net):
    optimizer = adamw(net)
    return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


def adagrad(net):  # makes its state in the constructor
    return torch.optim.Adagrad(net.parameters(), lr=0.1)


def common_batches():
    """The same batches on every rank, so that runs at different world sizes can be compared."""
    return DataLoader(Pairs(24, WIDTHS[0]), batch_size=8)


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())


def strategy_named(name):
    kinds = {"zero3": {}, "sharded": {"state_dict_type": "sharded"}}
    kinds["async"] = {**kinds["sharded"], "save_async": True}
    return zero3(**kinds[name]) if name in kinds else name


def train(name, epochs, save=None, ckpt_path=None, make_optimizer=with_schedule, make_task=Task, **options):
    """Fit up to a number of epochs, on every rank of this job. Returns losses, weights and optimizer state."""
    losses = Losses()
    t = trainer(strategy_named(name), max_epochs=epochs, callbacks=[losses], use_distributed_sampler=False, **options)
    module = make_task(make_mlp(), make_optimizer)
    t.fit(module, common_batches(), ckpt_path=ckpt_path)
    if save:
        t.save_checkpoint(save)
    t.strategy.state_dict_type = "full"  # to compare with
    weights, state = weights_of(module), t.strategy.broadcast(t.strategy.optimizer_state(t.optimizers[0]))
    return losses.losses, weights, state, t.optimizers[0].param_groups[0]["lr"], t.global_step


def layout(value):
    """A nested value with every tensor replaced by its type, dtype, shape and device."""
    if isinstance(value, Tensor):
        return type(value), value.dtype, tuple(value.shape), value.device, value.is_contiguous()
    if isinstance(value, dict):
        return {k: layout(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [layout(v) for v in value]
    return value


@pytest.mark.parametrize("make_optimizer", [with_schedule, adagrad])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@distributed(world=2)
def test_the_file_is_exactly_ddps(tmp_path, make_optimizer, precision):
    contents = []
    for name in ("zero3", "ddp"):
        path = tmp_path / f"{name}.ckpt"
        train(name, 1, save=path, make_optimizer=make_optimizer, precision=precision)
        content = torch.load(path, weights_only=True)  # nothing but tensors and plain values
        for timing in ("callbacks", "loops"):  # of the test's own callback and of the clock
            content.pop(timing)
        contents.append(content)
    ours, ddp = contents
    assert list(ours["state_dict"]) == list(ddp["state_dict"])
    assert layout(ours) == layout(ddp)
    tolerance = {"32-true": 1e-5}.get(precision, 0.05)
    assert_same(ours, ddp, rtol=tolerance, atol=tolerance * 0.1)
    tensors = [
        *ours["state_dict"].values(),
        *(v for s in ours["optimizer_states"][0]["state"].values() for v in s.values()),
    ]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert len(storages) == len(tensors)  # nothing is shared: a common step count would count once per parameter
    assert sum(storages.values()) == sum(t.nbytes for t in tensors)  # nor a view of something larger


@pytest.mark.parametrize(
    ("first", "then", "worlds"),
    [
        ("zero3", "zero3", (2, 3)),
        ("zero3", "zero3", (3, 1)),
        ("zero3", "zero3", (1, 4)),
        ("zero3", "zero3", (4, 2)),
        ("ddp", "zero3", (2, 3)),
        ("zero3", "ddp", (3, 2)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_training_goes_on_as_if_never_interrupted(tmp_path, first, then, worlds):
    """L1, L2, L8."""
    path = tmp_path / "half.ckpt"
    whole = run(train, worlds[1], then, 4)[0]
    half = run(train, worlds[0], first, 2, path)[0]
    rest = run(train, worlds[1], then, 4, None, path)[0]
    assert_same(half[0] + rest[0], whole[0], rtol=1e-5, what="losses")
    assert_same(rest[1:], whole[1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make_optimizer", [adagrad])
def test_state_made_in_the_optimizers_constructor_is_resumed(tmp_path, make_optimizer):
    path = tmp_path / "half.ckpt"
    whole = run(train, 1, "ddp", 3, make_optimizer=make_optimizer)[0]
    run(train, 2, "zero3", 1, path, make_optimizer=make_optimizer)
    rest = run(train, 3, "zero3", 3, None, path, make_optimizer=make_optimizer)[0]
    assert_same(rest[1:], whole[1:], rtol=1e-4, atol=1e-5)


class Saved(Task):
    def __init__(self, width: int = 15):
        super().__init__(MLP(WIDTHS[0], width, 16, 17))
        self.save_hyperparameters()


def train_and_save(path):
    module = Saved(width=14)
    t = trainer(zero3(), max_epochs=1)
    t.fit(module, common_batches())
    t.save_checkpoint(path)
    return weights_of(module)


def test_load_from_checkpoint_needs_no_strategy(tmp_path):
    """L7."""
    path = tmp_path / "saved.ckpt"
    weights = run(train_and_save, 2, path)[0]
    module = Saved.load_from_checkpoint(path)
    assert module.hparams.width == 14
    assert_same(dict(module.state_dict()), weights, rtol=0, atol=0)


class Edited(Task):
    """Changes the checkpoint on its way in and out."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["extra"] = 17

    def on_load_checkpoint(self, checkpoint):
        self.extra = checkpoint["extra"]
        checkpoint["state_dict"]["net.shift"] = torch.tensor([5.0, 6.0])


@distributed(world=2)
def test_edits_of_the_checkpoint_count(tmp_path):
    path = tmp_path / "edited.ckpt"
    train("zero3", 1, path, make_task=Edited)
    module = Edited(make_mlp(), with_schedule)
    trainer(zero3(), max_epochs=1, use_distributed_sampler=False).fit(module, common_batches(), ckpt_path=path)
    assert module.extra == 17
    assert_same(weights_of(module)["net.shift"], torch.tensor([5.0, 6.0]), rtol=0, atol=0)


@distributed(world=2)
def test_a_sharded_module_takes_a_checkpoint_too(tmp_path):
    """Resuming into a module that an earlier fit has sharded."""
    path = tmp_path / "a.ckpt"
    module = mlp_task()
    t = trainer(zero3(), max_epochs=1)
    t.fit(module, loader(Pairs(24, 7)))
    t.save_checkpoint(path)
    saved = weights_of(module)
    t.fit_loop.max_epochs = 3
    t.fit(module, loader(Pairs(24, 7)))
    assert not torch.equal(weights_of(module)["net.head.weight"], saved["net.head.weight"])
    scores = t.validate(module, loader(Pairs(24, 7)), ckpt_path=path, verbose=False)
    assert_same(weights_of(module), saved, rtol=0, atol=0)
    again = trainer(zero3(), max_epochs=1)
    again.fit(module, loader(Pairs(24, 7)), ckpt_path=path)
    assert_same(weights_of(module), saved, rtol=0, atol=0)
    assert_same(again.validate(module, loader(Pairs(24, 7)), verbose=False), scores)


@dataclass
class Trust:
    """A class of the user's own, which a safe load refuses."""

    level: int


class Trusting(Task):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["trust"] = Trust(3)

    def on_load_checkpoint(self, checkpoint):
        self.trust = checkpoint["trust"]


@pytest.mark.parametrize("sharded_before", [False, True])
@distributed(world=2)
def test_weights_only_is_honoured(tmp_path, sharded_before):
    """L12."""
    path = tmp_path / "own-class.ckpt"
    train("zero3", 1, path, make_task=Trusting)
    module = Trusting(make_mlp(), with_schedule)
    if sharded_before:
        trainer(zero3(), max_epochs=1).fit(module, common_batches())
    options = {"max_epochs": 2, "use_distributed_sampler": False}
    with pytest.raises(Exception, match="Trust"):
        trainer(zero3(), **options).fit(module, common_batches(), ckpt_path=path, weights_only=True)
    trainer(zero3(), **options).fit(module, common_batches(), ckpt_path=path, weights_only=False)
    assert module.trust.level == 3


class Loose(Task):
    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["net.other"] = torch.zeros(3)
        del checkpoint["state_dict"]["net.scale"]


@pytest.mark.parametrize("sharded_before", [False, True])
@distributed(world=2)
def test_missing_and_unexpected_keys_are_errors_unless_loading_is_not_strict(tmp_path, sharded_before):
    path = tmp_path / "a.ckpt"
    weights = train("zero3", 1, path)[1]
    module = Loose(make_mlp(), with_schedule)
    if sharded_before:
        trainer(zero3(), max_epochs=1).fit(module, common_batches())
    with pytest.raises(RuntimeError, match=r"(?s)net\.scale.*net\.other|net\.other.*net\.scale"):
        trainer(zero3()).validate(module, common_batches(), ckpt_path=path, verbose=False)
    module.strict_loading = False
    trainer(zero3()).validate(module, common_batches(), ckpt_path=path, verbose=False)
    loaded = weights_of(module)
    loaded.pop("net.scale")
    weights.pop("net.scale")
    assert_same(loaded, weights, rtol=0, atol=0)


@distributed(world=2)
def test_weights_alone_can_be_saved_and_evaluated_but_not_resumed(tmp_path):
    path = tmp_path / "weights.ckpt"
    module = mlp_task()
    t = trainer(zero3(), max_epochs=1)
    t.fit(module, common_batches())
    t.save_checkpoint(path, weights_only=True)
    scores = t.validate(module, common_batches(), verbose=False)
    other = trainer(zero3()).validate(mlp_task(), common_batches(), ckpt_path=path, verbose=False)
    assert_same(other, scores)
    with pytest.raises(KeyError, match="only the model"):
        trainer(zero3(), max_epochs=2).fit(mlp_task(), common_batches(), ckpt_path=path)


@distributed(world=2)
def test_resuming_in_the_middle_of_an_epoch_equals_ddp(tmp_path):
    """L9."""
    results = []
    for name in ("zero3", "ddp"):
        every = ModelCheckpoint(tmp_path / name, "{step}", every_n_train_steps=2, save_top_k=-1)
        options = {"max_steps": 5, "use_distributed_sampler": False, "callbacks": [every]}
        trainer(strategy_named(name), **options).fit(mlp_task(), common_batches())
        losses = Losses()
        options["callbacks"] = [losses]
        module, path = mlp_task(), tmp_path / name / "step=4.ckpt"
        trainer(strategy_named(name), **{**options, "max_steps": 8}).fit(module, common_batches(), ckpt_path=path)
        results.append([losses.losses, weights_of(module)])
    assert_same(results[0], results[1], rtol=1e-4)


def test_a_checkpoint_of_another_optimizer_or_model_is_an_error(tmp_path):
    path = tmp_path / "a.ckpt"
    run(train, 2, "zero3", 1, path)

    def fails(match, **options):
        with pytest.raises(AssertionError, match=match):
            run(train, 2, "zero3", 2, None, path, **options)

    fails(
        "AdamW has parameter groups of .* this one of .*configure_optimizers or the model has changed",
        make_optimizer=one_group,
    )
    fails("the checkpoint has 1 optimizers, configure_optimizers returned 2", make_optimizer=two, make_task=Manual)


def one_group(net):
    return torch.optim.AdamW(net.parameters())


def two(net):
    halves = list(net.parameters())[::2], list(net.parameters())[1::2]
    return [torch.optim.SGD(half, lr=0.1) for half in halves], []


class Manual(Task):
    def __init__(self, *args):
        super().__init__(*args)
        self.automatic_optimization = False


@distributed(world=2)
def test_only_the_first_rank_holds_and_writes_the_whole_model(tmp_path):
    module = mlp_task()
    t = trainer(zero3(), max_epochs=1)
    t.fit(module, common_batches())
    checkpoint = t._checkpoint_connector.dump_checkpoint()
    tensors = list(
        itertools.chain(checkpoint["state_dict"].values(), checkpoint["optimizer_states"][0]["state"].values())
    )
    assert bool(tensors) == (dist.get_rank() == 0)
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] == 1e-2


@distributed(world=2)
def test_a_wrong_shape_names_the_key(tmp_path):
    path = tmp_path / "a.ckpt"
    train("zero3", 1, path)
    module = Task(MLP(7, 15, 16, 18), with_schedule)
    trainer(zero3(), max_epochs=1).fit(module, common_batches())
    with pytest.raises(Zero3Error, match=r"shape of 'net.head.weight': \[3, 17\] in the state dict, \[3, 18\] here"):
        trainer(zero3()).validate(module, common_batches(), ckpt_path=path, verbose=False)
