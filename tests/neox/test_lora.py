"""LoRA: peft computes the same from our files and we from its; merged, and saved alone from shards."""

from __future__ import annotations

import json

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_zero3 import full_state_dict, gather_parameters
from neox_lit import (
    LoRAOptions,
    NeoXError,
    NeoXLightning,
    NeoXModel,
    SaveAdapter,
    add_lora,
    load_adapter,
    merge_lora,
    remove_lora,
    save_adapter,
    to_int8,
    unmerge_lora,
)
from tests.harness import assert_same, distributed
from tests.neox.helpers import random_model, tiny, to_hf
from tests.neox.tuning import EXACT, Tuned, loader, module, zero3
from tests.strategy.runs import trainer

peft = pytest.importorskip("peft")

OPTIONS = LoRAOptions(rank=3, alpha=12.0, targets=("query_key_value", "dense", "dense_4h_to_h"))
IDS = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))


def adapted(options: LoRAOptions = OPTIONS) -> NeoXModel:
    """In float64, with adapters that are not zero."""
    model = random_model(tiny()).double()
    add_lora(model, options)
    for name, p in model.named_parameters():
        if name.endswith("lora.B"):
            nn.init.normal_(p, std=0.1)
    return model


def base(model: NeoXModel) -> NeoXModel:
    """The same model without its adapters."""
    plain = NeoXModel(model.config).double().eval()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if ".lora." not in name})
    return plain


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    out = model(IDS)
    return out if isinstance(out, torch.Tensor) else out.logits


def test_peft_reads_our_adapter(tmp_path):
    model = adapted()
    save_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(to_hf(base(model)).double(), tmp_path).double().eval()
    assert (logits(base(model)) - logits(model)).abs().max() > 0.1
    assert_same(logits(theirs), logits(model), rtol=1e-6, atol=1e-6)  # parts of theirs are float32
    saved = peft.get_peft_model_state_dict(theirs)
    assert len(saved) == len([n for n, _ in model.named_parameters() if ".lora." in n]) == 2 * 2 * 3


def test_we_read_an_adapter_of_peft_into_any_module(tmp_path):
    plain = random_model(tiny()).double()
    torch.manual_seed(3)
    config = peft.LoraConfig(r=5, lora_alpha=7, target_modules=["dense", "dense_h_to_4h"], init_lora_weights=False)
    theirs = peft.get_peft_model(to_hf(plain).double(), config).double().eval()
    theirs.save_pretrained(tmp_path)
    ours = NeoXLightning(tiny())
    ours.configure_model()
    ours.model.load_state_dict(plain.state_dict())
    ours.load_adapter(tmp_path)
    ours.double().eval()
    assert_same(logits(ours), logits(theirs), rtol=1e-6, atol=1e-6)  # loaded as float32
    assert ours.hparams["lora"] == LoRAOptions(rank=5, alpha=7, targets=("dense", "dense_h_to_4h")).to_dict()
    assert {n.rpartition(".lora.")[1] for n, p in ours.named_parameters() if p.requires_grad} == {".lora."}


def test_merged_weights_compute_the_same_alone():
    model = adapted()
    expected, before = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    merge_lora(merge_lora(model))
    assert_same(logits(model), expected, **EXACT)
    with pytest.raises(NeoXError, match=r"do not train while they are merged; call unmerge_lora\(\) first"):
        model.train()(IDS)
    with pytest.raises(NeoXError, match="would count twice"):
        save_adapter(model, "unused")
    unmerge_lora(model.eval())
    assert_same(model.state_dict(), before, **EXACT)
    assert_same(logits(model), expected, **EXACT)
    remove_lora(merge_lora(model))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in base(adapted()).named_parameters()]
    assert_same(logits(model), expected, **EXACT)


def test_dropout_is_of_training_only():
    model = adapted(LoRAOptions(rank=3, dropout=0.5))
    assert torch.equal(logits(model), logits(model))
    model.train()
    assert not torch.equal(logits(model), logits(model))


