"""Work with a checkpoint's model: in this process, or sharded over several."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3Strategy
from neox_lit.checkpoints.heads import is_of_training, read_head
from neox_lit.errors import NeoXError
from neox_lit.module import NeoXLightning

T = TypeVar("T")


class _Worker(NeoXLightning):
    """A module that does in a step what is to be done."""

    work: Callable[[NeoXLightning], Any]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return self.work(self)
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
    options, ckpt_path = _source(checkpoint)
    module = _Worker(**options)
    module.work = work
    found = trainer.predict(module, DataLoader([0]), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    assert found is not None
    return found[0]  # type: ignore[return-value]


def _source(checkpoint: str) -> tuple[dict[str, Any], str | None]:
    """What to make a module with, and what to load into it then.

    Weights of a training in 8 bits, or with adapters, mean something in a module of that kind only.
    """
    told = read_head(checkpoint).get("hyper_parameters", {}) if is_of_training(checkpoint) else {}
    if told.get("int8") or told.get("lora"):
        known = signature(NeoXLightning).parameters
        return {name: value for name, value in told.items() if name in known}, checkpoint
    return {"pretrained": checkpoint}, None
