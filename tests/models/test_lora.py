"""Adapters of `peft`: each kind trains as under DDP, costs what trains, and is saved, read and merged as without us."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

from lightning_zero3 import LayerState, full_state_dict, gather_parameters
from tests.harness import assert_same, distributed
from tests.harness.oracles import fit
from tests.models.test_outside import Wrapped, gpt_neox, loader
from tests.models.test_uses import EXACT, Scored
from tests.strategy.runs import same_run, trainer, zero3

peft = pytest.importorskip("peft")

MATRICES = ["query_key_value", "dense_h_to_4h"]


def adapted(config: peft.PeftConfig) -> nn.Module:
    return peft.get_peft_model(gpt_neox(), config)


def lora(**options):
    """LoRA whose second matrix is not zero, so that the first has a gradient from the start."""
    return adapted(peft.LoraConfig(**{"r": 4, "target_modules": MATRICES, "init_lora_weights": False, **options}))


def checkpointed(reentrant: bool):
    model = lora()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


TASK = {"task_type": "CAUSAL_LM"}
KINDS = {
    "lora": lora,
    "biases too": lambda: lora(bias="all"),
    "whole head": lambda: lora(modules_to_save=["lm_head"]),
    "embedding": lambda: lora(target_modules=[*MATRICES, "embed_in"]),
    "dora": lambda: lora(use_dora=True),
    "parameters": lambda: lora(target_modules=[], target_parameters=["attention.dense.weight"]),
    "checkpointed": lambda: checkpointed(False),
    "checkpointed, reentrant": lambda: checkpointed(True),
    "ia3": lambda: adapted(peft.IA3Config(target_modules=MATRICES, feedforward_modules=["dense_h_to_4h"])),
    "oft": lambda: adapted(peft.OFTConfig(target_modules=MATRICES, oft_block_size=8)),
    "vera": lambda: adapted(peft.VeraConfig(r=4, target_modules=["query_key_value"])),
    "prompt": lambda: adapted(peft.PromptTuningConfig(num_virtual_tokens=3, **TASK)),
    "prefix": lambda: adapted(peft.PrefixTuningConfig(num_virtual_tokens=3, **TASK)),
}


@pytest.mark.parametrize("kind", KINDS)
@distributed(world=2)
def test_every_kind_of_adapter_trains_like_ddp(kind):
    make = KINDS[kind]
    ours, ddp = (fit(s, lambda: Wrapped(make), loader(False), steps=5) for s in (zero3(GPTNeoXLayer), "ddp"))
    same_run(ours, ddp, **EXACT)
    start = Wrapped(make)
    trains = {name for name, p in start.named_parameters() if p.requires_grad}
    assert 0 < len(trains) < len(list(start.parameters()))
    assert set(ours.optimizer_state) == trains
    fixed = {name: value for name, value in start.state_dict().items() if name not in trains}
    assert_same({name: ours.weights[name] for name in fixed}, fixed, rtol=0, atol=0)


class Watched(Wrapped):
    """Notes what was fetched and reduced between the start and the end of each backward pass."""

    def __init__(self, make) -> None:
        super().__init__(make)
        self.backwards: list[list[str]] = []

    def _steps(self):
        return self.trainer.strategy.engine.comm._groups.steps

    def on_before_backward(self, loss):
        self.before = self._steps().count

    def on_after_backward(self):
        self.backwards.append([what for count, what in self._steps().last if count > self.before])


@distributed(world=2)
def test_backward_stops_at_the_first_adapter():
    """With it in the last of three blocks, nothing of the others is fetched in backward, or reduced."""
    strategy = zero3(GPTNeoXLayer, nn.Embedding)
    module = Watched(lambda: lora(layers_to_transform=[2]))
    trainer(strategy, max_steps=4).fit(module, loader(False))
    last = "layer 'net.base_model.model.gpt_neox.layers.2'"
    reduced = [f"reduction of {last}", "end of gradients"]
    assert set(module.backwards[0]) == {f"fetch of {last}", *reduced, "end of backward"}  # recorded
    assert module.backwards[1:] == [reduced] * 3  # the block is still there from forward
    engine = strategy.engine
    assert all(layer.state is LayerState.SHARDED for layer in engine.layers)
    chunks = [c for layer in engine.layers for c in layer.trainable]
    trains = sum(p.numel() for p in Wrapped(lambda: lora(layers_to_transform=[2])).parameters() if p.requires_grad)
    assert sum(c.total for c in chunks) - trains < 64 * sum(len(c.params) for c in chunks)
    assert engine.comm.traffic.reduce_elements == 4 * sum(c.total for c in chunks) // 2
    assert engine.comm.traffic.reduces == 4


@pytest.mark.parametrize("whole", [None, ["lm_head"]], ids=["lora", "modules_to_save"])
@distributed(world=2)
def test_an_adapter_is_saved_read_back_and_merged(tmp_path, whole):
    module, data = Scored(lambda: lora(modules_to_save=whole)), loader(False)
    t = trainer(zero3(GPTNeoXLayer), max_steps=3, limit_predict_batches=1)
    t.fit(module, data)
    predicted = t.predict(module, data)[0]
    with gather_parameters(module.net):
        adapter = {k: v.clone() for k, v in peft.get_peft_model_state_dict(module.net).items()}
        if dist.get_rank() == 0:
            module.net.save_pretrained(tmp_path)
    assert all("lora_" in name or "lm_head" in name for name in adapter)
    if not whole:  # of a module that is kept as a whole, peft asks the state dict itself
        full = full_state_dict(module.net, rank0_only=False)
        assert_same(peft.get_peft_model_state_dict(module.net, state_dict=full), adapter, rtol=0, atol=0)
    dist.barrier()

    batch = next(iter(data))
    base = Scored(gpt_neox)  # with the weights that the adapter was trained on
    read = peft.PeftModel.from_pretrained(Scored(gpt_neox).net, tmp_path).double().eval()
    with torch.no_grad():
        assert (base.eval().predict_step(batch, 0) - predicted).abs().max() > 1e-3
        assert_same(read(**batch).logits, predicted, **EXACT)
        merged = read.merge_and_unload()
        assert_same(merged(**batch).logits, predicted, **EXACT)
    assert [name for name, _ in merged.named_parameters()] == [name for name, _ in base.net.named_parameters()]


class Preferring(Wrapped):
    """Compares itself with the base model, which is itself without its adapter (as in DPO)."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad(), self.net.disable_adapter():
            reference = self.net(**batch).logits
        out = self.net(**batch)
        return out.loss + (out.logits - reference).pow(2).mean()


@distributed(world=2)
def test_the_base_model_is_the_reference():
    ours, ddp = (fit(s, lambda: Preferring(lora), loader(False), steps=4) for s in (zero3(GPTNeoXLayer), "ddp"))
    same_run(ours, ddp, **EXACT)
