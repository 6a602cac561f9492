"""Work with a checkpoint's model: in this process, or sharded over several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3Strategy
from neox_lit.errors import NeoXError
from neox_lit.module import NeoXLightning

T = TypeVar("T")


class _Worker(LightningModule):
    """A model and what is to be done with it."""

    def __init__(self, module: NeoXLightning, work: Callable[[NeoXLightning], Any]) -> None:
        super().__init__()
        self.module, self._work = module, work

    def configure_model(self) -> None:
        self.module.configure_model()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return self._work(self.module)
        except NeoXError as error:
            error.on_all_ranks = True  # they all do the same
            raise


def on_ranks(
    checkpoint: str,
    work: Callable[[NeoXLightning], T],
    devices: int,
    precision: str = "32-true",
    accelerator: str = "auto",
    strategy: Any = None,
) -> T:
    """Let `devices` ranks load a checkpoint straight into shards and do the same work together.

    As with `Trainer.fit`, the program runs on each rank, and each gets its own result.

    Args:
        checkpoint: Of any format that `open_checkpoint` knows.
        work: Gets the module in eval mode, without gradients. Every rank must make the same forwards.
        precision, accelerator: The Trainer's.
        strategy: By default `Zero3Strategy`.

    Raises:
        NeoXError: No ranks; see `NeoXLightning`.
    """
    if devices < 1:
        raise NeoXError(f"devices must be at least 1, got {devices}")
    trainer = Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy or Zero3Strategy(),
        precision=precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = NeoXLightning(pretrained=checkpoint)
    found = trainer.predict(_Worker(module, work), DataLoader([0]))  # type: ignore[arg-type]
    assert found is not None
    return found[0]  # type: ignore[return-value]
