"""Files that are there whole or not at all: written beside their place, made durable, then renamed."""

from __future__ import annotations

import ctypes
import io
import os
import shutil
from typing import Any

import fsspec
import torch

__all__ = ["beside", "is_local", "place_of", "remove", "replace", "save", "saved", "write_file"]


def place_of(path: str | os.PathLike) -> tuple[Any, str]:
    """File system, and path in it. Puts back what was put aside when a process died between two renames."""
    fs, place = fsspec.core.url_to_fs(str(path))
    place = place.rstrip("/")
    if is_local(fs) and not os.path.exists(place) and os.path.exists(beside(place, "old")):
        os.rename(beside(place, "old"), place)
    return fs, place


def is_local(fs: Any) -> bool:
    """Whether a file system is this machine's."""
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def beside(place: str, what: str) -> str:
    """A hidden name beside `place`."""
    folder, slash, name = place.rpartition("/")
    name = name.replace("hpc_ckpt_", "hpc-ckpt-")  # Lightning resumes whatever has that in its name
    return f"{folder}{slash}.{name}.{what}"


def replace(fs: Any, part: str, place: str) -> None:
    """Let the complete `part`, a file or directory, take the place of what is at `place`."""
    if not is_local(fs):  # a rename of a directory is a copy there
        if fs.exists(place):
            fs.rm(place, recursive=True)
        fs.mv(part, place, recursive=True)
        return
    if os.path.isfile(part) and not os.path.isdir(place):
        os.replace(part, place)
    elif os.path.lexists(place) and _exchange(part, place):
        _sync(os.path.dirname(place) or ".")
        remove(part)
    else:  # a directory cannot replace another at once
        old = beside(place, "old")
        if os.path.exists(place):
            remove(old)
            os.rename(place, old)
        os.rename(part, place)
        _sync(os.path.dirname(place) or ".")
        remove(old)
    _sync(os.path.dirname(place) or ".")


def save(value: Any, path: str | os.PathLike) -> None:
    """`torch.save` to a file that is there whole or not at all."""
    fs, place = place_of(path)
    part = beside(place, "partial")
    try:
        if is_local(fs):
            os.makedirs(os.path.dirname(place) or ".", exist_ok=True)
            with open(part, "wb") as file:
                torch.save(value, file)
                file.flush()
                os.fsync(file.fileno())
        else:
            write_file(fs, part, saved(value))
        replace(fs, part, place)
    except BaseException:
        if fs.exists(part):
            fs.rm(part)
        raise


def saved(value: Any) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write_file(fs: Any, place: str, content: bytes) -> None:
    """Write a small file durably."""
    with fs.open(place, "wb") as file:
        file.write(content)
        if is_local(fs):
            file.flush()
            os.fsync(file.fileno())


def remove(path: str) -> None:
    """A file or a directory, if there is one."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _exchange(one: str, other: str) -> bool:
    """Let two names change places at once, where the kernel and the file system can: Linux's `renameat2`."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _sync(directory: str) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
