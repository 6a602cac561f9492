"""Documents to words: token ids with two marks, in a file that is nothing but them.

A word is a uint32. The low 30 bits are the id. `START` marks the first token of a document, `READ_ONLY` a token that is
read but not learnt: the prompt of an instruction. So one memory-mapped array tells ids, boundaries and targets.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from neox_lit.corpus import Document
from neox_lit.tokenizer import TextTokenizer

Words = npt.NDArray[np.uint32]

READ_ONLY = np.uint32(1 << 31)
START = np.uint32(1 << 30)
ID = np.uint32((1 << 30) - 1)

_BATCH = 128  # documents that one thread takes at a time,
_BATCH_CHARS = 1 << 18  # or fewer, of about so many characters

T = TypeVar("T")
U = TypeVar("U")


def open_words(path: Path) -> Words:
    """A file of words, memory-mapped: processes share its pages."""
    return np.memmap(path, np.uint32, "r")


def encode(documents: list[Document], tokenizer: TextTokenizer) -> list[Words]:
    """The words of each document."""
    ids = iter(tokenizer.encode_batch([piece.text for document in documents for piece in document.pieces]))
    result = []
    for document in documents:
        parts = []
        for piece in document.pieces:
            end = [tokenizer.end_of_text] if piece.ends else []
            part = np.array([*next(ids), *end], dtype=np.uint32)
            parts.append(part if piece.learnt else part | READ_ONLY)
        words = np.concatenate(parts)
        words[0] |= START
        result.append(words)
    return result


def encode_all(documents: Iterable[Document], tokenizer: TextTokenizer, workers: int = 0) -> Iterator[Words]:
    """The words of each document, in order.

    Args:
        workers: Threads; 0 is one per core. The tokenizer lets go of Python's lock, so they work at the same time.
    """
    for batch in _in_order(lambda some: encode(some, tokenizer), _batches(documents), workers or os.cpu_count() or 1):
        yield from batch


def write_words(
    file: IO[bytes], documents: Iterable[Document], tokenizer: TextTokenizer, workers: int = 0, progress: bool = True
) -> None:
    """Write all documents' words; on a terminal, with a bar that counts tokens."""
    with tqdm(desc="Tokenising", unit=" tokens", unit_scale=True, disable=None if progress else True) as bar:
        for words in encode_all(documents, tokenizer, workers):
            file.write(words.tobytes())
            bar.update(len(words))


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += sum(len(piece.text) for piece in document.pieces)
        if len(batch) >= _BATCH or chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _in_order(function: Callable[[T], U], items: Iterable[T], workers: int) -> Iterator[U]:
    """`map` on several threads, never more than a few items ahead."""
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[U]] = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
