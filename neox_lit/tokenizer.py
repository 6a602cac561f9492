"""Byte-level BPE: trained on the corpus and cached, or read from a tokenizer.json."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from neox_lit.config import padded_vocab
from neox_lit.errors import NeoXError
from neox_lit.files import publish

END_OF_TEXT = "<|endoftext|>"
_BYTES = 256


class TextTokenizer:
    """A `tokenizers.Tokenizer` with what language modelling needs of it.

    Args:
        tokenizer: Must have the token `<|endoftext|>`, which separates documents.

    Raises:
        NeoXError: It has not.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        end_of_text = tokenizer.token_to_id(END_OF_TEXT)
        if end_of_text is None:
            raise NeoXError(f"no token {END_OF_TEXT!r} in the tokenizer, which separates documents; add it to the file")
        self._tokenizer = tokenizer
        self.end_of_text: int = end_of_text

    @classmethod
    def from_file(cls, path: str | Path) -> TextTokenizer:
        """Read a `tokenizer.json`.

        Raises:
            NeoXError: No such file, or not a tokenizer.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise NeoXError(f"tokenizer {str(path)!r} cannot be read: {error.strerror}") from error
        except NeoXError as error:
            raise NeoXError(f"tokenizer {str(path)!r}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> TextTokenizer:
        """From the text of a `tokenizer.json`; the inverse of `to_json`."""
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exception
            raise NeoXError(f"not a tokenizer.json: {error}") from error
        return cls(tokenizer)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> TextTokenizer:
        """Learn merges from texts.

        Args:
            vocab_size: Most tokens, the 256 bytes and `<|endoftext|>` included. A small text yields fewer.
        """
        if vocab_size <= _BYTES:
            raise NeoXError(f"vocab_size must be above {_BYTES} (the bytes, and {END_OF_TEXT}), got {vocab_size}")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def train_cached(cls, texts: Iterable[str], vocab_size: int, content: str, directory: Path) -> TextTokenizer:
        """Train once per content.

        Several processes may call this at the same time: each trains, one file is kept, and all return that one.

        Args:
            content: Hash of `texts`.
            directory: Cache directory.
        """
        path = cls.cached_path(content, vocab_size, directory)
        if not path.exists():
            text = cls.train(texts, vocab_size).to_json()
            publish(path, lambda file: file.write(text.encode()))
        return cls.from_file(path)

    @staticmethod
    def cached_path(content: str, vocab_size: int, directory: Path) -> Path:
        """Where `train_cached` keeps the tokenizer."""
        return directory / f"tokenizer-{content[:16]}-{vocab_size}.json"

    @property
    def n_tokens(self) -> int:
        """Number of ids, added tokens included: ids are in [0, n_tokens)."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def n_vocab(self) -> int:
        """Vocabulary rows a model should have for it: `n_tokens` rounded up to a multiple of 128."""
        return padded_vocab(self.n_tokens)

    @cached_property
    def hash(self) -> str:
        """Of all that decides how text becomes ids."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def cuts_before_space(self) -> bool:
        """Whether a word and the space before it are tokenised whatever they follow, as in GPT-2's and NeoX's way."""
        parts = ("a", " b", "\nc", "  d", "\n\n e", "\tf.")
        return self.encode("".join(parts)) == [id_ for part in parts for id_ in self.encode(part)]

    def encode(self, text: str) -> list[int]:
        """Ids of a text; nothing is added at its ends."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of several texts, on all cores."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included. Bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """The text of a `tokenizer.json`."""
        return self._tokenizer.to_str()
