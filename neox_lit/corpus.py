"""Where text comes from: Python's own documentation, files, or a data set. The result is a `datasets.Dataset`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from neox_lit.errors import NeoXError

if TYPE_CHECKING:
    from datasets import Dataset  # type: ignore[import-untyped]

PYTHON_DOCS = "python-docs"
_COLUMN = "text"


def check_source(source: str) -> None:
    """Raise early, before anything is read or launched, if `source` is a path and nothing is there."""
    looks_like_path = source.startswith((".", "/", "~")) or source.endswith(("/", ".txt"))
    if looks_like_path and not Path(source).expanduser().exists():
        raise NeoXError(f"data.source={source!r}: no such file or directory (here: {Path.cwd()})")


def load_corpus(
    source: str = PYTHON_DOCS,
    *,
    text_column: str = _COLUMN,
    dataset_config: str | None = None,
    dataset_split: str = "train",
) -> Dataset:
    """Documents, one a row, in the column 'text'. Blank ones are left out.

    Args:
        source: 'python-docs': the reference text in CPython's `pydoc_data.topics`, about 460 KB of English. Or a text
            file (one document), a directory (each `*.txt` below it is one), or the name of a data set for
            `datasets.load_dataset`, with `dataset_config`, `dataset_split` and the column `text_column`.

    Raises:
        NeoXError: Nothing there, not UTF-8, no such column, or no text in it.
    """
    check_source(source)
    path = Path(source).expanduser()
    if source == PYTHON_DOCS:
        corpus = _documents(_python_docs())
    elif path.is_file():
        corpus = _documents([_read(path)])
    elif path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise NeoXError(f"data.source={source!r}: no *.txt file in this directory")
        corpus = _documents([_read(file) for file in files])
    else:
        corpus = _named(source, text_column, dataset_config, dataset_split)
    if not len(corpus):
        raise NeoXError(f"data.source={source!r} has no text in it")
    return corpus


def texts_of(corpus: Dataset, batch_size: int = 256) -> Iterator[list[str]]:
    """The documents, some at a time."""
    for batch in corpus.iter(batch_size):
        yield batch[_COLUMN]


def content_hash(corpus: Dataset) -> str:
    """Of the documents, their order and their boundaries."""
    digest = hashlib.sha256()
    for texts in texts_of(corpus):
        for text in texts:
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()


def _documents(texts: list[str]) -> Dataset:
    from datasets import Dataset  # slow to import; ranks that only read the cache never need it

    return Dataset.from_dict({_COLUMN: [text for text in texts if text.strip()]})


def _python_docs() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise NeoXError(
            f"data.source={PYTHON_DOCS!r}: this Python comes without the standard module pydoc_data; "
            "set data.source to a text file"
        ) from error
    return [topics[name] for name in sorted(topics)]


def _read(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise NeoXError(f"data.source: {path} is not UTF-8 at line {line} (byte {error.start})") from error


def _named(source: str, text_column: str, dataset_config: str | None, dataset_split: str) -> Dataset:
    from datasets import load_dataset

    try:
        corpus = load_dataset(source, dataset_config, split=dataset_split)
    except Exception as error:  # whatever `datasets`, the hub's client or the network raise
        raise NeoXError(
            f"data.source={source!r} is neither {PYTHON_DOCS!r}, nor a file, nor a directory, and `datasets` cannot "
            f"load it with dataset_config={dataset_config!r}, dataset_split={dataset_split!r}: {error}"
        ) from error
    if text_column not in corpus.column_names:
        raise NeoXError(
            f"data.text_column={text_column!r} is no column of {source!r}, which has {', '.join(corpus.column_names)}"
        )
    corpus = corpus.select_columns([text_column]).rename_column(text_column, _COLUMN)
    return corpus.filter(lambda row: isinstance(row[_COLUMN], str) and bool(row[_COLUMN].strip()))
