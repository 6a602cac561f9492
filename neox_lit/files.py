"""The cache directory, and files in it that several processes may make at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO


def cache_directory() -> Path:
    """`$NEOX_LIT_CACHE`, else `neox_lit` in the user's cache directory (`$XDG_CACHE_HOME`, else `~/.cache`)."""
    own = os.environ.get("NEOX_LIT_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neox_lit"


def publish(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Create a file that appears whole or not at all, and that never changes once it is there.

    The first of several writers wins: the others' bytes are dropped, so what one process has read is what every
    other process will read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        try:
            os.link(name, path)  # unlike os.replace, fails if the file is there
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
