"""Train a small model as a user's script does: `python fit.py STRATEGY FITS RESULT`, the strategy by its name.

Writes losses and weights after each fit, all on Trainers of their own, as the first rank has them.
"""

import sys

import torch
from lightning.pytorch import Trainer

import lightning_zero3
from tests.harness.models import MLP, Pairs, Task, adamw


class Small(Task):
    def __init__(self) -> None:
        super().__init__(MLP(7, 15, 16), adamw)
        self.save_hyperparameters(ignore=["net"])


def weights(module: Task) -> dict[str, torch.Tensor]:
    """In a process that was there before the others, the module is plain again; else every rank takes part."""
    return {k: v.clone() for k, v in lightning_zero3.full_state_dict(module).items()}


def main(strategy: str, fits: str, result: str) -> None:
    module, kept = Small(), []
    for _ in range(int(fits)):
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.utils.data.DataLoader(Pairs(32, 7), batch_size=16)
        trainer.fit(module, data, data)
        kept.append({"loss": trainer.callback_metrics["val_loss"], "weights": weights(module)})
    if trainer.is_global_zero:
        torch.save(kept, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
