"""Where text comes from, row by row: Python's own documentation, files, or a data set.

Rows become documents, and documents are pieces of text that are to be learnt or only read. A row that cannot become one
is bad: it is reported by its place, `file:line` or `data set:row`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from neox_lit.errors import NeoXError

PYTHON_DOCS = "python-docs"
JSON_LINES = (".jsonl", ".json")
PARQUET = ".parquet"
_SUFFIXES = (".txt", *JSON_LINES, PARQUET)
_ASSISTANT = "assistant"
_SHOWN = 10  # bad rows that a report names

RowKind = Literal["text", "prompt", "chat"]
BadRows = Literal["error", "skip"]


class Piece(NamedTuple):
    """Text that is tokenised apart from its neighbours."""

    text: str
    learnt: bool  # its tokens are targets of the loss
    ends: bool = False  # the end-of-text token follows


class Document(NamedTuple):
    """What belongs together."""

    place: str
    pieces: list[Piece]


class _Bad(NamedTuple):
    """In place of a row: why there is none."""

    reason: str


@dataclass(frozen=True)
class Corpus:
    """Documents of one source, in order.

    Args:
        source: 'python-docs': the reference text in CPython's `pydoc_data.topics`, about 460 KB of English. Or a file:
            `*.jsonl` (or `*.json`) with an object per line, `*.parquet`, anything else is UTF-8 text and one document.
            Or a directory: every `*.txt`, `*.jsonl`, `*.json`, `*.parquet` below it, in order of their paths. Or the
            name of a data set for `datasets.load_dataset`.
        rows: 'text': the column `text_column`, all of it learnt. 'prompt': `prompt_column` is read and
            `response_column` learnt. 'chat': `messages_column` is a list of `{"role": ..., "content": ...}`, and what
            the assistant says is learnt.
        bad_rows: 'error': the first bad row is an error. 'skip': bad rows are left out, with a warning that names them.
        dataset_config, dataset_split: For a named data set.
        streaming: Read a named data set while it is downloaded.
    """

    source: str = PYTHON_DOCS
    rows: RowKind = "text"
    text_column: str = "text"
    prompt_column: str = "prompt"
    response_column: str = "response"
    messages_column: str = "messages"
    bad_rows: BadRows = "error"
    dataset_config: str | None = None
    dataset_split: str = "train"
    streaming: bool = False

    @property
    def path(self) -> Path | None:
        """The file or directory, if it is one."""
        path = Path(self.source).expanduser()
        return path if self.source != PYTHON_DOCS and path.exists() else None

    @property
    def columns(self) -> dict[str, str]:
        """Settings that name the columns in use, and their values."""
        names = {
            "text": ("text_column",),
            "prompt": ("prompt_column", "response_column"),
            "chat": ("messages_column",),
        }[self.rows]
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raise early, before anything is read or launched, if the source is a path and nothing is there."""
        looks_like_path = self.source.startswith((".", "/", "~")) or self.source.endswith(("/", *_SUFFIXES))
        if looks_like_path and self.source != PYTHON_DOCS and self.path is None:
            raise NeoXError(f"data.source={self.source!r}: no such file or directory (here: {Path.cwd()})")

    def documents(self) -> Iterator[Document]:
        """All good rows.

        Raises:
            NeoXError: Nothing there, no such column, a bad row (unless they are skipped), or no good one.
        """
        self.check()
        bad, good = _Report(self), 0
        for place, row in self._rows():
            pieces = row if isinstance(row, _Bad) else self._pieces(row)
            if isinstance(pieces, _Bad):
                bad.add(place, pieces.reason)
            else:
                good += 1
                yield Document(place, pieces)
        bad.end()
        if not good:
            raise NeoXError(
                f"data.source={self.source!r} has no text in it" + (f" ({bad.count} bad rows)" if bad.count else "")
            )

    def hash(self) -> str:
        """Of the contents and of all settings that decide what is made of them; not of names and places of files."""
        digest = hashlib.sha256()
        settings = {**self.columns, "rows": self.rows, "bad_rows": self.bad_rows, "version": 2}
        _feed(digest, json.dumps(settings, sort_keys=True).encode())
        if self.path is not None:
            for file in self._files():
                _feed(digest, file.suffix.encode(), str(file.stat().st_size).encode())
                with file.open("rb") as data:
                    while part := data.read(1 << 20):
                        digest.update(part)
                _feed(digest)
        else:
            for document in self.documents():
                for piece in document.pieces:
                    _feed(digest, piece.text.encode(), bytes(piece[1:]))
                _feed(digest)
        return digest.hexdigest()

    def replace(self, **fields: Any) -> Corpus:
        return dataclasses.replace(self, **fields)

    def _rows(self) -> Iterator[tuple[str, Any]]:
        """(place, row): a row is a dict, or `_Bad`."""
        if self.source == PYTHON_DOCS:
            self._only_text(self.source)
            yield from ((name, {self.text_column: text}) for name, text in _python_docs().items())
        elif self.path is not None:
            for file in self._files():
                if file.suffix in JSON_LINES:
                    yield from _json_lines(file)
                elif file.suffix == PARQUET:
                    yield from self._parquet(file)
                else:
                    self._only_text(str(file))
                    yield from self._text(file)
        else:
            yield from self._named()

    def _files(self) -> list[Path]:
        assert self.path is not None
        if self.path.is_file():
            return [self.path]
        files = sorted(file for file in self.path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not files:
            raise NeoXError(
                f"data.source={self.source!r}: no {', '.join('*' + s for s in _SUFFIXES)} file in this directory"
            )
        return files

    def _only_text(self, what: str) -> None:
        if self.rows != "text":
            raise NeoXError(
                f"data.rows={self.rows!r} needs columns, and {what} is plain text; give *.jsonl or *.parquet"
            )

    def _text(self, file: Path) -> Iterator[tuple[str, Any]]:
        """One document; lines that are not UTF-8 are bad rows of their own."""
        data = file.read_bytes()
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            lines = []
            for number, line in enumerate(data.splitlines(keepends=True), 1):
                try:
                    lines.append(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except UnicodeDecodeError as error:
                    yield f"{file}:{number}", _not_utf8(error)
            text = "".join(lines)
        yield str(file), {self.text_column: text}

    def _parquet(self, file: Path) -> Iterator[tuple[str, Any]]:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile

        try:
            parquet = ParquetFile(file)
        except (ArrowInvalid, OSError) as error:
            raise NeoXError(f"data.source: {file} is not a parquet file, or is damaged: {error}") from error
        self._check_columns(str(file), parquet.schema_arrow.names)
        number = 0
        for batch in parquet.iter_batches(columns=list(self.columns.values())):
            for i in range(len(batch)):
                number += 1
                try:
                    row: Any = {name: batch.column(name)[i].as_py() for name in batch.schema.names}
                except UnicodeDecodeError as error:
                    row = _not_utf8(error)
                yield f"{file}:{number}", row

    def _named(self) -> Iterator[tuple[str, Any]]:
        from datasets import load_dataset  # type: ignore[import-untyped]  # slow to import

        options = {"streaming": True} if self.streaming else {}
        try:
            rows = load_dataset(self.source, self.dataset_config, split=self.dataset_split, **options)
        except Exception as error:  # whatever `datasets`, the hub's client or the network raise
            raise NeoXError(
                f"data.source={self.source!r} is neither {PYTHON_DOCS!r}, nor a file, nor a directory, and `datasets` "
                f"cannot load it with dataset_config={self.dataset_config!r}, dataset_split={self.dataset_split!r}: "
                f"{error}"
            ) from error
        if rows.column_names is not None:  # a stream may not know
            self._check_columns(self.source, rows.column_names)
            rows = rows.select_columns(list(self.columns.values()))
        for number, row in enumerate(rows, 1):
            yield f"{self.source}:{number}", row

    def _check_columns(self, where: str, there: list[str]) -> None:
        for setting, column in self.columns.items():
            if column not in there:
                raise NeoXError(f"data.{setting}={column!r} is no column of {where!r}, which has {', '.join(there)}")

    def _pieces(self, row: dict[str, Any]) -> list[Piece] | _Bad:
        """A row's document."""
        for column in self.columns.values():
            if column not in row:
                return _Bad(f"no column {column!r}, but {', '.join(row) or 'none'}")
        if self.rows == "chat":
            return _conversation(row[self.messages_column])
        for column in self.columns.values():
            wrong = _wrong_text(row[column])
            if wrong:
                return _Bad(f"{column!r} is {wrong}")
        if self.rows == "text":
            return [Piece(row[self.text_column], learnt=True, ends=True)]
        return [
            Piece(row[self.prompt_column], learnt=False),
            Piece(row[self.response_column], learnt=True, ends=True),
        ]


class _Report:
    """Bad rows of one reading."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.count = 0
        self.first: list[str] = []

    def add(self, place: str, reason: str) -> None:
        if self.corpus.bad_rows == "error":
            raise NeoXError(
                f"data.source: bad row at {place}: {reason}; mend it, or set data.bad_rows to 'skip' to leave "
                "such rows out"
            )
        self.count += 1
        if self.count <= _SHOWN and self.corpus.streaming:  # whose end may never come
            rank_zero_warn(f"data.source={self.corpus.source!r}: left out bad row {place}: {reason}")
        elif self.count <= _SHOWN:
            self.first.append(f"{place}: {reason}")

    def end(self) -> None:
        if self.first:
            more = f" and {self.count - _SHOWN} more" if self.count > _SHOWN else ""
            rows = "; ".join(self.first)
            rank_zero_warn(f"data.source={self.corpus.source!r}: left out {self.count} bad row(s): {rows}{more}")


def _conversation(messages: Any) -> list[Piece] | _Bad:
    """`user: hello` and so on, a blank line between messages. What the assistant says, and its end, is learnt.

    A role and its colon are a piece apart, so that a prompt that ends with `assistant:` has the tokens of training.
    """
    if not isinstance(messages, list) or not messages:
        return _Bad(
            f"messages are {'empty' if isinstance(messages, list) else _type(messages)}, not a list of messages"
        )
    pieces = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            return _Bad(f"message {i} is not an object with a role and a content")
        wrong = _wrong_text(message["content"])
        if wrong:
            return _Bad(f"the content of message {i} is {wrong}")
        learnt = message["role"] == _ASSISTANT
        pieces.append(Piece(("\n\n" if i else "") + message["role"] + ":", learnt=False))
        pieces.append(Piece(" " + message["content"], learnt=learnt, ends=learnt or i == len(messages) - 1))
    if not any(piece.learnt for piece in pieces):
        return _Bad(f"no message of the role {_ASSISTANT!r}, so nothing to learn")
    return pieces


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            row: Any
            try:
                row = (
                    json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")) if line.strip() else _Bad("empty")
                )
            except UnicodeDecodeError as error:
                row = _not_utf8(error)
            except (json.JSONDecodeError, RecursionError) as error:
                row = _Bad(f"not JSON: {error}")
            yield f"{file}:{number}", row if isinstance(row, (dict, _Bad)) else _Bad(f"{_type(row)}, not an object")


def _python_docs() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise NeoXError(
            f"data.source={PYTHON_DOCS!r}: this Python comes without the standard module pydoc_data; "
            "set data.source to a text file"
        ) from error
    return {name: topics[name] for name in sorted(topics)}


def _wrong_text(value: Any) -> str:
    """What is wrong with a text, or nothing."""
    if not isinstance(value, str):
        return f"{_type(value)}, not text"
    if not value.strip():
        return "empty"
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON may escape half a surrogate pair
        return "text that is not Unicode"
    return ""


def _type(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _not_utf8(error: UnicodeDecodeError) -> _Bad:
    return _Bad(f"not UTF-8 (byte {error.start})")


def _feed(digest: Any, *parts: bytes) -> None:
    """Update a hash such that boundaries count."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    digest.update(b"\xff" * 8)
