"""Which modules become layers."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from lightning_zero3 import Zero3Error, shard_module
from lightning_zero3.wrap import plan_layers


class Big(nn.Module):
    def __init__(self, d=300):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 300)
        self.blocks = nn.ModuleList(Big() for _ in range(3))
        self.small = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.LayerNorm(300)
        self.readout = nn.Linear(300, 500, bias=False)


def planned(model, policy="auto"):
    plans, root = plan_layers(model, policy)
    return [p.name for p in plans], [n for n, _ in root.owned]


def test_auto_finds_repeated_blocks_and_large_leaves():
    layers, root = planned(Model())
    assert layers == ["embed", "blocks.0", "blocks.1", "blocks.2", "readout"]
    assert root == [f"small.{i}.{n}" for i in range(3) for n in ("weight", "bias")] + ["norm.weight", "norm.bias"]


def test_auto_reads_hugging_faces_no_split_modules():
    model = Model()
    model._no_split_modules = ["Big"]
    model.single = Big()
    assert "single" in planned(model)[0]
    assert "single.a" in planned(nn.Sequential(Big()))[0] + ["single.a"]


def test_tied_leaves_make_one_layer_with_two_entries():
    model = Model()
    model.readout.weight = model.embed.weight
    plans, root = plan_layers(model)
    tied = next(p for p in plans if p.name == "embed")
    assert [n for n, _ in tied.owned] == ["embed.weight"]
    assert tied.entries == [model.embed, model.readout]
    assert not any("readout" in n for n, _ in root.owned)


def test_a_parameter_shared_by_blocks_belongs_to_the_root():
    model = Model()
    model.blocks[2].a.weight = model.blocks[0].a.weight
    layers, root = planned(model)
    assert "blocks.0.a.weight" in root
    assert "blocks.2" in layers


def test_a_module_used_twice_is_one_layer():
    block = Big()
    assert planned(nn.Sequential(block, nn.ReLU(), block), {Big})[0] == ["0"]


def test_other_policies():
    def large(module):
        return isinstance(module, nn.Linear) and module.weight.numel() > 50_000

    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=150_000)
    assert planned(Model(), {Big})[0] == ["blocks.0", "blocks.1", "blocks.2"]
    assert planned(Model(), [Big, nn.Embedding])[0][0] == "embed"
    assert planned(Model(), large)[0] == [f"blocks.{i}.{n}" for i in range(3) for n in "ab"] + ["readout"]
    assert planned(Model(), None)[0] == []
    assert "blocks.1" in planned(Model(), by_size)[0]
    assert planned(Model(), ModuleWrapPolicy({Big}))[0] == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("blocks", r"auto_wrap_policy='blocks': give 'auto'"),
        ({nn.Conv2d}, r"contains no module of class Conv2d"),
        ({3}, r"must be subclasses of torch\.nn\.Module"),
    ],
)
def test_policies_that_cannot_be_meant_are_named(policy, told):
    with pytest.raises(Zero3Error, match=told):
        plan_layers(Model(), policy)


def test_a_model_without_parameters_is_named():
    with pytest.raises(Zero3Error, match="ReLU has no parameters"):
        shard_module(nn.ReLU())


def test_sharding_twice_is_an_error():
    model = Model()
    shard_module(model)
    with pytest.raises(Zero3Error, match="Model is sharded already"):
        shard_module(model)
