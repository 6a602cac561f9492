#!/usr/bin/env python3
"""How a checkpoint at the width of GPT-NeoX-20B comes into shards: memory per rank, and bytes per second.

    python benchmarks/straight_into_shards.py --directory /big/disk   # five minutes, 5 GB of disk, 16 of memory

The checkpoint is a synthetic one (4 layers of 6,144, vocabulary 50,432, float16) in GPT-NeoX's format for 2
tensor-parallel ranks. In turns, on 2 CPU ranks, each variant in new processes and with the files out of the cache:

- `plain read`: the ranks read the files, half each, into one small buffer. As fast as this disk gives them.
- `straight into shards`: `NeoXLightning(pretrained=...)` under `Zero3Strategy`, from `configure_model` to `fit`.
- `whole, then shards`: each rank loads the model and shards it. What one would do without the hook.

`peak` is the most memory a rank had resident, less what Python and its modules take; `chunk` what it keeps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from step_time import Machine, _cpuinfo, forget_peak, resident

if TYPE_CHECKING:
    from torch import Tensor

WORLD = 2
SAMPLED = ("blocks.0.attention.query_key_value.weight", "blocks.1.mlp.dense_h_to_4h.bias")  # compared afterwards
VARIANTS = {"read": "plain read", "straight": "straight into shards", "whole": "whole, then shards"}


def sizes(args: argparse.Namespace) -> dict[str, int]:
    return {"n_vocab": 50_432, "n_hidden": args.hidden, "n_layers": args.layers, "n_heads": args.hidden // 96}


@dataclass(frozen=True)
class Noise:
    """A tensor that is made when it is read. What it holds does not matter, but zeros might be compressed."""

    where: str
    shape: Any
    dtype: Any

    def read(self, start: int, stop: int) -> Tensor:
        import torch

        block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(len(self.where))).mul_(0.02)
        out = torch.empty(stop - start, dtype=self.dtype)
        for part in out.split(len(block)):
            part.copy_(block[: len(part)])
        return out


def write(path: Path, config: dict[str, int]) -> None:
    """By our own writer, layer by layer."""
    import torch

    from neox_lit import NeoXConfig, save_neox
    from neox_lit.checkpoints import Checkpoint
    from neox_lit.checkpoints.shapes import shapes_of_config

    shape = NeoXConfig(**config)  # type: ignore[arg-type]
    tensors = {name: Noise(name, torch.Size(s), torch.float16) for name, s in shapes_of_config(shape).items()}
    save_neox(Checkpoint(path, shape, tensors, None), path, tp=2)  # type: ignore[arg-type]


def files_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.pt"))


def out_of_cache(path: Path) -> None:
    for file in files_of(path):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(variant: str, rank: int, path: Path) -> dict[str, float]:
    import torch
    from lightning.pytorch import Callback, Trainer

    from lightning_zero3 import Zero3Strategy, full_state_dict
    from neox_lit import NeoXLightning, open_checkpoint
    from neox_lit.checkpoints import load_model

    torch.set_num_threads(1)
    times: dict[str, float] = {}

    if variant == "read":
        buffer = memoryview(bytearray(1 << 24))
        forget_peak()
        times["before"] = resident("VmRSS")
        begun = time.perf_counter()
        for file in files_of(path)[rank::WORLD]:
            with open(file, "rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass
        return {"seconds": time.perf_counter() - begun, "peak": resident("VmHWM") - times["before"], "chunk": 0.0}

    class Module(NeoXLightning):
        def configure_model(self) -> None:
            if variant == "straight":
                torch.distributed.barrier()
                forget_peak()
                times["before"], times["begun"] = resident("VmRSS"), time.perf_counter()
            super().configure_model()

    class Watch(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            torch.distributed.barrier()
            times["seconds"] = time.perf_counter() - times["begun"]
            times["peak"] = resident("VmHWM") - times["before"]
            times["chunk"] = trainer.strategy.report().parameters[0] / 1e6

    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=Zero3Strategy(),
        precision="16-true",
        callbacks=[Watch()],
        max_epochs=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(pretrained=str(path), trainable="biases")
    if variant == "whole":
        forget_peak()
        times["before"], times["begun"] = resident("VmRSS"), time.perf_counter()
        module.model = load_model(path, dtype=torch.float16)
    trainer.fit(module, torch.utils.data.DataLoader([0]))

    held = {f"model.{name}": tensor for name, tensor in open_checkpoint(path).tensors.items() if name in SAMPLED}
    state = full_state_dict(module, only=held.__contains__)
    for name, value in state.items():
        if not torch.equal(value.flatten(), held[name].read(0, value.numel())):
            raise SystemExit(f"{name} differs from the files")
    return times


def run(variant: str, path: Path) -> list[dict[str, float]]:
    """The ranks of one variant, each a process."""
    out_of_cache(path)
    processes = []
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(WORLD):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29518", "TORCHELASTIC_RUN_ID": "benchmark"}
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            command = [sys.executable, __file__, "--worker", json.dumps([variant, rank, str(path), directory])]
            with open(f"{directory}/{rank}.log", "w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        for process in processes:
            process.wait()
        if any(process.returncode for process in processes):
            raise SystemExit("\n".join(Path(f"{directory}/{r}.log").read_text()[-4000:] for r in range(WORLD)))
        return [json.loads(Path(f"{directory}/{r}.json").read_text()) for r in range(WORLD)]


def table(rounds: dict[str, list[list[dict[str, float]]]], gigabytes: float) -> str:
    """Medians over rounds, of the slower or larger rank."""

    def of(variant: str, field: str) -> float:
        return statistics.median(max(rank[field] for rank in one) for one in rounds[variant])

    lines = ["|  | seconds | GB/s | / plain read | peak MB per rank | chunk MB |", "|---|---|---|---|---|---|"]
    for variant, name in VARIANTS.items():
        seconds = of(variant, "seconds")
        lines.append(
            f"| {name} | {seconds:.1f} | {gigabytes / seconds:.2f} | {of('read', 'seconds') / seconds:.2f} "
            f"| {of(variant, 'peak'):,.0f} | {of(variant, 'chunk'):,.0f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", type=Path, help="where the checkpoint goes; default a temporary directory")
    parser.add_argument("--rounds", type=int, default=3, help="how often to run each variant")
    parser.add_argument("--hidden", type=int, default=6144, help="width; a multiple of 96")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--markdown", type=Path, help="write conditions and table to this file as well")
    args = parser.parse_args(argv)
    import torch

    machine = Machine()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        path = Path(directory) / "checkpoint"
        write(path, sizes(args))
        gigabytes = sum(file.stat().st_size for file in files_of(path)) / 1e9
        rounds: dict[str, list[list[dict[str, float]]]] = {variant: [] for variant in VARIANTS}
        for _ in range(args.rounds):
            for variant in VARIANTS:
                rounds[variant].append(run(variant, path))
                print(variant, rounds[variant][-1], flush=True)
    cpu = next((line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), "CPU")
    text = (
        f"{datetime.date.today():%Y-%m-%d}, {cpu}, {os.cpu_count()} cores, torch {torch.__version__}; {WORLD} ranks of "
        f"1 thread; {args.layers} layers of {args.hidden:,}, float16, {gigabytes:.2f} GB for 2 tensor-parallel ranks; "
        f"medians of {args.rounds} rounds. Other processes took {machine.busy_with_others():.0%} of the machine "
        f"meanwhile.\n\n"
        f"{table(rounds, gigabytes)}\n"
    )
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        variant, rank, path, directory = json.loads(sys.argv[2])
        Path(f"{directory}/{rank}.json").write_text(json.dumps(measure(variant, rank, Path(path))))
    else:
        sys.exit(main())
