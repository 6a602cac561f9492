"""Checkpoints of every known format as one thing: a config, and tensors under `NeoXModel`'s names that are read later.

| what is there                                      | format                                                        |
|----------------------------------------------------|---------------------------------------------------------------|
| layer_XX-model_YY-model_states.pt                  | GPT-NeoX, a file for each layer and tensor-parallel rank      |
| mp_rank_YY_model_states.pt                         | GPT-NeoX without pipeline: `["module"]["sequential.{i}.{key}"]` |
| model.safetensors, pytorch_model.bin, or their `.index.json` | Hugging Face; `zero3 consolidate` of the next two    |
| .metadata                                          | a sharded checkpoint of this package's training               |
| a file .ckpt                                       | a checkpoint of this package's training                       |
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neox_lit.checkpoints import pickles, safetensors
from neox_lit.checkpoints.lazy import LazyTensor, Merged, Once
from neox_lit.checkpoints.shapes import EMBEDDING, READOUT, checked, layer_prefixes
from neox_lit.config import NeoXConfig
from neox_lit.errors import NeoXError
from neox_lit.merging import parameters_of, rule_of


class Checkpoint(NamedTuple):
    """A model in files."""

    path: Path
    config: NeoXConfig | None  # None: the files tell too little (the number of heads, say)
    tensors: dict[str, LazyTensor]  # by `NeoXModel`'s names; a tied readout is not among them
    tokenizer: str | None  # content of a tokenizer.json, if there is one

    def require_config(self) -> NeoXConfig:
        """The config.

        Raises:
            NeoXError: There is none.
        """
        if self.config is None:
            raise NeoXError(
                f"{self.path} has no config beside the weights (config.json or configs/*.yml); "
                "give one: config=NeoXConfig.preset(...) or NeoXConfig.from_yml(...)"
            )
        return self.config


def open_checkpoint(path: str | Path, config: NeoXConfig | None = None) -> Checkpoint:
    """Look into a checkpoint, of whatever format; weights are read when they are asked for, and only what is asked for.

    Args:
        path: A directory (GPT-NeoX's may be the one with `latest` in it), or a file.
        config: The model. By default what a config file beside the weights says.

    Raises:
        NeoXError: No such file, no known format, files missing, damaged or holding code, parameters missing or of
            other shapes than the config's; the message names file and key.
    """
    path = Path(path)
    if path.is_dir():
        return _open_directory(path, config)
    if not path.exists():
        raise NeoXError(f"checkpoint {str(path)!r}: no such file (here: {Path.cwd()})")
    if path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json"):
        return _open_hf(path, config)
    if path.suffix == ".pt":
        raise NeoXError(f"{path} is one file of a checkpoint; give its directory, {path.parent}")
    return _open_lightning(path, config)


def _open_directory(path: Path, config: NeoXConfig | None) -> Checkpoint:
    if (path / ".metadata").exists():
        return _open_sharded(path, config)
    for pattern, read in ((_LAYER_FILE, _read_layers), (_RANK_FILE, _read_sequential)):
        files = {tuple(map(int, m.groups())): f for f in sorted(path.iterdir()) if (m := pattern.fullmatch(f.name))}
        if files:
            return _open_neox(path, config, read(files))
    for name in ("model.safetensors", "pytorch_model.bin"):
        for entry in (path / f"{name}.index.json", path / name):
            if entry.exists():
                return _open_hf(entry, config)
    if (path / "latest").is_file():
        tag = (path / "latest").read_text().strip()
        inner = path / tag
        if Path(tag).name != tag or not inner.is_dir():
            raise NeoXError(f"{path / 'latest'} names {tag!r}, which is no directory beside it")
        return _open_directory(inner, config)
    raise NeoXError(
        f"{path} has no checkpoint of a known format: no layer_XX-model_YY-model_states.pt, no mp_rank_YY_model_states"
        ".pt, no model.safetensors or pytorch_model.bin or an index of them, no .metadata"
    )


# -- GPT-NeoX ----------------------------------------------------------------------------------------------------------

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")


def layer_file(number: int, rank: int) -> str:
    """Name of the file of one layer and tensor-parallel rank."""
    return f"layer_{number:02d}-model_{rank:02d}-model_states.pt"


class _Pieces(NamedTuple):
    """What files of GPT-NeoX hold, by number of the layer and tensor-parallel rank."""

    states: dict[tuple[int, int], Mapping[str, LazyTensor]]
    name: Callable[[int, int], str]  # of the file in which a layer and rank should be


def _read_layers(files: dict[tuple[int, ...], Path]) -> _Pieces:
    states: dict[tuple[int, int], Mapping[str, LazyTensor]] = {
        (number, rank): pickles.lazy_tensors(file) for (number, rank), file in files.items()
    }
    return _Pieces(states, layer_file)


def _read_sequential(files: dict[tuple[int, ...], Path]) -> _Pieces:
    states: dict[tuple[int, int], dict[str, LazyTensor]] = {}
    for (rank,), file in files.items():
        for name, tensor in pickles.lazy_tensors(file, "module").items():
            match = re.fullmatch(r"sequential\.(\d+)\.(.+)", name)
            if match is None:
                raise NeoXError(f"{tensor.where} does not belong to a GPT-NeoX model: names begin with sequential.N.")
            states.setdefault((int(match[1]), rank), {})[match[2]] = tensor
    return _Pieces(dict(states), lambda number, rank: f"mp_rank_{rank:02d}_model_states.pt")


def _open_neox(path: Path, given: NeoXConfig | None, pieces: _Pieces) -> Checkpoint:
    config = given or _yml_beside(path)
    numbers = sorted({number for number, _ in pieces.states})
    n_layers = config.n_layers if config else _count_layers(path, pieces)
    prefixes = layer_prefixes(n_layers)
    for number in numbers:
        if number not in prefixes:
            rank = min(r for n, r in pieces.states if n == number)
            raise NeoXError(
                f"{path / pieces.name(number, rank)}: a model with n_layers={n_layers} has no layer number {number}; "
                f"here are {', '.join(map(str, numbers))}. Is it the config of these files?"
            )
    tp = 1 + max(rank for _, rank in pieces.states)
    if tp > 1 and config is None:
        raise NeoXError(
            f"{path} has {tp} shards of each layer and no configs/*.yml that says whether the residual is parallel, on "
            "which it depends how biases merge; give config=NeoXConfig.preset(...) or NeoXConfig.from_yml(...)"
        )
    tied = config is not None and config.tied_readout
    found: dict[str, LazyTensor] = {}
    once = Once()
    for number, prefix in prefixes.items():
        if prefix == "readout." and tied and number not in numbers:
            continue
        for rank in range(tp):
            if (number, rank) not in pieces.states:
                hint = " (or the model is tied: give config= with tied_readout=True)" if prefix == "readout." else ""
                raise NeoXError(
                    f"{path / pieces.name(number, rank)} is missing, or has nothing of layer {number}: a model with "
                    f"n_layers={n_layers} has layers 0, 2 to {n_layers + 1}, {n_layers + 3} and {n_layers + 4}, here "
                    f"in {tp} shard(s) each{hint}"
                )
        shards = [_named(pieces.states[number, rank]) for rank in range(tp)]
        for rank, shard in enumerate(shards):
            for name in {**shards[0], **shard}:
                if (name in shards[0]) != (name in shard):
                    other = 0 if name in shard else rank
                    raise NeoXError(
                        f"{path / pieces.name(number, other)}: {name!r} is missing, which another shard has"
                    )
        for name in shards[0]:
            rule = rule_of(name, config is None or config.parallel_residual)
            parts = [shard[name] for shard in shards]
            found[prefix + name] = parts[0] if tp == 1 else Merged(rule, parts, once)

    if given is None and config is not None and EMBEDDING in found and len(found[EMBEDDING].shape) == 2:
        config = dataclasses.replace(config, n_vocab=found[EMBEDDING].shape[0])  # ymls do not tell it

    def place(name: str) -> str:
        number = next(number for number, prefix in prefixes.items() if name.startswith(prefix))
        return str(path / pieces.name(number, 0))

    return Checkpoint(path, config, checked(found, config, place), _tokenizer_beside(path))


def _named(state: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    return {name: state[key] for name, key in parameters_of(state).items()}


def _count_layers(path: Path, pieces: _Pieces) -> int:
    """From the highest number, if it is the readout's."""
    last = max(number for number, _ in pieces.states)
    state = next(state for (number, _), state in pieces.states.items() if number == last)
    if "final_linear.weight" not in state or last < 5:
        raise NeoXError(
            f"{path / pieces.name(last, 0)}, the last layer there, is no readout. A file is missing, or the model is "
            "tied: then give config= with tied_readout=True"
        )
    return last - 4


def _yml_beside(path: Path) -> NeoXConfig | None:
    ymls = [
        f for folder in (path / "configs", path) for end in ("yml", "yaml") for f in sorted(folder.glob(f"*.{end}"))
    ]
    return NeoXConfig.from_yml(*ymls) if ymls else None


# -- Hugging Face ------------------------------------------------------------------------------------------------------

_FROM_HF = (
    (r"(?:gpt_neox\.)?embed_in\.weight", EMBEDDING),
    (r"(?:gpt_neox\.)?layers\.(\d+\..+)", r"blocks.\1"),
    (r"(?:gpt_neox\.)?final_layer_norm\.(.+)", r"final_norm.norm.\1"),
    (r"embed_out\.weight|lm_head\.weight", READOUT),
    (r"model\.((?:embedding|blocks|final_norm|readout)\..+)", r"\1"),  # of training, through `zero3 consolidate`
)


def hf_name(name: str) -> str:
    """Hugging Face's name of a parameter, on disk, by its name here."""
    if name == EMBEDDING:
        return "gpt_neox.embed_in.weight"
    if name == READOUT:
        return "embed_out.weight"
    return name.replace("blocks.", "gpt_neox.layers.", 1).replace("final_norm.norm.", "gpt_neox.final_layer_norm.", 1)


def _open_hf(entry: Path, config: NeoXConfig | None) -> Checkpoint:
    """`entry`: the one file with weights, or the index of several."""
    folder = entry.parent
    if config is None and (folder / "config.json").exists():
        config = NeoXConfig.from_hf(_read_json(folder / "config.json"))
    tensors = _indexed(entry) if entry.suffix == ".json" else _read_hf(entry)
    found: dict[str, LazyTensor] = {}
    for name, key in parameters_of(tensors).items():
        ours = next((re.sub(old, new, name) for old, new in _FROM_HF if re.fullmatch(old, name)), None)
        if ours is None:
            raise NeoXError(f"{tensors[key].where} does not belong to a GPT-NeoX model")
        if ours in found:
            raise NeoXError(f"{tensors[key].where} and {found[ours].where} are the same parameter")
        found[ours] = tensors[key]
    return Checkpoint(folder, config, checked(found, config, lambda _: str(entry)), _tokenizer_beside(folder))


def _read_hf(file: Path) -> Mapping[str, LazyTensor]:
    return safetensors.lazy_tensors(file) if file.suffix == ".safetensors" else pickles.lazy_tensors(file)


def _indexed(index: Path) -> dict[str, LazyTensor]:
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise NeoXError(f"{index} has no weight_map of names to files")
    files = {file: _read_hf(_inside(index, file)) for file in dict.fromkeys(names.values())}
    for name, file in names.items():
        if name not in files[file]:
            raise NeoXError(f"{index.parent / file}: {name!r} is missing, which {index.name} says is there")
    return {name: files[file][name] for name, file in names.items()}


def _inside(index: Path, name: str) -> Path:
    """The file that an index names, which must lie beside it.

    The hub's cache links every file of `snapshots/REVISION` into the `blobs` of the same model; that is allowed.
    """
    folder, real = index.parent.resolve(), (index.parent / name).resolve()
    allowed = [folder] + ([folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [])
    if Path(name).is_absolute() or ".." in Path(name).parts or not any(a in real.parents for a in allowed):
        raise NeoXError(
            f"{index} names {name!r}, which lies outside of its directory; such an index is not to be trusted"
        )
    return index.parent / name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NeoXError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise NeoXError(f"{path} holds no JSON object")
    return content


def _tokenizer_beside(path: Path) -> str | None:
    file = path / "tokenizer.json"
    return file.read_text() if file.is_file() else None


# -- this package's training -------------------------------------------------------------------------------------------

_PREFIX = "model."  # of NeoXLightning


def _open_lightning(path: Path, config: NeoXConfig | None) -> Checkpoint:
    extra = pickles.read_content(path)
    if not isinstance(extra, dict) or not isinstance(extra.get("state_dict"), Mapping):
        raise NeoXError(f"{path} is no checkpoint: it has no state dict")
    return _of_training(path, config, extra, pickles.lazy_tensors(path, "state_dict"))


def _open_sharded(path: Path, config: NeoXConfig | None) -> Checkpoint:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from lightning_zero3 import Zero3Error
    from lightning_zero3.checkpoints import sharded_checkpoint

    try:
        sharded_checkpoint.verify(path, None)
        extra = sharded_checkpoint.read_extra(path)
        index = sharded_checkpoint.contents(path).state_dict_metadata
    except Zero3Error as error:
        raise NeoXError(str(error)) from error
    tensors = {
        key.removeprefix("state_dict."): InShards(str(path), key, found.size, found.properties.dtype)
        for key, found in index.items()
        if isinstance(found, TensorStorageMetadata) and key.startswith("state_dict.")
    }
    return _of_training(path, config, extra, tensors)


class InShards(NamedTuple):
    """A tensor of a sharded checkpoint."""

    path: str
    key: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def where(self) -> str:
        return f"{self.path}: {self.key!r}"

    def read(self, start: int, stop: int) -> Tensor:
        from lightning_zero3.checkpoints.boxes import FlatRange
        from lightning_zero3.checkpoints.sharded_checkpoint import read

        flat = torch.empty(stop - start, dtype=self.dtype)
        if stop > start:
            strides = torch.empty(self.shape, device="meta").stride()
            read(self.path, {self.key: FlatRange(self.shape, strides, start, flat)}, None)
        return flat


def _of_training(
    path: Path, config: NeoXConfig | None, extra: dict[str, Any], tensors: Mapping[str, LazyTensor]
) -> Checkpoint:
    told = extra.get("hyper_parameters", {}).get("config")
    if config is None and isinstance(told, dict):
        config = NeoXConfig.from_dict(told)
    found = {name.removeprefix(_PREFIX): t for name, t in tensors.items() if name.startswith(_PREFIX)}
    return Checkpoint(path, config, checked(found, config, lambda _: str(path)), extra.get("neox_lit_tokenizer"))
