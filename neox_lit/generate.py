"""Text from a model: one token at a time, with a key/value cache.

A model that is sharded over ranks gathers its layers in every forward, so all ranks must make equally many. With the
same prompts, settings and seed they do, because a seed fixes the draw (made on the CPU, whatever the model runs on).
Ranks with prompts of their own go on, with blank forwards, until the last is done; see `any_rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from neox_lit.cache import KVCache
from neox_lit.config import NeoXConfig
from neox_lit.errors import NeoXError
from neox_lit.masks import document_mask


class LanguageModel(Protocol):
    """What `generate` needs: `NeoXModel` and `NeoXLightning` both are one."""

    config: NeoXConfig
    training: bool

    def __call__(self, ids: Tensor, cache: KVCache | None = None, mask: Tensor | None = None) -> Tensor: ...

    def train(self, mode: bool = True) -> object: ...


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: Divides the logits; 0 takes the likeliest token always (greedy).
        top_k: Choose among the k likeliest tokens only; 0 is no limit.
        top_p: Choose among the likeliest tokens that together have this probability, in (0, 1]; 1 is no limit.
        repetition_penalty: Makes tokens that the sequence has, prompt included, less likely: their logits are divided
            by it if positive, else multiplied. 1 is none. Source: Keskar et al. 2019, arXiv:1909.05858, section 4.1.
        seed: Of the draw. The same seed gives the same text. Each row of a batch draws by itself.

    Raises:
        NeoXError: A value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise NeoXError(f"temperature must be at least 0 (0 is greedy), got {self.temperature!r}")
        if self.top_k < 0:
            raise NeoXError(f"top_k must be at least 0 (0 is no limit), got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise NeoXError(f"top_p must be in (0, 1] (1 is no limit), got {self.top_p!r}")
        if not self.repetition_penalty > 0:
            raise NeoXError(f"repetition_penalty must be above 0 (1 is none), got {self.repetition_penalty!r}")

    def penalise(self, logits: Tensor, seen: Sequence[int]) -> None:
        """Apply the repetition penalty to one row of logits `[n_vocab]`, in place."""
        if self.repetition_penalty != 1:
            ids = torch.tensor(sorted(set(seen)))
            of_seen = logits[ids]
            divided, multiplied = of_seen / self.repetition_penalty, of_seen * self.repetition_penalty
            logits[ids] = torch.where(of_seen > 0, divided, multiplied)

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """One token per row of `logits` `[batch, n_vocab]`, float32 on the CPU; `-inf` is never chosen.

        Returns:
            int64 `[batch]`.
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        logits, ids = (logits / self.temperature).sort(dim=-1, descending=True)
        if self.top_k:
            logits[:, self.top_k :] = float("-inf")
        probabilities = logits.softmax(dim=-1)
        # A token stays if those before it have not reached top_p yet: the first always stays.
        probabilities[probabilities.cumsum(dim=-1) - probabilities >= self.top_p] = 0
        return ids.gather(1, torch.multinomial(probabilities, 1, generator=generator))[:, 0]


