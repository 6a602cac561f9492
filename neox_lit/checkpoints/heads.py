"""What checkpoints of this package's training say beside their weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from lightning_zero3.checkpoints.sharded_checkpoint import read_extra
from neox_lit.errors import NeoXError


def is_of_training(checkpoint: str | os.PathLike) -> bool:
    """Whether it is one of this package's training, by its name; or nothing, of which `read_head` says so."""
    path = Path(checkpoint)
    return path.suffix == ".ckpt" or (path / ".metadata").exists() or not path.exists()


def read_head(checkpoint: str | os.PathLike) -> dict[str, Any]:
    """What a checkpoint, a file or a sharded directory, says beside its weights, which are not read.

    Raises:
        NeoXError: No such file, or not a checkpoint.
    """
    path = Path(checkpoint)
    if not path.exists():
        raise NeoXError(f"checkpoint {str(checkpoint)!r}: no such file (here: {Path.cwd()})")
    try:
        if path.is_dir():
            return read_extra(path)
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:  # torch and pickle raise many kinds, and advise to trust the file
        raise NeoXError(f"{str(checkpoint)!r} is not a checkpoint, or is damaged ({type(error).__name__})") from error
    if not isinstance(content, dict):
        raise NeoXError(f"{str(checkpoint)!r} is not a checkpoint: it holds a {type(content).__name__}")
    return content
