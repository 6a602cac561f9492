"""Whatever graph a model builds, it trains as under DDP (or, where DDP cannot, as in one process)."""

import copy
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_zero3 import LayerState, Zero3Error, gather_parameters, shard_module, trainable_chunks
from lightning_zero3.shard import engine_of
from tests.engine.runs import full_grads
from tests.harness import DistributedError, assert_same, distributed, run

D = 12


class Block(nn.Module):
    def __init__(self, d: int = D) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 3 * d)
        self.down = nn.Linear(3 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two linears; subclasses change `run`."""

    depth = 3

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, D)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.depth))
        self.last = nn.Linear(D, 2)

    def block(self) -> nn.Module:
        return Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self.first(x)))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Reused(Net):
    """E1: one block called three times, another in between."""

    def run(self, x):
        a, b, _ = self.blocks
        return a(b(a(b(a(a(x))))))

    depth = 3


@dataclass
class Record:
    x: Tensor
    note: str = ""


Pair = namedtuple("Pair", "x extra")


class Odd(nn.Module):
    """E2: takes its input by keyword, gives its output in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = Block(), kind

    def forward(self, *, value):
        y = self.inner(value)
        return {
            "dict": {"y": y, "none": None, "n": 3},
            "dataclass": Record(y),
            "namedtuple": Pair(y, None),
            "nested": [[("s", [y])]],
        }[self.kind]


def unpack(out):
    if isinstance(out, dict):
        return out["y"]
    if isinstance(out, list):
        return out[0][0][1][0]
    return out.x


class Containers(Net):
    kinds = ("dict", "dataclass", "namedtuple", "nested")

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Odd(kind) for kind in self.kinds)

    def run(self, x):
        for block in self.blocks:
            x = unpack(block(value=x))
        return x


class InPlace(Net):
    """E3: the first op of a block is in place on its input, and its output is changed in place, through a view too."""

    def block(self):
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D, D))

    def run(self, x):
        for block in self.blocks:
            x = block(x * 1.0)
            x.add_(0.5)
            x[:, ::2].mul_(2.0)
        return x


class Unused(Net):
    """E6: a parameter and a whole block unused in some steps."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.blocks[1].spare = nn.Linear(D, D)

    def run(self, x):
        self.calls += 1
        x = self.blocks[0](x)
        if self.calls % 2:
            x = self.blocks[1](x)
        if self.calls % 3 == 0:
            x = x + self.blocks[1].down(F.gelu(self.blocks[1].up(x))) if dist.get_world_size() == 1 else x
        return self.blocks[2](x)


class CheckpointAround(Net):
    reentrant = False

    def run(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointAroundReentrant(CheckpointAround):
    reentrant = True


class CheckpointPairs(Net):
    """E8: one checkpoint around two blocks."""

    depth = 4

    def run(self, x):
        for a, b in (self.blocks[:2], self.blocks[2:]):
            x = checkpoint(lambda t, a=a, b=b: b(a(t)), x, use_reentrant=False)
        return x


class Inner(Block):
    reentrant = False

    def forward(self, x):
        h = checkpoint(lambda t: F.gelu(self.up(self.norm(t))), x, use_reentrant=self.reentrant)
        return x + checkpoint(self.down, h, use_reentrant=self.reentrant)


class InnerReentrant(Inner):
    reentrant = True


class CheckpointInside(Net):
    def block(self):
        return Inner()


class CheckpointInsideReentrant(Net):
    def block(self):
        return InnerReentrant()


class Offloaded(Net):
    """Saved activations on the CPU, through a hook pair of the user's around the blocks."""

    def run(self, x):
        with torch.autograd.graph.save_on_cpu():
            return super().run(x)


class Nested(Net):
    """Layers inside of layers."""

    def block(self):
        outer = Block()
        outer.inner = Block()
        return outer

    def run(self, x):
        for block in self.blocks:
            x = block(x) + block.inner(x)
        return x


class InnerCalls(Block):
    def __init__(self):
        super().__init__()
        self.child = Block()

    def forward(self, x):
        return super().forward(self.child(x)) + self.child(x * 0.5)


class NestedInside(Net):
    def block(self):
        return InnerCalls()


