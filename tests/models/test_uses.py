"""What users do with Hugging Face models besides training them: export, generate, checkpoint, leave parts unused."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from transformers import AutoModelForCausalLM, BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertLayer, BertPooler

from lightning_zero3 import Zero3Error, full_state_dict, gather_parameters
from tests.harness import assert_same, distributed
from tests.harness.oracles import fit
from tests.models.test_outside import MODELS, NO_DROPOUT, SMALL, Wrapped, gpt_neox, llama, loader, t5
from tests.strategy.runs import same_run, trainer, zero3

EXACT = {"rtol": 1e-9, "atol": 1e-10}  # of float64, after sums in another order


def blocks(net) -> set[type]:
    """The repeated blocks that Hugging Face names, as classes."""
    names = set(net._no_split_modules or ())
    return {type(m) for m in net.modules() if type(m).__name__ in names}


def sharded(make):
    return zero3(*blocks(make()))


class Scored(Wrapped):
    """Keeps the logits of the first batch that it predicts."""

    def predict_step(self, batch, batch_idx):
        return self.net(**batch).logits


@pytest.mark.parametrize("name", MODELS)
@distributed(world=2)
def test_what_is_saved_is_the_plain_model(tmp_path, name):
    """L8: keys of the checkpoint, and a plain model with these weights computes what the sharded one did."""
    make, data = MODELS[name], loader(name == "vit")
    module, t = Scored(make), trainer(sharded(make), max_steps=3, limit_predict_batches=1)
    t.fit(module, data)
    t.save_checkpoint(tmp_path / "model.ckpt")
    predicted = t.predict(module, data)[0]
    with gather_parameters(module.net):
        if dist.get_rank() == 0:
            module.net.save_pretrained(tmp_path / "hugging_face")
    dist.barrier()

    plain = Scored(make)
    state = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    assert list(state) == list(plain.state_dict())
    batch = next(iter(data))
    start = plain.eval().predict_step(batch, 0)
    plain.load_state_dict(state)
    with torch.no_grad():
        assert_same(predicted, plain.eval().predict_step(batch, 0), **EXACT)
        assert (predicted - start).abs().max() > 1e-4  # it did train
        exported = type(plain.net).from_pretrained(tmp_path / "hugging_face", dtype=torch.float64)
        assert_same(predicted, exported.eval()(**batch).logits, **EXACT)


@distributed(world=2)
def test_exporting_shards_without_gathering_is_an_error(tmp_path):
    module = Wrapped(gpt_neox)
    trainer(sharded(gpt_neox), max_steps=1).fit(module, loader(False))
    with pytest.raises(Zero3Error, match="full_state_dict"):
        module.net.save_pretrained(tmp_path)
    state = full_state_dict(module.net)
    if dist.get_rank() == 0:  # and the way that needs no full model on the other ranks
        module.net.save_pretrained(tmp_path, state_dict=state)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).state_dict()
        assert_same(exported, state, rtol=0, atol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("make", [gpt_neox, llama, t5], ids=lambda make: make.__name__)
@distributed(world=2)
def test_either_attention_trains_like_ddp(make, attention):
    def module():
        made = Wrapped(make)
        made.net.set_attn_implementation(attention)
        assert made.net.config._attn_implementation == attention
        return made

    same_run(*(fit(s, module, loader(False), steps=3) for s in (sharded(make), "ddp")), **EXACT)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"gpt_neox"}))
@distributed(world=2)
def test_checkpointed_blocks_train_like_ddp(name, reentrant):
    """E8."""

    def checkpointed():
        module = Wrapped(MODELS[name])
        module.net.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert any(getattr(m, "gradient_checkpointing", False) for m in module.net.modules())
        return module

    data = loader(name == "vit")
    ours = fit(sharded(MODELS[name]), checkpointed, data, steps=3)
    same_run(ours, fit("ddp", lambda: Wrapped(MODELS[name]), data, steps=3), **EXACT)


# -- a part that is never used ----------------------------------------------------------------------------------------

DECAY, RATE, STEPS = 0.1, 1e-2, 4


class Pooled(LightningModule):
    """BERT with a pooler whose output nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = BertModel(BertConfig(vocab_size=101, max_position_embeddings=32, **SMALL, **NO_DROPOUT)).double()

    def training_step(self, batch, batch_idx):
        return self.net(batch["input_ids"]).last_hidden_state[:, :, :3].pow(4).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=RATE, weight_decay=DECAY)


