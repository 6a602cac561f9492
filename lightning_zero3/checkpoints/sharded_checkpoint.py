"""Sharded checkpoints: directories in which every rank writes its part, and of which every rank reads its part.

The format is that of `torch.distributed.checkpoint`, laid out as Lightning's ModelParallelStrategy does:

    name.ckpt/
        .metadata          torch's: which box of which tensor lies where
        __0_0.distcp, ...  the boxes, a file for each rank
        meta.pt            all else: loops, callbacks, hyperparameters, the optimizers' parameter groups
        checksums.json     CRC-32 of every file above

Entries are `state_dict.{name}` and `optimizer_{i}.state.{name}.{key}`, in their true shapes.

A checkpoint is written beside its place, made durable and then renamed: under its own name there is never half of one.
It changes places with the one before it at once, on Linux; elsewhere that one is put aside for the moment between two
renames, and if the process dies just then, it is found there.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from collections import UserDict
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan

from lightning_zero3.checkpoints.durable import beside, is_local, place_of, replace, write_file
from lightning_zero3.comm import Communicator
from lightning_zero3.errors import Zero3Error

__all__ = [
    "Stored",
    "StoredState",
    "contents",
    "is_sharded_checkpoint",
    "load",
    "load_whole",
    "on_first",
    "read",
    "write",
]

PARAM_GROUPS = "optimizer_param_groups"  # in meta.pt: of each optimizer, with parameters by name

_INDEX, _EXTRA, _SUMS = ".metadata", "meta.pt", "checksums.json"


def is_sharded_checkpoint(path: str | os.PathLike) -> bool:
    """Whether there is a complete one."""
    fs, place = place_of(path)
    return fs.exists(f"{place}/{_INDEX}")


# -- writing ----------------------------------------------------------------------------------------------------------


def write(path: str | os.PathLike, entries: dict[str, Any], extra: bytes, comm: Communicator | None) -> None:
    """Write a checkpoint. Called on every rank; returns when it is complete.

    Args:
        path: of the directory. An earlier checkpoint or file there is replaced when this one is complete.
        entries: this rank's `FlatRange`s, and what the first rank writes for all (plain tensors).
        extra: everything else, of the first rank, as `torch.save` writes it.

    Raises:
        Zero3Error: a rank could not write. On every rank; what was there before is as it was.
    """
    fs, place = place_of(path)
    part = beside(place, "partial")

    def prepare() -> None:
        if fs.exists(part):
            fs.rm(part, recursive=True)
        fs.makedirs(part, exist_ok=True)
        write_file(fs, f"{part}/{_EXTRA}", extra)

    def write_part() -> None:
        writer = FsspecWriter(_url(fs, part), sync_files=is_local(fs), thread_count=1, overwrite=True)
        planner = _SavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        dcp.save(entries, storage_writer=writer, planner=planner, **_group(comm))

    def sums() -> dict[str, int]:
        return {name: _checksum(fs, f"{part}/{name}") for name in _mine(sorted(_names(fs, part)), comm)}

    def commit(found: list[dict[str, int]]) -> None:
        merged = {name: value for one in found for name, value in one.items()}
        write_file(fs, f"{part}/{_SUMS}", json.dumps(merged, indent=1).encode())
        replace(fs, part, place)

    try:
        on_first(comm, prepare, path)
        _everywhere(comm, write_part, path)
        found = _everywhere(comm, sums, path)
        on_first(comm, lambda: commit(found), path)
    except BaseException:
        if _rank(comm)[0] == 0 and fs.exists(part):
            fs.rm(part, recursive=True)
        raise


class _SavePlanner(DefaultSavePlanner):
    """torch's, with an index in the order of the first rank's entries: that of the module's state dict."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        known = dict(metadata.state_dict_metadata)
        metadata.state_dict_metadata.clear()
        metadata.state_dict_metadata.update({k: known[k] for k in [*self.state_dict, *known] if k in known})
        return plans, metadata


# -- reading ----------------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike, entries: dict[str, Any], comm: Communicator | None) -> None:
    """Fill this rank's entries (`FlatRange`s or plain tensors) from a checkpoint. Called on every rank.

    Raises:
        Zero3Error: entries that it does not have, of other shapes, or a file that is damaged. On every rank.
    """
    _everywhere(
        comm,
        lambda: dcp.load(entries, storage_reader=_Reader(path), planner=_Planner(), **_group(comm)),
        path,
        "read",
    )


