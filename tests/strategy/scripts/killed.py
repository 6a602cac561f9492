"""Trains on two ranks, saving after every step, is killed, and goes on: `killed.py DIRECTORY MODE KILLS SEED`.

MODE is "sync" or "async". Every run is a process group of its own, started by Lightning's launcher (by fork, so that a
run costs no imports) and killed as a whole at a random moment. After that the newest checkpoint must be complete, and
the next run goes on from it. The last run is not killed; its weights must be those of a run that never was.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3Strategy, newest_checkpoint
from lightning_zero3.checkpoints.sharded_checkpoint import load_whole
from tests.harness.models import MLP, Block, Pairs, Task


class Steady(Task):
    """What a step sees depends on its number only, so that a resumed run can be compared with a whole one."""

    def training_step(self, batch, batch_idx):
        data = Pairs(4, 7, seed=self.global_step * 2 + self.global_rank)
        return super().training_step((data.x, data.y), batch_idx)


def train(directory: Path, mode: str, steps: int, result: Path | None) -> None:
    callbacks = []
    if mode != "never":
        options = {"monitor": "train_loss", "save_top_k": 2, "save_last": True, "every_n_train_steps": 1}
        callbacks.append(ModelCheckpoint(directory, "{step}", **options))
    trainer = Trainer(
        strategy=Zero3Strategy(
            auto_wrap_policy={Block},
            state_dict_type="full" if mode == "never" else "sharded",
            save_async=mode == "async",
            start_method="fork",
        ),
        accelerator="cpu",
        devices=2,
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Steady(MLP(7, 15, 16))
    trainer.fit(module, DataLoader(Pairs(400, 7), batch_size=4), ckpt_path=newest_checkpoint(directory))
    if result is not None:
        torch.save(module.state_dict(), result)


def start(*arguments: object) -> int:
    """A run in a process group of its own. Returns its number."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            train(*arguments)
            status = 0
        finally:
            os._exit(status)
    return child


def finish(child: int) -> None:
    _, status = os.waitpid(child, 0)
    assert status == 0, f"a run that was not killed ended with {status}"


def newest_step(directory: Path) -> int:
    path = newest_checkpoint(directory)
    return 0 if path is None else load_whole(path)["global_step"]


def main(directory: Path, mode: str, kills: int, seed: int) -> None:
    pick, step, cut_off = random.Random(seed), 0, 0
    for _ in range(kills):
        child = start(directory, mode, 10**6, None)
        begun = time.time()
        while not (directory / "last.ckpt").exists() or (directory / "last.ckpt").stat().st_mtime < begun:
            time.sleep(0.01)
            assert time.time() < begun + 60, "no checkpoint was written"
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "a run ended by itself"
        time.sleep(pick.uniform(0, 0.5))
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        cut_off += any(name.endswith((".partial", ".old")) for name in os.listdir(directory))
        found = newest_step(directory)
        assert found > step, f"after step {step} the newest complete checkpoint is of step {found}"
        step = found
    results = [directory / f"{name}.pt" for name in ("resumed", "whole")]
    finish(start(directory, mode, step + 3, results[0]))
    finish(start(directory / "none", "never", step + 3, results[1]))
    resumed, whole = (torch.load(path) for path in results)
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name
    print(f"{mode}: killed {kills} times, {cut_off} of them while saving; {step} steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
