"""What a mistyped setting was probably meant to be."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Trainer

from neox_lit.config import NeoXConfig
from neox_lit.data import TextDataModule
from neox_lit.lora import LoRAOptions
from neox_lit.module import NeoXLightning

_GROUPS = {
    "trainer": Trainer,
    "model": NeoXLightning,
    "data": TextDataModule,
    "model.config": NeoXConfig,
    "model.lora": LoRAOptions,
}


def suggestions(arguments: Sequence[str]) -> list[str]:
    """A line for each setting, on the command line or in a YAML it names, that is none but resembles one."""
    lines = []
    for name in dict.fromkeys(_names(arguments)):
        group, _, last = name.rpartition(".")
        if group in _GROUPS:
            known = [p for p in inspect.signature(_GROUPS[group]).parameters if p != "self"]
            close = difflib.get_close_matches(last, known, n=1)
            if last not in known and last != "help" and close:
                lines.append(f"{name}: did you mean {group}.{close[0]}?")
    return lines


def _names(arguments: Sequence[str]) -> Iterator[str]:
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--config", "-c") and (equals or i + 1 < len(arguments)):
            try:
                with open(value if equals else arguments[i + 1], encoding="utf-8") as file:
                    yield from _keys(yaml.safe_load(file), "")
            except (OSError, ValueError, yaml.YAMLError):
                continue  # the parser has said so
        elif name.startswith("--"):
            yield name[2:]


def _keys(node: Any, prefix: str) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _keys(value, f"{prefix}{key}.")
