"""From a sharded checkpoint to one file, or to files of a given size, without ever holding the model.

Tensors are read and written a few at a time: at most the largest one, and what torch needs to read it, is in memory.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_zero3.checkpoints import safetensors, sharded_checkpoint
from lightning_zero3.checkpoints.durable import beside, is_local, place_of, remove, replace
from lightning_zero3.checkpoints.sharded_checkpoint import Stored, StoredState
from lightning_zero3.errors import Zero3Error

__all__ = ["consolidate", "parse_size"]

PICKLED = (".ckpt", ".pt", ".pth", ".bin")
INDEX = "model.safetensors.index.json"

_OURS = r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
_TOGETHER = 64 << 20  # bytes of tensors that are read at a time, unless one alone has more


def consolidate(
    source: str | os.PathLike,
    out: str | os.PathLike,
    weights_only: bool = False,
    max_shard_size: int | None = None,
    force: bool = False,
    trust: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Write a sharded checkpoint in another form. For one process, which needs neither a GPU nor the others.

    Args:
        source: a directory that `state_dict_type="sharded"` wrote, or Lightning's ModelParallelStrategy.
        out: what to write. `.ckpt`, `.pt`, `.pth`, `.bin`: one file of torch.save, the checkpoint that
            `state_dict_type="full"` would have written. `.safetensors`: the weights, one file. A name without suffix: a
            directory of `model-00001-of-0000N.safetensors` and an index, or of one `model.safetensors`. It is there
            whole or not at all.
        weights_only: of a file of torch.save, the plain state dict and nothing else.
        max_shard_size: bytes of tensors in a file of such a directory, unless one tensor has more; default 5e9.
        force: replace what is at `out`.
        trust: let the checkpoint hold classes of the user's own, which may run code when they are loaded.
        progress: called with the bytes done and the bytes there are.

    Returns:
        The files written.

    Raises:
        Zero3Error: `source` is not complete or is damaged, `out` exists or cannot be written. Names the file.

    The ZIP checksums in files of torch.save are not filled in (as with `torch.serialization.set_crc32_options(False)`);
    torch does not look at them.
    """
    source = str(source).rstrip("/")
    fs, place = place_of(out)
    if not is_local(fs):
        raise Zero3Error(f"{out}: write to a file system of this machine, and copy from there")
    suffix = Path(place).suffix
    pickled = suffix in PICKLED
    directory = not suffix or str(out).endswith("/") or (os.path.isdir(place) and not pickled)
    if not (pickled or directory or suffix == ".safetensors"):
        raise Zero3Error(f"{out}: end the name in one of {', '.join(PICKLED)}, .safetensors, or give a directory")
    if weights_only and (suffix == ".ckpt" or not pickled):
        raise Zero3Error(f"{out}: weights_only makes a plain state dict; name it .pt, .pth or .bin")
    if max_shard_size is not None and not directory:
        raise Zero3Error(f"{out} is one file, so max_shard_size has no meaning; give a directory")
    if os.path.isfile(source):
        raise Zero3Error(f"{source} is a file already; there is nothing to put together")
    if not os.path.isdir(source) and is_local(place_of(source)[0]):
        raise Zero3Error(f"{source}: no such directory")
    _check_free(place, directory, force)
    part = beside(place, "partial")
    try:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        remove(part)
        files = []
        if pickled and not weights_only:
            content = sharded_checkpoint.load(source, None, False if trust else None)
            states = {key: OrderedDict(value.data) for key, value in content.items() if isinstance(value, StoredState)}
            _write_pickled({**content, **states}, part, progress)
        else:
            sharded_checkpoint.verify(source, None)
            if pickled:
                _write_pickled(_weights(source), part, progress)
            else:
                files = _write_safetensors(source, part, directory, max_shard_size or 5 * 10**9, progress)
        replace(fs, part, place)
    except OSError as error:
        raise Zero3Error(f"cannot write {place}: {error.strerror or error}") from error
    finally:
        remove(part)
    return [f"{place}/{name}" for name in files] or [place]


