"""The oracles agree with each other, so that a test may use whichever it likes."""

import functools

import pytest
import torch

from tests.harness import assert_same, distributed
from tests.harness.models import MLP, Pairs, Task, Tokens, adamw, batches, loader, tiny_gpt_neox
from tests.harness.oracles import fit, train_ddp, train_fsdp2, train_single

make_mlp = functools.partial(MLP, 7, 15, 16, 17)
make_plain_mlp = functools.partial(MLP, 7, 15, 16, 17, awkward=False)


def same_run(ours, theirs, grads=True):
    assert_same(ours.losses, theirs.losses, what="losses")
    assert_same(ours.weights, theirs.weights, rtol=1e-4, what="weights")
    assert_same(ours.optimizer_state, theirs.optimizer_state, rtol=1e-4, what="optimizer state")
    if grads:
        assert_same(ours.grads, theirs.grads, rtol=1e-4, what="gradients")


@pytest.mark.parametrize(("accumulation", "clip"), [(1, None), (2, 0.05)])
@distributed(world=[1, 3])
def test_single_ddp_and_fsdp2_agree(world, accumulation, clip):
    data = batches(Pairs(96, 7), world=world)
    options = {"accumulation": accumulation, "clip": clip}
    single = train_single(make_mlp, data, adamw, 4, world=world, **options)
    assert len(single.losses) == 4 * accumulation
    assert single.optimizer_state.keys() == single.grads.keys() == dict(make_mlp().named_parameters()).keys()
    if clip:
        norm = torch.stack([g.norm() for g in single.grads.values()]).norm()
        assert_same(norm, clip, rtol=1e-4)
    same_run(train_ddp(make_mlp, data, adamw, 4, **options), single)
    same_run(train_fsdp2(make_mlp, data, adamw, 4, **options), single)


@distributed(world=2)
def test_lightning_agrees_with_the_plain_loops():
    single = train_single(make_plain_mlp, batches(Pairs(64, 7), world=2), adamw, 5, world=2)
    for strategy in ("ddp", "fsdp2"):
        ours = fit(strategy, lambda: Task(make_plain_mlp()), loader(Pairs(64, 7)), steps=5)
        same_run(ours.strip("net."), single, grads=False)


@distributed(world=2)
def test_hugging_face_model_trains():
    single = train_single(tiny_gpt_neox, batches(Tokens(64), world=2), adamw, 5, world=2)
    assert single.losses[-1] < single.losses[0]
    same_run(train_fsdp2(tiny_gpt_neox, batches(Tokens(64), world=2), adamw, 5), single)
    ours = fit("ddp", lambda: Task(tiny_gpt_neox()), loader(Tokens(64)), steps=5)
    same_run(ours.strip("net."), single, grads=False)