@pytest.mark.parametrize("of_its_own", [True, False], ids=["own layer", "with the root"])
@distributed(world=2)
def test_an_unused_pooler(of_its_own):
    """E6: it has no gradient, whether or not its layer has others that are used, and AdamW leaves it alone."""
    strategy = zero3(BertLayer, BertPooler) if of_its_own else zero3(BertLayer)
    ours = fit(strategy, Pooled, loader(False), steps=STEPS)
    ddp = fit("ddp_find_unused_parameters_true", Pooled, loader(False), steps=STEPS)
    start = Pooled().state_dict()
    pooler = [name for name in start if "pooler" in name]
    assert len(pooler) == 2
    for name in pooler:
        assert torch.equal(ours.weights[name], start[name])
        assert name not in ours.optimizer_state
    same_run(ours, ddp, **EXACT)


# -- generation -------------------------------------------------------------------------------------------------------


def left_padded():
    """Two prompts of different lengths, their mask, and what marks the padding."""
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :3] = 0
    return {"attention_mask": mask, "pad_token_id": 0}


WAYS = {
    "greedy": {"do_sample": False},
    "without a cache": {"do_sample": False, "use_cache": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20},
    "padded": {"do_sample": False, **left_padded()},
}


class Writing(Wrapped):
    """Generates in validation, with what it has learned so far."""

    def __init__(self, make, **options) -> None:
        super().__init__(make)
        self.options, self.written = options, []

    def validation_step(self, batch, batch_idx):
        torch.manual_seed(dist.get_rank())
        self.written.append(self.net.generate(batch["input_ids"][:2, :6], **{"max_new_tokens": 5, **self.options}))


def written(strategy, make, **options):
    module = Writing(make, **options)
    t = trainer(strategy, max_steps=6, val_check_interval=2, limit_val_batches=1, num_sanity_val_steps=1)
    t.fit(module, loader(False), loader(False))
    return module.written


@pytest.mark.parametrize("way", WAYS)
@distributed(world=2)
def test_texts_written_during_training_are_those_under_ddp(way):
    ours, ddp = (written(s, gpt_neox, **WAYS[way]) for s in (sharded(gpt_neox), "ddp"))
    assert len(ours) == 4
    assert_same(ours, ddp, rtol=0, atol=0)


@distributed(world=2)
def test_an_encoder_and_decoder_write_too():
    ours, ddp = (written(s, t5, do_sample=False) for s in (sharded(t5), "ddp"))
    assert_same(ours, ddp, rtol=0, atol=0)


def lengths() -> list[int]:
    """As many new tokens as the rank says."""
    return [3 + 4 * rank for rank in range(dist.get_world_size())]


@distributed(world=3)
def test_texts_of_different_lengths_are_written_in_step_when_asked_to():
    """Ranks that are done go on computing for those that are not."""
    texts = []
    for strategy in (sharded(gpt_neox), "ddp"):
        module = Writing(gpt_neox, do_sample=False, max_new_tokens=lengths()[dist.get_rank()], synced_gpus=True)
        trainer(strategy, limit_val_batches=2).validate(module, loader(False), verbose=False)
        texts.append(module.written)
    assert_same(*texts, rtol=0, atol=0)
    assert all(text.shape == (2, 6 + lengths()[dist.get_rank()]) for text in texts[0])


@distributed(world=2, timeout=20)
def test_texts_of_different_lengths_are_otherwise_an_error_that_says_how():
    module = Writing(gpt_neox, do_sample=False, max_new_tokens=lengths()[dist.get_rank()])
    with pytest.raises(Zero3Error, match="different ways.*synced_gpus=True"):
        trainer(sharded(gpt_neox), limit_val_batches=2).validate(module, loader(False), verbose=False)
