"""Documents to words: token ids with two marks, in a file that is nothing but them.

A word is a uint32. The low 30 bits are the id. `START` marks the first token of a document, `READ_ONLY` a token that is
read but not learnt: the prompt of an instruction. So one memory-mapped array tells ids, boundaries and targets.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from neox_lit.corpus import Document
from neox_lit.tokenizer import TextTokenizer

Words = npt.NDArray[np.uint32]

READ_ONLY = np.uint32(1 << 31)
START = np.uint32(1 << 30)
ID = np.uint32((1 << 30) - 1)

_BATCH = 512  # documents that are tokenised together, on all cores,
_BATCH_CHARS = 1 << 20  # or fewer, of about so many characters
_PART = 1 << 16  # characters of a long document that one core takes
_SPACE = re.compile(r"(?<=\S)\s")


def open_words(path: Path) -> Words:
    """A file of words, memory-mapped: processes share its pages."""
    return np.memmap(path, np.uint32, "r")


def encode(documents: list[Document], tokenizer: TextTokenizer) -> list[Words]:
    """The words of each document."""
    cut = [_cut(piece.text, tokenizer) for document in documents for piece in document.pieces]
    encoded = iter(tokenizer.encode_batch([text for texts in cut for text in texts]))
    ids = ([np.array(next(encoded), dtype=np.uint32) for _ in texts] for texts in cut)
    end = np.array([tokenizer.end_of_text], dtype=np.uint32)
    result = []
    for document in documents:
        parts = []
        for piece in document.pieces:
            part = np.concatenate([*next(ids), end[: piece.ends]])
            parts.append(part if piece.learnt else part | READ_ONLY)
        words = np.concatenate(parts)
        words[0] |= START
        result.append(words)
    return result


def encode_all(documents: Iterable[Document], tokenizer: TextTokenizer) -> Iterator[Words]:
    """The words of each document, in order.

    `tokenizers` works on all cores and lets go of Python's lock: the next documents are read, and the last ones' words
    taken, meanwhile.
    """
    waiting: deque[Future[list[Words]]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for batch in _batches(documents):
            waiting.append(pool.submit(encode, batch, tokenizer))
            if len(waiting) > 2:
                yield from waiting.popleft().result()
        for future in waiting:
            yield from future.result()


def write_words(
    file: IO[bytes], documents: Iterable[Document], tokenizer: TextTokenizer, progress: bool = True
) -> None:
    """Write all documents' words; on a terminal, with a bar that counts tokens."""
    with tqdm(desc="Tokenising", unit=" tokens", unit_scale=True, disable=None if progress else True) as bar:
        for words in encode_all(documents, tokenizer):
            file.write(words.tobytes())
            bar.update(len(words))


def _cut(text: str, tokenizer: TextTokenizer) -> list[str]:
    """A long text as parts that have the same tokens as the whole, for several cores."""
    if len(text) <= 2 * _PART or not tokenizer.cuts_before_space:
        return [text]
    edges = [0]
    while found := _SPACE.search(text, edges[-1] + _PART):
        edges.append(found.start())
    return [text[start:end] for start, end in pairwise([*edges, len(text)])]


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
