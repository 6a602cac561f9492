"""Configurations in the files of others: every published yml, and Hugging Face as the oracle."""

import json

import pytest
import torch
import yaml

from neox_lit.config import PRESETS, NeoXConfig
from neox_lit.errors import NeoXError
from neox_lit.model import NeoXModel


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_the_original_ymls_say(name, real_data):
    file = name.removeprefix("pythia-").removeprefix("gpt-neox-").replace(".", "-").upper() + ".yml"
    assert NeoXConfig.from_yml(real_data / "neox-configs" / file) == NeoXConfig.preset(name)


@pytest.mark.parametrize("name", PRESETS)
def test_a_yml_reads_back(name, tmp_path):
    config = NeoXConfig.preset(name, dropout=0.1, rotary_base=5_000.0, tied_readout=True, d_ff=96)
    yml = config.to_yml(model_parallel_size=2)
    dashed = {key.replace("_", "-"): value for key, value in list(yml.items())[:8]}
    (tmp_path / "a.yml").write_text(yaml.safe_dump(dashed))
    (tmp_path / "b.yml").write_text(json.dumps(dict(list(yml.items())[8:])))
    assert NeoXConfig.from_yml(tmp_path / "a.yml", tmp_path / "b.yml", n_tokens=config.n_vocab - 5) == config


SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pos_emb": "rotary",
    "rotary_pct": 0.5,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pos_emb": "alibi"}, "pos_emb='alibi' is not supported; it must be 'rotary'"),
        ({"pos_emb": None}, "pos_emb=None"),
        ({"norm": "rmsnorm"}, "norm='rmsnorm'"),
        ({"gpt_j_tied": True}, "gpt_j_tied=True"),
        ({"attention-config": [[["local"], 2]]}, "attention_config="),
        ({"hidden-dropout": 0.1}, "hidden_dropout=0.1 and attention_dropout=0.0 differ"),
        ({"init_method": "xavier_normal"}, "init_method='xavier_normal'"),
        ({"num_layers": "many"}, "num_layers='many' is no positive integer"),
    ],
)
def test_ymls_of_other_models_are_refused_by_key_and_value(change, message, tmp_path):
    path = tmp_path / "model.yml"
    path.write_text(yaml.safe_dump({**SMALL, **change}))
    with pytest.raises(NeoXError, match=message):
        NeoXConfig.from_yml(path)


def test_ymls_that_miss_contradict_or_are_none(tmp_path):
    one, two = tmp_path / "one.yml", tmp_path / "two.yml"
    one.write_text(yaml.safe_dump(SMALL))
    two.write_text("num-layers: 3")
    with pytest.raises(NeoXError, match=r"two.yml: num_layers=3 contradicts an earlier file, which has 2"):
        NeoXConfig.from_yml(one, two)
    with pytest.raises(NeoXError, match=r"two.yml: pos_emb='learned' is not supported"):
        NeoXConfig.from_yml(two)
    with pytest.raises(NeoXError, match=r"none.yml cannot be read as yml"):
        NeoXConfig.from_yml(tmp_path / "none.yml")
    two.write_text("just words")
    with pytest.raises(NeoXError, match=r"two.yml is no yml of GPT-NeoX"):
        NeoXConfig.from_yml(two)
    one.write_text(yaml.safe_dump({k: v for k, v in SMALL.items() if k != "hidden_size"}))
    with pytest.raises(NeoXError, match="hidden_size is missing"):
        NeoXConfig.from_yml(one)


@pytest.mark.parametrize("gelu", ["tanh", "exact"])
@pytest.mark.parametrize("parallel", [True, False])
def test_hugging_face_builds_the_same_model_from_our_config(gelu, parallel, tmp_path):
    from transformers import AutoConfig, GPTNeoXForCausalLM

    config = NeoXConfig(
        n_vocab=96, n_hidden=32, n_layers=2, n_heads=2, rotary_pct=0.5, rotary_base=500.0, max_seq_len=64,
        gelu=gelu, parallel_residual=parallel, layer_norm_eps=1e-3, d_ff=80,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    theirs = GPTNeoXForCausalLM(AutoConfig.from_pretrained(tmp_path)).eval()
    ours = NeoXModel(config).eval()
    names = {
        "embedding.word_embeddings.weight": "gpt_neox.embed_in.weight",
        "final_norm.norm.weight": "gpt_neox.final_layer_norm.weight",
    }
    state = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, param in ours.named_parameters():
            other = names.get(name) or name.replace("blocks.", "gpt_neox.layers.").replace(
                "final_norm.norm.bias", "gpt_neox.final_layer_norm.bias"
            ).replace("readout.final_linear.weight", "lm_head.weight")
            param.copy_(state[other])
        ids = torch.arange(40).view(2, 20)
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=2e-5, atol=2e-5)

    again = NeoXConfig.from_hf(tmp_path)
    assert again == NeoXConfig.from_hf(theirs.config.to_dict())  # by its new names alone
    expected = {**config.to_dict(), "init_std": config.weight_std, "output_init_std": config.weight_std}
    assert again.to_dict() == pytest.approx(expected)


def test_a_config_with_the_old_names():
    old = {"model_type": "gpt_neox", "rotary_pct": 1.0, "rotary_emb_base": 123, "hidden_act": "gelu_fast"}
    config = NeoXConfig.from_hf(old, n_layers=3)
    assert (config.rotary_pct, config.rotary_base, config.gelu, config.n_layers) == (1.0, 123.0, "tanh", 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not 'gpt_neox'"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; known are gelu"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "type 'linear' are not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "type 'yarn' are not supported"),
        ({"attention_bias": False}, "attention_bias=False"),
        ({"hidden_dropout": 0.1}, "hidden_dropout=0.1 and attention_dropout=0.0 differ"),
    ],
)
def test_configs_of_other_models_are_refused_by_key_and_value(change, message):
    with pytest.raises(NeoXError, match=message):
        NeoXConfig.from_hf({"model_type": "gpt_neox", **change})


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(NeoXError, match=r"config.json cannot be read"):
        NeoXConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(NeoXError, match="model_type='list'"):
        NeoXConfig.from_hf(tmp_path)
