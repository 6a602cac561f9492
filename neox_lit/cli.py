"""`neox-lit`: train, evaluate and generate from a YAML file or the command line."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import lightning_zero3  # noqa: F401  registers strategy names, and its classes can be named in YAML
from lightning_zero3 import Zero3Error
from lightning_zero3.sharded_checkpoint import read_extra
from neox_lit import checkpoints
from neox_lit.config import PRESETS, NeoXConfig
from neox_lit.data import TextDataModule
from neox_lit.errors import NeoXError
from neox_lit.generate import Sampling
from neox_lit.module import NeoXLightning
from neox_lit.spelling import suggestions


def generate(
    checkpoint: str,
    prompt: str = "",
    prompts_file: str | None = None,
    batch_size: int = 8,
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    repetition_penalty: float = 1.0,
    stop: list[str] | None = None,
    seed: int = 0,
    device: str | None = None,
) -> None:
    """Continue a text with a trained model and print prompt and continuation, word by word as it comes.

    Args:
        checkpoint: A .ckpt, file or directory, that `neox-lit fit` wrote, or a directory of GPT-NeoX or Hugging Face
            with a tokenizer.json.
        prompt: Text to continue. Empty: begin a new document.
        prompts_file: A file with a prompt in each line, in place of `prompt`. For each, a line of JSON is printed with
            `prompt` and `text`, what follows it.
        batch_size: Prompts of the file that are continued at the same time.
        max_new_tokens: Most tokens to add. By default what fits into the model's `max_seq_len`, in a file of prompts
            after the longest of a batch.
        temperature: Divides the logits; 0 takes the likeliest token always.
        top_k: Choose among the k likeliest tokens only; 0 is no limit.
        top_p: Choose among the likeliest tokens that together have this probability; 1 is no limit.
        repetition_penalty: Makes tokens that the text has already less likely; 1 is none, 1.2 a common choice.
        stop: A list of texts, e.g. '["\\n\\n"]'; generation ends before the first of them.
        seed: The same seed gives the same text. Line i of a file, from 0, draws with seed + i.
        device: 'cpu', 'cuda', 'cuda:1', ... By default a GPU if there is one.
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, repetition_penalty=repetition_penalty
    )
    if prompt and prompts_file is not None:
        raise NeoXError("prompt and prompts_file are both given; leave one out")
    if batch_size < 1:
        raise NeoXError(f"batch_size must be at least 1, got {batch_size}")
    prompts = _lines(prompts_file) if prompts_file is not None else None
    module = load_module(checkpoint, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if prompts is not None:
        for first in range(0, len(prompts), batch_size):
            some = prompts[first : first + batch_size]
            texts = module.complete_all(some, max_new_tokens, replace(sampling, seed=seed + first), stop=stop or ())
            for before, text in zip(some, texts, strict=True):
                print(json.dumps({"prompt": before, "text": text}, ensure_ascii=False), flush=True)
        return
    start = [prompt]  # printed with the first piece: an error in the settings comes before any text

    def write(text: str) -> None:
        print(start.pop() + text if start else text, end="", flush=True)

    module.complete(prompt, max_new_tokens, sampling, stop=stop or (), write=write)
    print("".join(start))


def _lines(path: str) -> list[str]:
    """The lines of a text file."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise NeoXError(f"prompts_file={path!r} cannot be read as UTF-8 text: {error}") from error


def convert(
    src: str,
    dst: str,
    to: Literal["neox", "neox-sequential", "hf"] = "hf",
    tp: int = 2,
    model: str | None = None,
) -> None:
    """Rewrite a checkpoint in another format, layer by layer.

    Args:
        src: A checkpoint: a directory of GPT-NeoX (layer_XX-model_YY or mp_rank_YY files) or of Hugging Face
            (safetensors or .bin), or one that `neox-lit fit` wrote.
        dst: A directory that does not exist yet.
        to: 'hf': what transformers reads. 'neox': a file for each layer and rank. 'neox-sequential': mp_rank files.
        tp: Tensor-parallel ranks to write for, for GPT-NeoX.
        model: A preset's name or a GPT-NeoX yml, if there is no config beside the weights.
    """
    config = None
    if model is not None:
        config = NeoXConfig.preset(model) if model in PRESETS else NeoXConfig.from_yml(model)
    checkpoints.convert(src, dst, to, tp, config)
    print(f"Wrote {dst}")


def load_module(checkpoint: str, device: str = "cpu") -> NeoXLightning:
    """The module of a checkpoint of any format that `open_checkpoint` knows, ready to generate.

    Raises:
        NeoXError: No such file, not a checkpoint, or one of something else.
    """
    path = Path(checkpoint)
    ours = path.suffix == ".ckpt" or (path / ".metadata").exists() or not path.exists()
    try:
        if ours:
            read_head(checkpoint)
            return NeoXLightning.load_from_checkpoint(checkpoint, map_location=device, weights_only=True).eval()
        module = NeoXLightning(pretrained=checkpoint)
        module.configure_model()
        return module.to(device).eval()
    except NeoXError:
        raise
    except Exception as error:  # torch and pickle raise many kinds
        raise NeoXError(f"checkpoint {checkpoint!r} is not one of NeoXLightning: {error}") from error


def read_head(checkpoint: str | os.PathLike) -> dict[str, Any]:
    """What a checkpoint, a file or a sharded directory, says beside its weights, which are not read.

    Raises:
        NeoXError: No such file, or not a checkpoint.
    """
    path = Path(checkpoint)
    if not path.exists():
        raise NeoXError(f"checkpoint {str(checkpoint)!r}: no such file (here: {Path.cwd()})")
    try:
        if path.is_dir():
            return read_extra(path)
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:  # torch and pickle raise many kinds, and advise to trust the file
        raise NeoXError(f"{str(checkpoint)!r} is not a checkpoint, or is damaged ({type(error).__name__})") from error
    if not isinstance(content, dict):
        raise NeoXError(f"{str(checkpoint)!r} is not a checkpoint: it holds a {type(content).__name__}")
    return content


class NeoXCLI(LightningCLI):
    """LightningCLI, but what the user says about the model counts when there is a checkpoint too.

    Lightning would replace every model option by the checkpoint's, `--model.lr` on a resumed run included. Here the
    checkpoint gives the model's shape, and only if the user gives none; and so what trains, adapters and int8.
    """

    def _parse_ckpt_path(self) -> None:
        command = self.config.get("subcommand")
        options = self.config[command]
        path = options.get("ckpt_path")
        if not path or path in ("best", "last", "hpc", "registry") or "://" in str(path):
            return
        saved = read_head(path).get("hyper_parameters", {})
        shape = saved.get("config") or {}
        if options.model.trainable == "all" and not options.model.int8:
            tuned = {name: saved[name] for name in ("trainable", "lora", "int8", "int8_threshold") if name in saved}
            self.config = self.parser.parse_object({command: {"model": tuned}}, self.config)
        if options.model.config is None and options.model.preset is None:
            self.config = self.parser.parse_object({command: {"model": {"config": shape}}}, self.config)
        elif options.model.config is not None:
            asked = vars(options.model.config)
            for name in ("n_hidden", "n_layers"):
                if name in shape and asked.get(name) != shape[name]:
                    raise NeoXError(
                        f"ckpt_path={str(path)!r} has model.config.{name}={shape[name]}, this run {asked.get(name)}; "
                        "give the same, or leave model.config out to take the checkpoint's"
                    )

    def after_fit(self) -> None:
        """Say where the model is, and what may come next."""
        saved = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        if saved and self.trainer.is_global_zero:
            path = os.path.relpath(saved)
            print(f'\nCheckpoint: {path}\nNext: neox-lit generate --checkpoint {path} --prompt "..."')


# Warnings that ask for nothing a user of this command could do.
_NOISE = (
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning's own call into torch
    r".*does not have many workers",  # reading memory-mapped windows takes no time
    r".*it is recommended to use `Trainer\(devices=1, num_nodes=1\)`",  # TextDataModule fills up with blank windows
)

# Commands beside LightningCLI's; each is a typed function whose docstring is its help.
COMMANDS: dict[str, Callable[..., None]] = {"convert": convert, "generate": generate}
_POSITIONAL = ("convert",)  # those whose required arguments come without their names

_DESCRIPTION = (
    "GPT-NeoX on PyTorch Lightning with ZeRO stage 3. The commands below take --config FILE.yaml. Further commands, "
    f"each with its own --help: {', '.join(COMMANDS)}."
)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `neox-lit`. `args` are the command line's by default."""
    arguments = list(sys.argv[1:] if args is None else args)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message)
    try:
        if arguments and arguments[0] in COMMANDS:
            name, *options = arguments
            options = [_with_underscores(option) for option in options]
            jsonargparse.auto_cli(
                COMMANDS[name], args=options, as_positional=name in _POSITIONAL, prog=f"neox-lit {name}"
            )
        else:
            NeoXCLI(
                NeoXLightning,
                TextDataModule,
                seed_everything_default=42,
                save_config_kwargs={"overwrite": True},
                auto_configure_optimizers=False,
                parser_kwargs={"prog": "neox-lit", "description": _DESCRIPTION},
                args=args if args is None else arguments,
            )
    except (ValueError, Zero3Error, MisconfigurationException) as error:
        ours = _ours(error)
        if ours is None:
            raise
        sys.exit(1 if _said_elsewhere(ours) else f"neox-lit: error: {ours}")
    except SystemExit as end:
        if end.code == 2:  # of the parser, which has said what it does not know
            sys.stderr.writelines(f"{line}\n" for line in suggestions(arguments))
        raise


def _ours(error: BaseException | None) -> BaseException | None:
    """The error behind an exception that tells the user enough; jsonargparse wraps those of constructors in its own."""
    while error is not None and not isinstance(error, (NeoXError, Zero3Error, MisconfigurationException)):
        error = error.__cause__ or error.__context__
    return error


def _said_elsewhere(error: BaseException) -> bool:
    """Whether another process prints this error: one that all ranks raise, or, under torchrun, all those of a node."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    before_ranks_meet = torch.distributed.is_torchelastic_launched() and not torch.distributed.is_initialized()
    if getattr(error, "on_all_ranks", False):
        return int(getattr(rank_zero_only, "rank", 0)) > 0
    return before_ranks_meet and local_rank > 0


def _with_underscores(argument: str) -> str:
    """`--max-new-tokens=5` as `--max_new_tokens=5`, the way Lightning spells options; values stay as they are."""
    name, equals, value = argument.partition("=")
    return (name.replace("-", "_").replace("__", "--", 1) if name.startswith("--") else name) + equals + value


if __name__ == "__main__":
    main()
