"""Trains until it is told to stop: `goes_on.py STRATEGY MARK`. Each rank writes its process id beside MARK."""

import os
import sys
import time
from pathlib import Path

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

import lightning_zero3  # noqa: F401 - makes strategy="zero3" known
from tests.harness.models import MLP, Pairs, Task


class Endless(Task):
    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            Path(f"{sys.argv[2]}.{self.global_rank}").write_text(str(os.getpid()))
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1:
            loss.register_hook(lambda _: time.sleep(0.3))  # a signal finds this rank in backward, and the other waiting
        return loss


if __name__ == "__main__":
    trainer = Trainer(
        strategy=sys.argv[1],
        accelerator="cpu",
        devices=2,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Endless(MLP(7, 200, 200)), DataLoader(Pairs(4096, 7), batch_size=4))
