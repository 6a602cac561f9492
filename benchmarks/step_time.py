#!/usr/bin/env python3
"""Step time and memory of a 70M GPT-NeoX under one process, DDP, FSDP2 and ZeRO-3, on CPU ranks of one machine.

    python benchmarks/step_time.py                       # about six minutes on two cores
    python benchmarks/step_time.py --lightning           # the same through Trainer and its strategies
    python benchmarks/step_time.py --markdown table.md   # write the table to a file too

Every variant runs in processes of its own, so that the peak memory is its own; all import the same modules. Rounds are
interleaved (A B C A B C ...), so that a machine that slows down for a while does so for all. All variants see the same
seeded weights and batches, and the losses are compared: nothing is fast by being wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

VARIANTS = {"single": "one process", "ddp": "DDP", "fsdp2": "FSDP2", "zero3": "ZeRO-3"}
OPTIMIZERS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}


@dataclass(frozen=True)
class Settings:
    """What all variants of one benchmark share. The defaults are GPT-NeoX at the size of Pythia 70m."""

    world: int = 2
    threads: int = 1
    n_hidden: int = 512
    n_layers: int = 6
    n_heads: int = 8
    n_vocab: int = 50_304
    batch: int = 2
    seq_len: int = 128
    optimizer: str = "fused"
    lr: float = 1e-4
    warmup: int = 2
    steps: int = 5
    lightning: bool = False


class Measured(NamedTuple):
    """What one process reports. Sizes in MB."""

    seconds: list[float]  # per step, after the warm-up
    cpu_seconds: list[float]  # the same as processor time of this process
    losses: list[float]  # this rank's, of all steps
    imported: float  # resident after the imports
    peak: float  # most ever resident


# ---------------------------------------------------------------------------------------------------------------------
# One process
# ---------------------------------------------------------------------------------------------------------------------


def build_model(s: Settings) -> nn.Module:
    import torch

    from neox_lit.config import NeoXConfig
    from neox_lit.model import NeoXModel

    torch.manual_seed(0)
    sizes = {"n_vocab": s.n_vocab, "n_hidden": s.n_hidden, "n_layers": s.n_layers, "n_heads": s.n_heads}
    return NeoXModel(NeoXConfig(**sizes))  # type: ignore[arg-type]


def build_optimizer(params: Iterable[Any], s: Settings) -> Optimizer:
    import torch

    return torch.optim.AdamW(params, lr=s.lr, **OPTIMIZERS[s.optimizer])  # type: ignore[arg-type]


class Built(NamedTuple):
    """A model that is ready to train, and what its optimizer gets."""

    model: nn.Module
    params: Iterable[Any]


def build_single(model: nn.Module) -> Built:
    return Built(model, model.parameters())


def build_ddp(model: nn.Module) -> Built:
    from torch.nn.parallel import DistributedDataParallel

    return Built(DistributedDataParallel(model), model.parameters())


def build_fsdp2(model: nn.Module) -> Built:
    """Each block, the embedding and the readout by itself, the rest with the root; everything else as by default."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.blocks, model.embedding, model.readout):  # type: ignore[misc]
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Built(model, model.parameters())


def build_zero3(model: nn.Module) -> Built:
    from lightning_zero3 import shard_module, trainable_chunks

    shard_module(model)
    return Built(model, trainable_chunks(model))


BUILDERS: dict[str, Callable[[nn.Module], Built]] = {
    "single": build_single,
    "ddp": build_ddp,
    "fsdp2": build_fsdp2,
    "zero3": build_zero3,
}


def batches(rank: int, s: Settings) -> list[Tensor]:
    """Token ids `[batch, seq_len + 1]` for each step of this rank."""
    import torch

    g = torch.Generator().manual_seed(rank + 1)
    return [torch.randint(s.n_vocab, (s.batch, s.seq_len + 1), generator=g) for _ in range(s.warmup + s.steps)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    from torch.nn import functional as F

    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Stopwatch:
    """Times the steps after the warm-up."""

    def __init__(self, s: Settings) -> None:
        self._warmup = s.warmup
        self._last = (0.0, 0.0)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, loss: float) -> None:
        now = (time.perf_counter(), time.process_time())
        self.losses.append(loss)
        if len(self.losses) > self._warmup:
            self.seconds.append(now[0] - self._last[0])
            self.cpu_seconds.append(now[1] - self._last[1])
        self._last = (time.perf_counter(), time.process_time())


def train_plain(variant: str, rank: int, s: Settings, watch: Stopwatch) -> None:
    model, params = BUILDERS[variant](build_model(s))
    optimizer = build_optimizer(params, s)
    for ids in batches(rank, s):
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        watch.step(loss.item())


