"""Presets against published numbers; every wrong field is named."""

from __future__ import annotations

import re

import pytest

from neox_lit import NeoXConfig, NeoXError, NeoXModel
from tests.neox.helpers import tiny

# Parameters of the released models: Biderman et al. 2023 (arXiv:2304.01373), table 1, and Black et al. 2022.
PUBLISHED = {
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(name, parameters):
    assert NeoXConfig.preset(name).n_parameters == parameters


def test_defaults_are_the_20b_model():
    assert NeoXConfig() == NeoXConfig.preset("gpt-neox-20b")


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_count_is_that_of_the_model(tied):
    config = tiny(tied_readout=tied, d_ff=100)
    assert config.n_parameters == sum(p.numel() for p in NeoXModel(config).parameters())


def test_overrides_and_round_trip():
    config = NeoXConfig.preset("pythia-70m", n_layers=2, gelu="exact")
    assert (config.n_layers, config.n_hidden, config.gelu) == (2, 512, "exact")
    assert NeoXConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_vocab", 0),
        ("n_hidden", -1),
        ("n_layers", 1.5),
        ("n_heads", 3),
        ("max_seq_len", "64"),
        ("d_ff", -2),
        ("rotary_pct", 0.0),
        ("rotary_pct", 1.5),
        ("rotary_pct", 0.01),
        ("rotary_base", float("nan")),
        ("layer_norm_eps", 0.0),
        ("gelu", "fast"),
        ("parallel_residual", "yes"),
        ("dropout", 1.0),
        ("init_std", -0.1),
    ],
)
def test_a_wrong_field_is_named_with_its_value(field, value):
    with pytest.raises(NeoXError, match=f"NeoXConfig.{field} .*got {re.escape(repr(value))}"):
        tiny(**{field: value})


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(NeoXError, match=r"'pythia-71m' is unknown.*pythia-70m"):
        NeoXConfig.preset("pythia-71m")
    with pytest.raises(NeoXError, match=r"no field 'n_head'.*n_heads"):
        NeoXConfig.preset("pythia-70m", n_head=2)