class Tied(Net):
    """E12: one weight in two modules, in different layers, and a block's used in another."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.out.weight = self.embed.weight
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def run(self, x):
        return self.out(super().run(self.embed(x)))


class Memory(Net):
    """Two inputs, one of them shared by all blocks, as in a decoder."""

    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.kv = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x, memory):
            return x + torch.tanh(self.q(x)) * self.kv(memory)

    def block(self):
        return self.Cross()

    def run(self, x):
        memory = x * 2
        for block in self.blocks:
            x = block(x, memory)
        return x


class Strided(Net):
    """E17: parameters that are not contiguous."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up.weight = nn.Parameter(block.up.weight.data.t().contiguous().t())
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)

    def run(self, x):
        x = super().run(x)
        return x + self.conv(x.view(-1, 1, 3, 4)).mean(dim=(1, 2, 3)).unsqueeze(1)


class Dtypes(Net):
    """E13: bfloat16 and float32 parameters in one block, and integers that do not train."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(D, D).bfloat16() / 4)
            self.lora = nn.Linear(D, D)
            self.q = nn.Parameter(torch.randint(-4, 4, (D, D), dtype=torch.int8), requires_grad=False)
            self.u = nn.Parameter(torch.randint(0, 4, (3,), dtype=torch.uint8), requires_grad=False)

        def forward(self, x):
            base = F.linear(x, self.q.float() / 16) * self.u.float().mean()
            return x + torch.tanh(base + self.lora(x) + F.linear(x.bfloat16(), self.w).float())

    def block(self):
        return self.Mixed()


class ReadOutside(Net):
    """Weights of one layer used by another module, and a module of a layer called without it."""

    def run(self, x):
        a, b, c = self.blocks
        x = c(b(a(x)))
        x = x + F.linear(F.gelu(F.linear(x, a.up.weight, a.up.bias)), b.down.weight)
        return x + a.norm(x)


class Penalised(Net):
    """All parameters are read, before and after the layers' use, and no module is asked for them."""

    def forward(self, x):
        params = list(self.parameters())
        penalty = sum(p.square().sum() for p in params) + sum(p.T.sum() ** 2 for p in params if p.ndim == 2)
        out = super().forward(x) + 0.01 * penalty
        flat = torch.cat([p.flatten() for p in params])  # views, of all layers at once
        return out + 0.01 * flat.abs().mean() + 0.001 * torch.stack(torch._foreach_norm(params)).sum()


class ReusedReentrant(Net):
    """One block three times, each in a reentrant checkpoint, with a parameter that is not used: gradients in parts."""

    def __init__(self):
        super().__init__()
        self.blocks[0].spare = nn.Linear(D, D)

    def run(self, x):
        for _ in range(3):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return x


