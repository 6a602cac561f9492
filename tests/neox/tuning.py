"""What the tests of fine-tuning share: a seeded module, its data, and a quiet Trainer on the ranks of a job."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_zero3 import Zero3Strategy
from neox_lit import NeoXLightning, TransformerLayer
from neox_lit.optim import decay_groups
from tests.harness.models import AdamW
from tests.neox.helpers import tiny

EXACT = {"rtol": 1e-9, "atol": 1e-10}  # in float64


class Windows(Dataset):
    """Fixed windows of random tokens."""

    def __init__(self, n: int) -> None:
        self.ids = torch.randint(0, 128, (n, 13), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index, :-1], "labels": self.ids[index, 1:]}


def loader(n: int = 16) -> DataLoader:
    return DataLoader(Windows(n), batch_size=2)


class Tuned(NeoXLightning):
    """Seeded, the same whoever builds it, with a constant learning rate."""

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            super().configure_model()
            torch.manual_seed(1)
            with torch.no_grad():  # outliers for int8; adapters that are not zero, so that A has a gradient at once
                for name, p in self.named_parameters():
                    if name.endswith("lora.B"):
                        p.normal_(std=0.02)
                    elif name.endswith("layernorm.weight"):
                        p[3] = 8.0

    def configure_optimizers(self) -> Any:
        self.configure_model()
        return AdamW(decay_groups(self.parameters(), 0.1), lr=1e-2)


def module(**options: Any) -> Tuned:
    return Tuned(tiny(), **options)


def built(**options: Any) -> Tuned:
    """What a run in "64-true" starts from."""
    torch.set_default_dtype(torch.float64)
    try:
        start = module(**options)
        start.configure_model()
    finally:
        torch.set_default_dtype(torch.float32)
    return start


def zero3(**options: Any) -> Zero3Strategy:
    """Each block is a layer; "auto" would not cut models this small."""
    return Zero3Strategy(**{"auto_wrap_policy": {TransformerLayer}, **options})
