"""Checkpoints that are directories: any number of ranks to any other, other strategies, and damage of all kinds."""

import itertools
import json
import math
import os
import pickle
import random
import shutil
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_zero3 import Zero3Error
from lightning_zero3.checkpoints import sharded_checkpoint
from lightning_zero3.checkpoints.boxes import FlatRange, boxes
from lightning_zero3.checkpoints.durable import saved
from tests.harness import assert_same, distributed, run
from tests.harness.models import Task
from tests.strategy.runs import make_mlp, make_plain_mlp, trainer, weights_of, zero3
from tests.strategy.test_checkpoints import Saved, adagrad, common_batches, train, with_schedule

# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_boxes_are_the_range_and_few():
    pick = random.Random(0)
    for _ in range(3000):
        shape = tuple(pick.randint(1, 5) for _ in range(pick.randint(0, 4)))
        n = math.prod(shape)
        lo = pick.randint(0, n)
        hi = pick.randint(lo, n)
        whole, found = torch.arange(n).view(shape), []
        for box in boxes(shape, lo, hi):
            part = whole
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            assert box.start == len(found)
            found += part.reshape(-1).tolist()
        assert found == list(range(lo, hi))
        assert len(boxes(shape, lo, hi)) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("dims", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_ranges_of_any_dense_layout_are_written_and_read(tmp_path, dims):
    back = [dims.index(i) for i in range(4)]
    whole = torch.randn([(4, 3, 5, 2)[i] for i in dims]).permute(back)
    flat = whole.permute(dims).reshape(-1)
    path, cuts = tmp_path / "x", [0, 17, 18, 60, 120]
    parts = {f"{lo}": FlatRange(whole.shape, whole.stride(), lo, flat[lo:hi]) for lo, hi in itertools.pairwise(cuts)}
    for name, part in parts.items():
        sharded_checkpoint.write(path / name, {"w": part}, b"", None)
        read = FlatRange(whole.shape, whole.stride(), int(name), torch.zeros_like(part.flat))
        sharded_checkpoint.read(path / name, {"w": read}, None)
        assert torch.equal(read.flat, part.flat)


# -- training goes on -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then", "worlds"),
    [
        *(("sharded", "sharded", worlds) for worlds in itertools.product((1, 2, 3, 4), repeat=2)),
        ("zero3", "sharded", (2, 3)),
        ("sharded", "zero3", (3, 2)),
        ("sharded", "ddp", (3, 2)),
        ("ddp", "sharded", (2, 3)),
        ("async", "sharded", (2, 3)),
        ("sharded", "async", (1, 2)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_training_goes_on_as_if_never_interrupted(tmp_path, first, then, worlds):
    """L1, L2: losses, weights, optimizer state and schedule."""
    path = tmp_path / "half.ckpt"
    whole = run(train, worlds[1], then, 4)[0]
    half = run(train, worlds[0], first, 2, path)[0]
    rest = run(train, worlds[1], then, 4, None, path)[0]
    assert_same(half[0] + rest[0], whole[0], rtol=1e-5, what="losses")
    assert_same(rest[1:], whole[1:], rtol=1e-4, atol=1e-5)
    if first == "sharded":
        assert len([n for n in os.listdir(path) if n.endswith(".distcp")]) == worlds[0]
        assert os.listdir(tmp_path) == ["half.ckpt"]


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_other_precisions_and_optimizers(tmp_path, precision):
    path = tmp_path / "half.ckpt"
    options = {"make_optimizer": adagrad, "precision": precision}
    whole = run(train, 2, "zero3", 3, **options)[0]
    run(train, 2, "sharded", 1, path, **options)
    rest = run(train, 2, "sharded", 3, None, path, **options)[0]
    assert_same(rest[1:], whole[1:], rtol=1e-6, atol=1e-7)


def train_with_policy(policy, epochs, save=None, ckpt_path=None):
    t = trainer(
        zero3(state_dict_type="sharded", auto_wrap_policy=policy), max_epochs=epochs, use_distributed_sampler=False
    )
    module = Task(make_mlp(), with_schedule)
    t.fit(module, common_batches(), ckpt_path=ckpt_path)
    if save:
        t.save_checkpoint(save)
    return weights_of(module)


def test_layers_may_be_cut_otherwise_when_resuming(tmp_path):
    path = tmp_path / "half.ckpt"
    whole = run(train_with_policy, 2, None, 3)[0]
    run(train_with_policy, 2, {nn.Linear}, 1, path)
    assert_same(run(train_with_policy, 3, None, 3, None, path)[0], whole, rtol=1e-4, atol=1e-5)


def fit_and_save(path, strategy="sharded"):
    module = Saved(width=14)
    t = trainer(zero3(state_dict_type=strategy), max_epochs=1)
    t.fit(module, common_batches())
    t.save_checkpoint(path)
    return weights_of(module)


def test_load_from_checkpoint_needs_no_strategy(tmp_path):
    """L7, L8."""
    path = tmp_path / "x.ckpt"
    weights = run(fit_and_save, 3, path)[0]
    module = Saved.load_from_checkpoint(path, map_location="cpu")
    assert module.hparams.width == 14
    assert_same(dict(module.state_dict()), weights, rtol=0, atol=0)
    assert list(module.state_dict()) == list(weights)


def test_plain_torch_reads_it_by_plain_names(tmp_path):
    path = tmp_path / "x.ckpt"
    weights = run(fit_and_save, 3, path)[0]
    state = {f"state_dict.{name}": torch.zeros_like(value) for name, value in weights.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert_same({k.removeprefix("state_dict."): v for k, v in state.items()}, weights, rtol=0, atol=0)


def plain(_, make_optimizer):
    """FSDP2 takes no scalars."""
    return Task(make_plain_mlp(), make_optimizer)


def fsdp2(epochs, save=None, ckpt_path=None):
    """Lightning's ModelParallelStrategy."""
    from tests.harness.oracles import _model_parallel_strategy

    module = plain(None, with_schedule)
    t = trainer(_model_parallel_strategy(module), max_epochs=epochs, use_distributed_sampler=False)
    t.fit(module, common_batches(), ckpt_path=ckpt_path)
    if save:
        t.save_checkpoint(save)


def test_a_checkpoint_of_model_parallel_strategy_is_resumed(tmp_path):
    path = tmp_path / "fsdp2.ckpt"
    run(fsdp2, 2, 2, path)
    assert not (path / "checksums.json").exists()
    whole = run(train, 3, "ddp", 4, make_task=plain)[0]
    rest = run(train, 3, "sharded", 4, None, path, make_task=plain)[0]
    assert_same(rest[1:], whole[1:], rtol=1e-4, atol=1e-5)


class Old(Task):
    """A module with another name for its net."""

    def __init__(self):
        super().__init__(make_mlp())
        self.body = self._modules.pop("net")

    @property
    def net(self):
        return self.body


class Renamed(Task):
    """A module whose hook changes names, and one value, of what it loads."""

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        for name in list(state):
            state[name.replace("body.", "net.")] = state.pop(name)
        state["net.head.bias"] = state["net.head.bias"] + 1


@distributed(world=2)
def test_what_on_load_checkpoint_changes_counts(tmp_path):
    first = Old()
    t = trainer(zero3(state_dict_type="sharded"), max_epochs=1)
    t.fit(first, common_batches())
    t.save_checkpoint(tmp_path / "x.ckpt")
    second = Renamed(make_mlp())
    trainer(zero3(), limit_val_batches=1).validate(second, common_batches(), ckpt_path=str(tmp_path / "x.ckpt"))
    weights = {name.replace("body.", "net."): value for name, value in weights_of(first).items()}
    loaded = weights_of(second)
    weights["net.head.bias"] += 1
    assert_same(loaded, weights, rtol=0, atol=0)


@distributed(world=2)
def test_a_state_dict_that_does_not_fit_is_named(tmp_path):
    t = trainer(zero3(state_dict_type="sharded"), max_epochs=1)
    t.fit(Task(make_mlp()), common_batches())
    t.save_checkpoint(tmp_path / "x.ckpt")
    t = trainer(zero3())
    module = Saved(width=14)
    with pytest.raises(
        Zero3Error, match=r"shape of 'net.blocks.0.linear.weight': \[15, 7\] in the state dict, \[14, 7\]"
    ):
        t.validate(module, common_batches(), ckpt_path=str(tmp_path / "x.ckpt"))


# -- ModelCheckpoint --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_async", [False, True])
@distributed(world=2)
def test_model_checkpoint_keeps_the_best_and_the_last(tmp_path, save_async):
    """L9."""
    keep = ModelCheckpoint(
        tmp_path, "{step}", monitor="train_loss", save_top_k=2, save_last=True, every_n_train_steps=1
    )
    t = trainer(zero3(state_dict_type="sharded", save_async=save_async), max_epochs=2, callbacks=[keep])
    t.fit(Task(make_mlp()), common_batches())
    dist.barrier()
    kept = {*keep.best_k_models, keep.last_model_path}
    kept, best = t.strategy.broadcast(
        (kept, keep.best_model_path)
    )  # each rank ranks by its own loss; the first decides
    assert len(kept) == 3
    assert {str(tmp_path / name) for name in os.listdir(tmp_path)} == kept
    assert all(sharded_checkpoint.is_sharded_checkpoint(path) for path in kept)
    results = trainer(zero3(), limit_val_batches=1).validate(
        Task(make_mlp()), common_batches(), ckpt_path=best, verbose=False
    )
    assert results[0]["val_loss"] < 10


@pytest.mark.parametrize("save_async", [False, True])
@distributed(world=2)
def test_what_goes_wrong_while_writing_is_raised_on_every_rank(tmp_path, save_async):
    blocked = tmp_path / "blocked"
    if dist.get_rank() == 0:
        blocked.touch()
    dist.barrier()
    write = sharded_checkpoint.write

    def write_and_dawdle(*args):  # a rank that knows of the error steps later than the other
        try:
            write(*args)
        finally:
            time.sleep(0.5 * dist.get_rank())

    class Save(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            if trainer.global_step == 1:
                trainer.save_checkpoint(blocked / "x.ckpt")  # a file where a folder should be

    t = trainer(zero3(state_dict_type="sharded", save_async=save_async), max_epochs=200, callbacks=[Save()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint, "write", write_and_dawdle)
        with pytest.raises(Zero3Error, match="cannot write the checkpoint .*blocked/x.ckpt .*rank 0: "):
            t.fit(Task(make_mlp()), common_batches())
    assert t.global_step < 600


# -- damage -----------------------------------------------------------------------------------------------------------


def spoil(path, how):
    """Damage a checkpoint. Returns the file that an error should name."""
    name = next(n for n in sorted(os.listdir(path)) if n.startswith("__1"))
    file = path / name
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "truncate":
        file.write_bytes(content[:-100])
    elif how == "missing":
        file.unlink()
    elif how == "index":
        file = path / ".metadata"
        file.write_bytes(file.read_bytes()[:-20])
    elif how == "extra":
        file = path / "meta.pt"
        file.write_bytes(file.read_bytes()[:50])
    return file.name


@pytest.mark.parametrize("how", ["flip", "truncate", "missing", "index", "extra"])
def test_damage_is_an_error_on_every_rank_that_names_the_file(tmp_path, how):
    path = tmp_path / "x.ckpt"
    run(fit_and_save, 2, path)
    name = spoil(path, how)
    with pytest.raises(AssertionError, match=name) as caught:
        run(train, 2, "sharded", 2, None, path)
    assert "on ranks 0, 1" in str(caught.value)
    with pytest.raises(Zero3Error, match=name):
        Saved.load_from_checkpoint(path)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("name", [".metadata", "meta.pt"])
def test_code_in_a_checkpoint_is_refused(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.ckpt"
    run(fit_and_save, 1, path)
    (path / "checksums.json").unlink()
    if name == "meta.pt":
        torch.save({"evil": Evil()}, path / name)
    else:
        (path / name).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(Zero3Error, match=name):
        Saved.load_from_checkpoint(path)
    assert not os.path.exists("evil")


def test_a_write_that_was_cut_off_between_two_renames_is_found(tmp_path):
    path = tmp_path / "x.ckpt"
    weights = run(fit_and_save, 1, path)[0]
    os.rename(path, tmp_path / ".x.ckpt.old")
    assert_same(dict(Saved.load_from_checkpoint(path).state_dict()), weights, rtol=0, atol=0)


def test_half_a_checkpoint_is_none(tmp_path):
    path = tmp_path / "x.ckpt"
    run(fit_and_save, 1, path)
    shutil.copytree(path, tmp_path / "half.ckpt")
    (tmp_path / "half.ckpt" / ".metadata").unlink()
    assert not sharded_checkpoint.is_sharded_checkpoint(tmp_path / "half.ckpt")
    assert set(json.loads((path / "checksums.json").read_text())) == {".metadata", "meta.pt", "__0_0.distcp"}


def test_remote_paths(tmp_path):
    """Through fsspec."""
    weights = torch.randn(5, 4)
    for url in ("memory://bucket/x.ckpt", f"file://{tmp_path}/x.ckpt"):
        for scale in (1.0, 2.0):
            part = FlatRange(weights.shape, weights.stride(), 0, (weights * scale).reshape(-1))
            sharded_checkpoint.write(url, {"state_dict.w": part}, _extra(), None)
        loaded = sharded_checkpoint.load_whole(url)
        assert torch.equal(loaded["state_dict"]["w"], weights * 2)
        assert loaded["epoch"] == 3


def _extra():
    return saved({"epoch": 3, sharded_checkpoint.PARAM_GROUPS: []})


def test_inspect_prints_what_a_file_of_the_same_run_would_have(tmp_path):
    from lightning_zero3.checkpoints.inspection import inspect_checkpoint

    told = []
    for kind in ("sharded", "full"):
        path = tmp_path / f"{kind}.ckpt"
        run(fit_and_save, 3, path, kind)
        told.append(inspect_checkpoint(str(path)).split("\n"))
    ours, full = told
    assert ours.pop(3) == "written by 3 ranks"
    assert sorted(line.split(",")[0] for line in ours) == sorted(line.split(",")[0] for line in full)
    with pytest.raises(Zero3Error, match=r"\.metadata is missing or damaged"):
        inspect_checkpoint(str(tmp_path))


def save_for_ever(path, first):
    for number in itertools.count(first):
        weights = torch.full((300, 7), float(number))
        part = FlatRange(weights.shape, weights.stride(), 0, weights.reshape(-1))
        sharded_checkpoint.write(path, {"state_dict.w": part}, saved({"number": number, **NO_OPTIMIZER}), None)


NO_OPTIMIZER = {sharded_checkpoint.PARAM_GROUPS: []}


def test_killed_at_any_moment_of_saving_the_newest_complete_one_loads(tmp_path):
    """L20: kill -9, fifty times."""
    path, pick, last = tmp_path / "x.ckpt", random.Random(0), 0
    for _ in range(50):
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(path, last + 1)
            finally:
                os._exit(1)
        while not sharded_checkpoint.is_sharded_checkpoint(path):  # the very first
            time.sleep(0.001)
        time.sleep(pick.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        loaded = sharded_checkpoint.load_whole(path)
        assert (loaded["state_dict"]["w"] == loaded["number"]).all()
        assert loaded["number"] >= last
        last = loaded["number"]
    assert last > 10


# -- by name, and loosely ---------------------------------------------------------------------------------------------


@distributed(world=2)
def test_best_last_hpc_and_paths_name_directories_too(tmp_path):
    """L10: in every stage, on the Trainer that wrote them and on another."""
    root = tmp_path / "root"
    keep = ModelCheckpoint(tmp_path / "kept", monitor="val_loss", mode="max", save_top_k=-1, save_last=True)
    t = trainer(zero3(state_dict_type="sharded"), max_epochs=2, callbacks=[keep], default_root_dir=root)
    module = Task(make_mlp(), with_schedule)
    t.fit(module, common_batches(), common_batches())
    t.save_checkpoint(root / "hpc_ckpt_2.ckpt")
    first, last = (sharded_checkpoint.load_whole(path) for path in (keep.best_model_path, keep.last_model_path))
    assert (first["epoch"], last["epoch"]) == (0, 1)
    for name, expected in (("best", first), ("last", last), ("hpc", last), (keep.best_model_path, first)):
        for stage in (t.validate, t.test):
            stage(module, common_batches(), ckpt_path=name, verbose=False)
            assert_same(weights_of(module), expected["state_dict"], rtol=0, atol=0)
        t.predict(module, common_batches(), ckpt_path=name)
        assert_same(weights_of(module), expected["state_dict"], rtol=0, atol=0)

    whole = Task(make_mlp(), with_schedule)
    trainer("ddp", max_epochs=3).fit(whole, common_batches())
    for name in ("last", "hpc"):
        keep = ModelCheckpoint(tmp_path / "kept", monitor="val_loss", mode="max", save_top_k=-1, save_last=True)
        t = trainer(zero3(), max_epochs=3, callbacks=[keep], default_root_dir=root)
        again = Task(make_mlp(), with_schedule)
        t.fit(again, common_batches(), common_batches(), ckpt_path=name)
        assert t.global_step == t.num_training_batches * 3
        assert_same(weights_of(again), weights_of(whole), rtol=1e-4, atol=1e-5)
        dist.barrier()


class Other(Saved):
    """`Saved`, with one parameter more and one of another name."""

    def __init__(self, width: int = 15):
        super().__init__(width)
        self.more = nn.Parameter(torch.full((3,), 7.0))
        self.net.rescale = self.net._parameters.pop("scale")
        self.net.scale = None


@distributed(world=2)
def test_loading_is_strict_unless_told_otherwise(tmp_path):
    path = tmp_path / "x.ckpt"
    weights = fit_and_save(path)
    with pytest.raises(RuntimeError, match=r"(?s)more.*net\.scale|net\.scale.*more"):
        Other.load_from_checkpoint(path)
    loaded = dict(Other.load_from_checkpoint(path, strict=False).state_dict())
    module = Other(width=14)
    with pytest.raises(Zero3Error, match=r"(?s)more.*net\.scale|net\.scale.*more"):
        trainer(zero3()).validate(module, common_batches(), ckpt_path=path, verbose=False)
    module = Other(width=14)
    module.strict_loading = False
    trainer(zero3()).validate(module, common_batches(), ckpt_path=path, verbose=False)
    expected = {**weights, "more": torch.full((3,), 7.0), "net.rescale": torch.tensor(0.5)}
    del expected["net.scale"]
    assert_same(loaded, expected, rtol=0, atol=0)
    assert_same(weights_of(module), expected, rtol=0, atol=0)
