"""Fixtures of the neox_lit tests: a cache of their own, the real tokenizer when it is there, one short training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pytest
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from neox_lit import NeoXLightning, TextDataModule
from tests.neox.helpers import tiny

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Directory with 20B_tokenizer.json, tinyshakespeare.txt and neox-configs/; not part of the product."""
    if not DATA.is_dir():
        pytest.skip(f"no {DATA}")
    return DATA


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache):
    monkeypatch.setenv("NEOX_LIT_CACHE", str(cache))


class Trained(NamedTuple):
    module: NeoXLightning
    data: TextDataModule
    checkpoint: Path
    first_loss: float
    last_loss: float
    metrics: dict[str, float]


@pytest.fixture(scope="session")
def trained(tmp_path_factory, cache) -> Trained:
    """A tiny model after 60 steps on one process."""
    seed_everything(0)
    data = TextDataModule(seq_len=32, batch_size=8, vocab_size=512, cache_dir=str(cache), val_fraction=0.002)
    module = NeoXLightning(tiny(n_vocab=512, n_hidden=64, n_heads=2), lr=1e-2, warmup_steps=5)
    directory = tmp_path_factory.mktemp("run")
    checkpoints = ModelCheckpoint(directory, filename="last")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=60,
        gradient_clip_val=1.0,
        default_root_dir=directory,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return Trained(
        module,
        data,
        Path(checkpoints.best_model_path),
        math.log(512),
        trainer.callback_metrics["train_loss"].item(),
        {name: value.item() for name, value in trainer.callback_metrics.items()},
    )
