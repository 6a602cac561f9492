"""A SLURM job that is signalled to go back into the queue, on ranks that the signal finds at different places."""

import logging
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_zero3.checkpoints.durable import beside
from lightning_zero3.checkpoints.sharded_checkpoint import load_whole
from tests.harness import assert_same, distributed
from tests.harness.models import Task
from tests.strategy.runs import make_mlp, trainer, weights_of, zero3
from tests.strategy.test_checkpoints import Losses, common_batches, with_schedule


class Signalled(Task):
    """The second rank gets the signal in the second step's forward pass, the first rank a step later."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 2 - self.global_rank and not hasattr(self, "told"):
            self.told = True
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


class SaveAt(Callback):
    """What ModelCheckpoint(every_n_train_steps) does, to compare with."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(f"{self.path}/step-{trainer.global_step}.ckpt")


def become_slurm_job(root):
    """Set the variables of a job with a task for each rank, and a `scontrol` that notes its arguments."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    given = {"NTASKS": world_size, "NTASKS_PER_NODE": world_size, "PROCID": rank, "LOCALID": rank, "NODEID": "0"}
    given |= {"JOB_ID": "1234", "JOB_NAME": "train", "NNODES": "1"}
    os.environ.update({f"SLURM_{name}": value for name, value in given.items()})
    os.environ["PATH"] = f"{root}/bin:{os.environ['PATH']}"
    if dist.get_rank() == 0:
        (root / "bin").mkdir()
        (root / "bin" / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {root}/requeued\n')
        (root / "bin" / "scontrol").chmod(0o755)
    dist.barrier()


def job(root, kind, *callbacks):
    strategy = zero3(state_dict_type="full" if kind == "full" else "sharded", save_async=kind == "async")
    options = {"max_epochs": 2, "use_distributed_sampler": False, "plugins": [SLURMEnvironment()]}
    return trainer(strategy, callbacks=list(callbacks), default_root_dir=root, **options)


def content_of(path):
    loaded = load_whole(path) if path.is_dir() else torch.load(path, weights_only=True)
    return {key: loaded[key] for key in ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")}


@distributed(world=2)
def test_ranks_save_together_after_the_step_and_the_requeued_job_goes_on(tmp_path):
    """Full, sharded and in the background: what is saved is what a callback saves after that step."""
    become_slurm_job(tmp_path)
    whole = Task(make_mlp(), with_schedule)
    trainer(zero3(), max_epochs=2, use_distributed_sampler=False).fit(whole, common_batches())
    for kind in ("full", "sharded", "async"):
        root = tmp_path / kind
        module = Signalled(make_mlp(), with_schedule)
        job(root, kind, SaveAt(root / "steps")).fit(module, common_batches())
        assert_same(weights_of(module), weights_of(whole), rtol=0, atol=0)  # training went on meanwhile
        for number, step in ((1, 2), (2, 3)):  # in the middle of an epoch, and at its end
            ours, expected = root / f"hpc_ckpt_{number}.ckpt", root / "steps" / f"step-{step}.ckpt"
            assert_same(content_of(ours), content_of(expected), rtol=0, atol=0)

        left = Path(beside(str(root / "hpc_ckpt_7.ckpt"), "partial"))  # of a job that was killed while it saved
        left.mkdir(exist_ok=True)
        again, losses = Task(make_mlp(), with_schedule), Losses()
        job(root, kind, losses).fit(again, common_batches())
        assert len(losses.losses) == 3
        assert_same(weights_of(again), weights_of(whole), rtol=0, atol=0)
    if dist.get_rank() == 0:
        assert (tmp_path / "requeued").read_text() == "requeue 1234\n" * 6


class SignalledInValidation(Task):
    def validation_step(self, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGUSR1)
        super().validation_step(batch, batch_idx)


@distributed(world=2)
def test_outside_of_training_the_signal_is_answered_with_a_warning(tmp_path):
    become_slurm_job(tmp_path)
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("lightning_zero3.requeue").addHandler(handler)
    try:
        job(tmp_path, "full").validate(SignalledInValidation(make_mlp()), common_batches(), verbose=False)
    finally:
        logging.getLogger("lightning_zero3.requeue").removeHandler(handler)
    assert "after a step of training" in told[0]
    assert not list(tmp_path.glob("hpc*"))
