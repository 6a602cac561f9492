"""`neox-lit evaluate`: perplexity on a text, and the tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from neox_lit.errors import NeoXError
from neox_lit.module import NeoXLightning
from neox_lit.scoring import Perplexity, score, windows


def perplexity(
    module: NeoXLightning, text: str, seq_len: int | None = None, stride: int | None = None, batch_size: int = 8
) -> Perplexity:
    """How well a model predicts a text, each token but the first once. Called on every rank, which share the work out.

    Args:
        seq_len: Most tokens that the model sees at once. By default its `max_seq_len`.
        stride: New tokens of each window after the first; the rest is context. By default half of `seq_len`; the
            smaller, the more context, and the longer it takes.

    Raises:
        NeoXError: No tokenizer, a text of fewer than two tokens, or sizes that do not fit the model.
    """
    if module.tokenizer is None:
        raise NeoXError("no tokenizer is known; set module.tokenizer = TextTokenizer.from_file(path)")
    limit = module.config.max_seq_len
    seq_len = seq_len or limit
    stride = stride or max(1, seq_len // 2)
    if seq_len > limit:
        raise NeoXError(f"seq_len={seq_len} is above the model's max_seq_len={limit}")
    if not 1 <= stride <= seq_len:
        raise NeoXError(f"stride must be from 1 to seq_len={seq_len}, got {stride}")
    ids = module.tokenizer.encode(text)
    if len(ids) < 2:
        raise NeoXError(f"the text has {len(ids)} tokens; at least two are needed to predict one")
    scores = score(module, windows(ids, seq_len, stride), batch_size, module.device)
    n_tokens = len(ids) - 1
    return Perplexity(-sum(one.logprob for one in scores) / n_tokens, n_tokens, len(text.encode()))


def run_tasks(
    module: NeoXLightning,
    tasks: list[str],
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Results of harness tasks, by task and metric. Called on every rank; each gets all of them.

    Raises:
        NeoXError: lm_eval is not installed, or a task is unknown.
    """
    import lm_eval

    from neox_lit.lm_eval import NeoXLM

    manager = check_tasks(tasks, include_path)
    found = lm_eval.simple_evaluate(
        model=NeoXLM(module, batch_size),
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        bootstrap_iters=0,
        verbosity=None,
    )
    results = [dict(found["results"]) if found is not None else None]  # the harness gives them to the first rank only
    if dist.is_initialized():
        dist.broadcast_object_list(results)
    assert results[0] is not None
    return results[0]


def check_tasks(tasks: list[str], include_path: str | None = None) -> Any:
    """The harness's manager of tasks that has all of these. Raises early for what `run_tasks` would raise for."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise NeoXError("tasks need the harness: pip install 'lightning-zero3[eval]'") from error
    if include_path is not None and not Path(include_path).is_dir():
        raise NeoXError(f"include_path={include_path!r}: no such directory")
    unknown: list[str] = []
    for with_its_own in (False, True) if include_path is not None else (True,):  # to look through its own takes seconds
        manager = TaskManager(include_path=include_path, include_defaults=with_its_own)
        unknown = [task for task in tasks if task not in manager.all_tasks]
        if not unknown:
            return manager
    elsewhere = f" or in {include_path}" if include_path else "; --include_path names a directory of your own"
    raise NeoXError(f"tasks: {', '.join(unknown)} is not known to lm_eval{elsewhere}")


def report(found: Perplexity | None, results: dict[str, Any] | None) -> str:
    """For people, and as JSON in the last line for programs."""
    told: dict[str, Any] = {}
    lines = []
    if found is not None:
        told["text"] = {
            "loss": found.loss,
            "perplexity": found.perplexity,
            "bits_per_byte": found.bits_per_byte,
            "n_tokens": found.n_tokens,
        }
        lines.append(
            f"{found.n_tokens:,} tokens: loss {found.loss:.4f} nats, perplexity {found.perplexity:.3f}, "
            f"{found.bits_per_byte:.4f} bits per byte"
        )
    for task, metrics in (results or {}).items():
        shown = {name.partition(",")[0]: value for name, value in metrics.items() if isinstance(value, float)}
        lines.append(f"{task}: " + ", ".join(f"{name} {value:.4f}" for name, value in shown.items()))
        told[task] = shown
    return "\n".join([*lines, json.dumps(told)])