class Positions(Net):
    """A layer whose output is a part of its weight, used after others have had their turn."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(9, D))

        def forward(self, n):
            return self.table[:n]

    def __init__(self):
        super().__init__()
        self.positions = self.Table()

    def run(self, x):
        positions = self.positions(len(x))
        return super().run(x) + positions


MODELS = [
    Net, Reused, Containers, InPlace, Unused, CheckpointAround, CheckpointAroundReentrant, CheckpointPairs,
    CheckpointInside, CheckpointInsideReentrant, Offloaded, Nested, NestedInside, Tied, Memory, Strided, Dtypes,
    ReadOutside, Penalised, ReusedReentrant, Positions,
]  # fmt: skip
BY_NAME = {m.__name__: m for m in MODELS}
LAYERS = {Block, Odd, Inner, InnerReentrant, InnerCalls, nn.Sequential, Memory.Cross, Dtypes.Mixed, Positions.Table}


def policy(module):
    return type(module) in LAYERS or (type(module) is nn.Linear and module.weight.shape[0] in (2, D))


def make(name, freeze=None):
    torch.manual_seed(0)
    model = BY_NAME[name]()
    if name != "Dtypes":
        model = model.double()  # so that nothing but the arithmetic can be the reason for a difference
    for param_name, param in model.named_parameters():
        if param.is_floating_point() and freeze is not None:
            param.requires_grad_(freeze not in param_name)
    return model


def batch(rank, step, name=""):
    g = torch.Generator().manual_seed(100 * step + rank)
    dtype = torch.float32 if name == "Dtypes" else torch.float64
    return torch.randn(4, 5, generator=g, dtype=dtype), torch.randn(4, 2, generator=g, dtype=dtype)


def one_process(name, steps=4, freeze=None, loss=None):
    """Losses of this rank, mean gradients and weights, as data parallelism defines them."""
    models = [make(name, freeze) for _ in range(dist.get_world_size())]
    optimizer = torch.optim.SGD([p for p in models[0].parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    losses, grads = [], {}
    for step in range(steps):
        totals = {}
        for rank, model in enumerate(models):
            model.load_state_dict(models[0].state_dict())
            model.zero_grad()
            x, y = batch(rank, step, name)
            value = loss(model, x, y) if loss else F.mse_loss(model(x), y)
            value.backward()
            if rank == dist.get_rank():
                losses.append(value.item())
            for n, p in model.named_parameters():
                if p.grad is not None:
                    totals[n] = totals.get(n, 0) + p.grad.detach().clone() / len(models)
        for n, p in models[0].named_parameters():
            p.grad = totals.get(n)
        grads = totals
        optimizer.step()
    return losses, grads, models[0].state_dict()


def sharded(name, steps=4, freeze=None, loss=None, prefetch=1):
    model = make(name, freeze)
    engine = shard_module(model, policy, prefetch=prefetch)
    optimizer = torch.optim.SGD(trainable_chunks(model), lr=0.01, momentum=0.9)
    losses, slots = [], []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(dist.get_rank(), step, name)
        value = loss(model, x, y) if loss else F.mse_loss(model(x), y)
        value.backward()
        losses.append(value.item())
        assert all(layer.state in (LayerState.SHARDED, LayerState.RESIDENT) for layer in engine.layers)
        assert engine.pool.taken == 0, "a slot leaked"
        slots.append(len(engine.pool.slots))
        grads = full_grads(model)
        optimizer.step()
    from lightning_zero3 import full_state_dict

    return losses, grads, full_state_dict(model, rank0_only=False)


def compare(ours, theirs, rtol=1e-9, atol=1e-12):
    assert_same(ours[0], theirs[0], rtol=rtol, atol=atol, what="losses")
    for name, grad in ours[1].items():  # what nothing used has no gradient there, zero here
        assert_same(grad, theirs[1].get(name, torch.zeros_like(grad)), rtol=rtol, atol=atol, what=name)
    assert theirs[1].keys() <= ours[1].keys()
    assert_same(ours[2], theirs[2], rtol=rtol, atol=atol, what="weights")


@pytest.mark.parametrize("name", BY_NAME)
@distributed(world=[1, 2, 3])
def test_graph_trains_like_one_process(name):
    tolerance = {"rtol": 0.1, "atol": 5e-3} if name == "Dtypes" else {}  # sums in bfloat16, in another order
    compare(sharded(name), one_process(name), **tolerance)


@pytest.mark.parametrize("freeze", ["blocks.0", "blocks.1", "blocks.2", "norm", "weight", "up", "first", "blocks"])
@pytest.mark.parametrize(
    "name", ["Net", "Reused", "CheckpointAround", "CheckpointAroundReentrant", "CheckpointInside", "NestedInside"]
)
@distributed(world=2)
def test_frozen_parts_train_like_one_process(name, freeze):
    """E5, E8 with frozen norms; "weight" is BitFit (E4)."""
    compare(sharded(name, freeze=freeze), one_process(name, freeze=freeze))


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("name", ["Reused", "CheckpointPairs", "Tied"])
@distributed(world=2)
def test_prefetch_depth_changes_no_number(name, prefetch):
    compare(sharded(name, prefetch=prefetch), one_process(name))


def preference(model, x, y):
    """E9: two forwards and one backward, a no-grad forward of the reference in between."""
    good = model(x)
    with torch.no_grad():
        reference = model(x * 0.9)
    return F.mse_loss(good, y) + (good - reference - model(-x)).pow(2).mean()


def retained(model, x, y):
    """Two backward passes through one graph."""
    loss = F.mse_loss(model(x), y)
    loss.backward(retain_graph=True)
    return loss * 2


def penalised(model, x, y):
    """Double backward: a gradient penalty on the inputs."""
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + gradient.pow(2).mean()


def wasted(model, x, y):
    """E10: a forward with gradients that nobody takes."""
    model(x * 3)
    return F.mse_loss(model(x), y)


LOSSES = {f.__name__: f for f in (preference, retained, penalised, wasted)}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["Net", "Reused", "CheckpointAround", "NestedInside"])
@distributed(world=2)
def test_uses_of_the_graph_train_like_one_process(name, loss):
    compare(sharded(name, loss=LOSSES[loss]), one_process(name, loss=LOSSES[loss]))


@distributed(world=2)
def test_only_what_trains_is_reduced_and_frozen_weights_do_not_change():
    """E4: BitFit."""
    model = make("Net", freeze="weight")
    engine = shard_module(model, policy)
    before = [c.data.clone() for layer in engine.layers for c in layer.chunks if not c.trainable]
    biases = sum(c.total for layer in engine.layers for c in layer.trainable)
    optimizer = torch.optim.AdamW(trainable_chunks(model))
    for step in range(5):
        engine.comm.traffic.reset()
        F.mse_loss(model(batch(dist.get_rank(), step)[0]), torch.zeros(4, 2, dtype=torch.float64)).backward()
        optimizer.step()
        assert engine.comm.traffic.reduce_elements == biases // 2
    after = [c.data for layer in engine.layers for c in layer.chunks if not c.trainable]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert engine.pool.nbytes < sum(layer.slot_nbytes for layer in engine.layers)  # none for frozen gradients


BEFORE = {"blocks.0": "first", "blocks.1": "blocks.0.up", "blocks.2": "blocks.1.up"}


@pytest.mark.parametrize("frozen", BEFORE)
@distributed(world=2)
def test_frozen_layers_are_released_during_backward(frozen):
    """E5: in the middle of backward, when its input's gradient is done, not at its end."""
    model = make("Net", freeze=frozen)
    engine = shard_module(model, policy)
    layer = next(layer for layer in engine.layers if layer.name == frozen)
    states = []
    earlier = model.get_submodule(BEFORE[frozen]).weight
    earlier.register_post_accumulate_grad_hook(lambda _: states.append(layer.state))
    for step in range(3):
        model(batch(dist.get_rank(), step)[0]).sum().backward()
        assert all(layer.state in (LayerState.SHARDED, LayerState.RESIDENT) for layer in engine.layers)
    assert states == [LayerState.SHARDED] * 3


