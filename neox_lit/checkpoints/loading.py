"""A model with the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from neox_lit.checkpoints.opening import open_checkpoint
from neox_lit.config import NeoXConfig
from neox_lit.errors import NeoXError
from neox_lit.model import NeoXModel


def load_model(path: str | Path, config: NeoXConfig | None = None, dtype: torch.dtype | None = None) -> NeoXModel:
    """See `NeoXModel.from_checkpoint`."""
    from lightning_zero3 import empty_parameters, load_weights

    checkpoint = open_checkpoint(path, config)
    if dtype is None:
        by_dtype = {tensor.dtype: tensor for tensor in reversed(checkpoint.tensors.values())}
        if len(by_dtype) > 1:
            told = ", ".join(f"{tensor.where} is {found}" for found, tensor in by_dtype.items())
            raise NeoXError(f"{path} has parameters of several dtypes ({told}); give the one to load them in: dtype=")
        (dtype,) = by_dtype
    with empty_parameters():
        model = NeoXModel(checkpoint.require_config()).to(dtype)
    load_weights(model, checkpoint.tensors)
    return model