def read_extra(path: str | os.PathLike, weights_only: bool | None = None) -> dict[str, Any]:
    """What is in a checkpoint beside tensors: `meta.pt`.

    Args:
        path: of the directory.
        weights_only: False trusts the file, which may then run code.
    """
    fs, place = place_of(path)
    try:
        with fs.open(f"{place}/{_EXTRA}", "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        raise Zero3Error(
            f"{place}/{_EXTRA} holds objects of classes that are not known to be safe (hyperparameters of your own?). "
            "If you trust the file: trainer.fit(..., weights_only=False), or name the classes with "
            f"torch.serialization.add_safe_globals([...]). ({str(error).splitlines()[0]})"
        ) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise Zero3Error(f"{place}/{_EXTRA} is missing or damaged: {error}") from error


def contents(path: str | os.PathLike) -> Metadata:
    """Names, shapes and dtypes of a checkpoint's entries, and where they lie. Reads no tensor."""
    return _Reader(path).read_metadata()


def verify(path: str | os.PathLike, comm: Communicator | None) -> None:
    """Compare all files with their checksums; every rank reads its share of them. Called on every rank.

    Raises:
        Zero3Error: a file is missing or damaged. On every rank.
    """
    fs, place = place_of(path)
    if not fs.exists(f"{place}/{_SUMS}"):
        return  # written by someone else
    sums = json.loads(fs.cat_file(f"{place}/{_SUMS}"))

    def check() -> None:
        for name in _mine(sorted(sums), comm):
            if not fs.exists(f"{place}/{name}"):
                raise FileNotFoundError(f"{place}/{name} is missing")
            if _checksum(fs, f"{place}/{name}") != sums[name]:
                raise OSError(f"{place}/{name} is damaged: its checksum differs")

    _everywhere(comm, check, path, "read")


