"""How likely a model finds tokens after others; shared out over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

import torch
from torch import Tensor

from neox_lit.errors import NeoXError
from neox_lit.generate import LanguageModel
from neox_lit.sharing import dealt, merged


class Row(NamedTuple):
    """Tokens that are given, at least one, and tokens that are asked about."""

    context: Sequence[int]
    targets: Sequence[int]


class Score(NamedTuple):
    """Of a row's targets: the log of their probability, nats, and whether greedy generation would give them."""

    logprob: float
    greedy: bool


@torch.no_grad()
def score(
    model: LanguageModel, rows: Sequence[Row], batch_size: int = 8, device: torch.device | str | None = None
) -> list[Score]:
    """Score rows of any lengths. Of a row too long for the model, the end of its context is used.

    If processes are connected, each computes a part, and all get all scores: called on every rank, with the same rows.

    Args:
        batch_size: Rows in one forward.
        device: Where the model takes its input.

    Raises:
        NeoXError: A row without context or with more targets than the model's `max_seq_len`.
    """
    limit = model.config.max_seq_len
    for i, row in enumerate(rows):
        if not len(row.context):
            raise NeoXError(f"row {i} has no context; begin with the end-of-text token")
        if len(row.targets) > limit:
            raise NeoXError(f"row {i} has {len(row.targets)} targets, more than the model's max_seq_len={limit}")
    # By length, so that a batch has little padding; dealt out like cards, so that ranks have equally much to do.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].context) - len(rows[i].targets))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    was_training = model.training
    model.train(False)
    try:
        found: dict[int, Score] = {}
        for chosen in dealt(batches):
            asked = [rows[i] for i in chosen] or [Row([0], [0])]
            found.update(zip(chosen, _forward(model, asked, limit, device), strict=False))
    finally:
        model.train(was_training)
    found = merged(found)
    return [found[i] for i in range(len(rows))]


def _forward(model: LanguageModel, rows: list[Row], limit: int, device: torch.device | str | None) -> list[Score]:
    """Padded on the right, where causal attention does not look."""
    tokens = [[*row.context, *row.targets][-limit - 1 :] for row in rows]
    ids = torch.zeros(len(rows), max(map(len, tokens)) - 1, dtype=torch.int64)
    for row, given in zip(ids, tokens, strict=True):
        row[: len(given) - 1] = torch.tensor(given[:-1])
    logits = model(ids.to(device))
    scores = []
    for of_row, given, row in zip(logits, tokens, rows, strict=True):
        n, last = len(row.targets), len(given) - 1
        of_targets = of_row[last - n : last].float()
        targets = torch.tensor(list(row.targets), dtype=torch.int64, device=of_targets.device)
        logprobs: Tensor = of_targets.log_softmax(dim=-1).gather(1, targets[:, None])
        scores.append(Score(logprobs.sum().item(), bool((of_targets.argmax(dim=-1) == targets).all())))
    return scores


def windows(ids: Sequence[int], seq_len: int, stride: int) -> list[Row]:
    """Rows that ask about every token of a text but the first, once.

    Args:
        seq_len: Most tokens that the model sees.
        stride: Tokens asked about in each row after the first; those before them, up to `seq_len` in all, are context.
    """
    rows, done = [], 1
    while done < len(ids):
        end = min(done + (seq_len if done == 1 else stride), len(ids))
        rows.append(Row(ids[max(0, end - 1 - seq_len) : done], ids[done:end]))
        done = end
    return rows


@dataclass(frozen=True)
class Perplexity:
    """What a model makes of a text.

    Attributes:
        loss: Nats per token.
        n_tokens: That were predicted: all of the text but the first.
        n_bytes: Of the text in UTF-8.
    """

    loss: float
    n_tokens: int
    n_bytes: int

    @property
    def perplexity(self) -> float:
        """exp of the loss."""
        return exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.loss * self.n_tokens / self.n_bytes / log(2)
