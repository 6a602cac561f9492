"""Sharded checkpoints where Lightning expects a file: `load_from_checkpoint`, and strategies other than ours.

Lightning reads every checkpoint through one function, imported by name into two modules of each of its homes. There it
is replaced by one that knows directories, too, and leaves all else to the original.
"""

from __future__ import annotations

import os
import zipfile
from functools import wraps
from importlib import import_module
from typing import Any

from lightning_zero3.checkpoints import sharded_checkpoint
from lightning_zero3.checkpoints.durable import place_of

__all__ = ["let_lightning_load_directories", "newest_checkpoint"]


def let_lightning_load_directories(pl: str, fabric: str) -> None:
    """For one home of Lightning, given the names of its two packages."""
    for name in (f"{pl}.core.saving", f"{fabric}.plugins.io.torch_io"):
        module = import_module(name)
        original = module.pl_load
        if hasattr(original, "__wrapped__"):
            continue

        @wraps(original)
        def load(path_or_url: Any, *args: Any, _original: Any = original, **options: Any) -> Any:
            if isinstance(path_or_url, (str, bytes)) or hasattr(path_or_url, "__fspath__"):
                path = str(path_or_url)
                if not path.startswith("http") and sharded_checkpoint.is_sharded_checkpoint(path):
                    return sharded_checkpoint.load_whole(path, options.get("weights_only"))
            return _original(path_or_url, *args, **options)

        vars(module)["pl_load"] = load


def newest_checkpoint(directory: str | os.PathLike) -> str | None:
    """The checkpoint in a directory that was written last, of those that are complete: for a job that was killed.

    Sharded or full, by the time of writing; what was put aside when a process died is put back. None if there is none.

    Example::

        trainer.fit(model, data, ckpt_path=newest_checkpoint("checkpoints"))
    """
    fs, folder = place_of(directory)
    if not fs.exists(folder):
        return None
    names = {found.rstrip("/").rpartition("/")[2] for found in fs.ls(folder, detail=False)}
    aside = {n[1:-4].replace("hpc-ckpt-", "hpc_ckpt_") for n in names if n.startswith(".") and n.endswith(".old")}
    times: dict[str, Any] = {}
    for name in sorted(names | aside):
        path = f"{str(directory).rstrip('/')}/{name}"
        if name.startswith("."):
            continue
        if sharded_checkpoint.is_sharded_checkpoint(path):
            times[path] = fs.modified(f"{folder}/{name}/.metadata")
        elif name.endswith(".ckpt") and fs.isfile(f"{folder}/{name}"):
            with fs.open(f"{folder}/{name}", "rb") as file:
                if zipfile.is_zipfile(file):
                    times[path] = fs.modified(f"{folder}/{name}")
    return max(times, key=lambda path: times[path], default=None)
