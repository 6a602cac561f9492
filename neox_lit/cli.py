"""`neox-lit`: train, evaluate and generate from a YAML file or the command line."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence

import jsonargparse
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import lightning_zero3  # noqa: F401  registers strategy names, and its classes can be named in YAML
from lightning_zero3 import Zero3Error
from neox_lit.checkpoints.heads import read_head
from neox_lit.commands import convert, evaluate, generate, tokenizer
from neox_lit.data import TextDataModule
from neox_lit.errors import NeoXError
from neox_lit.module import NeoXLightning
from neox_lit.spelling import suggestions


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
COMMANDS: dict[str, Callable[..., None]] = {
    "convert": convert,
    "evaluate": evaluate,
    "generate": generate,
    "tokenizer": tokenizer,
}
_POSITIONAL = ("convert", "tokenizer")  # those whose required arguments come without their names

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
