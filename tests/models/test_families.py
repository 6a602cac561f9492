"""Hugging Face families that each use their weights in a way of their own train as under DDP, every weight compared."""

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from tests.harness import distributed
from tests.harness.oracles import fit
from tests.models.test_outside import NO_DROPOUT, SMALL, Wrapped, loader
from tests.models.test_uses import EXACT
from tests.strategy.runs import same_run, zero3

TEXT = {"vocab_size": 101, "max_position_embeddings": 32, **SMALL}
TWO_SIDED = {
    "d_model": 32,
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 4))},
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "vocab_size": 101,
}


class On(nn.Module):
    """A model that takes something else than token ids, made from them."""

    def __init__(self, net: nn.Module, inputs: Callable[[Tensor], dict]) -> None:
        super().__init__()
        self.net, self.inputs = net, inputs

    def forward(self, input_ids: Tensor, labels: Tensor):
        return self.net(**self.inputs(input_ids))


def albert():
    """One block, called three times (E1)."""
    return hf.AlbertForMaskedLM(hf.AlbertConfig(embedding_size=16, **TEXT, **NO_DROPOUT))


def bart():
    """An embedding and a readout tied over encoder, decoder and head, with a bias that is a buffer."""
    return hf.BartForConditionalGeneration(hf.BartConfig(max_position_embeddings=32, **TWO_SIDED))


def mixtral():
    """Experts in parameters of three dimensions, of which each token uses two; ranks route differently."""
    options = {"num_local_experts": 4, "num_key_value_heads": 2, "output_router_logits": True}
    return hf.MixtralForCausalLM(hf.MixtralConfig(experts_implementation="eager", **options, **TEXT))


def mamba():
    """Parameters that no submodule owns, in a block inside a block."""
    return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2, state_size=4))


def deberta():
    """An embedding of positions that every block reads, normalised anew in each step."""
    options = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
    return hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**options, **TEXT, **NO_DROPOUT))


def clip():
    """Two towers and a scalar."""
    text, image = {**TEXT, "eos_token_id": 100}, {"image_size": 16, "patch_size": 4, **SMALL}
    net = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=image, projection_dim=16))

    def inputs(ids: Tensor) -> dict:
        images = torch.sin(ids[:, :1, None, None] + torch.arange(3 * 256).view(3, 16, 16)).double()
        return {"input_ids": ids, "pixel_values": images, "return_loss": True}

    return On(net, inputs)


def whisper():
    """Convolutions first; positions of the encoder that do not train."""
    lengths = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
    net = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**lengths, **tokens, **TWO_SIDED))

    def inputs(ids: Tensor) -> dict:
        sound = torch.sin(ids.double().repeat(1, 2)[:, None, :] * torch.arange(1, 9)[None, :, None])
        return {"input_features": sound, "labels": ids}

    return On(net, inputs)


def wav2vec2():
    """A convolution whose weight is computed from two parameters (weight norm), and a feature that is not used."""
    names = ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout")
    convolutions = {"conv_dim": (16, 16), "conv_kernel": (5, 3), "conv_stride": (3, 2), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    options = {**dict.fromkeys(names, 0.0), "layerdrop": 0.0, "apply_spec_augment": False, "vocab_size": 32}
    net = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**convolutions, **positions, **options, **SMALL))
    net.wav2vec2.masked_spec_embed.requires_grad_(False)

    def inputs(ids: Tensor) -> dict:
        return {"input_values": torch.sin(ids.double().repeat(1, 12)), "labels": ids[:, :4] % 31 + 1}

    return On(net, inputs)


BLOCKS = {
    albert: {"AlbertLayer"},
    bart: {"BartEncoderLayer", "BartDecoderLayer"},
    mixtral: {"MixtralDecoderLayer"},
    mamba: {"MambaBlock", "MambaMixer"},
    deberta: {"DebertaV2Layer"},
    clip: {"CLIPEncoderLayer", "CLIPTextEmbeddings", "CLIPVisionEmbeddings"},
    whisper: {"WhisperEncoderLayer", "WhisperDecoderLayer"},
    wav2vec2: {"Wav2Vec2EncoderLayer", "Wav2Vec2PositionalConvEmbedding"},
}


@pytest.mark.parametrize("make", BLOCKS, ids=lambda make: make.__name__)
@distributed(world=2)
def test_every_family_trains_like_ddp(make):
    classes = {type(m) for m in make().modules() if type(m).__name__ in BLOCKS[make]}
    assert len(classes) == len(BLOCKS[make])
    ours, ddp = (fit(s, lambda: Wrapped(make), loader(False), steps=4) for s in (zero3(*classes), "ddp"))
    same_run(ours, ddp, **EXACT)
