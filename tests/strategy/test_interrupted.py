"""Training that is killed, runs out of disk, or finds its checkpoint damaged: the last good one is there. L20."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_zero3 import Zero3Error, newest_checkpoint
from lightning_zero3.checkpoints import sharded_checkpoint
from lightning_zero3.checkpoints.durable import beside, remove
from tests.harness import assert_same, distributed
from tests.harness.models import Task
from tests.strategy.runs import make_mlp, trainer, weights_of, zero3
from tests.strategy.test_checkpoints import Saved, common_batches, strategy_named, with_schedule

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("ZERO3_TEST_KILLS", "3"))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_killed_at_any_moment_training_resumes_from_the_newest_complete_checkpoint(tmp_path, mode):
    """L20: kill -9 of all processes of a run; in the end its weights are those of a run that was never killed."""
    command = [sys.executable, "-m", "tests.strategy.scripts.killed", str(tmp_path), mode, str(KILLS), "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60 + 20 * KILLS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{mode}: killed {KILLS} times" in done.stdout


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    """Of either kind; not what is half written; put back if it was put aside for the next."""
    assert newest_checkpoint(tmp_path / "none") is newest_checkpoint(tmp_path) is None
    paths = [tmp_path / name for name in ("c.ckpt", "b.ckpt", "hpc_ckpt_1.ckpt")]
    sharded_checkpoint.write(paths[0], {"state_dict.w": torch.ones(3)}, b"", None)
    torch.save({}, paths[1])
    sharded_checkpoint.write(paths[2], {"state_dict.w": torch.ones(3)}, b"", None)
    for second, path in enumerate((paths[0] / ".metadata", paths[1], paths[2] / ".metadata")):
        os.utime(path, (1e9 + second, 1e9 + second))
    (tmp_path / "half").mkdir()
    (tmp_path / "half.ckpt").write_bytes(paths[1].read_bytes()[:-5])
    (tmp_path / "notes").write_text("new")
    assert newest_checkpoint(tmp_path) == str(paths[2])
    paths[2].rename(beside(str(paths[2]), "old"))
    assert newest_checkpoint(str(tmp_path)) == str(paths[2])
    (paths[2] / ".metadata").unlink()
    assert newest_checkpoint(tmp_path) == str(paths[1])


# -- no place to write ------------------------------------------------------------------------------------------------


class SaveTwice(Callback):
    """Saves after the first step, and once more when `spoil` has been called; waits for each."""

    def __init__(self, path, spoil, mend):
        self.path, self.spoil, self.mend, self.weights = path, spoil, mend, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 0:
            trainer.save_checkpoint(self.path)
            trainer.strategy.wait_for_checkpoint()
            self.weights = weights_of(module)
        elif batch_idx == 1:
            self.spoil()
            try:
                trainer.save_checkpoint(self.path)
                trainer.strategy.wait_for_checkpoint()
            finally:
                self.mend()


def limit_files(nbytes):
    """What this process writes beyond that many bytes of a file is an error, as on a full disk.

    Not so few that the store in which ranks meet, a file too, would be full.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))


@pytest.mark.parametrize("full_on", [0, 1])
@distributed(world=2)
def test_a_disk_that_is_full_for_one_rank_is_an_error_on_all_and_keeps_the_last_one(tmp_path, full_on):
    for kind in ("zero3", "sharded", "async"):
        if kind == "zero3" and full_on == 1:
            continue  # the first rank writes for all
        path = tmp_path / f"{kind}.ckpt"
        mine = dist.get_rank() == full_on
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        save = SaveTwice(path, lambda mine=mine: limit_files(100_000) if mine else None, lambda n=limit: limit_files(n))
        t = trainer(strategy_named(kind), max_epochs=1, callbacks=[save], use_distributed_sampler=False)
        with pytest.raises(Zero3Error, match=f"cannot write the checkpoint .*{kind}.ckpt .*rank {full_on}"):
            t.fit(Saved(width=3000), common_batches())
        dist.barrier()
        assert os.listdir(tmp_path) == [path.name]
        module = Saved(width=3000)
        trainer(zero3()).validate(module, common_batches(), ckpt_path=path, verbose=False)
        assert_same(weights_of(module), save.weights, rtol=0, atol=0)
        dist.barrier()
        if dist.get_rank() == 0:
            os.rename(path, tmp_path.parent / f"{tmp_path.name}-{path.name}")
        dist.barrier()


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 800 kB."""
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(tmp_path / "disk")]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield tmp_path / "disk"
    subprocess.run(["umount", str(tmp_path / "disk")], check=True)


@distributed(world=2)
def test_no_space_left_on_device(tiny_disk):
    """The same with a real file system, which has space for one checkpoint and not for two."""
    for kind in ("zero3", "sharded"):
        path = tiny_disk / f"{kind}.ckpt"
        save = SaveTwice(path, lambda: None, lambda: None)
        t = trainer(strategy_named(kind), max_epochs=1, callbacks=[save], use_distributed_sampler=False)
        with pytest.raises(Zero3Error, match=f"cannot write the checkpoint .*{kind}.ckpt"):
            t.fit(Saved(width=1700), common_batches())
        dist.barrier()
        assert os.listdir(tiny_disk) == [path.name]
        module = Saved(width=1700)
        trainer(zero3()).validate(module, common_batches(), ckpt_path=path, verbose=False)
        assert_same(weights_of(module), save.weights, rtol=0, atol=0)
        dist.barrier()
        if dist.get_rank() == 0:
            remove(str(path))
        dist.barrier()


@distributed(world=2)
def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(tmp_path):
    """/proc takes no files, not even root's."""
    for kind in ("zero3", "sharded", "async"):
        save = SaveTwice("/proc/none/x.ckpt", lambda: None, lambda: None)
        t = trainer(strategy_named(kind), max_epochs=1, callbacks=[save])
        with pytest.raises(Zero3Error, match=r"cannot write the checkpoint /proc/none/x.ckpt \(rank 0: "):
            t.fit(Task(make_mlp()), common_batches())


@distributed(world=2)
def test_a_damaged_file_is_named_on_every_rank(tmp_path):
    """What is damaged in a directory is tested beside its format."""
    t = trainer(zero3(), max_epochs=1)
    t.fit(Task(make_mlp(), with_schedule), common_batches())
    t.save_checkpoint(tmp_path / "x.ckpt")
    content = (tmp_path / "x.ckpt").read_bytes()
    dist.barrier()
    for name, kept in (("cut.ckpt", content[:-2000]), ("empty.ckpt", b"")):
        if dist.get_rank() == 0:
            (tmp_path / name).write_bytes(kept)
        dist.barrier()
        with pytest.raises(Zero3Error, match=f"cannot read the checkpoint .*{name}"):
            trainer(zero3(), max_epochs=2).fit(
                Task(make_mlp(), with_schedule), common_batches(), ckpt_path=tmp_path / name
            )