class Merging(Callback):
    """Merges while the model is sharded, and back."""

    @torch.no_grad()
    def on_train_end(self, trainer, module):
        module.eval()
        expected = module(IDS)
        merge_lora(module)
        self.weights = full_state_dict(module.model, rank0_only=False)
        assert_same(module(IDS), expected, **EXACT)
        with pytest.raises(NeoXError, match="a checkpoint of merged adapters would apply them twice"):
            module.on_save_checkpoint({})
        unmerge_lora(module)
        assert_same(module(IDS), expected, **EXACT)


class Gathered(Callback):
    """What is fetched to save the adapters alone, and what is read back."""

    def __init__(self, directory) -> None:
        self.directory = directory

    def on_train_end(self, trainer, module):
        traffic = trainer.strategy.engine.comm.traffic
        traffic.reset()
        module.save_adapter(self.directory)
        chunks = [c for layer in trainer.strategy.engine.layers for c in layer.chunks if c.trainable]
        assert traffic.fetch_bytes == sum(c.size * c.dtype.itemsize for c in chunks)
        trainer.strategy.barrier()
        adapters = [p for name, p in module.named_parameters() if ".lora." in name]
        before = full_state_dict(module, rank0_only=False)
        with gather_parameters(module, writeback=True), torch.no_grad():
            torch._foreach_zero_(adapters)
        module.load_adapter(self.directory)
        assert_same(full_state_dict(module, rank0_only=False), before, rtol=0, atol=0)


@distributed(world=2)
def test_adapters_are_saved_loaded_and_merged_in_shards(tmp_path):
    tuned = module(trainable="lora", lora=OPTIONS)
    merging = Merging()
    callbacks = [SaveAdapter(tmp_path / "last"), Gathered(tmp_path / "again"), merging]
    t = trainer(zero3(), max_steps=3, precision="64-true", callbacks=callbacks)
    t.fit(tuned, loader())
    one, other = ((tmp_path / d / "adapter_model.safetensors").read_bytes() for d in ("last", "again"))
    assert one == other
    weights = full_state_dict(tuned.model, rank0_only=False)
    plain = NeoXModel(tiny()).double().eval()
    plain.load_state_dict({name: value for name, value in weights.items() if ".lora." not in name})
    load_adapter(plain, tmp_path / "last")
    expected = t.predict(tuned, loader(4))
    assert_same(plain.double().state_dict(), weights, **EXACT)
    merge_lora(plain)
    assert_same(plain.state_dict(), merging.weights, **EXACT)
    tuned = Tuned(tiny())
    tuned.model = remove_lora(plain)
    assert_same(trainer(zero3(), precision="64-true").predict(tuned, loader(4)), expected, **EXACT)


def test_adapters_that_do_not_fit_are_named(tmp_path):
    model = adapted()
    with pytest.raises(NeoXError, match="the model has no adapters to save; set model.trainable to lora"):
        save_adapter(base(model), tmp_path)
    with pytest.raises(NeoXError, match=r"adapter '.*': cannot read adapter_config.json"):
        load_adapter(base(model), tmp_path)
    save_adapter(model, tmp_path)
    with pytest.raises(
        NeoXError, match=r"has rank 3 and alpha 12.0, the model's own adapters 3 and 16.0; set model.lo"
    ):
        load_adapter(adapted(LoRAOptions(rank=3)), tmp_path)
    with pytest.raises(
        NeoXError, match=r"does not fit: blocks.2.attention.query_key_value.lora.A is missing; blocks.2"
    ):
        load_adapter(NeoXModel(tiny(n_layers=3)), tmp_path)
    with pytest.raises(NeoXError, match="has adapters already"):
        add_lora(model)
    with pytest.raises(NeoXError, match="attention.query_key_value has an adapter; call to_int8"):
        to_int8(model)
    with pytest.raises(NeoXError, match="weight is int8, in which the adapter would be rounded away"):
        merge_lora(add_lora(to_int8(NeoXModel(tiny()))))
    with pytest.raises(NeoXError, match="SaveAdapter needs a NeoXLightning with model.trainable=lora"):
        SaveAdapter("unused").setup(None, module(), "fit")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": True}))
    with pytest.raises(NeoXError, match=r"has use_dora=True; only False can be loaded here"):
        load_adapter(base(model), tmp_path)
