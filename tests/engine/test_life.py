"""The life of a layer: states, memory, placeholders."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero3 import LayerState, Zero3Error, Zero3Layer, Zero3Sequential, shard_module, trainable_chunks
from lightning_zero3.layer import layer_of
from tests.engine.runs import train_zero3
from tests.harness import distributed
from tests.harness.models import MLP, Block, Pairs, adamw, batches


class Deep(nn.Module):
    """Blocks of equal size between an embedding and a readout of equal size."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        self.norm = nn.LayerNorm(32)
        self.readout = nn.Linear(32, 64, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.readout(self.norm(x))


def big_leaf(module):
    return isinstance(module, nn.Linear | nn.Embedding)


def ids():
    return torch.arange(20).view(2, 10) % 64


@distributed(world=2)
def test_layers_are_fetched_for_use_only():
    model = Deep()
    engine = shard_module(model, big_leaf)
    seen = []
    for layer in engine.layers:
        if layer is not engine.root:
            layer.entries[0].register_forward_hook(
                lambda *_, me=layer: seen.append(
                    (me.state, sum(other.state is LayerState.FETCHED for other in engine.layers))
                )
            )
    for _ in range(2):
        model(ids()).sum().backward()
        assert all(layer.state is LayerState.SHARDED for layer in engine.layers)
        assert engine.pool.taken == 0
    # A hook of the user's runs after ours: what it sees is released, except for the last layer. The root stays.
    assert [state for state, _ in seen[8:]] == [LayerState.SHARDED] * 7 + [LayerState.FETCHED]
    assert max(fetched for _, fetched in seen) <= 2


@distributed(world=2)
def test_slots_are_few_and_made_once():
    """Two for the blocks' parameters, two for their gradients, one each for what is larger or smaller."""
    model = Deep(depth=10)
    engine = shard_module(model, big_leaf)
    optimizer = torch.optim.AdamW(trainable_chunks(model))
    after = []
    for _ in range(4):
        model(ids()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after.append([s.bytes.data_ptr() for s in engine.pool.slots])
    assert after[1] == after[3]
    block = engine.layers[1].slot_nbytes
    assert sum(s.bytes.numel() == block for s in engine.pool.slots) <= 4
    assert engine.pool.nbytes < 0.5 * 2 * sum(layer.slot_nbytes for layer in engine.layers)


@distributed(world=2)
def test_gathered_views_die_with_their_slot_only():
    """Nothing but slots holds gathered parameters: their storages are the slots'."""
    model = Deep()
    engine = shard_module(model, big_leaf)
    storages = set()
    for layer in engine.layers[:-1]:
        layer.entries[0].register_forward_pre_hook(
            lambda module, _: storages.update(p.untyped_storage().data_ptr() for p in module.parameters())
        )
    for _ in range(3):
        model(ids()).sum().backward()
    assert storages <= {s.bytes.untyped_storage().data_ptr() for s in engine.pool.slots}


@distributed(world=2)
def test_the_original_parameters_are_freed():
    model = Deep()
    originals = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    tensors = [weakref.ref(p.data) for p in model.parameters()]
    shard_module(model, big_leaf)
    gc.collect()
    assert all(ref() is None for ref in tensors)
    assert sum(p.untyped_storage().nbytes() for p in {layer_of(p).chunks[0]._scalars for p in model.parameters()}) < 200
    del originals


@distributed(world=3)
def test_padding_is_zero_always():
    def check(engine):
        for layer in engine.layers:
            for chunk in layer.chunks:
                flat = torch.zeros(chunk.total, dtype=chunk.dtype)
                grad = torch.zeros(chunk.total, dtype=chunk.dtype)
                engine.comm.own(flat).copy_(chunk.data)
                for segment in chunk.segments:
                    engine.comm.own(grad)[segment.lo : segment.hi] = segment.param.grad
                engine.comm.wait(engine.comm.gather("check", [flat, grad]))
                assert all(not flat[lo:hi].any() and not grad[lo:hi].any() for lo, hi in chunk.layout.gaps(chunk.total))

    train_zero3(lambda: MLP(7, 15, 16, 17), batches(Pairs(200, 7), world=3), adamw, 3, policy={Block}, each_step=check)


@distributed(world=2)
def test_a_sharded_parameter_looks_right_and_reads_as_nan():
    layer = Zero3Layer(nn.Linear(7, 15))
    weight = layer.weight
    assert weight.shape == (15, 7)
    assert weight.dtype == torch.float32
    assert weight.ndim == 2
    assert weight.requires_grad
    assert weight.isnan().all()
    assert weight.untyped_storage().nbytes() <= 16
    assert isinstance(weight, nn.Parameter)


CHANGES = {
    "in place": lambda p: p.zero_(),
    "data.fill_": lambda p: p.data.fill_(1.0),
    "data.zero_": lambda p: p.data.zero_(),
    "replaced": lambda p: setattr(p, "data", torch.ones_like(p)),
    "cast": lambda p: setattr(p, "data", p.data.to(torch.bfloat16)),
}


@pytest.mark.parametrize("change", CHANGES)
@distributed(world=2)
def test_a_change_behind_the_engine_is_named(change):
    model = Deep()
    shard_module(model, big_leaf)
    with torch.no_grad():
        CHANGES[change](model.blocks[3].weight)
    with pytest.raises(Zero3Error, match=r"'blocks\.3\.weight'.*gather_parameters\(module, writeback=True\)"):
        model(ids())


@distributed(world=2)
def test_initialising_a_sharded_parameter_is_noticed():
    layer = Zero3Layer(nn.Linear(4, 4))
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(Zero3Error, match="parameter 'weight' of layer 'Linear' was written while sharded"):
        layer(torch.ones(1, 4))
    with pytest.raises(RuntimeError, match="single memory location"):  # random fills are torch's own error
        nn.init.normal_(Zero3Layer(nn.Linear(4, 4)).weight)


@distributed(world=[1, 2, 3])
def test_names_and_attributes_are_those_of_the_module():
    plain, wrapped = Deep(), Deep()
    layer = Zero3Layer(wrapped)
    assert [n for n, _ in layer.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert layer.blocks is wrapped.blocks
    assert nn.Sequential(layer).state_dict.__self__[0] is layer
    assert [n for n, _ in nn.Sequential(layer).named_parameters()] == [f"0.{n}" for n, _ in plain.named_parameters()]
    layer.eval()
    assert not wrapped.training
    assert not wrapped.norm.training


@distributed(world=2)
def test_the_seeds_interface():
    rank, world = dist.get_rank(), dist.get_world_size()
    module = nn.Linear(7, 15)
    module.bias.requires_grad_(False)
    layer = Zero3Layer(module, rank, world, torch.device("cpu"), torch.float64)
    assert layer.param_refs == [[module.weight], [module.bias]]
    assert layer.chunk_size == [c.numel() for c in layer.chunk] == [64, 16]
    assert all(c.dtype == torch.float64 for c in layer.chunk)
    assert layer.get_trainable_chunk()[0] is layer.chunk[0]
    layer.fetch_params()
    assert layer.state is LayerState.FETCHED
    assert not module.weight.isnan().any()
    model = Zero3Sequential([nn.Linear(4, 4), nn.ReLU(), Zero3Layer(nn.Linear(4, 2))])
    assert len(model.get_trainable_chunk()) == 2
    assert model(torch.ones(3, 4)).shape == (3, 2)


def test_world_one_needs_no_process_group_and_copies_nothing():
    model = Deep()
    engine = shard_module(model, big_leaf)
    model(ids()).sum().backward()
    assert engine.pool.nbytes == 0
    assert model.blocks[0].weight.data_ptr() == engine.layers[1].chunk[0].data_ptr()


@distributed(world=2)
def test_every_rank_starts_from_the_first_ones_values():
    torch.manual_seed(dist.get_rank())
    layer = Zero3Layer(nn.Linear(4, 4))
    torch.manual_seed(0)
    layer.fetch_params()
    assert torch.equal(layer.weight, nn.Linear(4, 4).weight)


@distributed(world=2)
def test_meta_parameters_are_initialised_layer_by_layer():
    with torch.device("meta"):
        model = Deep()
    torch.manual_seed(3)
    shard_module(model, big_leaf)
    model(ids()).sum().backward()
    assert all(torch.isfinite(p).all() for p in trainable_chunks(model))

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.empty(3, device="meta"))

    with pytest.raises(Zero3Error, match=r"'w' is on the meta device.*Bare has no reset_parameters"):
        shard_module(Bare())
