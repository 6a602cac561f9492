"""A rank raises alone in `training_step`: `python one_fails.py RANK CALLBACK DIRECTORY`."""

import sys

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_zero3 import Zero3Strategy
from tests.harness.models import MLP, Block, Pairs, Task, loader


class Failing(Task):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == int(sys.argv[1]):
            raise ValueError("no such luck on this rank")
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    Trainer(
        strategy=Zero3Strategy(auto_wrap_policy={Block}),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        callbacks=[OnExceptionCheckpoint(sys.argv[3])] if sys.argv[2] == "OnExceptionCheckpoint" else [],
        default_root_dir=sys.argv[3],
        enable_progress_bar=False,
    ).fit(Failing(MLP(7, 15, 16)), loader(Pairs(64, 7), batch_size=4))
