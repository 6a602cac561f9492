#!/usr/bin/env python3
"""What saving costs training: time and memory per checkpoint of a 70M GPT-NeoX with Adam's state, on CPU ranks.

    python benchmarks/checkpoint_stall.py                       # about two minutes on two cores
    python benchmarks/checkpoint_stall.py --markdown table.md   # write the table to a file too

One run of one Trainer. After every few steps it saves: not at all, one file, a directory, a directory in the
background, and again from the start, so that a machine that slows down for a while does so for all.

- `stall`: how long the call that saves keeps training waiting.
- `in all`: how much longer the steps and the save took than the same steps without: what is written in the background
  takes processor time from the steps, too. It counts until the checkpoint is complete.
- `memory`: how much larger a process was while it saved than before, at most.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from step_time import (
    Machine,
    Settings,
    batches,
    build_model,
    build_optimizer,
    conditions,
    forget_peak,
    loss_of,
    resident,
)

KINDS = {"none": "no save", "full": "full", "sharded": "sharded", "async": "sharded, save_async"}


class Saved(NamedTuple):
    """One period of one rank: a save, and the steps after it."""

    kind: str
    stall: float  # seconds in the call
    period: float  # seconds until the next save could begin
    memory: float  # MB


def train(rank: int, directory: str, rounds: int, s: Settings) -> list[Saved]:
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer

    from lightning_zero3 import Zero3Strategy

    torch.set_num_threads(s.threads)
    plan = [kind for _ in range(rounds) for kind in KINDS]
    found: list[Saved] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(s)

        def training_step(self, ids: Any, batch_idx: int) -> Any:
            return loss_of(self.model, ids)

        def configure_optimizers(self) -> Any:
            return build_optimizer(self.parameters(), s)

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            done = batch_idx + 1 - s.warmup
            if done < 0 or done % s.steps:
                return
            strategy = trainer.strategy
            if done:
                strategy.wait_for_checkpoint()
                strategy.barrier()
                found[-1] = found[-1]._replace(
                    period=time.perf_counter() - self.begun, memory=resident("VmHWM") - self.before
                )
            if len(found) == len(plan):
                return
            kind = plan[len(found)]
            strategy.state_dict_type = "full" if kind == "full" else "sharded"
            strategy.save_async = kind == "async"
            forget_peak()
            self.before = resident("VmRSS")
            strategy.barrier()
            self.begun = time.perf_counter()
            if kind != "none":
                trainer.save_checkpoint(f"{directory}/{kind}.ckpt")
            found.append(Saved(kind, time.perf_counter() - self.begun, 0.0, 0.0))

    trainer = Trainer(
        accelerator="cpu",
        devices=s.world,
        strategy=Zero3Strategy(state_dict_type="sharded", save_async=True),
        callbacks=[Save()],
        max_steps=s.warmup + s.steps * len(plan),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = batches(rank, dataclasses.replace(s, steps=s.steps * len(plan)))
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return found


def size_of(path: Path) -> float:
    """MB."""
    files = [path] if path.is_file() else list(path.iterdir())
    return sum(file.stat().st_size for file in files) / 1e6


def table(ranks: Sequence[Sequence[Saved]], sizes: dict[str, float]) -> str:
    """Medians over rounds; of times, the slower rank's."""

    def of(kind: str, field: str, rank: int | None = None) -> float:
        rows = [[getattr(one, field) for one in saves if one.kind == kind] for saves in ranks]
        return statistics.median(map(max, zip(*rows, strict=True)) if rank is None else rows[rank])

    plain, sync = of("none", "period"), of("sharded", "stall")
    others = f"MB, rank{'s' * (len(ranks) > 2)} 1{'…' * (len(ranks) > 2)}"
    lines = [
        f"|  | stall ms | / sharded | in all ms | MB written | memory MB, rank 0 | {others} |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, name in KINDS.items():
        if kind == "none":
            first, rest = of(kind, "memory", 0), max(of(kind, "memory", r) for r in range(1, len(ranks)))
            lines.append(f"| {name} | 0 | 0 | 0 | 0 | {first:,.0f} | {rest:,.0f} |")
            continue
        stall, extra = of(kind, "stall"), of(kind, "period") - plain
        rest = max(of(kind, "memory", r) for r in range(1, len(ranks)))
        lines.append(
            f"| {name} | {1000 * stall:,.0f} | {stall / sync:.2f} | {1000 * extra:,.0f} | {sizes[kind]:,.0f} "
            f"| {of(kind, 'memory', 0):,.0f} | {rest:,.0f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=4, help="how often to save in each way")
    parser.add_argument("--steps", type=int, default=2, help="steps after each save")
    parser.add_argument("--layers", type=int, default=6, help="of the model; 6 are 70M parameters")
    parser.add_argument("--directory", type=Path, help="where to save; default a temporary directory")
    parser.add_argument("--markdown", type=Path, help="write conditions and table to this file as well")
    args = parser.parse_args(argv)
    if min(args.rounds, args.steps, args.layers) < 1:
        parser.error("rounds, steps and layers must be at least 1")
    s = Settings(steps=args.steps, n_layers=args.layers, lightning=True)
    machine = Machine()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        processes = []
        for rank in range(s.world):
            environment = {**os.environ, "OMP_NUM_THREADS": str(s.threads), "OPENBLAS_NUM_THREADS": "1"}
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(s.world)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "TORCHELASTIC_RUN_ID": "benchmark"}
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            given = json.dumps([rank, directory, args.rounds, dataclasses.asdict(s)])
            with open(f"{directory}/{rank}.log", "w") as log:
                command = [sys.executable, __file__, "--worker", given]
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        for process in processes:
            process.wait()
        if any(process.returncode for process in processes):
            raise SystemExit("\n".join(Path(f"{directory}/{r}.log").read_text()[-4000:] for r in range(s.world)))
        ranks = [[Saved(*one) for one in json.loads(Path(f"{directory}/{r}.json").read_text())] for r in range(s.world)]
        sizes = {kind: size_of(Path(f"{directory}/{kind}.ckpt")) for kind in KINDS if kind != "none"}
    text = f"{conditions(s, args.rounds, machine.busy_with_others())}\n\n{table(ranks, sizes)}\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        rank, directory, rounds, settings = json.loads(sys.argv[2])
        result = train(rank, directory, rounds, Settings(**settings))
        Path(f"{directory}/{rank}.json").write_text(json.dumps(result))
    else:
        sys.exit(main())
