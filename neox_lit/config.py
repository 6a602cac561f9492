"""What a GPT-NeoX model is made of: one dataclass, and the published sizes as data."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from neox_lit.config_files import hf_fields, hf_of, yml_fields, yml_of
from neox_lit.errors import NeoXError

_PILE_TOKENS = 50_277  # ids of 20B_tokenizer.json, which GPT-NeoX-20B and all Pythias share


@dataclass(frozen=True)
class NeoXConfig:
    """Shape and numerics of a GPT-NeoX model. The defaults are those of GPT-NeoX-20B.

    Args:
        n_vocab: Rows of the embedding and of the readout, padding included (a multiple of 128 in published models).
        n_hidden: Width of the residual stream.
        n_layers: Number of transformer layers.
        n_heads: Attention heads. Divides `n_hidden`.
        d_ff: Width inside the feed-forward layer. 0 means 4 x `n_hidden`.
        max_seq_len: Longest sequence, in tokens.
        rotary_pct: Part of each head, in (0, 1], that rotary embedding turns: the first `int(d_k * rotary_pct)` dims.
        rotary_base: Base of the rotary wavelengths.
        layer_norm_eps: Added to the variance in every LayerNorm.
        gelu: 'tanh' as GPT-NeoX trains (its bias_gelu_fusion), or 'exact' (erf) as Hugging Face's Pythia configs say.
        parallel_residual: `x + attn(ln1 x) + mlp(ln2 x)` if true, else one after the other.
        tied_readout: The readout shares the embedding's weight.
        dropout: Probability, in [0, 1), of zeroing embeddings, attention weights and residual branches in training.
        init_std: Standard deviation of the initial weights. None is GPT-NeoX's small_init: sqrt(2 / (5 n_hidden)).
        output_init_std: The same for the two linears that write to the residual stream. None is GPT-NeoX's wang_init:
            2 / (n_layers sqrt(n_hidden)).

    Raises:
        NeoXError: A field is out of range; the message names the field and its value.

    Source: Black et al. 2022, arXiv:2204.06745; initial values as in GPT-NeoX's `megatron/model/init_functions.py`
    (small_init: Nguyen & Salazar 2019, arXiv:1910.05895; wang_init: Wang's mesh-transformer-jax).
    """

    n_vocab: int = 50_432
    n_hidden: int = 6_144
    n_layers: int = 44
    n_heads: int = 64
    d_ff: int = 0
    max_seq_len: int = 2_048
    rotary_pct: float = 0.25
    rotary_base: float = 10_000.0
    layer_norm_eps: float = 1e-5
    gelu: Literal["tanh", "exact"] = "tanh"
    parallel_residual: bool = True
    tied_readout: bool = False
    dropout: float = 0.0
    init_std: float | None = None
    output_init_std: float | None = None

    def __post_init__(self) -> None:
        for name in ("n_vocab", "n_hidden", "n_layers", "n_heads", "max_seq_len"):
            self._require(name, self._is_int(name) and getattr(self, name) > 0, "a positive integer")
        self._require("d_ff", self._is_int("d_ff") and self.d_ff >= 0, "a positive integer, or 0 for 4 x n_hidden")
        self._require("n_heads", self.n_hidden % self.n_heads == 0, f"a divisor of n_hidden={self.n_hidden}")
        self._require("rotary_pct", self._is_number("rotary_pct") and 0 < self.rotary_pct <= 1, "in (0, 1]")
        self._require(
            "rotary_pct",
            self.d_rope >= 2 and self.d_rope % 2 == 0,
            f"such that int(rotary_pct x {self.d_k} dims of a head) is even and at least 2, it is {self.d_rope}",
        )
        self._require("rotary_base", self._is_number("rotary_base") and self.rotary_base > 1, "a number above 1")
        for name in ("layer_norm_eps", "init_std", "output_init_std"):
            optional = name != "layer_norm_eps"
            ok = (optional and getattr(self, name) is None) or (self._is_number(name) and getattr(self, name) > 0)
            self._require(name, ok, "a positive number" + (" or None" if optional else ""))
        self._require("gelu", self.gelu in ("tanh", "exact"), "'tanh' or 'exact'")
        for name in ("parallel_residual", "tied_readout"):
            self._require(name, isinstance(getattr(self, name), bool), "true or false")
        self._require("dropout", self._is_number("dropout") and 0 <= self.dropout < 1, "in [0, 1)")

    @property
    def d_k(self) -> int:
        """Width of one attention head."""
        return self.n_hidden // self.n_heads

    @property
    def d_rope(self) -> int:
        """Dimensions of a head that rotary embedding turns."""
        return int(self.d_k * self.rotary_pct)

    @property
    def weight_std(self) -> float:
        """`init_std`, or small_init's value."""
        return self.init_std or math.sqrt(2 / (5 * self.n_hidden))

    @property
    def output_weight_std(self) -> float:
        """`output_init_std`, or wang_init's value."""
        return self.output_init_std or 2 / (self.n_layers * math.sqrt(self.n_hidden))

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the model; a tied readout counts once."""
        h, d_ff = self.n_hidden, self.d_ff or 4 * self.n_hidden
        attention = 3 * h * h + 3 * h + h * h + h
        ffn = h * d_ff + d_ff + d_ff * h + h
        layer = attention + ffn + 4 * h  # two LayerNorms
        return self.n_layers * layer + 2 * h + (1 if self.tied_readout else 2) * self.n_vocab * h

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> NeoXConfig:
        """A published size (a key of `PRESETS`), with some fields replaced.

        Raises:
            NeoXError: No such preset or no such field.
        """
        if name not in PRESETS:
            raise NeoXError(f"preset {name!r} is unknown. Presets: {', '.join(PRESETS)}")
        return cls.from_dict({**PRESETS[name], **overrides})

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> NeoXConfig:
        """The inverse of `to_dict`. Missing fields take the defaults.

        Raises:
            NeoXError: A key is no field; the message names it.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [key for key in fields if key not in known]
        if unknown:
            raise NeoXError(f"NeoXConfig has no field {', '.join(map(repr, unknown))}. Fields: {', '.join(known)}")
        return cls(**fields)

    @classmethod
    def from_yml(cls, *paths: str | Path, n_tokens: int = _PILE_TOKENS, **overrides: Any) -> NeoXConfig:
        """The model of GPT-NeoX's ymls, later files adding to earlier ones, with some fields replaced.

        Args:
            paths: of the ymls; keys with `-` or `_`.
            n_tokens: ids of the tokenizer, which ymls do not tell; by default those of 20B_tokenizer.json. The
                vocabulary is padded as the ymls say.

        Raises:
            NeoXError: not a yml, or a model that these layers are not; the message names key and value.
        """
        return cls.from_dict({**yml_fields(*paths, n_tokens=n_tokens), **overrides})

    @classmethod
    def from_hf(cls, source: str | Path | dict[str, Any], **overrides: Any) -> NeoXConfig:
        """The model of a Hugging Face config.json (its path, its directory's, or its content), some fields replaced.

        Raises:
            NeoXError: not a config.json of GPT-NeoX, or a model that these layers are not.
        """
        return cls.from_dict({**hf_fields(source), **overrides})

    def to_yml(self, model_parallel_size: int = 1) -> dict[str, Any]:
        """What a GPT-NeoX yml says of the model; `from_yml` reads it back.

        Raises:
            NeoXError: something that a yml cannot say.
        """
        return yml_of(self, model_parallel_size)

    def to_hf(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json. It has one standard deviation for all initial weights."""
        return hf_of(self)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, for checkpoints and logs."""
        return dataclasses.asdict(self)

    def _require(self, name: str, ok: bool, what: str) -> None:
        if not ok:
            raise NeoXError(f"NeoXConfig.{name} must be {what}, got {getattr(self, name)!r}")

    def _is_int(self, name: str) -> bool:
        return isinstance(getattr(self, name), int) and not isinstance(getattr(self, name), bool)

    def _is_number(self, name: str) -> bool:
        value = getattr(self, name)
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def padded_vocab(n_tokens: int, multiple: int = 128) -> int:
    """Vocabulary rows for a tokenizer of `n_tokens` ids: rounded up to a multiple.

    GPT-NeoX pads to `make_vocab_size_divisible_by` (128) x the model-parallel size it trained with.
    """
    return -(-n_tokens // multiple) * multiple


def _size(layers: int, hidden: int, heads: int, mp: int = 1, **other: Any) -> dict[str, Any]:
    return {
        "n_vocab": padded_vocab(_PILE_TOKENS, 128 * mp),
        "n_hidden": hidden,
        "n_layers": layers,
        "n_heads": heads,
        **other,
    }


def _scaled_normal(layers: int) -> dict[str, Any]:
    """GPT-NeoX's default initial values (normal, scaled_normal), for the two ymls that name no others."""
    return {"init_std": 0.02, "output_init_std": 0.02 / math.sqrt(2 * layers)}


# Source: EleutherAI/pythia `models/*/pythia-*.yml` and EleutherAI/gpt-neox `configs/20B.yml`: num_layers, hidden_size,
# num_attention_heads, model_parallel_size (hence the padded vocabulary), bias_gelu_fusion (hence tanh). All have
# 2,048 positions, rotary_pct 0.25, gpt_j_residual, no_weight_tying, no dropout, which are this dataclass's defaults.
PRESETS: dict[str, dict[str, Any]] = {
    "pythia-14m": _size(6, 128, 4),
    "pythia-31m": _size(6, 256, 8),
    "pythia-70m": _size(6, 512, 8),
    "pythia-160m": _size(12, 768, 12),
    "pythia-410m": _size(24, 1_024, 16),
    "pythia-1b": _size(16, 2_048, 8),
    "pythia-1.4b": _size(24, 2_048, 16),
    "pythia-2.8b": _size(32, 2_560, 32),
    "pythia-6.9b": _size(32, 4_096, 32, mp=2, **_scaled_normal(32)),
    "pythia-12b": _size(36, 5_120, 40, mp=4, **_scaled_normal(36)),
    "gpt-neox-20b": _size(44, 6_144, 64, mp=2),
}