@distributed(world=2)
def test_evaluation_between_steps_sees_the_weights_of_the_step():
    """E11."""
    torch.manual_seed(0)
    model, plain = make("Net"), make("Net")
    shard_module(model, policy)
    ours, theirs = (torch.optim.SGD(p, lr=0.1) for p in (trainable_chunks(model), plain.parameters()))
    for step in range(3):
        x, y = batch(0, step)  # the same on both ranks: their mean gradient is each one's
        for net, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            assert_same(model(x), plain(x))
        with torch.inference_mode():
            assert_same(model(x), plain(x))
        assert_same(model(x).detach(), plain(x).detach())


@distributed(world=2)
def test_an_optimizer_step_between_forward_and_backward_is_an_error():
    model = make("Net")
    engine = shard_module(model, policy)
    out = model(batch(0, 0)[0])
    engine.weights_changed(engine.layers)
    with pytest.raises(Zero3Error, match=r"was updated, or unfrozen, between a forward and its backward"):
        out.sum().backward()


@distributed(world=2)
def test_an_activation_changed_in_place_is_an_error_as_in_torch():
    class Wrong(Net):
        def run(self, x):
            x = super().run(x)
            h = torch.exp(x)
            h.add_(1)
            return h

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(5, 2)

        def forward(self, x):
            h = torch.exp(self.lin(x))
            h.add_(1)
            return h

    for model in (Wrong().double(), Inside().double()):
        shard_module(model, policy)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(batch(0, 0)[0]).sum().backward()


class Failing(nn.Module):
    """Raises in forward or backward when told to."""

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("backward failed on purpose")

    def __init__(self):
        super().__init__()
        self.lin, self.fail = nn.Linear(D, D), ""

    def forward(self, x):
        if self.fail == "forward":
            raise ValueError("forward failed on purpose")
        x = self.lin(x)
        return self.Bad.apply(x) if self.fail == "backward" else x


@pytest.mark.parametrize("where", ["forward", "backward"])
@distributed(world=2)
def test_training_goes_on_after_an_exception(where):
    """E15."""

    def train(net, params, fail):
        optimizer = torch.optim.SGD(params, lr=0.1)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            net[1].fail = where if fail and step == 2 else ""
            x, y = batch(0, step)
            try:
                loss = F.mse_loss(net(x), y)
                loss.backward()
            except ValueError:
                optimizer.zero_grad()
                net[1].fail = ""
                loss = F.mse_loss(net(x), y)
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
        return losses

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, D), Failing(), Block(), nn.Linear(D, 2)).double()

    plain, model = build(), build()
    engine = shard_module(model, lambda m: isinstance(m, nn.Linear | Failing | Block))
    assert_same(train(model, trainable_chunks(model), True), train(plain, plain.parameters(), False))
    assert engine.pool.taken == 0


@distributed(world=2)
def test_anomaly_detection_works():
    with torch.autograd.detect_anomaly(check_nan=True):
        compare(sharded("Net"), one_process("Net"))


@distributed(world=2)
def test_no_tensors_in_and_nothing_trainable():
    """E22."""

    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, n: int):
            return self.w.sum() * n

    model = Count()
    shard_module(model, None)
    model(3).backward()
    assert_same(full_grads(model), {"w": torch.full((3,), 3.0)})
    frozen = make("Net", freeze="")
    shard_module(frozen, policy)
    assert engine_of(frozen) is not None
    assert torch.isfinite(frozen(batch(0, 0)[0])).all()


