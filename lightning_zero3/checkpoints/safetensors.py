"""The format of `.safetensors` files, read and written a tensor at a time.

A file is: eight bytes, the header's length N, little-endian; N bytes of JSON, name -> dtype, shape and the two ends of
its bytes in what follows; the tensors' bytes, row-major, without gaps. The library that goes by this name writes only
what it has in memory as a whole.

Source: https://huggingface.co/docs/safetensors/main/en/index#format
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, NamedTuple

from lightning_zero3.errors import Zero3Error

__all__ = ["Entry", "header", "read_header"]

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
_BITS = {"BOOL": 8, "BF16": 16}
_LARGEST_HEADER = 100_000_000  # the format's own bound


class Entry(NamedTuple):
    """A tensor in a file: dtype by torch's name, and bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def header(tensors: dict[str, Entry], metadata: dict[str, str]) -> bytes:
    """All that comes before the tensors' bytes, which follow in the same order. A multiple of eight bytes.

    Raises:
        Zero3Error: a dtype that the format does not have. Names the tensor.
    """
    names = {name: key for key, name in DTYPES.items()}
    content: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, entry in tensors.items():
        if entry.dtype not in names:
            raise Zero3Error(f"{name!r} is of {entry.dtype}, which .safetensors files cannot hold; write a .pt file")
        end = start + entry.nbytes
        content[name] = {"dtype": names[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a file, in the order of their bytes, and its free text. No tensor is read.

    Raises:
        Zero3Error: not such a file, or one that is cut off. Names the file.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            whole = os.fstat(file.fileno()).st_size
            if length > min(_LARGEST_HEADER, whole - 8):
                raise ValueError(f"its header should take {length:,} bytes")
            content = json.loads(file.read(length))
        metadata = content.pop("__metadata__", {})
        found = {name: _entry(name, value) for name, value in content.items()}
        expected = 8 + length + sum(entry.nbytes for _, entry in found.values())
        if whole != expected:
            raise ValueError(f"it has {whole:,} bytes instead of {expected:,}")
    except OSError as error:
        raise Zero3Error(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Zero3Error(f"{path} is no .safetensors file, or damaged: {error}") from error
    return {name: entry for name, (_, entry) in sorted(found.items(), key=lambda item: item[1][0])}, metadata


def _entry(name: str, value: dict[str, Any]) -> tuple[int, Entry]:
    kind, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    bits = _BITS.get(kind) or int(kind[1:].partition("_")[0])
    if end - start != math.prod(shape) * bits // 8:
        raise ValueError(f"{name!r} has {end - start} bytes for {kind} {list(shape)}")
    return start, Entry(DTYPES.get(kind, kind), shape, end - start)
