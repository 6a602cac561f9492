#!/usr/bin/env python3
"""Speed of neox_lit's model against transformers' GPTNeoXForCausalLM with the same weights, in one process on the CPU.

    python benchmarks/neox_speed.py             # about a minute and a half on two cores

Pythia-70m's shape with a smaller vocabulary, float32. A training step is forward, loss, backward and AdamW; generation
is greedy with a cache. Variants take turns in every round; medians are compared, and so are losses and generated
tokens: nothing is fast by being wrong. transformers runs with its scaled_dot_product_attention.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from neox_lit import NeoXConfig, NeoXModel, generate, save_hf


def pair(vocab: int) -> tuple[NeoXModel, Any]:
    """Our model and transformers', of equal weights."""
    from transformers import GPTNeoXForCausalLM

    torch.manual_seed(0)
    ours = NeoXModel(NeoXConfig.preset("pythia-70m", n_vocab=vocab))
    with tempfile.TemporaryDirectory() as directory:
        save_hf(ours, Path(directory) / "hf")
        theirs = GPTNeoXForCausalLM.from_pretrained(
            Path(directory) / "hf", dtype=torch.float32, attn_implementation="sdpa"
        )
    return ours, theirs


def trainer(model: Any, loss: Callable[[], torch.Tensor]) -> Callable[[], float]:
    """A training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        model.train()
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.item()

    return step


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Print a table; returns the ratios of tokens per second, ours to theirs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=8_192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    ours, theirs = pair(args.vocab)
    ids = torch.randint(args.vocab, (args.batch, args.seq_len + 1))
    x, y = ids[:, :-1], ids[:, 1:]
    prompt = ids[:1, : args.prompt]

    def our_tokens() -> list[int]:
        return generate(ours.eval(), prompt.tolist(), args.new_tokens)[0]

    def their_tokens() -> list[int]:
        with torch.no_grad():
            out = theirs.eval().generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=args.new_tokens,
                min_new_tokens=args.new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return out[0, args.prompt :].tolist()

    def their_loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(theirs(x, use_cache=False).logits.flatten(0, 1), y.flatten())

    works: dict[str, tuple[int, Callable[[], Any], Callable[[], Any]]] = {
        "generation": (args.new_tokens, our_tokens, their_tokens),
        "training": (
            y.numel(),
            trainer(ours, lambda: ours(x, labels=y, loss_chunk=1_024).mean),
            trainer(theirs, their_loss),
        ),
    }
    print("|  | neox_lit tokens/s | transformers tokens/s | ratio |\n|---|---|---|---|")
    ratios = {}
    for name, (tokens, mine, other) in works.items():
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.rounds + 1):
            results = []
            for work, times in zip((mine, other), seconds, strict=True):
                start = time.perf_counter()
                results.append(work())
                times.append(time.perf_counter() - start)
            same = results[0] == results[1] if name == "generation" else abs(results[0] / results[1] - 1) < 1e-3
            if not same:
                raise SystemExit(f"{name}: the results differ: {results}")
        a, b = (tokens / statistics.median(times[1:]) for times in seconds)
        ratios[name] = a / b
        print(f"| {name} | {a:,.0f} | {b:,.0f} | {a / b:.2f} |", flush=True)
    return ratios


if __name__ == "__main__":
    main()
