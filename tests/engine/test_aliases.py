"""Views of weights that outlive their use: right, warned about, or refused before they could part."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_zero3 import PrecisionPolicy, Zero3Error, gather_parameters, shard_module, trainable_chunks
from tests.harness import assert_same, distributed
from tests.harness.models import AdamW
from tests.strategy.runs import weights_of


class KeepsDetached(torch.autograd.Function):
    """A linear map that keeps its weight as a plain attribute, behind autograd's back."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        ctx.w = w.detach().t()
        return x @ ctx.w

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.w.t(), grad.t() @ x


class Keeping(nn.Linear):
    def forward(self, x):
        return KeepsDetached.apply(x, self.weight)


class Stashing(nn.Linear):
    """Leaves a view of its weight for whoever comes next."""

    def forward(self, x):
        self.view = self.weight.view(-1)
        return super().forward(x)


class UnderHooks(nn.Linear):
    """Runs under saved-tensor hooks of the user that keep what they are given."""

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return x @ self.weight.t() + self.bias


class Net(nn.Module):
    def __init__(self, kind, cached=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind(16, 16) for _ in range(4))
        self.cached = cached

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if i and isinstance(block, Stashing):
                x = x + self.blocks[i - 1].view[:16]  # of a layer that has been released
        if self.cached:
            self.kept = self.kept if hasattr(self, "kept") else self.blocks[0].weight.detach().t()
            x = x + 0 * self.kept.sum()
        return x.square().mean()


def train(model, params, steps=3):
    optimizer = AdamW(params, lr=1e-2)
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(5, 16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [Keeping, Stashing, UnderHooks])
@distributed(world=[1, 2])
def test_a_view_that_is_used_after_its_layer_has_the_right_values(world, kind):
    model, plain = Net(kind), Net(kind)
    engine = shard_module(model, {kind})
    train(model, trainable_chunks(model))
    train(plain, [p for p in plain.parameters() if kind is not Keeping or p.ndim > 1])
    plain_weights = dict(plain.state_dict())
    ours = weights_of(model)
    for name in ours if kind is not Keeping else [n for n in ours if "weight" in n]:
        assert_same(ours[name], plain_weights[name], rtol=1e-5, atol=1e-6)
    assert len(engine.pool.slots) <= 2 * len(engine.layers) + 4
    assert engine.pool.taken == 0


@distributed(world=2)
def test_a_view_that_is_kept_over_an_update_is_warned_about_once():
    model = Net(nn.Linear, cached=True)
    shard_module(model, {nn.Linear})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, trainable_chunks(model))
    told = [str(w.message) for w in caught if "view of a parameter of layer 'blocks.0'" in str(w.message)]
    assert len(told) == 1


class Shared(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        if how == "data":
            self.two.weight.data = self.one.weight.data
        elif how == "buffer":
            self.register_buffer("copy", self.one.weight.detach()[2:])
        elif how == "attribute":
            self.turned = self.one.weight.detach().t()


@pytest.mark.parametrize("how", ["data", "buffer", "attribute"])
def test_memory_that_is_shared_behind_parameters_is_refused_by_name(how):
    with pytest.raises(Zero3Error, match="'one.weight' and '.*' share memory|'.*' and 'one.weight' share memory"):
        shard_module(Shared(how), None)
    shard_module(Shared("nothing"), None)


def test_lazy_modules_and_scripts_are_refused_by_name():
    with pytest.raises(Zero3Error, match="parameter '0.weight' has no shape yet"):
        shard_module(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(Zero3Error, match="module '1' is a torch.jit.ScriptModule, which takes no hooks"):
        shard_module(nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3))))


def test_views_of_one_storage_that_do_not_overlap_are_no_sharing():
    model = nn.Linear(4, 4)
    whole = torch.arange(20.0)
    model.weight.data, model.bias.data = whole[:16].view(4, 4), whole[16:]
    shard_module(model, None)
    assert_same(F.linear(torch.eye(4), model.weight, model.bias), whole[:16].view(4, 4).t() + whole[16:])


class Sparse(nn.Module):
    """Saves and returns what has no storage: a graph's adjacency."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        adjacency = torch.eye(len(x)).to_sparse()
        for block in self.blocks:
            x = torch.sparse.mm(adjacency, torch.tanh(block(x)))
        return x.square().mean()


class ReturnsSparse(nn.Linear):
    def forward(self, x):
        return super().forward(x), torch.eye(len(x)).to_sparse()


@distributed(world=2)
def test_sparse_tensors_pass_through():
    model, plain = Sparse(), Sparse()
    shard_module(model, lambda module: isinstance(module, (nn.Linear, Sparse)))
    train(model, trainable_chunks(model))
    train(plain, list(plain.parameters()))
    assert_same(weights_of(model), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
    pair = nn.Sequential(ReturnsSparse(8, 8))
    shard_module(pair, {ReturnsSparse})
    assert pair(torch.ones(2, 8))[1].is_sparse


@distributed(world=2)
def test_complex_weights_are_not_cast_by_mixed_precision():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.out = nn.Linear(4, 4)

    model = Complex()
    kept = model.turn.detach().clone()
    engine = shard_module(model, None, precision=PrecisionPolicy(param_dtype=torch.bfloat16))
    assert {(*c.names, c.dtype, c.compute_dtype) for layer in engine.layers for c in layer.chunks} == {
        ("turn", torch.complex64, torch.complex64),
        ("out.weight", torch.float32, torch.bfloat16),
        ("out.bias", torch.float32, torch.float32),
    }
    assert_same(weights_of(model)["turn"], kept, rtol=0, atol=0)


@distributed(world=2)
def test_backward_inside_gather_parameters_of_a_forward_outside_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    shard_module(model, {nn.Linear})
    loss = model(torch.ones(2, 8)).sum()
    with (
        pytest.raises(Zero3Error, match="backward through layer '.' inside gather_parameters"),
        gather_parameters(model),
    ):
        loss.backward()
