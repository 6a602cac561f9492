"""`zero3`: a look at checkpoints and at what is installed, and one file made of many, from the shell."""

# What takes long to import (torch) is imported by the command that needs it.

from __future__ import annotations

import argparse
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from lightning_zero3.errors import Zero3Error

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    args = _parser().parse_args(argv)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant here
    try:
        if args.command == "inspect":
            from lightning_zero3.checkpoints.inspection import inspect_checkpoint

            print(inspect_checkpoint(args.path, args.optimizer))
        elif args.command == "consolidate":
            _consolidate(args)
        elif args.command == "plan":
            _plan(args)
        else:
            print(environment())
    except Zero3Error as error:
        print(f"zero3: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zero3", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="print what a checkpoint contains, without reading the weights")
    inspect.add_argument(
        "path", help="a .ckpt of Lightning, a file or a directory; a state dict saved by torch.save; .safetensors files"
    )
    inspect.add_argument("--optimizer", action="store_true", help="list optimizer state, too")
    consolidate = commands.add_parser(
        "consolidate",
        help="write a sharded checkpoint as one file, or as .safetensors",
        description="Write a sharded checkpoint as one file, or as .safetensors, tensor by tensor.",
    )
    consolidate.add_argument("source", metavar="DIR", help="the sharded checkpoint")
    consolidate.add_argument(
        "out",
        metavar="OUT",
        help=".ckpt (or .pt): the checkpoint of state_dict_type='full'; .safetensors: the weights, one file; a name "
        "without suffix, or one that ends in /: a directory of .safetensors files",
    )
    consolidate.add_argument("--weights-only", action="store_true", help="in a .pt: the plain state dict")
    consolidate.add_argument("--max-shard-size", type=_size, metavar="SIZE", help="of files in a directory; 5GB")
    consolidate.add_argument("--force", action="store_true", help="replace what is there")
    consolidate.add_argument(
        "--trust", action="store_true", help="let the checkpoint hold your own classes, which may run code"
    )
    plan = commands.add_parser(
        "plan",
        help="print what each rank of a run will take, before it runs",
        description="Print what each rank of a run will take. A step of it is run on ranks that do not exist, with "
        "tensors that have no memory, so this takes seconds on any machine.",
    )
    plan.add_argument("--config", required=True, metavar="YAML", help="as for `neox-lit fit` or another LightningCLI")
    plan.add_argument("--devices", type=int, help="ranks of a node; default trainer.devices")
    plan.add_argument("--nodes", type=int, help="default trainer.num_nodes, or 1 with --devices")
    plan.add_argument("--accelerator", choices=("cpu", "cuda"), help="default trainer.accelerator")
    plan.add_argument("--batch-size", type=int, help="samples of a micro-batch; default data.batch_size")
    plan.add_argument(
        "--memory", type=_size, metavar="SIZE", help="of a device, 80GiB for example: what is the largest micro-batch?"
    )
    plan.add_argument(
        "--bandwidth", type=_size, metavar="SIZE", help="bytes that a rank sends in a second, 50GB for example"
    )
    plan.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace something in the YAML; repeatable"
    )
    plan.add_argument("--compare", action="store_true", help="also with other precisions, checkpointing, LoRA, ...")
    plan.add_argument("--plot", metavar="PNG", help="draw memory against ranks, for DDP and ZeRO stages 1 to 3")
    commands.add_parser("env", help="print versions and devices")
    return parser


def _size(text: str) -> int:
    from lightning_zero3.checkpoints.consolidate import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _consolidate(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from lightning_zero3.checkpoints.consolidate import consolidate

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(os.path.basename(args.out.rstrip("/")), total=None)
        files = consolidate(
            args.source,
            args.out,
            args.weights_only,
            args.max_shard_size,
            args.force,
            args.trust,
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    print("\n".join(files))


def _plan(args: argparse.Namespace) -> None:
    import yaml  # type: ignore[import-untyped]

    from lightning_zero3.tools import plan_command as command

    changes = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise Zero3Error(f"--set {text}: write KEY=VALUE, trainer.precision=bf16-mixed for example")
        changes[key] = yaml.safe_load(value)
    if args.devices is not None:
        changes.update({"trainer.devices": args.devices, "trainer.num_nodes": args.nodes or 1})
    elif args.nodes is not None:
        changes["trainer.num_nodes"] = args.nodes
    if args.accelerator is not None:
        changes["trainer.accelerator"] = args.accelerator

    def planned(more: dict[str, Any]) -> command.Planned:
        return command.plan_config(args.config, {**changes, **more})

    first = planned({})
    batch_size = args.batch_size or first.batch_size
    print(command.table(first, batch_size, args.memory, args.bandwidth), flush=True)
    if args.compare:
        print(flush=True)
        for line in command.comparison(command.variants_of(planned, first), batch_size, args.memory):
            print(line, flush=True)
    if args.plot:
        command.plot(first, batch_size, args.plot)
        print(args.plot)


def environment() -> str:
    """Versions and devices, for bug reports."""
    import torch

    rows: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("lightning-zero3", "lightning", "pytorch-lightning"):
        try:
            rows[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            rows[name] = "-"
    rows["cpus"] = os.cpu_count()
    rows["cuda"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "-"
    return "\n".join(f"{name:<18} {value}" for name, value in rows.items())


if __name__ == "__main__":
    sys.exit(main())