class _Reader(FsspecReader):
    """torch's, with an index that can hold nothing but what belongs there: torch would unpickle anything."""

    def __init__(self, path: str | os.PathLike) -> None:
        fs, place = place_of(path)
        super().__init__(_url(fs, place))
        self._index = fs, f"{place}/{_INDEX}"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        fs, place = self._index
        try:
            with fs.open(place, "rb") as file:
                metadata = _IndexUnpickler(file).load()
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise Zero3Error(f"{place} is missing or damaged, so that is no complete checkpoint: {error}") from error
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    _KNOWN: ClassVar[dict[str, set[str]]] = {
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "PurePosixPath"},
        "pathlib._local": {"PosixPath", "PurePosixPath"},
        "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.serialization": {"_get_layout"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # how some versions of Python pickle a member of an enum
            return _member
        if name not in self._KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in the index of a checkpoint")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"{kind!r} does not belong in the index of a checkpoint")
    return kind[name]


class _Planner(DefaultLoadPlanner):
    """torch's, for entries by their full names, and objects only of plain types."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


# -- as a checkpoint in memory ----------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A tensor that is still in the checkpoint."""

    path: str
    key: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """The whole tensor, for this rank alone."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        read(self.path, {self.key: whole}, None)
        return whole


class StoredState(UserDict):
    """Tensors of a checkpoint by name, each read when it is looked up. `data` has those that were not as `Stored`.

    So a hook may change what it wants to change, and ranks read only their parts of the rest.
    """

    def __getitem__(self, name: Any) -> Any:
        value = self.data[name]
        if isinstance(value, Stored):
            value = self.data[name] = value.read()
        return value

    def read_all(self) -> dict[Any, Any]:
        """A plain dict."""
        return {name: self[name] for name in self.data}


def load(path: str | os.PathLike, comm: Communicator | None = None, weights_only: bool | None = None) -> dict[str, Any]:
    """A sharded checkpoint in the form of a full one, large tensors `Stored`. Called on every rank of `comm`.

    Args:
        path: of the directory.
        comm: who loads it together; default this process alone.
        weights_only: False trusts `meta.pt`, which may then run code.

    Raises:
        Zero3Error: a file is missing, damaged, or holds more than plain types.
    """
    verify(path, comm)
    checkpoint = read_extra(path, weights_only)
    index = contents(path).state_dict_metadata
    values: dict[str, Any] = {}
    for key, found in index.items():
        if isinstance(found, TensorStorageMetadata) and found.size.numel() > 1:
            values[key] = Stored(str(path), key, found.size, found.properties.dtype)
    small: dict[str, Any] = {
        key: torch.empty(found.size, dtype=found.properties.dtype) if isinstance(found, TensorStorageMetadata) else None
        for key, found in index.items()
        if key not in values
    }
    read(path, small, comm)
    values = {key: values.get(key, small.get(key)) for key in index}

    for key, value in values.items():
        what, _, name = key.partition(".")
        if not what.startswith("optimizer_"):
            checkpoint.setdefault(what, StoredState())[name] = value
    count = 1 + max((int(k[10 : k.index(".")]) for k in values if k.startswith("optimizer_")), default=-1)
    groups = checkpoint.pop(PARAM_GROUPS, None)
    for i in range(count if groups is None else len(groups)):
        ours = _groups_among(values, i) if groups is None else groups[i]
        numbers = {name: n for n, name in enumerate(name for g in ours for name in g["params"])}
        states: dict[int, StoredState] = {}
        for key, value in values.items():
            if key.startswith(prefix := f"optimizer_{i}.state."):
                name, _, what = key.removeprefix(prefix).rpartition(".")
                states.setdefault(numbers[name], StoredState())[what] = value
        given = [{**g, "params": [numbers[name] for name in g["params"]]} for g in ours]
        checkpoint.setdefault("optimizer_states", []).append(
            {"state": dict(sorted(states.items())), "param_groups": given}
        )
    return checkpoint


def _groups_among(values: dict[str, Any], optimizer: int) -> list[dict[str, Any]]:
    """Parameter groups as ModelParallelStrategy has them, an entry for each option: `optimizer_0.param_groups.1.lr`."""
    groups: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith(prefix := f"optimizer_{optimizer}.param_groups."):
            number, _, option = key.removeprefix(prefix).partition(".")
            groups.setdefault(int(number), {})[option] = value
    return [group for _, group in sorted(groups.items())]


def load_whole(path: str | os.PathLike, weights_only: bool | None = None) -> dict[str, Any]:
    """A sharded checkpoint as a full one, all tensors in memory, for this process alone."""
    checkpoint = load(path, None, weights_only)
    for what, value in checkpoint.items():
        checkpoint[what] = value.read_all() if isinstance(value, StoredState) else value
    for optimizer in checkpoint.get("optimizer_states", ()):
        optimizer["state"] = {number: state.read_all() for number, state in optimizer["state"].items()}
    return checkpoint


# -- ranks together ---------------------------------------------------------------------------------------------------


def _group(comm: Communicator | None) -> dict[str, Any]:
    return {"no_dist": True} if comm is None or comm.world_size == 1 else {"process_group": comm.control}


def _rank(comm: Communicator | None) -> tuple[int, int]:
    return (0, 1) if comm is None else (comm.rank, comm.world_size)


def _everywhere(comm: Communicator | None, work: Callable[[], Any], path: Any, doing: str = "write") -> list[Any]:
    """Every rank's result. If one fails all do, each naming who and why."""
    result, failure, cause = None, None, None
    try:
        result = work()
    except (Exception, CheckpointException) as error:  # torch's is a BaseException
        failure, cause = _reason(error), error
    found = [(result, failure)] if comm is None else comm.all_objects((result, failure))
    failed = {rank: why for rank, (_, why) in enumerate(found) if why is not None}
    if failed:
        told = "; ".join(f"rank {rank}: {why}" for rank, why in failed.items())
        raise Zero3Error(f"cannot {doing} the checkpoint {path} ({told})") from cause
    return [one for one, _ in found]


def on_first(comm: Communicator | None, work: Callable[[], None], path: Any) -> None:
    """Let the first rank write. If it fails all do, and none waits for it. Called on every rank."""
    _everywhere(comm, work if _rank(comm)[0] == 0 else lambda: None, path)


def _reason(error: BaseException) -> str:
    """The first failure inside torch's collection of all ranks' failures."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (first, _) = next(iter(failures.items()))
        return f"{_reason(first)}" + (f" (on rank {rank})" if len(failures) > 1 else "")
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def _url(fs: Any, place: str) -> str:
    return place if is_local(fs) else fs.unstrip_protocol(place)


def _names(fs: Any, directory: str) -> list[str]:
    return [found.rstrip("/").rpartition("/")[2] for found in fs.ls(directory, detail=False)]


def _mine(names: list[str], comm: Communicator | None) -> list[str]:
    rank, world_size = _rank(comm)
    return names[rank::world_size]


def _checksum(fs: Any, place: str) -> int:
    value = 0
    with fs.open(place, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
