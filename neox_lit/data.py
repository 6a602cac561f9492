"""Text as a LightningDataModule: load, tokenise once, pack, split."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

from neox_lit.corpus import PYTHON_DOCS, check_source, content_hash, load_corpus, texts_of
from neox_lit.errors import NeoXError
from neox_lit.files import cache_directory, publish
from neox_lit.tokenizer import TextTokenizer
from neox_lit.windows import PackedWindows, count_windows

Batch = dict[str, Tensor]


class _Corpus(NamedTuple):
    """What is known after `setup`."""

    tokenizer: TextTokenizer
    path: Path  # of the tokens
    train: list[int]  # windows, in order
    held_out: list[int]


class TextDataModule(LightningDataModule):
    """Windows of `seq_len` next-token targets from a text.

    Documents are tokenised, each followed by `<|endoftext|>`, into one stream that is cut into windows; no target is
    lost. Tokens (and a trained tokenizer) are cached under a hash of the text, so a changed text is a new entry and
    nothing is ever stale. Rank 0 prepares, all ranks memory-map the result.

    Args:
        source: 'python-docs' (English reference text that ships with Python), a text file, a directory of `*.txt`
            files, or the name of a data set that `datasets.load_dataset` takes.
        seq_len: Tokens per window. At most the model's `max_seq_len`.
        batch_size: Windows per step and process.
        tokenizer: Path of a `tokenizer.json`. By default one is trained on the text.
        vocab_size: Most tokens of a trained tokenizer. At most the model's `n_vocab`.
        val_fraction: Part of the windows, in [0, 1), held out for validation and test.
        split_seed: Which windows are held out.
        num_workers: Loader processes per rank; 0 loads in the training process.
        text_column: Column with the text; for a named data set.
        dataset_config: Configuration (subset); for a named data set.
        dataset_split: Split to read; for a named data set.
        cache_dir: Where tokens and trained tokenizers are kept. By default `$NEOX_LIT_CACHE`, else `neox_lit` in the
            user's cache directory.

    Raises:
        NeoXError: A setting is out of range or a path does not exist. Later, in `prepare_data`: no text, no UTF-8, or
            too little of it.
    """

    def __init__(
        self,
        source: str = PYTHON_DOCS,
        seq_len: int = 128,
        batch_size: int = 8,
        tokenizer: str | None = None,
        vocab_size: int = 4_096,
        val_fraction: float = 0.05,
        split_seed: int = 0,
        num_workers: int = 0,
        text_column: str = "text",
        dataset_config: str | None = None,
        dataset_split: str = "train",
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("seq_len", seq_len, 1),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise NeoXError(f"data.{name} must be at least {least}, got {value}")
        if not 0 <= val_fraction < 1:
            raise NeoXError(f"data.val_fraction must be in [0, 1), got {val_fraction}")
        check_source(source)
        if tokenizer is not None and not Path(tokenizer).expanduser().is_file():
            raise NeoXError(f"data.tokenizer={tokenizer!r}: no such file (here: {Path.cwd()})")
        self.source = source
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.tokenizer_path = Path(tokenizer).expanduser() if tokenizer is not None else None
        self.vocab_size = vocab_size
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.num_workers = num_workers
        self.text_column = text_column
        self.dataset_config = dataset_config
        self.dataset_split = dataset_split
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else cache_directory()
        self._content: str | None = None  # hash of the text; what rank 0 tells the others
        self._failure: str | None = None
        self._corpus: _Corpus | None = None

    @property
    def tokenizer(self) -> TextTokenizer:
        """Known after `setup`."""
        return self._ready.tokenizer

    def prepare_data(self) -> None:
        """Load, train the tokenizer, tokenise; each step only if the cache lacks it. Lightning calls it on rank 0.

        Under a Trainer a `NeoXError` is kept for `setup`, where all ranks raise it: here the others wait at a barrier.
        """
        try:
            self._content = self._prepare()
        except NeoXError as error:
            if self.trainer is None:
                raise
            self._failure = str(error)

    def _prepare(self) -> str:
        """Make sure that the cache has tokenizer and tokens, and return the hash of the text."""
        if getattr(rank_zero_only, "rank", 0):  # the first process of another node
            from datasets import disable_progress_bars  # type: ignore[import-untyped]

            disable_progress_bars()
        corpus = load_corpus(
            self.source,
            text_column=self.text_column,
            dataset_config=self.dataset_config,
            dataset_split=self.dataset_split,
        )
        content = content_hash(corpus)
        if self.tokenizer_path is not None:
            tokenizer = TextTokenizer.from_file(self.tokenizer_path)
        else:
            texts = (text for batch in texts_of(corpus) for text in batch)
            tokenizer = TextTokenizer.train_cached(texts, self.vocab_size, content, self.cache_dir)
        path = self._tokens_path(content, tokenizer)
        if not path.exists():
            parts = [
                np.array([*ids, tokenizer.end_of_text], dtype=np.int32)
                for texts in texts_of(corpus)
                for ids in tokenizer.encode_batch(texts)
            ]
            publish(path, lambda file: np.save(file, np.concatenate(parts)))
        self._check_length(len(np.load(path, mmap_mode="r")))
        return content

    def setup(self, stage: str | None = None) -> None:
        """Open what `prepare_data` made. Every rank calls it; calling it again does nothing."""
        if self._corpus is not None:
            return
        content, failure = self._content, self._failure
        if self.trainer is not None:
            content, failure = self.trainer.strategy.broadcast((content, failure))
        if failure or self._failure:
            raise NeoXError(failure or self._failure)
        if content is None:  # nobody called prepare_data
            content = self._prepare()
        path = self.tokenizer_path or TextTokenizer.cached_path(content, self.vocab_size, self.cache_dir)
        tokenizer = TextTokenizer.from_file(path)
        tokens = self._tokens_path(content, tokenizer)
        n_windows = count_windows(len(np.load(tokens, mmap_mode="r")), self.seq_len)
        order = torch.randperm(n_windows, generator=torch.Generator().manual_seed(self.split_seed)).tolist()
        n_held_out = self._n_held_out(n_windows)
        self._corpus = _Corpus(tokenizer, tokens, sorted(order[n_held_out:]), sorted(order[:n_held_out]))

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled windows: batches of `input_ids` and `labels`, int64 `[batch_size, seq_len]`."""
        return self._loader(self._ready.train, shuffle=True)

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        """Held-out windows in order; no loader if `val_fraction` is 0.

        Blank windows fill up to a multiple of the world size. Lightning's sampler would repeat real ones instead, and
        a mean over ranks would count those twice.
        """
        world = self.trainer.world_size if self.trainer is not None else 1
        corpus = self._ready
        if not corpus.held_out:
            return []
        blank = len(corpus.train) + len(corpus.held_out)  # past the last window
        return [self._loader(corpus.held_out + [blank] * (-len(corpus.held_out) % world), shuffle=False)]

    def test_dataloader(self) -> list[DataLoader[Batch]]:
        """The same windows as for validation."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Batch]:
        """The held-out windows in order."""
        return self._loader(self._ready.held_out, shuffle=False)

    @property
    def _ready(self) -> _Corpus:
        if self._corpus is None:
            raise NeoXError(
                "TextDataModule has no data yet; call prepare_data() and setup() first, or let a Trainer do it"
            )
        return self._corpus

    def _loader(self, windows: list[int], *, shuffle: bool) -> DataLoader[Batch]:
        return DataLoader(
            PackedWindows(self._ready.path, self.seq_len, windows),
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def _tokens_path(self, content: str, tokenizer: TextTokenizer) -> Path:
        return self.cache_dir / f"tokens-{content[:16]}-{tokenizer.hash[:16]}.npy"

    def _n_held_out(self, n_windows: int) -> int:
        return max(1, round(self.val_fraction * n_windows)) if self.val_fraction else 0

    def _check_length(self, n_tokens: int) -> None:
        if n_tokens <= self.seq_len:
            raise NeoXError(
                f"data.source={self.source!r} has {n_tokens} tokens, fewer than one window of data.seq_len="
                f"{self.seq_len} targets; give more text or a shorter seq_len"
            )
        n_windows = count_windows(n_tokens, self.seq_len)
        if self._n_held_out(n_windows) >= n_windows:
            raise NeoXError(
                f"data.source={self.source!r} has {n_windows} window(s) of data.seq_len={self.seq_len}, and "
                f"data.val_fraction={self.val_fraction} leaves none to train on"
            )
