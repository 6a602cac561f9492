"""NeoXLightning, which knows nothing of sharding, trains under ZeRO-3 as under DDP and FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from lightning_zero3 import Zero3Strategy
from neox_lit import NeoXConfig, NeoXLightning
from neox_lit.layers import Embedding, ReadoutLayer, TransformerLayer
from tests.engine.runs import train_zero3
from tests.harness import assert_same, distributed
from tests.harness.models import AdamW, Tokens, batches, loader
from tests.harness.oracles import fit, train_fsdp2


class Windows(Dataset):
    """`Tokens` as the windows that `NeoXLightning` takes."""

    def __init__(self) -> None:
        self.tokens = Tokens(400, length=17)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        ids = self.tokens[index]
        return {"input_ids": ids[:-1], "labels": ids[1:]}


class Module(NeoXLightning):
    """The oracle asks a fresh one, without a Trainer, for its optimizer."""

    def _can_fuse(self):
        return True


SHAPE = {"n_vocab": 128, "n_hidden": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 16}


def make(**shape):
    """With an eps that does not turn rounding in a gradient of zero (key biases) into a step of `lr`."""
    torch.manual_seed(0)
    module = Module(NeoXConfig(**{**SHAPE, **shape}), lr=1e-3, eps=1e-4, decay_steps=10)
    module.configure_model()
    return module


def is_layer(module):
    return isinstance(module, TransformerLayer | Embedding | ReadoutLayer)


@pytest.mark.parametrize(
    "shape", [{}, {"parallel_residual": False, "tied_readout": True}], ids=["parallel, untied", "sequential, tied"]
)
@distributed(world=[1, 2, 3, 4])
def test_ten_steps_equal_ddps(shape):
    data = loader(Windows())
    ours = fit(Zero3Strategy(auto_wrap_policy=is_layer), lambda: make(**shape), data, gradient_clip_val=1.0)
    ddp = fit("ddp", lambda: make(**shape), data, gradient_clip_val=1.0)
    assert_same(ours.losses, ddp.losses, rtol=1e-5)
    assert_same(ours.weights, ddp.weights, rtol=1e-4, atol=2e-6)
    assert ours.losses[-1] < ours.losses[0]


def next_token(model, batch):
    return cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def make_model():
    return make().model


def optimizer(model):
    return AdamW(model.parameters(), lr=1e-3)


@distributed(world=[1, 2, 3, 4])
def test_the_model_alone_trains_like_fsdp2_in_a_plain_loop():
    data = batches(Windows(), world=dist.get_world_size())
    ours = train_zero3(make_model, data, optimizer, 10, loss=next_token, policy=is_layer)
    fsdp2 = train_fsdp2(make_model, data, optimizer, 10, loss=next_token)
    assert_same(ours.losses, fsdp2.losses, rtol=1e-5)
    assert_same(ours.weights, fsdp2.weights, rtol=1e-4, atol=2e-6)