def parse_size(text: str) -> int:
    """Bytes, of "5GB", "200 MB", "1GiB" or "123456".

    Raises:
        ValueError: it is none of these, or less than one byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?\s*", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is no size; write 5GB, 200MB or 1GiB")
    number, prefix, binary = found.groups()
    size = int(float(number) * (1024 if binary else 1000) ** (1 + "KMGT".index(prefix.upper()) if prefix else 0))
    if size < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return size


def _check_free(place: str, directory: bool, force: bool) -> None:
    """Raise if there is something at `place` that may not be replaced."""
    if not os.path.lexists(place):
        return
    if os.path.isdir(place) != directory:
        raise Zero3Error(f"{place} is a {'file' if directory else 'directory'}; choose another name")
    foreign = [n for n in sorted(os.listdir(place)) if not re.fullmatch(_OURS, n)] if directory else []
    if foreign:
        raise Zero3Error(f"{place} holds {foreign[0]!r}, which is not of a model in .safetensors; choose another name")
    if not force and not (directory and not os.listdir(place)):
        raise Zero3Error(f"{place} is there already; --force (force=True) replaces it")


# -- files of torch.save ----------------------------------------------------------------------------------------------


def _write_pickled(content: Any, path: str, progress: Callable[[int, int], None] | None) -> None:
    """Let torch write a file with holes where tensors are, from tensors without memory; then fill the holes."""
    stored: dict[int, Stored] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        content = _without_memory(content, stored)
    met: list[Tensor] = []

    class Noting(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, Tensor):
                met.append(obj)
            return NotImplemented

    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(content, path, pickle_module=SimpleNamespace(__name__="pickle", Pickler=Noting, dumps=pickle.dumps))
    storages = list({tensor.untyped_storage()._cdata: tensor for tensor in met}.values())
    with open(path, "r+b") as file:
        places = _holes(file)
        if len(places) != len(storages):
            raise Zero3Error(f"torch wrote {len(places)} storages into {path}, instead of {len(storages)}")
        to_read: list[tuple[Stored, int]] = []
        for number, tensor in enumerate(storages):
            if id(tensor) in stored:
                to_read.append((stored[id(tensor)], places[number]))
            else:
                file.seek(places[number])
                file.write(_bytes_of(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())))
        _fill(file, to_read, progress)


def _without_memory(value: Any, stored: dict[int, Stored]) -> Any:
    """Plain containers, in which what is `Stored` is a tensor without memory; notes which."""
    if isinstance(value, Stored):
        fake = torch.empty(value.shape, dtype=value.dtype)
        stored[id(fake)] = value
        return fake
    if isinstance(value, StoredState):
        return {name: _without_memory(v, stored) for name, v in value.data.items()}
    if type(value) in (dict, OrderedDict):
        return type(value)((name, _without_memory(v, stored)) for name, v in value.items())
    if type(value) is list:
        return [_without_memory(v, stored) for v in value]
    return value


def _holes(file: BinaryIO) -> dict[int, int]:
    """Where each storage of a file of torch.save begins, by its number."""
    places = {}
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            folder, _, number = entry.filename.rpartition("/")
            if folder.endswith("/data"):
                file.seek(entry.header_offset + 26)  # the local header: 30 bytes, the name, an extra field of any size
                name, extra = int.from_bytes(file.read(2), "little"), int.from_bytes(file.read(2), "little")
                places[int(number)] = entry.header_offset + 30 + name + extra
    return places


# -- .safetensors -----------------------------------------------------------------------------------------------------


def _write_safetensors(
    source: str, part: str, directory: bool, limit: int, progress: Callable[[int, int], None] | None
) -> list[str]:
    """Write one file at `part`, or a directory. Returns the names in the directory."""
    weights = _weights(source)
    if other := [name for name, value in weights.items() if not isinstance(value, Stored)]:
        raise Zero3Error(f"{other[0]!r} is no tensor, and .safetensors files hold nothing else; write a .pt file")
    metadata = {"format": "pt", **_progress_of(source)}
    shards: list[list[str]] = [[]]
    size = 0
    for name, stored in weights.items():
        if directory and shards[-1] and size + stored.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += stored.nbytes
    count = len(shards)
    names = ["model.safetensors"]
    if count > 1:
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    total, done = sum(stored.nbytes for stored in weights.values()), 0
    if directory:
        os.mkdir(part)
    for name, members in zip(names, shards, strict=True):
        entries = {n: (str(weights[n].dtype)[6:], tuple(weights[n].shape), weights[n].nbytes) for n in members}
        head = safetensors.header({n: safetensors.Entry(*entry) for n, entry in entries.items()}, metadata)
        with open(f"{part}/{name}" if directory else part, "wb") as file:
            file.write(head)
            ends = accumulate((weights[n].nbytes for n in members), initial=len(head))
            _fill(file, list(zip((weights[n] for n in members), ends)), _shifted(progress, done, total))  # noqa: B905
        done += sum(weights[n].nbytes for n in members)
    if not directory:
        return []
    if count > 1:
        where = {n: name for name, members in zip(names, shards, strict=True) for n in members}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        with open(f"{part}/{INDEX}", "w") as file:
            json.dump(index, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        names.append(INDEX)
    return names


def _shifted(progress: Callable[[int, int], None] | None, before: int, total: int) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, _: progress(before + done, total)


def _progress_of(source: str) -> dict[str, str]:
    """How far training had come, if the checkpoint says so in words that are safe to read."""
    try:
        extra = sharded_checkpoint.read_extra(source)
    except Zero3Error:
        return {}
    return {key: str(extra[key]) for key in ("epoch", "global_step") if key in extra}


# -- tensors from here to there ---------------------------------------------------------------------------------------


def _weights(source: str) -> dict[str, Any]:
    """The state dict, tensors as `Stored`."""
    state: dict[str, Any] = {}
    for key, found in sharded_checkpoint.contents(source).state_dict_metadata.items():
        if key.startswith("state_dict."):
            name = key.removeprefix("state_dict.")
            if isinstance(found, TensorStorageMetadata):
                state[name] = Stored(source, key, found.size, found.properties.dtype)
            else:  # what a module's `get_extra_state` gave
                value = {key: None}
                sharded_checkpoint.read(source, value, None)
                state[name] = value[key]
    return state


def _fill(file: BinaryIO, holes: list[tuple[Stored, int]], progress: Callable[[int, int], None] | None) -> None:
    """Read tensors and write each at its place."""
    total, done = sum(stored.nbytes for stored, _ in holes), 0
    for group in _groups(holes):
        tensors = {stored.key: torch.empty(stored.shape, dtype=stored.dtype) for stored, _ in group}
        sharded_checkpoint.read(group[0][0].path, tensors, None)
        for stored, place in group:
            file.seek(place)
            file.write(_bytes_of(tensors.pop(stored.key)))
            done += stored.nbytes
            if progress is not None:
                progress(done, total)
    file.flush()
    os.fsync(file.fileno())


def _groups(holes: list[tuple[Stored, int]]) -> Iterator[list[tuple[Stored, int]]]:
    group: list[tuple[Stored, int]] = []
    for hole in holes:
        if group and sum(stored.nbytes for stored, _ in group) + hole[0].nbytes > _TOGETHER:
            yield group
            group = []
        group.append(hole)
    if group:
        yield group


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
