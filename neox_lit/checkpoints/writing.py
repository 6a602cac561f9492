"""Models to files of other programs: GPT-NeoX's and Hugging Face's, layer by layer.

Everything is written into a directory beside the place and renamed at the end: what has the name is whole.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor

from neox_lit.checkpoints.lazy import InMemory, LazyTensor, whole
from neox_lit.checkpoints.opening import Checkpoint, hf_name, layer_file, open_checkpoint
from neox_lit.checkpoints.shapes import READOUT, checked, layer_prefixes
from neox_lit.config import NeoXConfig
from neox_lit.errors import NeoXError
from neox_lit.merging import rule_of, split
from neox_lit.model import NeoXModel


def save_neox(
    model: NeoXModel | Checkpoint, path: str | Path, tp: int = 2, layout: Literal["layers", "sequential"] = "layers"
) -> None:
    """Write GPT-NeoX's files and `configs/model.yml`.

    Args:
        model: What to write. One that is sharded must be gathered first, see `lightning_zero3.gather_parameters`.
        path: A directory that does not exist yet.
        tp: Tensor-parallel ranks to divide the layers for. `open_checkpoint` merges them to the same bits.
        layout: 'layers': a file for each layer and rank, in host memory one layer at a time. 'sequential': a file
            `mp_rank_YY_model_states.pt` for each rank, in host memory one of them at a time.

    Raises:
        NeoXError: `tp` does not divide the model, or there is something at `path`.
    """
    config, tensors, tokenizer = _source(model)
    if tp < 1:
        raise NeoXError(f"tp must be at least 1, got {tp}")
    for field, value in (("n_heads", config.n_heads), ("n_vocab", config.n_vocab), ("d_ff", config.d_ff)):
        if value % tp:
            raise NeoXError(f"tp={tp} does not divide {field}={value} of this model")
    if layout not in ("layers", "sequential"):
        raise NeoXError(f"layout must be 'layers' or 'sequential', got {layout!r}")
    layers = {
        number: {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for number, prefix in layer_prefixes(config.n_layers).items()
        if prefix != "readout." or READOUT in tensors
    }

    def parts(number: int, ranks: range) -> list[dict[str, Tensor]]:
        """State dicts of a layer for some ranks. Clones, for `torch.save` writes all that a view is a view of."""
        states: list[dict[str, Tensor]] = [{} for _ in ranks]
        for key, tensor in layers[number].items():
            pieces = split(rule_of(key, config.parallel_residual), whole(tensor), tp, tensor.where)
            for state, rank in zip(states, ranks, strict=True):
                state[key] = pieces[rank].clone()
        return states

    with _whole_directory(path) as folder:
        if layout == "layers":
            for number in layers:
                for rank, state in enumerate(parts(number, range(tp))):
                    torch.save(state, folder / layer_file(number, rank))
        else:
            for rank in range(tp):
                module = {
                    f"sequential.{number}.{key}": piece
                    for number in layers
                    for key, piece in parts(number, range(rank, rank + 1))[0].items()
                }
                torch.save({"module": module}, folder / f"mp_rank_{rank:02d}_model_states.pt")
        (folder / "configs").mkdir()
        (folder / "configs" / "model.yml").write_text(yaml.safe_dump(_yml(config, tp), sort_keys=False))
        _write_tokenizer(folder, tokenizer)


def save_hf(
    model: NeoXModel | Checkpoint,
    path: str | Path,
    format: Literal["safetensors", "bin"] = "safetensors",
    shard_bytes: int = 1 << 30,
) -> None:
    """Write what `transformers.AutoModelForCausalLM.from_pretrained` reads: config.json and weights.

    Args:
        model: As in `save_neox`.
        path: A directory that does not exist yet.
        format: 'safetensors', or 'bin' for `pytorch_model.bin`.
        shard_bytes: Most bytes in one file, unless one layer is larger; so much host memory it takes.

    Raises:
        NeoXError: There is something at `path`.
    """
    from safetensors.torch import save_file

    config, tensors, tokenizer = _source(model)
    if format not in ("safetensors", "bin"):
        raise NeoXError(f"format must be 'safetensors' or 'bin', got {format!r}")
    stem, end = ("model", "safetensors") if format == "safetensors" else ("pytorch_model", "bin")
    shards = _shards(config, tensors, shard_bytes)
    names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.{end}" for i in range(len(shards))]
    if len(shards) == 1:
        names = [f"{stem}.{end}"]

    with _whole_directory(path) as folder:
        for name, shard in zip(names, shards, strict=True):
            state = {hf_name(ours): whole(tensors[ours]).contiguous() for ours in shard}
            if format == "safetensors":
                save_file(state, folder / name, metadata={"format": "pt"})
            else:
                torch.save({key: value.clone() for key, value in state.items()}, folder / name)
            del state
        if len(shards) > 1:
            size = sum(_bytes(tensor) for tensor in tensors.values())
            files = {hf_name(ours): name for name, shard in zip(names, shards, strict=True) for ours in shard}
            _write_json(folder / f"{stem}.{end}.index.json", {"metadata": {"total_size": size}, "weight_map": files})
        dtypes = {tensor.dtype for tensor in tensors.values()}
        told = {"torch_dtype": str(dtypes.pop()).removeprefix("torch.")} if len(dtypes) == 1 else {}
        _write_json(folder / "config.json", {**config.to_hf(), **told})
        _write_tokenizer(folder, tokenizer)


def convert(
    src: str | Path,
    dst: str | Path,
    to: Literal["neox", "neox-sequential", "hf"] = "hf",
    tp: int = 2,
    config: NeoXConfig | None = None,
) -> None:
    """Rewrite a checkpoint of any format that `open_checkpoint` knows.

    Args:
        src, config: See `open_checkpoint`.
        dst: A directory that does not exist yet.
        to: See `save_neox` and `save_hf`.
        tp: Tensor-parallel ranks, for GPT-NeoX.

    Raises:
        NeoXError: See `open_checkpoint`, `save_neox`, `save_hf`.
    """
    checkpoint = open_checkpoint(src, config)
    if to == "hf":
        save_hf(checkpoint, dst)
    elif to in ("neox", "neox-sequential"):
        save_neox(checkpoint, dst, tp, "layers" if to == "neox" else "sequential")
    else:
        raise NeoXError(f"to must be 'neox', 'neox-sequential' or 'hf', got {to!r}")


def _source(model: NeoXModel | Checkpoint) -> tuple[NeoXConfig, Mapping[str, LazyTensor], str | None]:
    """Config with `d_ff` written out, tensors in the order of files, tokenizer."""
    if isinstance(model, Checkpoint):
        config, tensors, tokenizer = model.require_config(), model.tensors, model.tokenizer
    else:
        config, tokenizer = model.config, None
        state = {name: InMemory(value, f"parameter {name!r}") for name, value in model.state_dict().items()}
        tensors = checked(state, config, lambda _: type(model).__name__)
    return dataclasses.replace(config, d_ff=config.d_ff or 4 * config.n_hidden), tensors, tokenizer


def _shards(config: NeoXConfig, tensors: Mapping[str, LazyTensor], most: int) -> list[list[str]]:
    """Names of parameters for each file, layers kept whole."""
    shards: list[list[str]] = [[]]
    held = 0
    for prefix in layer_prefixes(config.n_layers).values():
        layer = [name for name in tensors if name.startswith(prefix)]
        size = sum(_bytes(tensors[name]) for name in layer)
        if shards[-1] and held + size > most:
            shards.append([])
            held = 0
        shards[-1] += layer
        held += size
    return shards


def _bytes(tensor: LazyTensor) -> int:
    return tensor.shape.numel() * tensor.dtype.itemsize


def _yml(config: NeoXConfig, tp: int) -> dict[str, object]:
    try:
        return config.to_yml(tp)
    except NeoXError:  # initial values that a yml cannot say, and that a trained model does not need
        return dataclasses.replace(config, init_std=None, output_init_std=None).to_yml(tp)


def _write_tokenizer(folder: Path, tokenizer: str | None) -> None:
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def _whole_directory(path: str | Path) -> Iterator[Path]:
    """A directory to write into, which has its name only if all went well."""
    path = Path(path)
    if path.exists():
        raise NeoXError(f"{path} exists already; choose another place, or remove it first")
    part = path.absolute().with_name(f".{path.absolute().name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
