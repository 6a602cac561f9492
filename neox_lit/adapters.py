"""Adapter files of `peft`: what `PeftModel.from_pretrained` reads on Hugging Face's GPTNeoXForCausalLM, and back.

    adapter_config.json         rank, alpha, dropout, targets
    adapter_model.safetensors   base_model.model.gpt_neox.layers.N.attention.dense.lora_A.weight [rank, n_in],
                                ... .lora_B.weight [n_out, rank]

Names inside a block are the same here and there, and so is the order of a weight's rows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_zero3.shard import full_state_dict, load_full_state_dict
from neox_lit.errors import NeoXError
from neox_lit.lora import LoRAOptions, adapted, add_lora
from neox_lit.model import NeoXModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_OURS, _THEIRS = "blocks.", "base_model.model.gpt_neox.layers."

# Settings of peft that change what an adapter computes, and the values that are the same here.
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "target_parameters": None,
}


def save_adapter(model: NeoXModel, directory: str | os.PathLike) -> None:
    """Write the adapters alone. Called on every rank; of a sharded model only they are gathered.

    Args:
        directory: Where the two files go; made if it is not there, and files of the same names are replaced.

    Raises:
        NeoXError: The model has no adapters, or they are merged.
    """
    from safetensors.torch import save_file

    layers = list(adapted(model))
    if not layers:
        raise NeoXError("the model has no adapters to save; set model.trainable to lora")
    if any(lora.merged for _, _, lora in layers):
        raise NeoXError("the adapters are merged: base and adapter would count twice; call unmerge_lora() first")
    options = layers[0][2].options
    state = full_state_dict(model, only=lambda name: ".lora." in name)
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    config = {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "target_modules": list(options.targets),
    }
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {_to_peft(name): value.contiguous() for name, value in state.items()}, path / WEIGHTS, metadata={"format": "pt"}
    )
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_options(directory: str | os.PathLike) -> LoRAOptions:
    """The options of an adapter in files.

    Raises:
        NeoXError: No such file, or an adapter of a kind that is not computed here.
    """
    path = Path(directory) / CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NeoXError(f"adapter {str(directory)!r}: cannot read {CONFIG} ({error})") from error
    for name, plain in _PLAIN.items():
        value = config.get(name, plain)
        if value != plain and (value or plain):
            raise NeoXError(f"adapter {str(directory)!r} has {name}={value!r}; only {plain!r} can be loaded here")
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        raise NeoXError(f"adapter {str(directory)!r} has target_modules={targets!r}; a list of names is needed")
    return LoRAOptions(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout", 0.0),
        targets=tuple(target.rpartition(".")[2] for target in sorted(targets)),
    )


def load_adapter(model: NeoXModel, directory: str | os.PathLike) -> LoRAOptions:
    """Load adapters, ours or `peft`'s, into a model; it gets adapters if it has none. Called on every rank.

    Returns:
        The adapter's options.

    Raises:
        NeoXError: Files that are missing or not understood; an adapter of another shape than the model or than the
            adapters it has. Nothing has been loaded then.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    options, where = read_options(directory), f"adapter {str(directory)!r}"
    try:
        tensors = load_file(Path(directory) / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise NeoXError(f"{where}: cannot read {WEIGHTS} ({error})") from error
    state = {_from_peft(name): value for name, value in tensors.items()}
    own = [lora for _, _, lora in adapted(model)]
    if not own:
        add_lora(model, options)
    elif own[0].merged:
        raise NeoXError(f"{where} cannot be loaded over merged adapters; call unmerge_lora() first")
    elif (own[0].options.rank, own[0].options.alpha) != (options.rank, options.alpha):
        raise NeoXError(
            f"{where} has rank {options.rank} and alpha {options.alpha}, the model's own adapters "
            f"{own[0].options.rank} and {own[0].options.alpha}; set model.lora accordingly"
        )
    shapes = {name: p.shape for name, p in model.named_parameters() if ".lora." in name}
    problems = [f"{name} is missing" for name in shapes if name not in state]
    problems += [f"{name} is not in the model" for name in state if name not in shapes]
    problems += [
        f"{name} is {list(value.shape)}, in the model {list(shapes[name])}"
        for name, value in state.items()
        if name in shapes and value.shape != shapes[name]
    ]
    if problems:
        raise NeoXError(f"{where} does not fit: {'; '.join(problems[:5])}")
    load_full_state_dict(model, state, strict=False)
    return options


def _to_peft(name: str) -> str:
    """`blocks.0.attention.dense.lora.A` as in peft's file."""
    stem, _, matrix = name.rpartition(".lora.")
    return f"{_THEIRS}{stem.removeprefix(_OURS)}.lora_{matrix}.weight"


def _from_peft(name: str) -> str:
    for matrix in "AB":
        if name.startswith(_THEIRS) and name.endswith(end := f".lora_{matrix}.weight"):
            return f"{_OURS}{name.removeprefix(_THEIRS).removesuffix(end)}.lora.{matrix}"
    return name
