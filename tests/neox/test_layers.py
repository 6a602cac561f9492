"""The layers: names and arguments of the seed, numerics of Hugging Face's GPTNeoX, initial values."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from neox_lit import (
    PRESETS,
    AttentionLayer,
    Embedding,
    FFNLayer,
    FinalNorm,
    KVCache,
    NeoXConfig,
    NeoXError,
    NeoXModel,
    ReadoutLayer,
    RoPE,
    TransformerLayer,
    document_mask,
)
from neox_lit.rope import rotary_tables
from tests.neox.helpers import random_model, tiny, to_hf


@pytest.mark.parametrize("parallel_residual", [True, False])
@pytest.mark.parametrize("gelu", ["tanh", "exact"])
@pytest.mark.parametrize("tied_readout", [False, True])
def test_n2_logits_equal_hugging_face(parallel_residual, gelu, tied_readout):
    config = tiny(parallel_residual=parallel_residual, gelu=gelu, tied_readout=tied_readout, n_layers=3)
    check_against_hf(random_model(config))


@pytest.mark.parametrize("name", PRESETS)
def test_n2_every_preset_scaled_down(name):
    """The head size, which decides the rotary dims and the scale, stays that of the preset."""
    full = NeoXConfig.preset(name)
    config = NeoXConfig.preset(name, n_vocab=128, n_layers=2, n_heads=2, n_hidden=2 * full.d_k)
    assert config.d_rope == full.d_rope
    check_against_hf(random_model(config))


@torch.no_grad()
def check_against_hf(model: NeoXModel) -> None:
    ids = torch.randint(model.config.n_vocab, (2, 48), generator=torch.Generator().manual_seed(1))
    hf = to_hf(model)
    ours, theirs = model(ids), hf(ids).logits
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)

    model_16, hf_16 = copy.deepcopy(model).bfloat16(), hf.bfloat16()
    error, hf_error = (model_16(ids) - ours).abs().max(), (hf_16(ids).logits - ours).abs().max()
    assert error < 1.5 * hf_error


@torch.no_grad()
def test_hugging_face_gradients_are_ours():
    model = random_model(tiny(gelu="exact"))
    hf = to_hf(model)
    ids = torch.randint(128, (2, 16))
    with torch.enable_grad():
        model(ids).logsumexp(-1).sum().backward()
        hf(ids).logits.logsumexp(-1).sum().backward()
    ours = model.blocks[0].attention.query_key_value.weight.grad
    theirs = hf.gpt_neox.layers[0].attention.query_key_value.weight.grad
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_seed_constructors():
    ids = torch.randint(64, (2, 5))
    x = Embedding(64, 32)(ids)
    assert x.shape == (2, 5, 32)
    attention = AttentionLayer(32, 2, rope_percentage=0.5, mask_fill=-10_000.0, is_flash_attention=False)
    assert attention(x).shape == x.shape
    assert FFNLayer(32).dense_h_to_4h.out_features == 128
    assert FFNLayer(32, 48).dense_h_to_4h.out_features == 48
    assert TransformerLayer(32, 2, is_flash_attention=True)(x).shape == x.shape
    assert FinalNorm(32)(x).shape == x.shape
    assert ReadoutLayer(32, 64)(x).shape == (2, 5, 64)
    assert RoPE(8, base=10_000.0)(x.view(2, 5, 2, 16), offset=3).shape == (2, 5, 2, 16)


def test_state_dict_keys_are_those_of_checkpoint_files():
    assert list(Embedding(8, 8).state_dict()) == ["word_embeddings.weight"]
    assert list(FinalNorm(8).state_dict()) == ["norm.weight", "norm.bias"]
    assert list(ReadoutLayer(8, 8).state_dict()) == ["final_linear.weight"]
    linears = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    names = ("input_layernorm", "post_attention_layernorm", *linears)
    assert sorted(TransformerLayer(16, 2).state_dict()) == sorted(f"{n}.{p}" for n in names for p in ("weight", "bias"))


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_k", [8, 24, 96])
@torch.no_grad()
def test_written_out_attention_equals_the_fused_one(d_k):
    torch.manual_seed(0)
    plain = AttentionLayer(2 * d_k, 2, 1.0, init_std=0.3)
    fused = copy.deepcopy(plain)
    fused.is_flash_attention = True
    x = torch.randn(2, 9, 2 * d_k)
    torch.testing.assert_close(plain(x), fused(x))
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2]] * 2)
    torch.testing.assert_close(plain(x, mask=document_mask(documents)), fused(x, mask=document_mask(documents)))
    caches = KVCache(2, 9)
    for part in (x[:, :4], x[:, 4:8], x[:, 8:]):  # a chunk of several tokens after others needs a shifted triangle
        a, b = plain(part, caches.layers[0]), fused(part, caches.layers[1])
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(a, plain(x)[:, 8:])


@torch.no_grad()
def test_mask_fill_is_the_score_of_a_forbidden_pair():
    attention = AttentionLayer(16, 2, mask_fill=0.0)
    nn.init.zeros_(attention.query_key_value.weight)  # all scores 0: with fill 0 every token sees the mean of all
    nn.init.normal_(attention.query_key_value.weight.view(2, 3, 8, 16)[:, 2])
    out = attention(torch.randn(1, 5, 16))
    torch.testing.assert_close(out, out[:, :1].expand_as(out))


@pytest.mark.parametrize("is_flash_attention", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@torch.no_grad()
def test_n7_fp16_with_large_scores_stays_finite(is_flash_attention, autocast):
    torch.manual_seed(0)
    attention = AttentionLayer(128, 2, is_flash_attention=is_flash_attention, init_std=2.0)
    x = 5 * torch.randn(1, 16, 128)
    assert (attention.query_key_value(x).view(1, 16, 2, 3, 64)[..., :2, :] ** 2).sum(-1).max() > 65_504  # of fp16
    expected = attention(x)
    if autocast:
        with torch.autocast("cpu", torch.float16):
            out = attention(x)
    else:
        out = attention.half()(x.half())
    assert out.isfinite().all()
    assert (out - expected).abs().mean() < 0.05 * expected.abs().mean()


@torch.no_grad()
def test_n10_documents_do_not_see_each_other():
    model = random_model(tiny())
    a, b = torch.randint(128, (1, 7)), torch.randint(128, (1, 9))
    documents = torch.tensor([[0] * 7 + [1] * 9])
    packed = model(torch.cat((a, b), dim=1), mask=document_mask(documents))
    torch.testing.assert_close(packed, torch.cat((model(a), model(b)), dim=1), atol=1e-5, rtol=1e-5)


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model = NeoXModel(tiny(dropout=0.5))
    ids = torch.randint(128, (1, 8))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


# -- rotary embedding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_n7_low_precision_tables_are_the_fp32_ones_cast(dtype):
    exact = rotary_tables(2_048, 24)
    positions = torch.arange(2_048, dtype=torch.float64)
    angles = torch.outer(positions, 10_000.0 ** (-torch.arange(0, 24, 2, dtype=torch.float64) / 24))
    torch.testing.assert_close(exact.cos[:, 0, :12].double(), angles.cos(), atol=2e-4, rtol=0)
    for low, high in zip(rotary_tables(2_048, 24, dtype=dtype), exact, strict=True):
        assert torch.equal(low, high.to(dtype))
    model = random_model(tiny()).to(dtype)
    model(torch.zeros(1, 4, dtype=torch.int64))
    held = model.blocks[0].attention.rope.tables(4, torch.zeros(0, dtype=dtype))
    assert torch.equal(held.cos, rotary_tables(64, 4).cos.to(dtype))


def test_rotary_attention_depends_on_distance_only():
    rope = RoPE(16)
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    near = (rope(q, offset=9) * rope(k, offset=4)).sum()
    far = (rope(q, offset=1_009) * rope(k, offset=1_004)).sum()
    torch.testing.assert_close(near, far, atol=1e-3, rtol=1e-3)


def test_tables_are_built_once_grow_and_are_no_state(monkeypatch):
    calls = []
    monkeypatch.setattr("neox_lit.rope.rotary_tables", lambda *a, **k: calls.append(a) or rotary_tables(*a, **k))
    rope = RoPE(4, max_seq_len=8)
    x = torch.randn(1, 6, 1, 8)
    for offset in (0, 1, 2):
        rope(x, offset)
    assert len(calls) == 1
    grown = rope(x, offset=100)
    assert len(calls) == 2
    assert torch.equal(grown, RoPE(4)(x, offset=100))
    assert not rope.state_dict()
    assert not list(rope.buffers())


def test_tables_made_in_inference_mode_serve_training():
    model = NeoXModel(tiny())
    ids = torch.randint(128, (1, 8))
    with torch.inference_mode():
        model(ids)
    model(ids).sum().backward()


# -- initial values ----------------------------------------------------------------------------------------------------


def test_initial_values_are_small_init_and_wang_init():
    torch.manual_seed(0)
    config = tiny(n_hidden=256, n_layers=4)
    model = NeoXModel(config)
    small, wang = math.sqrt(2 / (5 * 256)), 2 / 4 / math.sqrt(256)
    expected = {"query_key_value": small, "dense_h_to_4h": small, "attention.dense.": wang, "dense_4h_to_h": wang}
    expected |= {"word_embeddings": small, "final_linear": small}
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            std = next(value for key, value in expected.items() if key in name)
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_from_the_meta_device_is_complete(tied):
    config = tiny(tied_readout=tied)
    torch.manual_seed(0)
    reference = NeoXModel(config)
    with torch.device("meta"):
        model = NeoXModel(config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert (model.readout.final_linear.weight is model.embedding.word_embeddings.weight) is tied
    ids = torch.randint(128, (1, 8))
    assert torch.equal(model(ids), reference(ids))


def test_tied_readout_is_one_parameter():
    model = NeoXModel(tiny(tied_readout=True)).double()
    assert len(list(model.parameters())) == len(list(NeoXModel(tiny()).parameters())) - 1
    assert "readout.final_linear.weight" in model.state_dict()


def test_too_many_tokens():
    model = NeoXModel(tiny(max_seq_len=8))
    with pytest.raises(NeoXError, match="9 tokens are more than the model's max_seq_len=8"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def test_heads_must_divide():
    with pytest.raises(NeoXError, match="n_heads=3 does not divide n_hidden=32"):
        AttentionLayer(32, 3)
