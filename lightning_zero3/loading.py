"""Sharded checkpoints where Lightning expects a file: `load_from_checkpoint`, and strategies other than ours.

Lightning reads every checkpoint through one function, imported by name into two modules of each of its homes. There it
is replaced by one that knows directories, too, and leaves all else to the original.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from typing import Any

from lightning_zero3 import sharded_checkpoint

__all__ = ["let_lightning_load_directories"]


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
