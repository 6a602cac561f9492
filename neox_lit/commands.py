"""The commands of `neox-lit` beside LightningCLI's. Each is a typed function whose docstring is its help."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from neox_lit import checkpoints
from neox_lit import evaluate as evaluation
from neox_lit.checkpoints.heads import is_of_training, read_head
from neox_lit.config import PRESETS, NeoXConfig
from neox_lit.corpus import Corpus
from neox_lit.errors import NeoXError
from neox_lit.generate import Sampling, check_prompts
from neox_lit.module import NeoXLightning
from neox_lit.ranks import on_ranks
from neox_lit.sharing import dealt, merged
from neox_lit.tokenizer import TextTokenizer

T = TypeVar("T")


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
    devices: int = 1,
    precision: str = "32-true",
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
        devices: Ranks that the model is sharded over, for one that fits on no single device.
        precision: Of a sharded model, as for `fit`.
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, repetition_penalty=repetition_penalty
    )
    if prompt and prompts_file is not None:
        raise NeoXError("prompt and prompts_file are both given; leave one out")
    if batch_size < 1:
        raise NeoXError(f"batch_size must be at least 1, got {batch_size}")
    prompts = _lines(prompts_file) if prompts_file is not None else None

    def work(module: NeoXLightning) -> None:
        first_rank = _first_rank()
        if prompts is not None:
            # All of them on all ranks: if one raised alone, the others would wait for it.
            check_prompts(module.encode(prompts), 1 if max_new_tokens is None else max_new_tokens, module.config)
            batches = [range(first, len(prompts))[:batch_size] for first in range(0, len(prompts), batch_size)]
            for mine in dealt(batches):
                draw = replace(sampling, seed=seed + mine[0]) if mine else sampling
                some = [prompts[i] for i in mine]
                texts = module.complete_all(some, max_new_tokens, draw, stop=stop or (), shared=True)
                found = merged(dict(zip(mine, texts, strict=True)))
                for i in sorted(found) if first_rank else ():
                    print(json.dumps({"prompt": prompts[i], "text": found[i]}, ensure_ascii=False), flush=True)
            return
        start = [prompt]  # printed with the first piece: an error in the settings comes before any text

        def write(text: str) -> None:
            if first_rank:
                print(start.pop() + text if start else text, end="", flush=True)

        module.complete(prompt, max_new_tokens, sampling, stop=stop or (), write=write)
        if first_rank:
            print("".join(start))

    _with_model(checkpoint, work, device, devices, precision)


def _first_rank() -> bool:
    return int(getattr(rank_zero_only, "rank", 0)) == 0


def _with_model(
    checkpoint: str, work: Callable[[NeoXLightning], T], device: str | None, devices: int, precision: str
) -> T:
    """Do it in this process, or on ranks that share the model."""
    if devices == 1:
        return work(load_module(checkpoint, device or ("cuda" if torch.cuda.is_available() else "cpu")))
    if device is not None and ":" in device:
        raise NeoXError(f"device={device!r} is one, and devices={devices} are asked for; leave out the number")
    accelerator = "auto" if device is None else {"cuda": "gpu"}.get(device, device)
    return on_ranks(checkpoint, work, devices, precision, accelerator)


def evaluate(
    checkpoint: str,
    text: str | None = None,
    seq_len: int | None = None,
    stride: int | None = None,
    tasks: list[str] | None = None,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
    devices: int = 1,
    precision: str = "32-true",
) -> None:
    """Perplexity on a text, results of lm-evaluation-harness tasks, or both. The last line printed is JSON.

    Args:
        checkpoint: As for `generate`.
        text: A text file. Each of its tokens but the first is predicted once.
        seq_len: Tokens that the model sees at once. By default its `max_seq_len`.
        stride: New tokens of each window of the text; the rest is context. By default half of `seq_len`.
        tasks: Names of harness tasks, e.g. '[lambada_openai]' (needs the extra `eval`).
        include_path: A directory of task files of your own.
        num_fewshot: Examples in each prompt. By default what the task says.
        limit: Documents of each task. By default all.
        batch_size: Rows in one forward of a rank.
        device: 'cpu', 'cuda', ... By default a GPU if there is one.
        devices: Ranks that the model is sharded over; they share the work out.
        precision: Of a sharded model, as for `fit`.
    """
    if text is None and not tasks:
        raise NeoXError("neither text nor tasks is given; say what to evaluate on")
    if batch_size < 1:
        raise NeoXError(f"batch_size must be at least 1, got {batch_size}")
    content = None
    if text is not None:
        try:
            content = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise NeoXError(f"text={text!r} cannot be read as UTF-8 text: {error}") from error
        if not content.strip():
            raise NeoXError(f"text={text!r} is empty")
    if tasks:
        evaluation.check_tasks(tasks, include_path)

    def work(module: NeoXLightning) -> str:
        found = None if content is None else evaluation.perplexity(module, content, seq_len, stride, batch_size)
        results = None
        if tasks:
            results = evaluation.run_tasks(module, tasks, include_path, num_fewshot, limit, batch_size)
        return evaluation.report(found, results)

    told = _with_model(checkpoint, work, device, devices, precision)
    if _first_rank():
        print(told)


def tokenizer(source: str, out: str = "tokenizer.json", vocab_size: int = 32_000) -> None:
    """Train a byte-level BPE tokenizer on a text and write a tokenizer.json, for `data.tokenizer`.

    Args:
        source: As `data.source` of `fit`: a text file, a directory, *.jsonl, *.parquet, or a data set's name.
        out: The file to write; it must not exist yet.
        vocab_size: Most tokens, the 256 bytes and <|endoftext|> included.
    """
    if Path(out).exists():
        raise NeoXError(f"out={out!r} exists; remove it, or give another name")
    texts = (piece.text for document in Corpus(source).documents() for piece in document.pieces)
    made = TextTokenizer.train(texts, vocab_size)
    Path(out).write_text(made.to_json(), encoding="utf-8")
    print(f"Wrote {out}: {made.n_tokens:,} tokens; model.config.n_vocab: {made.n_vocab}")


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
    try:
        if is_of_training(checkpoint):
            read_head(checkpoint)
            return NeoXLightning.load_from_checkpoint(checkpoint, map_location=device, weights_only=True).eval()
        module = NeoXLightning(pretrained=checkpoint)
        module.configure_model()
        return module.to(device).eval()
    except NeoXError:
        raise
    except Exception as error:  # torch and pickle raise many kinds
        raise NeoXError(f"checkpoint {checkpoint!r} is not one of NeoXLightning: {error}") from error
