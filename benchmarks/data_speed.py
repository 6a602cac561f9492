#!/usr/bin/env python3
"""Tokens per second of the data pipeline, beside what a training step of the quickstart's model takes.

    python benchmarks/data_speed.py                                # half a minute on two cores
    python benchmarks/data_speed.py --text big.txt --tokenizer tokenizer.json

Measured in one process, with an empty cache, on `configs/quickstart.yaml`'s text (written out `--copies` times),
tokenizer, windows and batches, or on those given:

- `tokenise and pack`: `TextDataModule.prepare_data` and `setup`, the tokenizer being there already.
- `open the cache`: the same once more; it reads the text for its hash.
- `batches`: an epoch of `train_dataloader`, with no loader process and with one; each kind of `documents`.
- `streamed batches`: the same with `streaming`, which tokenises on the way.
- `training step`: forward, backward and AdamW of the quickstart's model without a strategy, the batches ready.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml

from neox_lit import NeoXConfig, NeoXModel, TextDataModule, TextTokenizer
from neox_lit.corpus import Corpus
from neox_lit.encode import open_words
from neox_lit.loss import token_loss

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def fresh(**settings: Any) -> TextDataModule:
    """A data module after `setup`."""
    data = TextDataModule(**settings)
    data.prepare_data()
    data.setup()
    return data


def write_text(args: argparse.Namespace, directory: Path) -> dict[str, str]:
    """Source and tokenizer."""
    if args.text is not None:
        return {"source": args.text, "tokenizer": args.tokenizer}
    texts = [document.pieces[0].text for document in Corpus().documents()]
    tokenizer = TextTokenizer.train(texts, args.config["data"]["vocab_size"])
    (directory / "tokenizer.json").write_text(tokenizer.to_json())
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (directory / "text.jsonl").write_text("".join(lines * args.copies))
    return {"source": str(directory / "text.jsonl"), "tokenizer": args.tokenizer or str(directory / "tokenizer.json")}


def training(args: argparse.Namespace, n_vocab: int, batches: Sequence[dict[str, torch.Tensor]]) -> float:
    """Tokens per second of the median step."""
    model = NeoXModel(NeoXConfig(**{**args.config["model"]["config"], "n_vocab": n_vocab}))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(batch: dict[str, torch.Tensor]) -> None:
        token_loss(model(batch["input_ids"]), batch["labels"]).mean.backward()
        optimizer.step()
        optimizer.zero_grad()

    times = [seconds(lambda batch=batch: step(batch)) for batch in batches]
    return batches[0]["input_ids"].numel() / statistics.median(times[2:])


def measure(args: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Tokens per second by what was measured."""
    sizes = {name: args.config["data"][name] for name in ("seq_len", "batch_size")}
    settings: dict[str, Any] = {**sizes, **write_text(args, directory), "cache_dir": str(directory / "cache")}
    took = [seconds(lambda: fresh(**settings)) for _ in range(2)]
    data = fresh(**settings)
    n_tokens = len(open_words(data._ready.path))
    result = dict(zip(("tokenise and pack", "open the cache"), (n_tokens / each for each in took), strict=True))
    for documents in ("joined", "apart", "whole"):
        for workers in (0, 1):
            loader = fresh(**settings, documents=documents, num_workers=workers).train_dataloader()
            taken = min(len(loader), args.batches)
            took_epoch = seconds(lambda loader=loader, taken=taken: list(islice(loader, taken)))
            name = f"batches, documents: {documents}, num_workers: {workers}"
            result[name] = taken * sizes["seq_len"] * sizes["batch_size"] / took_epoch
    windows = len(data._ready.train)
    stream = fresh(**settings, streaming=True, epoch_windows=windows).train_dataloader()
    result["streamed batches"] = windows * sizes["seq_len"] / seconds(lambda: list(stream))
    result["training step"] = training(args, data.tokenizer.n_vocab, list(islice(data.train_dataloader(), args.steps)))
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="any source of TextDataModule that is a path; by default the quickstart's text")
    parser.add_argument("--tokenizer", help="tokenizer.json; by default trained on the quickstart's text")
    parser.add_argument("--copies", type=int, default=20, help="of the quickstart's text")
    parser.add_argument("--batches", type=int, default=1_000, help="most batches to read")
    parser.add_argument("--steps", type=int, default=12, help="training steps, the first two left out")
    args = parser.parse_args(arguments)
    if args.text is not None and args.tokenizer is None:
        parser.error("--text needs --tokenizer")
    args.config = yaml.safe_load(QUICKSTART.read_text())
    with tempfile.TemporaryDirectory() as directory:
        result = measure(args, Path(directory))
    print("| | tokens/s | of a training step's |\n|---|---:|---:|")
    for name, speed in result.items():
        print(f"| {name} | {speed:,.0f} | {speed / result['training step']:,.1f} x |")
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {torch.get_num_threads()} thread(s) of torch")


if __name__ == "__main__":
    main()
