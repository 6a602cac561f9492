"""What trains: everything, biases, adapters, or parameters chosen by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from neox_lit.errors import NeoXError

CHOICES = ("all", "biases", "lora")

BIASES = r"(attention\.query_key_value|attention\.dense|mlp\.dense_h_to_4h)\.bias$"
"""Biases of the attention's two linears and of the first of the feed-forward."""


def check_choice(trainable: str | Sequence[str], has_lora_options: bool) -> None:
    """Raise for a choice that does not exist, and for options that it would not use."""
    if isinstance(trainable, str) and trainable not in CHOICES:
        raise NeoXError(
            f"model.trainable={trainable!r} is not a choice; give one of {', '.join(CHOICES)}, or a list of regular "
            f"expressions for names of parameters: [{trainable!r}]"
        )
    if not trainable:
        raise NeoXError("model.trainable=[] leaves nothing to train; give at least one regular expression")
    for pattern in () if isinstance(trainable, str) else trainable:
        try:
            re.compile(pattern)
        except re.error as error:
            raise NeoXError(f"model.trainable: {pattern!r} is not a regular expression ({error})") from error
    if has_lora_options and trainable != "lora":
        raise NeoXError(f"model.lora is given, but model.trainable={trainable!r} makes no adapters; set it to lora")


def set_trainable(model: nn.Module, trainable: str | Sequence[str]) -> None:
    """Freeze every parameter of a model that was not chosen.

    Args:
        model: With its adapters, if any. Call before a strategy shards it: states are then those of what trains.
        trainable: One of `CHOICES`, or regular expressions: a name in which one is found (`re.search`) trains.

    Raises:
        NeoXError: An expression that matches nothing, or an int8 weight.
    """
    if trainable == "all":
        return
    named = dict(model.named_parameters(remove_duplicate=False))  # a tied weight has two names
    patterns = {"biases": [BIASES], "lora": [r"\.lora\.[AB]$"]}[trainable] if isinstance(trainable, str) else trainable
    chosen = set()
    for pattern in patterns:
        found = [name for name in named if re.search(pattern, name)]
        if not found:
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in named)
            raise NeoXError(f"model.trainable: {pattern!r} matches no parameter; there are {', '.join(kinds)}")
        for name in found:
            if not named[name].is_floating_point():
                raise NeoXError(
                    f"model.trainable: {pattern!r} matches {name!r}, which is int8 and cannot train; choose others, or "
                    "set model.int8 to false"
                )
            chosen.add(id(named[name]))
    for param in named.values():
        param.requires_grad_(id(param) in chosen)
