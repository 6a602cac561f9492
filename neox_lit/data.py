"""Text as a LightningDataModule: read, tokenise once, pack, split; or stream."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from neox_lit.corpus import PYTHON_DOCS, BadRows, Corpus, RowKind
from neox_lit.encode import open_words, write_words
from neox_lit.errors import NeoXError
from neox_lit.files import cache_directory, publish
from neox_lit.order import EpochOrder, Position, ResumableLoader, Share
from neox_lit.stream import Place, StreamSteps, StreamWindows
from neox_lit.tokenizer import TextTokenizer
from neox_lit.windows import Documents, PackedWindows, cuts

Batch = dict[str, Tensor]
Indices = npt.NDArray[np.int64]


_BLANK = -1  # an index of `PackedWindows`


class _Ready(NamedTuple):
    """What is known after `setup`."""

    tokenizer: TextTokenizer
    path: Path | None  # of the words to train on; none if they are streamed
    train: Indices  # windows, in order
    held_out_path: Path | None
    held_out: Indices


class _Prepared(NamedTuple):
    """What rank 0 tells the others: hashes of the texts, as far as they are not streamed."""

    train: str | None
    held_out: str | None


class TextDataModule(LightningDataModule):
    """Windows of `seq_len` next-token targets from a text.

    Documents are tokenised, each followed by `<|endoftext|>`, into one stream that is cut into windows; no target is
    lost. Tokens (and a trained tokenizer) are cached under a hash of the text, so a changed text is a new entry and
    nothing is ever stale. Rank 0 prepares, all ranks memory-map the result.

    The order of training is a function of seed, epoch and the number of windows that all ranks have taken (see
    `order`). A checkpoint has that number, and `Trainer.fit(..., ckpt_path=...)` goes on after it, in the middle of an
    epoch and with another number of ranks too. Ranks always share the windows, evenly: no sampler is needed.

    Args:
        source: 'python-docs' (English reference text that ships with Python), a file (`*.jsonl`, `*.parquet`, or
            text), a directory of such files, or the name of a data set that `datasets.load_dataset` takes.
        seq_len: Tokens per window. At most the model's `max_seq_len`.
        batch_size: Windows per step and process.
        tokenizer: Path of a `tokenizer.json`. By default one is trained on the text.
        vocab_size: Most tokens of a trained tokenizer. At most the model's `n_vocab`.
        rows: 'text': learn all of `text_column`. 'prompt': learn the `response_column` that follows `prompt_column`.
            'chat': learn what the assistant says in the `messages_column`, written as `user: ...`, a blank line,
            `assistant: ...<|endoftext|>`.
        documents: 'joined': attention runs from one document of a window into the next, as GPT-NeoX was trained.
            'apart': it stays inside each. 'whole': and windows end early rather than cut a document. By default
            'joined' for text, 'whole' for instructions.
        bad_rows: 'error': a bad row (empty, wrong type, not UTF-8, not JSON) ends the run. 'skip': such rows are left
            out. Both name file and line.
        val_fraction: Part of the windows, in [0, 1), held out for validation and test. By default 0.05, or 0 with a
            validation text of its own or when streaming.
        val_source: A text for validation, in place of a part of `source`.
        val_split: The split of the named data set for validation, in place of a part of `dataset_split`.
        split_seed: Which windows are held out.
        order_seed: Of the order of training. By default that of `seed_everything`, else 0. A resumed run keeps its own.
        streaming: Read, tokenise and pack while training, without a cache. Needs `tokenizer` and `epoch_windows`.
        epoch_windows: Windows of all ranks that make an epoch when streaming; the next goes on after them, and at the
            end of the text it starts again.
        shuffle_buffer: Documents from which the next one is drawn when streaming. 0: the order of the source.
        num_workers: Loader processes per rank; 0 loads in the training process. At most 1 when streaming.
        text_column, prompt_column, response_column, messages_column: Columns, see `rows`.
        dataset_config: Configuration (subset); for a named data set.
        dataset_split: Split to read; for a named data set.
        cache_dir: Where tokens and trained tokenizers are kept. By default `$NEOX_LIT_CACHE`, else `neox_lit` in the
            user's cache directory.

    Raises:
        NeoXError: A setting is out of range or a path does not exist. Later, in `prepare_data`: no text, bad rows, or
            too little text.
    """

    def __init__(
        self,
        source: str = PYTHON_DOCS,
        seq_len: int = 128,
        batch_size: int = 8,
        tokenizer: str | None = None,
        vocab_size: int = 4_096,
        rows: RowKind = "text",
        documents: Documents | None = None,
        bad_rows: BadRows = "error",
        val_fraction: float | None = None,
        val_source: str | None = None,
        val_split: str | None = None,
        split_seed: int = 0,
        order_seed: int | None = None,
        streaming: bool = False,
        epoch_windows: int | None = None,
        shuffle_buffer: int = 0,
        num_workers: int = 0,
        text_column: str = "text",
        prompt_column: str = "prompt",
        response_column: str = "response",
        messages_column: str = "messages",
        dataset_config: str | None = None,
        dataset_split: str = "train",
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("seq_len", seq_len, 1),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("shuffle_buffer", shuffle_buffer, 0),
            ("epoch_windows", epoch_windows, 1),
            ("order_seed", order_seed, 0),
        ):
            if value is not None and value < least:
                raise NeoXError(f"data.{name} must be at least {least}, got {value}")
        for name, choice, choices in (
            ("rows", rows, ("text", "prompt", "chat")),
            ("documents", documents, (None, "joined", "apart", "whole")),
            ("bad_rows", bad_rows, ("error", "skip")),
        ):
            if choice not in choices:
                raise NeoXError(f"data.{name} must be one of {', '.join(map(repr, choices))}, got {choice!r}")
        own_validation = val_source is not None or val_split is not None
        if val_fraction is None:
            val_fraction = 0.0 if own_validation or streaming else 0.05
        if not 0 <= val_fraction < 1:
            raise NeoXError(f"data.val_fraction must be in [0, 1), got {val_fraction}")
        if val_fraction and (own_validation or streaming):
            raise NeoXError(
                f"data.val_fraction={val_fraction} holds out a part of data.source, which does not go with "
                + (
                    "data.streaming; give data.val_source or data.val_split"
                    if streaming
                    else "a validation text; drop it"
                )
            )
        if streaming and (tokenizer is None or epoch_windows is None or num_workers > 1):
            raise NeoXError(
                "data.streaming needs data.tokenizer (none can be trained on a text that is not read yet), "
                "data.epoch_windows (its length is not known), and at most one of data.num_workers; got "
                f"{tokenizer!r}, {epoch_windows!r} and {num_workers}"
            )
        if not streaming and (epoch_windows is not None or shuffle_buffer):
            raise NeoXError("data.epoch_windows and data.shuffle_buffer are for data.streaming; set it, or drop them")
        if tokenizer is not None and not Path(tokenizer).expanduser().is_file():
            raise NeoXError(f"data.tokenizer={tokenizer!r}: no such file (here: {Path.cwd()})")
        self.source = source
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.tokenizer_path = Path(tokenizer).expanduser() if tokenizer is not None else None
        self.vocab_size = vocab_size
        self.documents: Documents = documents or ("joined" if rows == "text" else "whole")
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.order_seed = order_seed
        self.streaming = streaming
        self.epoch_windows = epoch_windows
        self.shuffle_buffer = shuffle_buffer
        self.num_workers = num_workers
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else cache_directory()
        self.corpus = Corpus(
            source,
            rows,
            text_column,
            prompt_column,
            response_column,
            messages_column,
            bad_rows,
            dataset_config,
            dataset_split,
            streaming,
        )
        self.corpus.check()
        self.val_corpus: Corpus | None = None
        if own_validation:
            self.val_corpus = self.corpus.replace(
                source=val_source or source, dataset_split=val_split or dataset_split, streaming=False
            )
            self.val_corpus.check()
        self._prepared: _Prepared | None = None
        self._failure: str | None = None
        self._data: _Ready | None = None
        self._loader: ResumableLoader | None = None  # of training
        self._stream: StreamWindows | None = None
        self._resume: dict[str, Any] | None = None

    @property
    def tokenizer(self) -> TextTokenizer:
        """Known after `setup`."""
        return self._ready.tokenizer

    def prepare_data(self) -> None:
        """Read, train the tokenizer, tokenise; each step only if the cache lacks it. Lightning calls it on rank 0.

        Under a Trainer a `NeoXError` is kept for `setup`, where all ranks raise it: here the others wait at a barrier.
        """
        self._failure = None
        try:
            self._prepared = self._prepare()
        except NeoXError as error:
            if self.trainer is None:
                raise
            self._failure = str(error)

    def _prepare(self) -> _Prepared:
        """Make sure that the cache has tokenizer and tokens, and return the hashes of the texts."""
        if getattr(rank_zero_only, "rank", 0):  # the first process of another node
            from datasets import disable_progress_bars  # type: ignore[import-untyped]

            disable_progress_bars()
        if self.streaming:
            next(self.corpus.documents())  # a text that is not there is an error now, not in training
        train = None if self.streaming else self.corpus.hash()
        if self.tokenizer_path is not None:
            tokenizer = TextTokenizer.from_file(self.tokenizer_path)
        else:
            assert train is not None
            texts = (piece.text for document in self.corpus.documents() for piece in document.pieces)
            tokenizer = TextTokenizer.train_cached(texts, self.vocab_size, train, self.cache_dir)
        held_out = self.val_corpus.hash() if self.val_corpus is not None else None
        for corpus, content in ((self.corpus, train), (self.val_corpus, held_out)):
            if corpus is not None and content is not None:
                self._tokenise(corpus, tokenizer, self._words_path(content, tokenizer))
        if train is not None:
            self._check_length(self._words_path(train, tokenizer))
        return _Prepared(train, held_out)

    def _tokenise(self, corpus: Corpus, tokenizer: TextTokenizer, path: Path) -> None:
        if path.exists():
            return
        progress = not getattr(rank_zero_only, "rank", 0)
        publish(path, lambda file: write_words(file, corpus.documents(), tokenizer, progress))

    def setup(self, stage: str | None = None) -> None:
        """Open what `prepare_data` made. Every rank calls it; calling it again does nothing."""
        if self._data is not None:
            return
        prepared, failure = self._prepared, self._failure
        if self.trainer is not None:
            prepared, of_rank_0 = self.trainer.strategy.broadcast((prepared, failure))
            failed_somewhere = not self.trainer.strategy.reduce_boolean_decision(failure is None)
            if failed_somewhere:  # rank 0 says why; without that, the first rank of the node that failed does
                reason = of_rank_0 or failure or "another node could not prepare the data, see its error"
                raise NeoXError(reason, on_all_ranks=bool(of_rank_0) or failure is None)
        if prepared is None:  # nobody called prepare_data
            prepared = self._prepare()
        path = self.tokenizer_path or TextTokenizer.cached_path(prepared.train or "", self.vocab_size, self.cache_dir)
        tokenizer = TextTokenizer.from_file(path)
        train_path = held_out_path = None
        train = held_out = np.empty(0, np.int64)
        if prepared.train is not None:
            train_path = held_out_path = self._words_path(prepared.train, tokenizer)
            n_windows = self._count(train_path)
            order = np.random.default_rng(self.split_seed).permutation(n_windows)
            n_held_out = self._n_held_out(n_windows)
            train, held_out = np.sort(order[n_held_out:]), np.sort(order[:n_held_out])
        if prepared.held_out is not None:
            held_out_path = self._words_path(prepared.held_out, tokenizer)
            held_out = np.arange(self._count(held_out_path))
        self._data = _Ready(tokenizer, train_path, train, held_out_path, held_out)

    def train_dataloader(self) -> ResumableLoader:
        """Shuffled windows: batches of `PackedWindows`' items, `[batch_size, seq_len]`. In an epoch's last step what is
        left over, with blank windows so that all ranks have equally many."""
        ready, share = self._ready, self._share()
        resume, self._resume = self._resume or {}, None
        begin = Position(**resume["position"]) if resume else None
        own_seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.order_seed is None else self.order_seed
        seed = resume.get("seed", own_seed)
        loader: Any
        order: Any
        if ready.path is None:
            assert self.epoch_windows is not None
            place = self._stream.place if self._stream is not None and not resume else Place(*resume.get("place", ()))
            order = StreamWindows(
                self.corpus,
                ready.tokenizer,
                self.seq_len,
                self.documents,
                self.epoch_windows,
                share,
                seed,
                self.shuffle_buffer,
                place,
            )
            loader = StreamSteps(
                DataLoader(order, batch_size=None, num_workers=self.num_workers, pin_memory=torch.cuda.is_available()),
                order,
            )
            self._stream = order
        else:
            blank = len(ready.train)
            windows = PackedWindows(ready.path, self.seq_len, np.append(ready.train, _BLANK), self.documents)
            shuffle = not (self.trainer is not None and self.trainer.overfit_batches)  # type: ignore[attr-defined]
            order = EpochOrder(blank, share, seed, blank=blank, shuffle=shuffle)
            loader = DataLoader(
                windows,
                batch_sampler=order,
                num_workers=self.num_workers,
                persistent_workers=self.num_workers > 0,
                pin_memory=torch.cuda.is_available(),
            )
        resumed = bool(resume) and self.trainer is not None
        self._loader = ResumableLoader(loader, order, begin, self._in_mid_epoch if resumed else lambda: False)
        if (
            begin is not None
            and self.trainer is not None
            and len(self._loader) != share.steps(Position(), order.n_samples)
        ):
            # The Trainer counts the batches of an epoch once. Here the next has another number of them than this one.
            self.trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        return self._loader

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        """Held-out windows in order; no loader if there are none.

        Blank windows fill up to a multiple of the world size. Lightning's sampler would repeat real ones instead, and
        a mean over ranks would count those twice.
        """
        ready, world = self._ready, self.trainer.world_size if self.trainer is not None else 1
        if not len(ready.held_out):
            return []
        return [self._held_out(np.append(ready.held_out, [_BLANK] * (-len(ready.held_out) % world)).astype(np.int64))]

    def test_dataloader(self) -> list[DataLoader[Batch]]:
        """The same windows as for validation."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Batch]:
        """The held-out windows in order."""
        return self._held_out(self._ready.held_out)

    def state_dict(self) -> dict[str, Any]:
        """Where training is in the data; plain numbers and a hash."""
        if self._loader is None:
            return {}
        position = self._loader.position
        state = {
            "position": {"epoch": position.epoch, "samples": position.samples, "batches": position.batches},
            "seed": self._loader.seed,
            "windows": self._windows_id(),
        }
        if self._stream is not None:
            state["place"] = list(self._stream.place)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next training data loader goes on where `state` was taken, with whatever number of ranks.

        With other data, where the place means nothing, it begins the epoch anew and warns.
        """
        position = dict(state["position"])
        if state["windows"] != self._windows_id():
            rank_zero_warn(
                "the checkpoint was written in training on other windows (another text, tokenizer, data.seq_len, "
                "data.documents, validation part or way of streaming), so its place in them means nothing here; the "
                "epoch begins anew"
            )
            state = {"position": {**position, "samples": 0}, "seed": state["seed"]}
        self._resume = state
        if self.trainer is not None and self.trainer.fit_loop._combined_loader is not None:
            # Whoever asked for the number of steps before the checkpoint was read (a scheduler) made the Trainer take a
            # loader, from the start. It takes another one when it has none.
            self.trainer.fit_loop._combined_loader = None

    def _in_mid_epoch(self) -> bool:
        """Whether the Trainer goes on in an epoch that it had begun. It may ask for a loader before it knows."""
        assert self.trainer is not None
        batches = self.trainer.fit_loop.epoch_loop.batch_progress
        return batches.current.ready > 0 and not batches.is_last_batch

    def _windows_id(self) -> list[Any]:
        """What must be the same for a position to mean the same."""
        ready = self._ready
        if ready.path is None:
            what: list[Any] = [self.source, ready.tokenizer.hash, self.epoch_windows, self.shuffle_buffer]
        else:
            what = [ready.path.stem, len(ready.train), self.split_seed]
        return [*what, self.seq_len, self.documents]

    def _share(self) -> Share:
        if self.trainer is None:
            return Share(self.batch_size)
        ranks = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return Share(self.batch_size, ranks["rank"], ranks["num_replicas"])

    @property
    def _ready(self) -> _Ready:
        if self._data is None:
            raise NeoXError(
                "TextDataModule has no data yet; call prepare_data() and setup() first, or let a Trainer do it"
            )
        return self._data

    def _held_out(self, windows: Indices) -> DataLoader[Batch]:
        path = self._ready.held_out_path
        if path is None:
            raise NeoXError("data.streaming holds no windows out; give data.val_source or data.val_split")
        return DataLoader(
            PackedWindows(path, self.seq_len, windows, self.documents),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def _words_path(self, content: str, tokenizer: TextTokenizer) -> Path:
        return self.cache_dir / f"tokens-{content[:16]}-{tokenizer.hash[:16]}.bin"

    def _count(self, path: Path) -> int:
        return len(cuts(open_words(path), self.seq_len, self.documents)) - 1

    def _n_held_out(self, n_windows: int) -> int:
        return max(1, round(self.val_fraction * n_windows)) if self.val_fraction else 0

    def _check_length(self, path: Path) -> None:
        n_tokens, n_windows = len(open_words(path)), self._count(path)
        if n_tokens <= self.seq_len and self.documents != "whole":
            raise NeoXError(
                f"data.source={self.source!r} has {n_tokens} tokens, fewer than one window of data.seq_len="
                f"{self.seq_len} targets; give more text or a shorter seq_len"
            )
        if self._n_held_out(n_windows) >= n_windows:
            raise NeoXError(
                f"data.source={self.source!r} has {n_windows} window(s) of data.seq_len={self.seq_len}, and "
                f"data.val_fraction={self.val_fraction} leaves none to train on; give more text, a shorter seq_len, or "
                "data.val_source"
            )