def train_lightning(variant: str, rank: int, s: Settings, watch: Stopwatch) -> None:
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    from lightning_zero3 import Zero3Strategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(s)

        def configure_model(self) -> None:
            if variant == "fsdp2":
                build_fsdp2(self.model)

        def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
            return loss_of(self.model, ids)

        def configure_optimizers(self) -> Optimizer:
            return build_optimizer(self.parameters(), s)

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            watch.step(float(outputs["loss"]))

    strategies: dict[str, Callable[[], Any]] = {
        "single": lambda: "auto",
        "ddp": lambda: "ddp",
        "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=s.world, tensor_parallel_size=1),
        "zero3": Zero3Strategy,
    }
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if variant == "single" else s.world,
        strategy=strategies[variant](),
        callbacks=[Watch()],
        max_steps=s.warmup + s.steps,
        use_distributed_sampler=False,  # the batches of this rank are given
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(batches(rank, s), batch_size=None))  # type: ignore[arg-type]


def measure(variant: str, rank: int, store: str, s: Settings) -> Measured:
    import torch
    import torch.distributed as dist

    # The same modules for every variant, so that their memory differs by what they do and not by what they import.
    for name in ("torch.distributed.fsdp", "lightning.pytorch", "lightning_zero3", "neox_lit.model"):
        importlib.import_module(name)
    torch.set_num_threads(s.threads)
    forget_peak()
    imported = resident("VmRSS")
    if variant != "single":
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=s.world)
    watch = Stopwatch(s)
    (train_lightning if s.lightning else train_plain)(variant, rank, s, watch)
    return Measured(watch.seconds, watch.cpu_seconds, watch.losses, imported, resident("VmHWM"))


def resident(field: str) -> float:
    """A size from the kernel's account of this process, in MB: VmRSS is resident now, VmHWM at most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """Let VmHWM begin again at the present size."""
    Path("/proc/self/clear_refs").write_text("5")


# ---------------------------------------------------------------------------------------------------------------------
# All processes
# ---------------------------------------------------------------------------------------------------------------------


def run_variant(variant: str, s: Settings, deadline: float) -> list[Measured]:
    """Start the processes of one variant and collect what each reports."""
    world = 1 if variant == "single" else s.world
    with tempfile.TemporaryDirectory() as directory:
        processes = []
        for rank in range(world):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": str(s.threads),
                "OPENBLAS_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",  # expected to be set, not used: the group meets at a file
                "TORCHELASTIC_RUN_ID": "benchmark",  # lets Lightning use the processes that are there
            }
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            task = {"variant": variant, "rank": rank, "store": f"{directory}/store", "settings": dataclasses.asdict(s)}
            with open(f"{directory}/{rank}.log", "w") as log:
                command = [sys.executable, __file__, "--worker", json.dumps(task), f"{directory}/{rank}.json"]
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        end = time.monotonic() + deadline
        try:
            for process in processes:
                process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{variant} took more than {deadline:g} s\n{_logs(directory, world)}") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(process.returncode for process in processes):
            raise SystemExit(f"{variant} failed\n{_logs(directory, world)}")
        return [Measured(*json.loads(Path(f"{directory}/{rank}.json").read_text())) for rank in range(world)]


def _logs(directory: str, world: int) -> str:
    return "\n".join(f"--- rank {r}\n{Path(f'{directory}/{r}.log').read_text()[-4000:]}" for r in range(world))


class Row(NamedTuple):
    """One variant over all rounds: medians."""

    variant: str
    ms: float
    spread: tuple[float, float]  # fastest and slowest round
    cpu_ms: float
    peak: float
    trained: float  # peak less what the imports took


def summarise(variant: str, rounds: Sequence[Sequence[Measured]]) -> Row:
    """A round's time is the median over its steps and ranks; its memory that of the larger rank."""
    ms = [1000 * statistics.median(t for rank in r for t in rank.seconds) for r in rounds]
    cpu_ms = [1000 * statistics.median(t for rank in r for t in rank.cpu_seconds) for r in rounds]
    return Row(
        variant,
        statistics.median(ms),
        (min(ms), max(ms)),
        statistics.median(cpu_ms),
        statistics.median(max(rank.peak for rank in r) for r in rounds),
        statistics.median(max(rank.peak - rank.imported for rank in r) for r in rounds),
    )


def check_losses(results: dict[str, list[list[Measured]]], rtol: float) -> list[str]:
    """Print the losses; returns in words where a variant's differ from the first data-parallel one's.

    One process sees the first rank's batches only: what it can be held to is the loss before the first update.
    """
    problems = []
    reference: list[list[float]] | None = None
    first = next((r[0][0].losses[0] for r in results.values()), 0.0)
    for variant, rounds in results.items():
        ranks = [rank.losses for rank in rounds[0]]
        mean = [sum(step) / len(step) for step in zip(*ranks, strict=True)]
        print(f"  {VARIANTS[variant]:12} losses {' '.join(f'{loss:.5f}' for loss in mean)}")
        if any(rank.losses != of_first for r in rounds for rank, of_first in zip(r, ranks, strict=True)):
            print(f"  {VARIANTS[variant]:12} (losses differ between rounds)")
        if abs(ranks[0][0] - first) > rtol * first:
            problems.append(f"{variant}: first loss {ranks[0][0]} is not {first}")
        if variant == "single":
            continue
        reference = reference or ranks
        worst = max(abs(a - b) / b for x, y in zip(ranks, reference, strict=True) for a, b in zip(x, y, strict=True))
        if worst > rtol:
            problems.append(f"{variant}: losses differ by up to {worst:.2e} relative")
    return problems