GREEDY = Sampling(temperature=0.0)


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    *,
    n_tokens: int | None = None,
    stop_id: int | None = None,
    on_token: Callable[[int, int], bool | None] | None = None,
    device: torch.device | str | None = None,
    any_rank: Callable[[bool], bool] = bool,
) -> list[list[int]]:
    """Continue each prompt. Prompts of different lengths in one batch give what each would give alone.

    Args:
        model: Called with ids `[batch, n]` and a cache, returns logits `[batch, n, n_vocab]`. Put in eval mode
            meanwhile.
        prompts: Token ids, at least one each.
        max_new_tokens: Most tokens to add to each prompt.
        n_tokens: Size of the tokenizer. Ids from here to `n_vocab` are padding of the embedding and are never chosen.
        stop_id: A sequence ends before this token (usually the end of text).
        on_token: Called with row and token as each one is chosen; if it returns true, the row ends with that token.
        device: Where the model takes its input.
        any_rank: Tells whether any rank goes on, from whether this one does. For ranks that share a sharded model and
            have other prompts each, or none.

    Returns:
        The new tokens of each prompt, without `stop_id`.

    Raises:
        NeoXError: An empty prompt, an id outside the vocabulary, or more tokens than the model's `max_seq_len`.
    """
    config = model.config
    check_prompts(prompts, max_new_tokens, config)
    longest = max(map(len, prompts), default=0)

    # Left-padded, so that every row's next token is in the last column. The padding is a document of its own:
    # its tokens see each other (no empty softmax), and no token of a prompt sees them.
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    documents = torch.tensor([[0] * (longest - len(p)) + [1] * (len(p) + max_new_tokens) for p in prompts])
    ragged = any(len(p) < longest for p in prompts)
    documents = documents.to(device)

    # A row draws by itself, so what it says does not hang on the other rows of the batch.
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))]
    cache = KVCache(config.n_layers, longest + max_new_tokens)
    new: list[list[int]] = [[] for _ in prompts]
    running = [True] * len(prompts)
    goes_on = bool(prompts) and max_new_tokens > 0
    was_training = model.training
    model.train(False)
    try:
        while any_rank(goes_on):
            if not goes_on:
                model(torch.zeros(1, 1, dtype=torch.int64).to(device))  # joins in
                continue
            n_total = cache.length + ids.shape[1]
            mask = document_mask(documents[:, :n_total], ids.shape[1]) if ragged else None
            logits = model(ids.to(device), cache, mask)[:, -1].float().cpu()
            logits[:, config.n_vocab if n_tokens is None else n_tokens :] = float("-inf")
            for row, prompt in enumerate(prompts):
                sampling.penalise(logits[row], [*prompt, *new[row]])
            if sampling.temperature == 0:
                chosen = logits.argmax(dim=-1)
            else:
                chosen = torch.cat([sampling.choose(logits[i : i + 1], g) for i, g in enumerate(generators)])
            for row, token in enumerate(chosen.tolist()):
                running[row] = running[row] and token != stop_id
                if running[row]:
                    new[row].append(token)
                    running[row] = not (on_token is not None and on_token(row, token))
            goes_on = n_total + 1 < longest + max_new_tokens and any(running)
            ids = chosen[:, None]
    finally:
        model.train(was_training)
    return new


class Continuation:
    """The text of new tokens as they come: written piece by piece, ended by a stop sequence.

    Held back are bytes that are no character yet, and what may turn out to be the start of a stop sequence.

    Args:
        decode: Text of ids.
        stop: Texts before the first of which it ends.
        write: Called with each new piece of text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        write: Callable[[str], object] | None = None,
    ) -> None:
        if "" in stop:
            raise NeoXError("a stop sequence is empty; leave it out")
        self._decode, self._stop, self._write = decode, tuple(stop), write
        self._ids: list[int] = []
        self._written = 0
        self.text = ""

    def add(self, token: int) -> bool:
        """Take a token; true if the text ends here."""
        self._ids.append(token)
        text = self._decode(self._ids)
        found = [at for at in map(text.find, self._stop) if at >= 0]
        self.text = text[: min(found)] if found else text
        if not found:
            whole = len(text.rstrip("\ufffd"))
            starts = [n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])]
            self._flush(min(whole, len(text) - max(starts, default=0)))
        return bool(found)

    def end(self) -> str:
        """The whole text; what was held back is written."""
        self._flush(len(self.text))
        return self.text

    def _flush(self, end: int) -> None:
        if self._write is not None and end > self._written:
            self._write(self.text[self._written : end])
            self._written = end


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, config: NeoXConfig) -> None:
    """Raise for what `generate` could not continue."""
    if max_new_tokens < 0:
        raise NeoXError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise NeoXError(f"prompt {i} has no token; begin with the end-of-text token to generate from nothing")
        if len(prompt) >= config.max_seq_len:
            raise NeoXError(
                f"prompt {i} has {len(prompt)} tokens, which leaves none of the model's max_seq_len="
                f"{config.max_seq_len} to generate; shorten the prompt"
            )
        if len(prompt) + max_new_tokens > config.max_seq_len:
            raise NeoXError(
                f"prompt {i} has {len(prompt)} tokens, with max_new_tokens={max_new_tokens} that is more than the "
                f"model's max_seq_len={config.max_seq_len}; shorten the prompt or ask for fewer tokens"
            )
        bad = [token for token in prompt if not 0 <= token < config.n_vocab]
        if bad:
            raise NeoXError(f"prompt {i} has token {bad[0]}, outside the model's vocabulary n_vocab={config.n_vocab}")
