"""Training with the engine equals DDP, FSDP2 and one process: losses, gradients, optimizer state, weights."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero3 import PrecisionPolicy
from tests.engine.runs import counts, train_zero3
from tests.harness import assert_same, distributed
from tests.harness.models import MLP, AdamW, Block, Pairs, Tokens, adamw, batches, tiny_gpt_neox
from tests.harness.oracles import train_ddp, train_fsdp2, train_single

WORLDS = [1, 2, 3, 4]
WIDTHS = (7, 15, 16, 17)


def make_mlp() -> nn.Module:
    return MLP(*WIDTHS)


def pairs():
    return batches(Pairs(400, WIDTHS[0]), world=dist.get_world_size())


def same_run(ours, theirs, rtol=1e-5):
    assert_same(ours.losses, theirs.losses, rtol=rtol)
    assert_same(ours.grads, theirs.grads, rtol=rtol, what="gradients")
    assert_same(ours.optimizer_state, theirs.optimizer_state, rtol=rtol, what="optimizer state")
    assert_same(ours.weights, theirs.weights, rtol=rtol, what="weights")


@distributed(world=WORLDS)
def test_awkward_shapes_train_like_ddp_fsdp2_and_one_process():
    world = dist.get_world_size()
    ours = train_zero3(make_mlp, pairs(), adamw, 10, policy={Block})
    same_run(ours, train_ddp(make_mlp, pairs(), adamw, 10))
    same_run(ours, train_fsdp2(make_mlp, pairs(), adamw, 10))
    same_run(ours, train_single(make_mlp, pairs(), adamw, 10, world=world))


@distributed(world=2)
def test_two_ranks_are_bit_equal_to_ddp():
    ours = train_zero3(make_mlp, pairs(), adamw, 10, policy={Block})
    ddp = train_ddp(make_mlp, pairs(), adamw, 10)
    assert_same(ours.losses, ddp.losses, rtol=0, atol=0)
    assert_same(ours.weights, ddp.weights, rtol=0, atol=0)


@distributed(world=WORLDS)
def test_hugging_face_gpt_neox_trains_like_ddp_and_fsdp2():
    data = batches(Tokens(400), world=dist.get_world_size())
    blocks = lambda m: list(m.gpt_neox.layers)  # noqa: E731
    ours = train_zero3(tiny_gpt_neox, data, adamw, 10, policy=lambda m: type(m).__name__ == "GPTNeoXLayer")
    same_run(ours, train_ddp(tiny_gpt_neox, data, adamw, 10), rtol=1e-4)
    assert_same(ours.losses, train_fsdp2(tiny_gpt_neox, data, adamw, 10, blocks=blocks).losses, rtol=1e-4)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@distributed(world=2)
def test_prefetch_depth_changes_nothing_but_slots(prefetch):
    ours = train_zero3(make_mlp, pairs(), adamw, 5, policy={Block}, prefetch=prefetch)
    assert_same(ours.losses, train_ddp(make_mlp, pairs(), adamw, 5).losses, rtol=0, atol=0)


@distributed(world=[2, 3])
def test_accumulation_and_clipping_train_like_ddp():
    ours = train_zero3(make_mlp, pairs(), adamw, 5, policy={Block}, accumulation=3, clip=0.1)
    same_run(ours, train_ddp(make_mlp, pairs(), adamw, 5, accumulation=3, clip=0.1))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@distributed(world=3)
def test_every_implementation_of_adamw_trains_like_ddp(options):
    def optimizer(model):
        return AdamW(model.parameters(), lr=1e-2, **options)

    same_run(train_zero3(make_mlp, pairs(), optimizer, 5, policy={Block}), train_ddp(make_mlp, pairs(), optimizer, 5))


@distributed(world=[1, 2, 3])
def test_bf16_compute_with_float32_masters_stays_near_ddp():
    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return nn.functional.mse_loss(model(batch[0]).float(), batch[1])

    def check(engine):
        for layer in engine.layers:
            for chunk in layer.trainable:
                assert chunk.data.dtype == torch.float32
                held = [s.param.grad for s in chunk.segments if s.indices]  # a rank may have padding only
                assert all(grad.dtype == torch.float32 for grad in held)

    policy = PrecisionPolicy(param_dtype=torch.bfloat16)
    ours = train_zero3(make_mlp, pairs(), adamw, 10, loss=loss, policy={Block}, precision=policy, each_step=check)
    ddp = train_ddp(make_mlp, pairs(), adamw, 10, loss=loss)
    assert_same(ours.losses, ddp.losses, rtol=2e-2)
    assert all(t.dtype == torch.float32 for t in ours.weights.values())


@distributed(world=[2, 3, 4])
def test_collectives_are_as_few_as_promised():
    """Each layer is fetched twice a step but for the last, which backward needs at once, and the root; reduced once."""
    seen = []
    train_zero3(make_mlp, pairs(), adamw, 4, policy={Block}, each_step=lambda e: seen.append((e, counts(e))))
    engine, steady = seen[-1]
    layers, world = len(engine.layers), dist.get_world_size()
    assert layers == 4
    assert steady.fetches == 2 * layers - 2  # root and last layer once
    assert steady.reduces == layers
    assert steady.agreements == 0
    totals = {layer.name: sum(c.total for c in layer.chunks) for layer in engine.layers}
    once = totals["root"] + totals["blocks.2"]
    whole = sum(totals.values())
    assert steady.reduce_elements == whole * (world - 1) // world
    assert steady.fetch_elements == (2 * whole - once) * (world - 1) // world
    assert steady.reduce_bytes == 4 * steady.reduce_elements
    # The paper's 3 Psi (N - 1) / N, less what stays fetched.
    assert steady.fetch_elements + steady.reduce_elements < 3 * whole * (world - 1) / world
