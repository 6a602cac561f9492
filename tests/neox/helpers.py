"""Small models, and weights from here to Hugging Face's GPTNeoX."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from neox_lit import NeoXConfig, NeoXModel


def tiny(**fields: Any) -> NeoXConfig:
    """A config that builds and runs in milliseconds."""
    small = {"n_vocab": 128, "n_hidden": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64, "rotary_pct": 0.25}
    return NeoXConfig(**{**small, **fields})


def random_model(config: NeoXConfig, seed: int = 0) -> NeoXModel:
    """Weights far from their initial values (biases and norms too), so that every term shows in the logits."""
    torch.manual_seed(seed)
    model = NeoXModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                nn.init.normal_(parameter, std=0.1 if parameter.ndim == 1 else parameter.shape[1] ** -0.5)
    return model


def to_hf(model: NeoXModel, **hf_fields: Any) -> Any:
    """A `GPTNeoXForCausalLM` with the same weights."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    c = model.config
    config = GPTNeoXConfig(
        vocab_size=c.n_vocab,
        hidden_size=c.n_hidden,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        intermediate_size=c.d_ff or 4 * c.n_hidden,
        max_position_embeddings=c.max_seq_len,
        rotary_pct=c.rotary_pct,
        rotary_emb_base=c.rotary_base,
        layer_norm_eps=c.layer_norm_eps,
        hidden_act={"exact": "gelu", "tanh": "gelu_fast"}[c.gelu],
        use_parallel_residual=c.parallel_residual,
        tie_word_embeddings=c.tied_readout,
        attn_implementation="eager",
        **hf_fields,
    )
    hf = GPTNeoXForCausalLM(config).eval()
    missing, unexpected = hf.load_state_dict(hf_state(model), strict=False)
    assert not unexpected
    assert not [name for name in missing if "rotary" not in name]
    return hf


def hf_state(model: NeoXModel) -> dict[str, Tensor]:
    """Our names to those that GPTNeoXForCausalLM has in memory."""
    prefixes = {
        "embedding.word_embeddings.": "gpt_neox.embed_in.",
        "blocks.": "gpt_neox.layers.",
        "final_norm.norm.": "gpt_neox.final_layer_norm.",
        "readout.final_linear.": "lm_head.",
    }
    state = {}
    for name, tensor in model.state_dict().items():
        old, new = next((old, new) for old, new in prefixes.items() if name.startswith(old))
        state[new + name.removeprefix(old)] = tensor
    return state
