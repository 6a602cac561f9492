"""Activation checkpointing by the strategy's argument, and compiled modules: E8, L22."""

import pytest
import torch
from torch import nn

from lightning_zero3 import Zero3Error
from tests.harness import assert_same, distributed
from tests.harness.models import Block, Pairs, Task, Tokens, loader, tiny_gpt_neox
from tests.harness.oracles import fit
from tests.strategy.runs import WIDTHS, make_mlp, mlp_task, same_run, trainer, weights_of, zero3, zero3_neox


class Counting(Task):
    """Counts forwards of each linear layer, and what autograd keeps in one step."""

    def __init__(self):
        super().__init__(make_mlp())
        self.forwards = self.kept = 0
        for module in self.net.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._count)

    def _count(self, *_):
        self.forwards += 1

    def training_step(self, batch, batch_idx):
        def pack(tensor):
            self.kept += tensor.numel()
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return super().training_step(batch, batch_idx)


POLICIES = {
    "layers": {Block},
    "inside": {nn.Linear},
    "a function": lambda module: isinstance(module, Block),
    "around": {nn.ModuleList, type(make_mlp())},
}


@pytest.mark.parametrize("name", POLICIES)
@distributed(world=[1, 2])
def test_checkpointed_modules_train_like_ddp(world, name):
    strategy = zero3(activation_checkpointing_policy=POLICIES[name])
    ours = fit(strategy, mlp_task, loader(Pairs(64 * world, 7)), steps=6, accumulate_grad_batches=2)
    ddp = fit("ddp", mlp_task, loader(Pairs(64 * world, 7)), steps=6, accumulate_grad_batches=2)
    same_run(ours, ddp)
    assert list(ours.weights) == list(ddp.weights)
    assert strategy.engine.pool.taken == 0


@distributed(world=2)
def test_less_is_kept_and_computed_again():
    counts = []
    for policy in (None, {Block}):
        module = Counting()
        fit(zero3(activation_checkpointing_policy=policy), lambda m=module: m, loader(Pairs(8, 7)), steps=1)
        counts.append((module.forwards, module.kept))
    (once, kept), (twice, less) = counts
    assert (once, twice) == (4, 7)  # three blocks again, and not the head
    assert less < kept


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@distributed(world=2)
def test_neox_with_frozen_norms(precision):
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

    def task():
        module = Task(tiny_gpt_neox(use_cache=False))  # a cache would grow when it is computed again
        for name, param in module.named_parameters():
            param.requires_grad_("layernorm" not in name)
        return module

    data = loader(Tokens(32))
    runs = [
        fit(zero3_neox(activation_checkpointing_policy=policy), task, data, steps=3, precision=precision)
        for policy in (None, {GPTNeoXLayer})
    ]
    same_run(*runs, rtol=1e-5, atol=1e-6)


@distributed(world=2)
def test_it_is_the_same_over_several_stages():
    module = mlp_task()
    for _ in range(2):
        t = trainer(zero3(activation_checkpointing_policy={Block}), max_steps=2)
        t.fit(module, loader(Pairs(32, 7)))
        t.validate(module, loader(Pairs(32, 7)), verbose=False)
    plain = mlp_task()
    for _ in range(2):
        t = trainer("ddp", max_steps=2)
        t.fit(plain, loader(Pairs(32, 7)))
    assert_same(weights_of(module), weights_of(plain))


@pytest.mark.parametrize("policy", ["auto", 3])
def test_what_is_no_policy_is_named(policy):
    with pytest.raises(Zero3Error, match=f"activation_checkpointing_policy={policy!r}: give a set of module classes"):
        zero3(activation_checkpointing_policy=policy)


# -- torch.compile ----------------------------------------------------------------------------------------------------


class CompiledBlocks(Task):
    def configure_model(self):
        for block in self.net.blocks:
            block.compile(backend="aot_eager")


@distributed(world=2, deadline=180)
def test_compiled_blocks_train_like_ddp_and_are_compiled_once():
    """L22."""
    torch._dynamo.reset()
    counts = []

    class Module(CompiledBlocks):
        def on_train_batch_end(self, *_):
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    data = loader(Pairs(96, 7))
    ours = fit(zero3(), lambda: Module(make_mlp()), data, steps=8)
    same_run(ours, fit("ddp", mlp_task, data, steps=8))
    assert counts[2] == counts[-1] > 0


@distributed(world=2, deadline=180)
def test_a_checkpoint_of_compiled_blocks_is_the_plain_modules(tmp_path):
    torch._dynamo.reset()
    module = CompiledBlocks(make_mlp())
    t = trainer(zero3(), max_steps=3)
    t.fit(module, loader(Pairs(32, 7)))
    t.save_checkpoint(tmp_path / "x.ckpt")
    t.strategy.barrier()
    plain = mlp_task()
    plain.load_state_dict(torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"])
    assert_same(dict(plain.state_dict()), weights_of(module), rtol=0, atol=0)


@distributed(world=2)
def test_a_module_compiled_as_a_whole_is_refused_by_lightning():
    with pytest.raises(RuntimeError, match="compiled model is incompatible with the current strategy: `Zero3Strategy`"):
        trainer(zero3(), max_steps=1).fit(torch.compile(mlp_task(), backend="eager"), loader(Pairs(32, 7)))


@distributed(world=2, deadline=180)
def test_checkpointed_and_compiled_at_once():
    torch._dynamo.reset()
    data = loader(Pairs(32, WIDTHS[0]))
    ours = fit(zero3(activation_checkpointing_policy={Block}), lambda: CompiledBlocks(make_mlp()), data, steps=3)
    same_run(ours, fit("ddp", mlp_task, data, steps=3))
