"""Models from outside: small random ones of Hugging Face train as under DDP, every weight compared; also with LoRA."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_zero3 import Zero3Strategy
from tests.harness import distributed
from tests.harness.models import AdamW
from tests.harness.oracles import fit
from tests.strategy.runs import same_run

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt_neox():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=101, max_position_embeddings=32, use_cache=False, **SMALL))


def gpt2():  # tied embeddings, Conv1D
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=101, n_positions=32, n_embd=32, n_layer=3, n_head=4, **dropout))


def llama():  # grouped keys and values, RMSNorm
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=101, num_key_value_heads=2, max_position_embeddings=32, **SMALL))


def t5():  # E12: one embedding, used three times; encoder and decoder
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 101}
    return T5ForConditionalGeneration(T5Config(dropout_rate=0.0, decoder_start_token_id=0, **sizes))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=101, max_position_embeddings=32, **SMALL, **NO_DROPOUT))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=5, **SMALL, **NO_DROPOUT))


MODELS = {f.__name__: f for f in (gpt_neox, gpt2, llama, t5, bert, vit)}


class Samples(Dataset):
    """Token ids, or images and classes, made from the index."""

    def __init__(self, images: bool, count: int = 64) -> None:
        self.images, self.count = images, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        made = torch.Generator().manual_seed(index)
        if self.images:
            image = torch.randn(3, 16, 16, generator=made, dtype=torch.float64)
            return {"pixel_values": image, "labels": torch.randint(5, (), generator=made)}
        ids = torch.randint(1, 101, (12,), generator=made)
        return {"input_ids": ids, "labels": ids}


class Wrapped(LightningModule):
    """Any Hugging Face model with a loss, in float64, so that only a real difference shows."""

    def __init__(self, make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = make().double()

    def training_step(self, batch, batch_idx):
        return self.net(**batch).loss

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.requires_grad and p.ndim >= 2]
        other = [p for p in self.parameters() if p.requires_grad and p.ndim < 2]
        return AdamW([{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=1e-3)


def loader(images: bool) -> DataLoader:
    data = Samples(images)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))


@pytest.mark.parametrize("name", MODELS)
@distributed(world=[2, 3])
def test_hugging_face_models_train_like_ddp(world, name):
    """Cut by "auto" as far as it cuts models this small: by `_no_split_modules` and repeated blocks."""
    import lightning_zero3.wrap as wrap

    wrap.MIN_NUMEL, before = 1000, wrap.MIN_NUMEL
    try:
        runs = [fit(s, lambda: Wrapped(MODELS[name]), loader(name == "vit"), steps=5) for s in (Zero3Strategy(), "ddp")]
    finally:
        wrap.MIN_NUMEL = before
    layers = runs[0].trainer.strategy.engine.layers
    assert len(layers) > 3
    same_run(*runs, rtol=1e-9, atol=1e-10)
    assert list(runs[0].weights) == list(runs[1].weights)


@pytest.mark.parametrize("reentrant", [True, False])
@distributed(world=2)
def test_gradient_checkpointing_of_hugging_face(reentrant):
    def make(checkpoint):
        module = Wrapped(gpt_neox)
        if checkpoint:
            module.net.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return module

    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

    strategy = Zero3Strategy(auto_wrap_policy={GPTNeoXLayer})
    runs = [
        fit(strategy, lambda: make(True), loader(False), steps=4),
        fit("ddp", lambda: make(False), loader(False), steps=4),
    ]
    same_run(*runs, rtol=1e-9, atol=1e-10)


class Generating(Wrapped):
    def validation_step(self, batch, batch_idx):
        self.made = self.net.generate(batch["input_ids"][:2, :4], max_new_tokens=6, do_sample=False, use_cache=True)


@distributed(world=2)
def test_generate_on_shards_is_generate():
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

    from tests.strategy.runs import trainer

    made = []
    for strategy in (Zero3Strategy(auto_wrap_policy={GPTNeoXLayer}), "ddp"):
        module = Generating(gpt_neox)
        trainer(strategy, limit_val_batches=1).validate(module, loader(False), verbose=False)
        made.append(module.made)
    assert torch.equal(*made)


class Pretrained(LightningModule):
    """Reads its net from a directory when it is configured (L11)."""

    def __init__(self, path) -> None:
        super().__init__()
        self.path, self.configured = path, 0

    def configure_model(self):
        self.configured += 1
        if not hasattr(self, "net"):
            from transformers import GPTNeoXForCausalLM

            self.net = GPTNeoXForCausalLM.from_pretrained(self.path, dtype=torch.float64)

    training_step, configure_optimizers = Wrapped.training_step, Wrapped.configure_optimizers

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(**batch).loss, sync_dist=True)


@distributed(world=2)
def test_from_pretrained_inside_configure_model(tmp_path):
    from tests.strategy.runs import trainer, weights_of

    if dist.get_rank() == 0:
        torch.manual_seed(0)
        gpt_neox().double().save_pretrained(tmp_path)
    dist.barrier()
    weights = []
    for strategy in (Zero3Strategy(), "ddp"):
        module = Pretrained(tmp_path)
        t = trainer(strategy, max_steps=3)
        t.fit(module, loader(False))
        t.validate(module, loader(False), verbose=False)
        assert module.configured == 2
        weights.append(weights_of(module))
    from tests.harness import assert_same

    assert_same(*weights, rtol=1e-9, atol=1e-10)


# -- PEFT -------------------------------------------------------------------------------------------------------------


def lora():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        gpt_neox(), peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["query_key_value"])
    )


@distributed(world=2)
def test_lora_trains_like_ddp_and_costs_what_trains():
    pytest.importorskip("peft")
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

    strategy = Zero3Strategy(auto_wrap_policy={GPTNeoXLayer})
    ours = fit(strategy, lambda: Wrapped(lora), loader(False), steps=5)
    same_run(ours, fit("ddp", lambda: Wrapped(lora), loader(False), steps=5), rtol=1e-9, atol=1e-10)
    start = Wrapped(lora)
    frozen = {n: p for n, p in start.named_parameters() if not p.requires_grad}
    assert all(torch.equal(ours.weights[n], p) for n, p in frozen.items())
    assert set(ours.optimizer_state) == {n for n, p in start.named_parameters() if p.requires_grad}

    engine = strategy.engine
    chunks = [c for layer in engine.layers for c in layer.trainable]
    trainable = sum(p.numel() for p in start.parameters() if p.requires_grad)
    padding = sum(c.total for c in chunks) - trainable
    assert 0 <= padding < 64 * sum(len(c.params) for c in chunks)
    report = strategy.report()
    assert report.gradients[0] == sum(c.size for c in chunks) * 8  # float64
    assert report.optimizer[0] <= 2 * report.gradients[0] + 64 * len(chunks)
    assert engine.comm.traffic.reduce_elements == 5 * sum(c.total for c in chunks) // 2
