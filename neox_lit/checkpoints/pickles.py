"""Files that `torch.save` wrote: what is in them, without running code of theirs or reading the tensors."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neox_lit.checkpoints.lazy import InFile, InMemory, LazyTensor
from neox_lit.errors import NeoXError

_reconstruct = np.zeros(1).__reduce__()[0]  # numpy's, wherever this version of numpy keeps it
# GPT-NeoX puts numpy's random state beside the weights; these are what it takes to read that array.
_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    (_reconstruct, "numpy.core.multiarray._reconstruct"),
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
]


def read_content(path: str | os.PathLike) -> Any:
    """What a file holds, with tensors that have shape and dtype only (device 'meta'); see `lazy_tensors`.

    Raises:
        NeoXError: No such file, damaged, holding code, or renamed from another GPT-NeoX layer file.
    """
    _check_name(path)
    return _load(path, map_location="meta")


def lazy_tensors(path: str | os.PathLike, part: str | None = None) -> dict[str, LazyTensor]:
    """The tensors of a file by key.

    Args:
        path: The file.
        part: Key of the state dict in it; by default the file is one.

    Raises:
        NeoXError: As `read_content`, or there is no such part, or a tensor ends beyond the end of the file.
    """
    tensors = _tensors(_part(read_content(path), path, part))
    found: dict[str, LazyTensor] = {}
    for key, tensor in tensors.items():
        offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if offset is not None and tensor.is_contiguous():
            start = offset + tensor.storage_offset() * tensor.dtype.itemsize
            found[key] = InFile(os.fspath(path), key, tensor.shape, tensor.dtype, start)
    if len(found) < len(tensors):
        # Tensors that lie transposed, and files of torch before 1.6, which do not tell places.
        mapped = _tensors(_part(_load(path, map_location="cpu", mmap=zipfile.is_zipfile(path)), path, part))
        found |= {key: InMemory(mapped[key], f"{os.fspath(path)}: {key!r}") for key in tensors if key not in found}
    return {key: found[key] for key in tensors}


def read_state(path: str | os.PathLike) -> dict[str, Tensor]:
    """The tensors of a file by key, all in memory.

    Raises:
        NeoXError: As `read_content`.
    """
    _check_name(path)
    return _tensors(_part(_load(path, map_location="cpu"), path, None))


def _load(path: str | os.PathLike, **options: Any) -> Any:
    if not os.path.isfile(path):
        raise NeoXError(f"{os.fspath(path)}: no such file")
    try:
        with torch.serialization.safe_globals(_NUMPY):
            return torch.load(path, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise NeoXError(
            f"{os.fspath(path)} is refused: it is damaged, or holds code that would run when it is loaded"
            f"{f' ({found[1]})' if found else ''}. Get the weights as safetensors, or, if you trust where the file is "
            "from, load it with torch.load(..., weights_only=False) and save its tensors alone with torch.save"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise NeoXError(f"{os.fspath(path)} is damaged or truncated: {str(error).splitlines()[0]}") from error


def _check_name(path: str | os.PathLike) -> None:
    """torch writes the name of a file into it, so files of blocks that changed places show, though they look alike."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        written = next((name.partition("/")[0] for name in archive.namelist()), "")
    numbered = r"layer_\d+-model_\d+-model_states|mp_rank_\d+_model_states"
    if re.fullmatch(numbered, written) and written != Path(path).stem:
        raise NeoXError(f"{os.fspath(path)} was written as {written}.pt; files have changed places")


def _part(content: Any, path: str | os.PathLike, part: str | None) -> Mapping[str, Any]:
    state = content.get(part) if part is not None and isinstance(content, Mapping) else content
    if not isinstance(state, Mapping):
        what = "is no state dict" if part is None else f"has no state dict {part!r}"
        raise NeoXError(f"{os.fspath(path)} {what}; is it a checkpoint of a model?")
    return state


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {str(key): value for key, value in state.items() if isinstance(value, Tensor)}
