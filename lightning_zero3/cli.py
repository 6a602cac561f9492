"""`zero3`: a look at checkpoints and at what is installed, from the shell."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_zero3 import sharded_checkpoint
from lightning_zero3.errors import Zero3Error

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="zero3", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="print what a checkpoint contains, without loading the weights")
    inspect.add_argument(
        "path", help="a .ckpt of Lightning, a file or a directory, or a state dict saved by torch.save"
    )
    inspect.add_argument("--optimizer", action="store_true", help="list optimizer state, too")
    commands.add_parser("env", help="print versions and devices")
    args = parser.parse_args(argv)
    try:
        if args.command == "inspect":
            print(inspect_checkpoint(args.path, args.optimizer))
        else:
            print(environment())
    except Zero3Error as error:
        print(f"zero3: {error}", file=sys.stderr)
        return 1
    return 0


def inspect_checkpoint(path: str, optimizer: bool = False) -> str:
    """Names, shapes, dtypes and bytes of the tensors in a checkpoint, full or sharded. Tensors are not read.

    Raises:
        Zero3Error: no such file, not a file of torch.save, an incomplete directory, or pickled classes in it.
    """
    if os.path.isdir(path):
        return _inspect_directory(path, optimizer)
    if not os.path.isfile(path):
        raise Zero3Error(f"{path}: no such file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise Zero3Error(
            f"{path} is no checkpoint that torch.load(weights_only=True) can read ({type(error).__name__})"
        ) from error
    if not isinstance(content, dict):
        raise Zero3Error(f"{path} holds a {type(content).__name__}, not a checkpoint or state dict")
    state = content.get("state_dict", content)
    lines = _progress(content)
    lines += _table({k: v for k, v in state.items() if isinstance(v, Tensor)}, "weights")
    for i, saved in enumerate(content.get("optimizer_states", [])):
        tensors = {f"{n}.{k}": v for n, s in saved["state"].items() for k, v in s.items() if isinstance(v, Tensor)}
        table = _table(tensors, f"optimizer {i}")
        lines += table if optimizer else table[:1]
    return "\n".join(lines)


def _inspect_directory(path: str, optimizer: bool) -> str:
    tensors: dict[str, dict[str, Tensor]] = {}
    for key, found in sharded_checkpoint.contents(path).state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            what, _, name = key.partition(".")
            entry = torch.empty(found.size, dtype=found.properties.dtype, device="meta")
            tensors.setdefault(what, {})[name.removeprefix("state.")] = entry
    files = [name for name in os.listdir(path) if name.endswith(".distcp")]
    lines = [*_progress(sharded_checkpoint.read_extra(path)), f"written by {len(files)} ranks"]
    for what, held in sorted(tensors.items(), key=lambda item: item[0] != "state_dict"):
        table = _table(held, "weights" if what == "state_dict" else what.replace("_", " "))
        lines += table if optimizer or not what.startswith("optimizer") else table[:1]
    return "\n".join(lines)


def _progress(content: dict[str, Any]) -> list[str]:
    return [f"{key}: {content[key]}" for key in ("epoch", "global_step", "pytorch-lightning_version") if key in content]


def _table(tensors: dict[str, Tensor], what: str) -> list[str]:
    nbytes = sum(t.nbytes for t in tensors.values())
    width = max((len(n) for n in tensors), default=0)
    head = f"{what}: {len(tensors)} tensors, {sum(t.numel() for t in tensors.values()):,} elements, {nbytes:,} bytes"
    return [head] + [f"  {n:<{width}}  {str(t.dtype)[6:]:<9} {list(t.shape)}" for n, t in tensors.items()]


def environment() -> str:
    """Versions and devices, for bug reports."""
    rows: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("lightning-zero3", "lightning", "pytorch-lightning"):
        try:
            rows[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            rows[name] = "-"
    rows["cpus"] = os.cpu_count()
    rows["cuda"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "-"
    return "\n".join(f"{name:<18} {value}" for name, value in rows.items())


if __name__ == "__main__":
    sys.exit(main())
