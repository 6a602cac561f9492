#!/usr/bin/env python3
"""Memory and time of the loss: all logits at once against `neox_lit.loss.chunked_loss`.

    python benchmarks/loss_memory.py                    # under a minute: 4,096 tokens, the vocabulary of GPT-NeoX-20B
    python benchmarks/loss_memory.py --hidden 512 --chunks 256,1024

Forward and backward of readout and loss alone. Memory is counted and not measured: a dispatch mode sees every tensor
that an operation makes and when it dies; `peak` is the most bytes alive at once beyond the inputs (the weight's
gradient included), `largest` the largest single tensor. Times are medians of rounds in which the variants take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from neox_lit.loss import chunked_loss, token_loss


class Memory(TorchDispatchMode):
    """Counts the bytes of storages that operations make while they live."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.alive: set[int] = {t.untyped_storage()._cdata for t in inputs}
        self.now = self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.alive:
            return
        self.alive.add(key)
        self.now += nbytes
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, nbytes)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self.alive.discard(key)
        self.now -= nbytes


def step(x: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> float:
    """Loss of a batch, with gradients of `x` and `weight`."""
    x.grad = weight.grad = None
    loss = chunked_loss(x, weight, labels, chunk) if chunk else token_loss(x @ weight.T, labels)
    loss.mean.backward()
    return loss.mean.item()


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Print a table; returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4_096)
    parser.add_argument("--vocab", type=int, default=50_432)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--chunks", default="256,512,1024", help="tokens at a time, by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    x = torch.randn(args.tokens, args.hidden, requires_grad=True)
    weight = (torch.randn(args.vocab, args.hidden) * args.hidden**-0.5).requires_grad_()
    labels = torch.randint(args.vocab, (args.tokens,))
    variants = [0, *(int(c) for c in args.chunks.split(","))]
    rows = []
    for chunk in variants:
        with Memory(x, weight, labels) as memory:
            loss = step(x, weight, labels, chunk)
        rows.append({"chunk": chunk, "loss": loss, "peak": memory.peak, "largest": memory.largest})
    times: dict[int, list[float]] = {chunk: [] for chunk in variants}
    for _ in range(args.rounds):
        for chunk in variants:
            start = time.perf_counter()
            step(x, weight, labels, chunk)
            times[chunk].append(time.perf_counter() - start)
    print(f"{args.tokens:,} tokens, vocabulary {args.vocab:,}, {args.hidden} hidden, float32, {args.threads} threads\n")
    print("| logits at once | loss | largest tensor MiB | peak MiB | ms |\n|---|---|---|---|---|")
    for row in rows:
        row["ms"] = 1e3 * statistics.median(times[int(row["chunk"])])
        print(
            f"| {str(row['chunk']) + ' tokens' if row['chunk'] else 'all'} | {row['loss']:.6f} | "
            f"{row['largest'] / 2**20:,.0f} | {row['peak'] / 2**20:,.0f} | {row['ms']:,.0f} |"
        )
    return rows


if __name__ == "__main__":
    main()
