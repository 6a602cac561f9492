"""Windows of a text that is never there as a whole: read, tokenised and packed while training."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from neox_lit.corpus import Corpus
from neox_lit.encode import START, Words, encode_all
from neox_lit.errors import NeoXError
from neox_lit.order import Position, Share
from neox_lit.tokenizer import TextTokenizer
from neox_lit.windows import Documents, window

T = TypeVar("T")


class Place(NamedTuple):
    """A token of the stream."""

    reading: int = 0  # how often the text was read to its end before
    document: int = 0  # in the order of this reading
    token: int = 0  # in the document


class Step(NamedTuple):
    """A batch, and where the stream goes on after all ranks' parts of the step."""

    batch: dict[str, Tensor]
    place: Place


class StreamWindows(IterableDataset[Step | str]):
    """The batches of one rank in one epoch of `n_samples` windows; or, in place of one, what is wrong with the text.

    Every rank reads and tokenises the whole text and keeps its share, so that what it sees is a function of the samples
    taken alone, as in `order`. The stream goes on from epoch to epoch, and from the end of the text at its start.

    Attributes:
        begin: Position of the epoch's first batch.
        place: Of that batch's first token.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: TextTokenizer,
        seq_len: int,
        documents: Documents,
        n_samples: int,
        share: Share,
        seed: int,
        shuffle_buffer: int,
        place: Place,
    ) -> None:
        self.corpus = corpus
        self.tokenizer_json = tokenizer.to_json()
        self.seq_len = seq_len
        self.documents = documents
        self.n_samples = n_samples
        self.share = share
        self.seed = seed
        self.shuffle_buffer = shuffle_buffer
        self.place = place
        self.begin = Position()

    def __iter__(self) -> Iterator[Step | str]:
        if get_worker_info() is not None:  # forked, and a tokenizer's threads do not survive that
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            yield from self._steps()
        except NeoXError as error:  # raised by `StreamSteps`: what a loader's worker raises becomes a stack trace
            yield str(error)

    def _steps(self) -> Iterator[Step]:
        share, windows = self.share, self._windows()
        blank = window(np.empty(0, np.uint32), self.seq_len, self.documents)
        for start in range(self.begin.samples, self.n_samples, share.step):
            step = list(islice(windows, min(share.step, self.n_samples - start)))
            items = [item for item, _ in step] + [blank] * (-len(step) % share.world)
            mine = items[share.rank :: share.world]
            yield Step({name: torch.stack([item[name] for item in mine]) for name in blank}, step[-1][1])

    def _windows(self) -> Iterator[tuple[dict[str, Tensor], Place]]:
        """Windows without end, each with the place of its last token, with which the next begins."""
        words, places = np.empty(0, np.uint32), np.empty((0, 3), np.int64)
        for new, place in self._words():
            words = np.concatenate((words, new))
            new_places = [(place.reading, place.document, place.token + i) for i in range(len(new))]
            places = np.concatenate((places, np.array(new_places, np.int64).reshape(-1, 3)))
            start = 0
            while len(words) - start > self.seq_len + 1:  # one more than a window, to know whether a document ends
                end = start + self._length(words[start : start + self.seq_len + 2])
                yield window(words[start : end + 1], self.seq_len, self.documents), Place._make(places[end].tolist())
                start = end
            words, places = words[start:], places[start:]

    def _length(self, words: Words) -> int:
        """Targets of the window that begins with these words; see `windows.cuts`."""
        if self.documents != "whole":
            return self.seq_len
        ends = np.flatnonzero(words[2:] & START) + 1
        return int(ends[-1]) if len(ends) else self.seq_len

    def _words(self) -> Iterator[tuple[Words, Place]]:
        """Words by document, without end, from `place` on."""
        tokenizer = TextTokenizer.from_json(self.tokenizer_json)
        reading, skip, token = self.place
        for again in count(reading):
            documents: Iterable = self.corpus.documents()
            if self.shuffle_buffer:
                documents = _shuffled(documents, self.shuffle_buffer, random.Random(f"{self.seed} {again}"))
            words = encode_all(islice(documents, skip, None), tokenizer)
            for document, some in enumerate(words, skip):
                yield some[token:], Place(again, document, token)
                token = 0
            skip = 0


def _shuffled(items: Iterable[T], size: int, rng: random.Random) -> Iterator[T]:
    """In the order of draws from a buffer of `size` items, which the next ones fill up."""
    buffer: list[T] = []
    for item in items:
        if len(buffer) < size:
            buffer.append(item)
        else:
            at = rng.randrange(size)
            yield buffer[at]
            buffer[at] = item
    rng.shuffle(buffer)
    yield from buffer


class StreamSteps:
    """The batches of a `Step` loader, for `ResumableLoader`; keeps the place where the stream goes on."""

    def __init__(self, loader: Any, windows: StreamWindows) -> None:
        self._loader, self._windows = loader, windows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in self._loader:
            if isinstance(step, str):
                raise NeoXError(step, on_all_ranks=True)  # all ranks read the same text
            self._windows.place = Place(*step.place)
            yield step.batch
