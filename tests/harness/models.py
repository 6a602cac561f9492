"""Small models with awkward shapes, the data they train on, and one LightningModule around them."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate


class Block(nn.Module):
    """Linear and tanh, with a scalar gain where asked for."""

    def __init__(self, n_in: int, n_out: int, scalar: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)
        self.gain = nn.Parameter(torch.tensor(1.5)) if scalar else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        return x if self.gain is None else x * self.gain


class MLP(nn.Module):
    """`MLP(7, 15, 16, 17)`: blocks 7→15→16→17 and a small head, seeded.

    With `awkward`, every block has a scalar parameter, and the root has a scalar and a parameter of two elements, which
    is smaller than most worlds. (FSDP2 takes no scalars; the oracle `train_fsdp2` works around that.)
    """

    def __init__(self, *widths: int, awkward: bool = True, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.blocks = nn.ModuleList(Block(a, b, awkward) for a, b in itertools.pairwise(widths))
            self.head = nn.Linear(widths[-1], 3)
        self.scale = nn.Parameter(torch.tensor(0.5)) if awkward else None
        self.shift = nn.Parameter(torch.tensor([0.1, -0.2])) if awkward else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        if self.scale is not None and self.shift is not None:
            x = x * self.scale + self.shift.sum()
        return x


def tiny_gpt_neox(seed: int = 0, **overrides: Any) -> nn.Module:
    """Hugging Face's GPT-NeoX with random weights: three blocks, sizes that three ranks do not divide."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {
        "vocab_size": 101,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 68,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPTNeoXForCausalLM(GPTNeoXConfig(**{**sizes, **overrides}))


class Pairs(Dataset):
    """Input and target vectors for an `MLP`: target is a fixed nonlinear function of the input."""

    def __init__(self, n: int, n_in: int, n_out: int = 3, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, n_in, generator=g)
        self.y = torch.sin(self.x @ torch.randn(n_in, n_out, generator=g))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Tokens(Dataset):
    """Token sequences for a language model, easy to learn: a token always has the same successor."""

    def __init__(self, n: int, length: int = 16, vocab: int = 101, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        successor = torch.randperm(vocab, generator=g)
        tokens = [torch.randint(vocab, (n,), generator=g)]
        while len(tokens) < length:
            tokens.append(successor[tokens[-1]])
        self.ids = torch.stack(tokens, dim=1)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[index]


def loader(data: Dataset, batch_size: int = 4) -> DataLoader:
    """Batches in order, every rank its share.

    The sampler is explicit because the one that Lightning adds to a training loader shuffles, and plain loops could not
    follow. Where that one is meant to be tested, use a `DataLoader`.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1
    sampler = DistributedSampler(data, shuffle=False) if several else None
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def batches(data: Dataset, batch_size: int = 4, world: int = 1) -> Callable[[int, int], Any]:
    """Batch number `index` of rank `rank`, as `loader(data, batch_size)` gives it at that world."""

    def batch(rank: int, index: int) -> Any:
        mine: Sequence[int] = range(rank, len(data), world)  # type: ignore[arg-type]
        return default_collate([data[i] for i in mine[index * batch_size : (index + 1) * batch_size]])

    return batch


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean squared error for a pair; the model's own loss for token ids."""
    if isinstance(batch, Tensor):
        return model(input_ids=batch, labels=batch).loss
    x, y = batch
    return F.mse_loss(model(x), y)


# Smooth: with torch's eps, the first steps are the sign of the gradient, and rounding in a gradient of about zero
# (of key biases, of what is hardly used) becomes lr in a weight. Which elements that befalls, the CPU decides.
AdamW = partial(torch.optim.AdamW, eps=1e-4)


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    """AdamW with the usual two groups: weight decay for matrices only."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([g for g in groups if g["params"]], lr=lr)


class Task(LightningModule):
    """A net, a loss and an optimizer, as an ordinary LightningModule. Logs the loss as `train_loss`, `val_loss`, ..."""

    def __init__(
        self,
        net: nn.Module,
        make_optimizer: Callable[[nn.Module], Any] = adamw,
        loss: Callable[[nn.Module, Any], Tensor] = default_loss,
    ) -> None:
        super().__init__()
        self.net = net
        self.loss = loss
        self.make_optimizer = make_optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net, batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.net, batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(self.net, batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch) if isinstance(batch, Tensor) else self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net)
