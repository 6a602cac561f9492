"""Full parameters on request: gather_parameters, full_state_dict, load_full_state_dict, and their errors."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero3 import (
    Zero3Error,
    Zero3Layer,
    full_state_dict,
    gather_parameters,
    load_full_state_dict,
    shard_module,
    trainable_chunks,
)
from lightning_zero3.shard import unshard_module
from tests.harness import DistributedError, assert_same, distributed, run


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 15), nn.BatchNorm1d(15), nn.Linear(15, 15, bias=False), nn.Linear(15, 15))
    model[3].weight = model[2].weight  # tied
    model[0].bias.requires_grad_(False)
    return model


def is_linear(module):
    return isinstance(module, nn.Linear)


@distributed(world=[1, 2, 3])
def test_full_state_dict_is_the_plain_modules():
    model, plain = build(), build()
    shard_module(model, is_linear)
    state = full_state_dict(model, rank0_only=False)
    assert list(state) == list(plain.state_dict())
    assert_same(state, plain.state_dict(), rtol=0, atol=0)
    assert all(state[k].dtype == v.dtype for k, v in plain.state_dict().items())
    first_only = full_state_dict(model)
    assert list(first_only) == (list(state) if dist.get_rank() == 0 else [])
    assert list(full_state_dict(model[2], rank0_only=False)) == ["weight"]


@distributed(world=[1, 2, 3])
def test_what_is_loaded_is_what_is_saved():
    model = build()
    shard_module(model, is_linear)
    other = build(seed=1).state_dict()
    load_full_state_dict(model, other)
    assert_same(full_state_dict(model, rank0_only=False), other, rtol=0, atol=0)
    plain = build()
    plain.load_state_dict(other)
    x = torch.ones(4, 7)
    assert_same(model.eval()(x).detach(), plain.eval()(x).detach())


@distributed(world=2)
def test_a_state_dict_that_does_not_fit_changes_nothing():
    model = build()
    shard_module(model, is_linear)
    before = full_state_dict(model, rank0_only=False)
    wrong = {**build(seed=1).state_dict(), "0.weight": torch.zeros(3, 3), "extra": torch.zeros(1)}
    del wrong["0.bias"]
    with pytest.raises(Zero3Error, match=r"missing: '0\.bias'; unexpected: 'extra'; shape of '0\.weight': \[3, 3\]"):
        load_full_state_dict(model, wrong)
    assert_same(full_state_dict(model, rank0_only=False), before, rtol=0, atol=0)
    load_full_state_dict(model, {"0.bias": torch.ones(15)}, strict=False)
    assert full_state_dict(model, rank0_only=False)["0.bias"].eq(1).all()


@distributed(world=[1, 2, 3])
def test_writeback_makes_the_first_ranks_values_everyones():
    model = build()
    shard_module(model, is_linear)
    with gather_parameters(model, writeback=True):
        assert not any(p.isnan().any() for p in model.parameters())
        with torch.no_grad():
            model[0].weight.fill_(dist.get_rank() + 5.0)
    state = full_state_dict(model, rank0_only=False)
    assert state["0.weight"].eq(5).all()
    if dist.get_world_size() > 1:
        assert model[0].weight.isnan().all()
        with gather_parameters(model), torch.no_grad():
            model[0].weight.zero_()  # lost
        assert full_state_dict(model, rank0_only=False)["0.weight"].eq(5).all()


@distributed(world=2)
def test_inside_the_context_everything_works_on_the_plain_module():
    model, plain = build(), build()
    shard_module(model, is_linear)
    with gather_parameters(model, writeback=True):
        assert_same(model.state_dict(), plain.state_dict())
        model.load_state_dict(plain.state_dict())
        assert_same(model.eval()(torch.ones(2, 7)), plain.eval()(torch.ones(2, 7)))
    assert_same(full_state_dict(model, rank0_only=False), plain.state_dict())
    with pytest.raises(ValueError, match="on purpose"), gather_parameters(model):
        raise ValueError("on purpose")
    assert model[0].weight.isnan().all()
    model(torch.ones(2, 7))


@distributed(world=2)
def test_state_dicts_of_sharded_modules_are_refused_with_the_remedy():
    model = build()
    shard_module(model, is_linear)
    for module in (model, model[2], nn.Sequential(model)):
        with pytest.raises(Zero3Error, match=r"state_dict\(\) of Linear in layer '.*'.*full_state_dict\(module\)"):
            module.state_dict()
    with pytest.raises((Zero3Error, RuntimeError), match="gather_parameters"):
        model.load_state_dict(build().state_dict())


@distributed(world=[1, 2, 3, 4])
def test_copies_casts_and_moves_are_refused_or_harmless():
    """E16."""
    model = build()
    shard_module(model, is_linear)
    with pytest.raises(Zero3Error, match="cannot be copied or pickled"):
        copy.deepcopy(model)
    with pytest.raises(Zero3Error, match="cannot be copied or pickled"):
        pickle.dumps(Zero3Layer(nn.Linear(2, 2)))
    model.cpu()
    model.float()
    model(torch.ones(2, 7)).sum().backward()
    model.to(torch.bfloat16)
    with pytest.raises(Zero3Error, match=r"was replaced, moved or cast while sharded"):
        model(torch.ones(2, 7))


@distributed(world=2)
def test_unsharding_leaves_a_plain_module_on_the_first_rank():
    model, plain = build(), build()
    shard_module(model, is_linear)
    model(torch.ones(4, 7)).sum().backward()
    unshard_module(model)
    if dist.get_rank() == 0:
        plain(torch.ones(4, 7))
        assert_same(model.state_dict(), plain.state_dict())
        copy.deepcopy(model)
        assert_same(model(torch.ones(4, 7)), plain(torch.ones(4, 7)))
    else:
        model.state_dict()


def gather_on_one_rank_only(what, rank):
    model = build()
    shard_module(model, is_linear)
    if dist.get_rank() == rank:
        if what == "state":
            full_state_dict(model)
        else:
            with gather_parameters(model):
                pass


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["state", "parameters"])
def test_gathering_on_one_rank_only_is_an_error(what, rank):
    """L15: on whichever rank it is, within the timeout, naming those that are missing."""
    with pytest.raises(DistributedError, match=r"must be called on every rank.*Call it outside of `if rank == 0`") as e:
        run(gather_on_one_rank_only, 2, what, rank, deadline=60, timeout=5)
    assert f"missing: [{1 - rank}]" in str(e.value)


@distributed(world=2)
def test_use_before_and_after_training_without_a_step():
    """E10: a forward before any optimizer exists, then training: weights move."""
    model = build()
    shard_module(model, is_linear)
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    model(x)
    before = full_state_dict(model, rank0_only=False)
    optimizer = torch.optim.SGD(trainable_chunks(model), lr=0.1)
    model(x).pow(2).sum().backward()
    optimizer.step()
    after = full_state_dict(model, rank0_only=False)
    assert not torch.equal(before["0.weight"], after["0.weight"])
    assert torch.equal(before["0.bias"], after["0.bias"])
