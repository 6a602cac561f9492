"""What a checkpoint contains: names, shapes, dtypes and bytes, without reading tensors. For `zero3 inspect`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from lightning_zero3.checkpoints import safetensors
from lightning_zero3.errors import Zero3Error

__all__ = ["inspect_checkpoint"]


class _Row(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    nbytes: int


def inspect_checkpoint(path: str, optimizer: bool = False) -> str:
    """A table of what is in a checkpoint, full or sharded, in a file of torch.save or `.safetensors`, one or several.

    Args:
        path: of the file, or of the directory of a sharded checkpoint or of `.safetensors` files with their index.
        optimizer: list optimizer state, too.

    Raises:
        Zero3Error: no such file, one of another kind, an incomplete directory, or pickled classes in it.
    """
    if path.endswith(".safetensors"):
        if not os.path.isfile(path):
            raise Zero3Error(f"{path}: no such file")
        entries, metadata = safetensors.read_header(path)
        return "\n".join([*_said(metadata), *_table(_rows_of(entries), "weights")])
    if os.path.isdir(path):
        files = sorted(name for name in os.listdir(path) if name.endswith((".safetensors", ".safetensors.index.json")))
        return "\n".join(_several(path, files) if files else _sharded(path, optimizer))
    if not os.path.isfile(path):
        raise Zero3Error(f"{path}: no such file or directory")
    return "\n".join(_pickled(path, optimizer))


def _several(path: str, names: list[str]) -> list[str]:
    """A directory of `.safetensors` files; those of its index, if it has one."""
    index = [name for name in names if name.endswith(".json")]
    where: dict[str, str] = {}
    if index:
        try:
            with open(f"{path}/{index[0]}") as file:
                where = json.load(file)["weight_map"]
            names = sorted(set(where.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Zero3Error(f"{path}/{index[0]} is no index of .safetensors files, or damaged: {error!r}") from error
    rows: list[_Row] = []
    said: list[str] = []
    for name in names:
        if not os.path.isfile(f"{path}/{name}"):
            raise Zero3Error(f"{path}/{name} is missing; {index[0]} names it")
        entries, metadata = safetensors.read_header(f"{path}/{name}")
        if lost := [key for key, at in where.items() if at == name and key not in entries]:
            raise Zero3Error(f"{path}/{name} does not have {lost[0]!r}, though {index[0]} says so")
        rows += _rows_of(entries)
        said = said or _said(metadata)
    return [*said, f"files: {len(names)}", *_table(rows, "weights")]


def _rows_of(entries: dict[str, safetensors.Entry]) -> list[_Row]:
    return [_Row(n, e.dtype, e.shape, e.elements, e.nbytes) for n, e in entries.items()]


def _sharded(path: str, optimizer: bool) -> list[str]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from lightning_zero3.checkpoints import sharded_checkpoint

    tensors: dict[str, list[_Row]] = {}
    for key, found in sharded_checkpoint.contents(path).state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            what, _, name = key.partition(".")
            count, dtype = found.size.numel(), found.properties.dtype
            row = _Row(name.removeprefix("state."), str(dtype)[6:], tuple(found.size), count, count * dtype.itemsize)
            tensors.setdefault(what, []).append(row)
    files = [name for name in os.listdir(path) if name.endswith(".distcp")]
    lines = [*_said(sharded_checkpoint.read_extra(path)), f"written by {len(files)} ranks"]
    for what, rows in sorted(tensors.items(), key=lambda item: item[0] != "state_dict"):
        table = _table(rows, "weights" if what == "state_dict" else what.replace("_", " "))
        lines += table if optimizer or not what.startswith("optimizer") else table[:1]
    return lines


def _pickled(path: str, optimizer: bool) -> list[str]:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise Zero3Error(
            f"{path} is no checkpoint that torch.load(weights_only=True) can read ({type(error).__name__})"
        ) from error
    if not isinstance(content, dict):
        raise Zero3Error(f"{path} holds a {type(content).__name__}, not a checkpoint or state dict")

    def rows(tensors: Iterable[tuple[str, Any]]) -> list[_Row]:
        return [
            _Row(name, str(t.dtype)[6:], tuple(t.shape), t.numel(), t.nbytes)
            for name, t in tensors
            if isinstance(t, torch.Tensor)
        ]

    lines = [*_said(content), *_table(rows(content.get("state_dict", content).items()), "weights")]
    for i, saved in enumerate(content.get("optimizer_states", [])):
        table = _table(rows((f"{n}.{k}", v) for n, s in saved["state"].items() for k, v in s.items()), f"optimizer {i}")
        lines += table if optimizer else table[:1]
    return lines


def _said(content: dict[str, Any]) -> list[str]:
    return [f"{key}: {content[key]}" for key in ("epoch", "global_step", "pytorch-lightning_version") if key in content]


def _table(rows: list[_Row], what: str) -> list[str]:
    width = max((len(row.name) for row in rows), default=0)
    head = f"{what}: {len(rows)} tensors, {sum(r.elements for r in rows):,} elements, {sum(r.nbytes for r in rows):,}"
    return [f"{head} bytes"] + [f"  {r.name:<{width}}  {r.dtype:<9} {list(r.shape)}" for r in rows]