def table(rows: Sequence[Row]) -> str:
    by_name = {row.variant: row for row in rows}
    references = [v for v in ("fsdp2", "ddp") if v in by_name]
    head = ["", "ms per step", "(rounds)", "CPU ms", "peak MB", "less imports"]
    head += [f"{what} / {VARIANTS[v]}" for v in references for what in ("time", "peak")]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [
            VARIANTS[row.variant],
            f"{row.ms:,.0f}",
            f"{row.spread[0]:,.0f} – {row.spread[1]:,.0f}",
            f"{row.cpu_ms:,.0f}",
            f"{row.peak:,.0f}",
            f"{row.trained:,.0f}",
        ]
        for v in references:
            cells += [f"{row.ms / by_name[v].ms:.2f}", f"{row.peak / by_name[v].peak:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


class Machine:
    """How much of the machine's processor time went to others, by the kernel's account: a benchmark's honesty."""

    def __init__(self) -> None:
        self._start = self._now()

    def busy_with_others(self) -> float:
        """Share of all cores since the start, 0 to 1."""
        (all0, busy0, own0), (all1, busy1, own1) = self._start, self._now()
        return max(0.0, (busy1 - busy0 - (own1 - own0)) / max(1e-9, all1 - all0))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        ticks = [int(n) / os.sysconf("SC_CLK_TCK") for n in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        idle = ticks[3] + ticks[4]
        return sum(ticks), sum(ticks) - idle, children.ru_utime + children.ru_stime


def conditions(s: Settings, rounds: int, others: float) -> str:
    import torch

    cpu = next(
        (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    through = "through `Trainer`" if s.lightning else "plain loop"
    return (
        f"{datetime.date.today():%Y-%m-%d}, {cpu}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"Python {platform.python_version()}; {s.world} ranks of {s.threads} thread(s), {s.batch} x {s.seq_len} tokens "
        f"each, {s.n_layers} layers of {s.n_hidden}, vocabulary {s.n_vocab:,}, AdamW ({s.optimizer}), float32, "
        f"{through}; medians of {rounds} round{'s' * (rounds > 1)} of {s.steps} steps after {s.warmup}. "
        f"Other processes took {others:.0%} of the machine meanwhile."
    )


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME",
                        help=f"which to run, in this order; of {', '.join(VARIANTS)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="how often to run each variant")
    parser.add_argument("--markdown", type=Path, help="write conditions and table to this file as well")
    parser.add_argument("--rtol", type=float, default=1e-4, help="how much losses may differ, relative")
    parser.add_argument("--deadline", type=float, default=300, help="seconds that one run of a variant may take")
    for field in dataclasses.fields(Settings):
        option = "--" + field.name.replace("_", "-")
        if field.name == "lightning":
            parser.add_argument(option, action="store_true", help="train through Trainer and its strategies")
        elif field.name == "optimizer":
            parser.add_argument(option, choices=OPTIMIZERS, default=field.default, help="how AdamW updates")
        else:
            parser.add_argument(option, type=type(field.default), default=field.default)
    args = parser.parse_args(argv)
    if min(args.rounds, args.steps, args.world, args.warmup) < 1:
        parser.error("rounds, steps, warmup and world must be at least 1")
    return args, Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})


def main(argv: Sequence[str] | None = None) -> int:
    args, settings = parse(argv)
    results: dict[str, list[list[Measured]]] = {variant: [] for variant in args.variants}
    whole = Machine()
    for r in range(args.rounds):
        for variant in args.variants:
            machine = Machine()
            results[variant].append(run_variant(variant, settings, args.deadline))
            row = summarise(variant, results[variant][-1:])
            print(
                f"round {r + 1}/{args.rounds}  {VARIANTS[variant]:12} {row.ms:7.0f} ms  {row.cpu_ms:7.0f} ms CPU  "
                f"{row.peak:6.0f} MB  (others: {machine.busy_with_others():.0%} of the machine)",
                flush=True,
            )
    problems = check_losses(results, args.rtol)
    rows = [summarise(variant, results[variant]) for variant in args.variants]
    text = f"{conditions(settings, args.rounds, whole.busy_with_others())}\n\n{table(rows)}\n"
    print(f"\n{text}")
    if args.markdown:
        args.markdown.write_text(text)
    for problem in problems:
        print(f"WRONG  {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        given = json.loads(sys.argv[2])
        measured = measure(given["variant"], given["rank"], given["store"], Settings(**given["settings"]))
        Path(sys.argv[3]).write_text(json.dumps(measured))
    else:
        sys.exit(main())