class Branching(Net):
    """E7: which block runs depends on the rank."""

    def run(self, x):
        return self.blocks[dist.get_rank() % 2](x)


class Skipping(Net):
    """The second rank leaves a block out."""

    def run(self, x):
        for i, block in enumerate(self.blocks):
            if not (dist.get_rank() == 1 and i == 1):
                x = block(x)
        return x


class SkippingLater(Skipping):
    """The same, in the third step only."""

    steps = 0

    def run(self, x):
        self.steps += 1
        return super().run(x) if self.steps == 3 else Net.run(self, x)


class SkippingTheEnd(Net):
    steps = 0

    def run(self, x):
        self.steps += 1
        for block in self.blocks[: 2 if self.steps == 3 and dist.get_rank() == 1 else 3]:
            x = block(x)
        return x


def train_divergent(name):
    model = {m.__name__: m for m in (Branching, Skipping, SkippingLater, SkippingTheEnd)}[name]().double()
    shard_module(model, policy)
    optimizer = torch.optim.SGD(trainable_chunks(model), lr=0.1)
    for step in range(4):
        F.mse_loss(model(batch(0, step)[0]), torch.zeros(4, 2, dtype=torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["Branching", "Skipping", "SkippingLater", "SkippingTheEnd"])
def test_ranks_that_part_ways_are_named(name):
    """E7: an error that names the layer on every rank, within seconds; no hang, no crash, no mixed weights."""
    with pytest.raises(DistributedError) as caught:
        run(train_divergent, 2, name, deadline=50)
    told = str(caught.value)
    assert "the ranks went different ways" in told
    assert "layer 'blocks." in told or "layer 'last'" in told


@distributed(world=2)
def test_layers_of_a_penalty_are_fetched_once_each_and_evaluated_with_their_values():
    model, plain = make("Net"), make("Net")
    engine = shard_module(model, policy)
    params = [list(m.parameters()) for m in (model, plain)]
    norms, fetches = [], []

    def run_and_measure(x):
        norms.append(sum(p.norm() for p in params[0]))
        return Net.run(model, x)

    model.run = run_and_measure
    for _ in range(3):
        engine.comm.traffic.reset()
        out = model(batch(0, 0)[0])
        fetches.append(engine.comm.traffic.fetches)
        out.sum().backward()
    assert_same(norms, [sum(p.norm() for p in params[1])] * 3, rtol=1e-12)
    # Each layer for its use, and once more for all of its parameters; the root's, if any, are there.
    layers = [layer for layer in engine.layers if layer is not engine.root]
    assert fetches == [len(engine.root.chunks) + 2 * sum(len(layer.chunks) for layer in layers)] * 3
    assert isinstance(params[0][0], nn.Parameter)
    assert params[0][0].sum().isnan()  # outside of a forward
    part, plain_part = model.blocks[1].norm, plain.blocks[1].norm
    with pytest.raises(Zero3Error, match=r"of layer 'blocks.1' is sharded over ranks, a copy of it would be NaN"):
        copy.deepcopy(part.weight)
    with gather_parameters(part):
        assert_same(copy.deepcopy(part.weight), plain_part.weight, rtol=0, atol=0)


class Written(nn.Module):
    """Sets a parameter on its first batch."""

    def __init__(self):
        super().__init__()
        self.scale, self.lin, self.first = nn.Parameter(torch.ones(D)), nn.Linear(D, D), True

    def forward(self, x):
        if self.first:
            with torch.no_grad():
                self.scale.fill_(0.5)
        return self.lin(x) * self.scale


@distributed(world=2)
def test_a_write_in_forward_is_an_error_and_not_lost():
    for model in (nn.Sequential(Written()), nn.Sequential(nn.Embedding(20, D, max_norm=0.1))):
        shard_module(model, lambda m: isinstance(m, Written | nn.Embedding))
        x = torch.zeros(2, 3, dtype=torch.long) if isinstance(model[0], nn.Embedding) else torch.ones(2, D)
        with pytest.raises(Zero3Error, match="was written while its layer was in use"):
            model(x).sum().backward()


@distributed(world=2)
def test_functional_transforms_are_refused():
    model = make("Net")
    shard_module(model, policy)
    with pytest.raises(Zero3Error, match=r"under a torch\.func transform"):
        torch.func.grad(lambda x: model(x).sum())(batch(0, 0)[0])
