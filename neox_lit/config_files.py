"""`NeoXConfig` from and to the files of others: GPT-NeoX's ymls, and Hugging Face's config.json.

What such a file says about the model is translated, or refused by name if these layers cannot do it; what it says about
training, parallelism and data is left alone.

Sources: GPT-NeoX `megatron/neox_arguments/neox_args.py` (keys and their defaults), `megatron/model/init_functions.py`;
transformers' GPTNeoXConfig, whose rotary settings were `rotary_pct` and `rotary_emb_base` before version 5.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from neox_lit.errors import NeoXError

__all__ = ["hf_fields", "hf_of", "yml_fields", "yml_of"]

# Keys of a yml that decide what the layers compute, with GPT-NeoX's defaults, and the values that are understood.
_YML_FIXED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pos_emb": ("learned", ("rotary",)),
    "norm": ("layernorm", ("layernorm",)),
    "activation": ("gelu", ("gelu",)),
    "mlp_type": ("regular", ("regular",)),
    "gpt_j_tied": (False, (False,)),
    "use_bias_in_norms": (True, (True,)),
    "use_bias_in_attn_linear": (True, (True,)),
    "use_bias_in_mlp": (True, (True,)),
    "apply_query_key_layer_scaling": (False, (False,)),
    "num_kv_heads": (None, (None,)),
    "moe_num_experts": (1, (1,)),
}

# Hidden activations of Hugging Face, by what they compute.
_HF_GELU = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
}


def yml_fields(*paths: str | Path, n_tokens: int) -> dict[str, Any]:
    """Fields of NeoXConfig that GPT-NeoX's ymls give, later files adding to earlier ones.

    Args:
        paths: ymls; keys with `-` or `_`.
        n_tokens: ids of the tokenizer, which ymls do not tell; padded as `make_vocab_size_divisible_by` and
            `model_parallel_size` say.

    Raises:
        NeoXError: not a yml; a key in two files with two values; a model that these layers are not.
    """
    given: dict[str, Any] = {}
    for path in paths:
        for key, value in _read_yml(Path(path)).items():
            key = key.replace("-", "_")
            if key in given and given[key] != value:
                raise NeoXError(f"{path}: {key}={value!r} contradicts an earlier file, which has {given[key]!r}")
            given[key] = value
    where = ", ".join(map(str, paths))

    def need(key: str) -> Any:
        if key not in given:
            raise NeoXError(f"{where}: {key} is missing")
        return given[key]

    for key, (default, known) in _YML_FIXED.items():
        if (value := given.get(key, default)) not in known:
            raise NeoXError(f"{where}: {key}={value!r} is not supported; it must be {' or '.join(map(repr, known))}")
    for entry in given.get("attention_config") or ():
        kinds = entry[0] if isinstance(entry, list) else entry
        if any(kind not in ("global", "flash") for kind in kinds):
            raise NeoXError(
                f"{where}: attention_config={given['attention_config']!r} is not supported, only global/flash"
            )
    hidden_dropout, attention_dropout = given.get("hidden_dropout", 0.0), given.get("attention_dropout", 0.0)
    if hidden_dropout != attention_dropout:
        raise NeoXError(
            f"{where}: hidden_dropout={hidden_dropout!r} and attention_dropout={attention_dropout!r} differ; "
            "NeoXConfig has one dropout"
        )
    layers, hidden = need("num_layers"), need("hidden_size")
    for key, value in (("num_layers", layers), ("hidden_size", hidden)):
        if not isinstance(value, int) or value < 1:
            raise NeoXError(f"{where}: {key}={value!r} is no positive integer")
    multiple = given.get("make_vocab_size_divisible_by", 128) * max(1, given.get("model_parallel_size", 1))
    return {
        "n_vocab": -(-n_tokens // multiple) * multiple,
        "n_hidden": hidden,
        "n_layers": layers,
        "n_heads": need("num_attention_heads"),
        "d_ff": given.get("intermediate_size") or 0,
        "max_seq_len": need("max_position_embeddings"),
        "rotary_pct": float(given.get("rotary_pct", 1.0)),
        "rotary_base": float(given.get("rotary_emb_base", 10_000)),
        "layer_norm_eps": float(given.get("layernorm_epsilon", 1e-5)),
        "gelu": "tanh" if given.get("bias_gelu_fusion", False) else "exact",
        "parallel_residual": bool(given.get("gpt_j_residual", False)),
        "tied_readout": not given.get("no_weight_tying", False),
        "dropout": float(hidden_dropout),
        **_init_stds(given, layers, hidden, where),
    }


def _read_yml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise NeoXError(f"{path} cannot be read as yml: {error}") from error
    if not isinstance(content, dict):
        raise NeoXError(f"{path} is no yml of GPT-NeoX: it holds no keys")
    return content


def _init_stds(given: dict[str, Any], layers: int, hidden: int, where: str) -> dict[str, float | None]:
    """Standard deviations of the initial weights; None is what NeoXConfig computes itself."""
    std = float(given.get("init_method_std", 0.02))
    stds: dict[str, float] = {
        "normal": std,
        "scaled_normal": std / math.sqrt(2 * layers),
        "small_init": math.sqrt(2 / (5 * hidden)),
        "wang_init": 2 / (layers * math.sqrt(hidden)),
    }
    found: dict[str, float | None] = {}
    for field, key, default, own in (
        ("init_std", "init_method", "normal", "small_init"),
        ("output_init_std", "output_layer_init_method", "scaled_normal", "wang_init"),
    ):
        name = given.get(key, default)
        if name not in stds:
            raise NeoXError(f"{where}: {key}={name!r} is not supported; choose from {', '.join(stds)}")
        found[field] = None if name == own else stds[name]
    return found


def yml_of(config: Any, model_parallel_size: int = 1) -> dict[str, Any]:
    """The keys of a GPT-NeoX yml that describe the model.

    Raises:
        NeoXError: a vocabulary that GPT-NeoX would pad further.
    """
    if config.n_vocab % model_parallel_size:
        raise NeoXError(f"n_vocab={config.n_vocab} cannot be divided by model_parallel_size={model_parallel_size}")
    found: dict[str, Any] = {
        "model_parallel_size": model_parallel_size,
        "make_vocab_size_divisible_by": math.gcd(config.n_vocab // model_parallel_size, 128),
        "num_layers": config.n_layers,
        "hidden_size": config.n_hidden,
        "num_attention_heads": config.n_heads,
        "seq_length": config.max_seq_len,
        "max_position_embeddings": config.max_seq_len,
        "norm": "layernorm",
        "layernorm_epsilon": config.layer_norm_eps,
        "pos_emb": "rotary",
        "rotary_pct": config.rotary_pct,
        "rotary_emb_base": config.rotary_base,
        "no_weight_tying": not config.tied_readout,
        "gpt_j_residual": config.parallel_residual,
        "bias_gelu_fusion": config.gelu == "tanh",
        "hidden_dropout": config.dropout,
        "attention_dropout": config.dropout,
    }
    if config.d_ff:
        found["intermediate_size"] = config.d_ff
    if config.init_std is None:
        found["init_method"] = "small_init"
    else:
        found.update(init_method="normal", init_method_std=config.init_std)
    if config.output_init_std is None:
        found["output_layer_init_method"] = "wang_init"
    elif config.output_init_std == (config.init_std or 0.02) / math.sqrt(2 * config.n_layers):
        found["output_layer_init_method"] = "scaled_normal"
    else:
        raise NeoXError(
            f"output_init_std={config.output_init_std!r} is neither wang_init (None) nor scaled_normal "
            "(init_std / sqrt(2 n_layers)), which is what a yml can say"
        )
    return found


def hf_fields(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Fields of NeoXConfig that a Hugging Face config.json gives: a path of it or of its directory, or its content.

    Raises:
        NeoXError: not a config.json, another architecture, or something these layers cannot do.
    """
    where = "config"
    given: Any = source
    if not isinstance(source, dict):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        where = str(path)
        try:
            given = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise NeoXError(f"{path} cannot be read as a Hugging Face config.json: {error}") from error
    if not isinstance(given, dict) or given.get("model_type") != "gpt_neox":
        kind = given.get("model_type") if isinstance(given, dict) else type(given).__name__
        raise NeoXError(f"{where}: model_type={kind!r} is not 'gpt_neox'")
    rope = given.get("rope_parameters") or {}
    scaling = rope.get("rope_type", "default")
    if given.get("rope_scaling"):  # before version 5
        scaling = given["rope_scaling"].get("rope_type") or given["rope_scaling"].get("type")
    if scaling != "default":
        raise NeoXError(f"{where}: rotary embeddings of type {scaling!r} are not supported, only 'default'")
    if given.get("attention_bias", True) is not True:
        raise NeoXError(f"{where}: attention_bias={given['attention_bias']!r} is not supported; it must be true")
    activation = given.get("hidden_act", "gelu")
    if activation not in _HF_GELU:
        raise NeoXError(f"{where}: hidden_act={activation!r} is not supported; known are {', '.join(_HF_GELU)}")
    dropouts = given.get("hidden_dropout", 0.0), given.get("attention_dropout", 0.0)
    if dropouts[0] != dropouts[1]:
        raise NeoXError(
            f"{where}: hidden_dropout={dropouts[0]!r} and attention_dropout={dropouts[1]!r} differ; NeoXConfig has one"
        )
    hidden, d_ff = given.get("hidden_size", 6_144), given.get("intermediate_size", 24_576)
    return {
        "n_vocab": given.get("vocab_size", 50_432),
        "n_hidden": hidden,
        "n_layers": given.get("num_hidden_layers", 44),
        "n_heads": given.get("num_attention_heads", 64),
        "d_ff": 0 if d_ff == 4 * hidden else d_ff,
        "max_seq_len": given.get("max_position_embeddings", 2_048),
        "rotary_pct": float(rope.get("partial_rotary_factor") or given.get("rotary_pct", 0.25)),
        "rotary_base": float(rope.get("rope_theta") or given.get("rotary_emb_base", 10_000)),
        "layer_norm_eps": float(given.get("layer_norm_eps", 1e-5)),
        "gelu": _HF_GELU[activation],
        "parallel_residual": given.get("use_parallel_residual", True),
        "tied_readout": given.get("tie_word_embeddings", False),
        "dropout": float(dropouts[0]),
        "init_std": float(given.get("initializer_range", 0.02)),
        "output_init_std": float(given.get("initializer_range", 0.02)),
    }


def hf_of(config: Any) -> dict[str, Any]:
    """The content of a Hugging Face config.json, with rotary settings by their old and their new names."""
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.n_vocab,
        "hidden_size": config.n_hidden,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.d_ff or 4 * config.n_hidden,
        "hidden_act": "gelu_pytorch_tanh" if config.gelu == "tanh" else "gelu",
        "max_position_embeddings": config.max_seq_len,
        "rotary_pct": config.rotary_pct,
        "rotary_emb_base": config.rotary_base,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rotary_base,
            "partial_rotary_factor": config.rotary_pct,
        },
        "layer_norm_eps": config.layer_norm_eps,
        "use_parallel_residual": config.parallel_residual,
        "tie_word_embeddings": config.tied_readout,
        "attention_bias": True,
        "hidden_dropout": config.dropout,
        "attention_dropout": config.dropout,
        "initializer_range": config.weight_std,
        "bos_token_id": 0,  # <|endoftext|>, in every tokenizer of this family
        "eos_token_id": 0,
    }
