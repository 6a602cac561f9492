"""Files of safetensors: eight bytes that tell the length of a JSON header, the header, the tensors.

Source: github.com/huggingface/safetensors, "Format". Read here and not through the library, which maps the file.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from neox_lit.checkpoints.lazy import InFile
from neox_lit.errors import NeoXError

_LONGEST_HEADER = 100_000_000  # bytes; the library's own limit

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def lazy_tensors(path: str | os.PathLike) -> dict[str, InFile]:
    """The tensors of a file by key.

    Raises:
        NeoXError: No such file, truncated, or not a file of safetensors.
    """
    place = os.fspath(path)
    try:
        with open(place, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(_LONGEST_HEADER, os.path.getsize(place) - 8):
                raise NeoXError(f"{place} is truncated, or not a file of safetensors")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise NeoXError(f"{place}: no such file") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise NeoXError(f"{place} is damaged, or not a file of safetensors: {error}") from error
    if not isinstance(header, dict):
        raise NeoXError(f"{place} is not a file of safetensors")
    return {key: _tensor(place, key, told, 8 + length) for key, told in header.items() if key != "__metadata__"}


def _tensor(path: str, key: str, told: Any, start: int) -> InFile:
    try:
        shape = torch.Size(told["shape"])
        dtype = _DTYPES[told["dtype"]]
        first, end = map(int, told["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise NeoXError(f"{path}: the header's entry of {key!r} is wrong or of an unknown dtype: {told}") from error
    if min(shape, default=0) < 0 or first < 0 or end - first != shape.numel() * dtype.itemsize:
        raise NeoXError(f"{path}: {key!r} of shape {list(shape)}, {dtype}, cannot lie in bytes {first} to {end}")
    return InFile(path, key, shape, dtype, start + first)
