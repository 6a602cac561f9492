"""The order of training: each window once per epoch, whoever takes it, before and after a resume with other ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero3 import Zero3Strategy
from neox_lit import NeoXError, NeoXLightning, TextDataModule, TextTokenizer
from neox_lit.cli import main
from neox_lit.corpus import Corpus
from neox_lit.order import EpochOrder, Position, Share
from neox_lit.stream import Place, StreamWindows
from tests.harness import assert_same, run
from tests.neox.helpers import tiny

START, FIRST = Position(), Place()
WINDOWS = 27  # of 4 per step on two ranks: 7 steps, the last with 3


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_share_an_epoch_evenly_from_any_position(world):
    for taken in (0, 4, 12, 25, 26):
        orders = [EpochOrder(27, Share(2, rank, world), seed=3, blank=99) for rank in range(world)]
        for order in orders:
            order.begin = Position(epoch=1, samples=taken)
        batches = [list(order) for order in orders]
        assert all(len(b) == len(order) for b, order in zip(batches, orders, strict=True))
        assert len({tuple(map(len, b)) for b in batches}) == 1  # ranks never wait for each other
        steps = [[i for group in zip(*parts, strict=True) for i in group] for parts in zip(*batches, strict=True)]
        seen = [i for step in steps for i in step if i != 99]
        assert seen == orders[0].samples(1)[taken:].tolist()
    assert sorted(orders[0].samples(1)) == list(range(27))
    assert orders[0].samples(1).tolist() != orders[0].samples(2).tolist()


class Record(Callback):
    """What this rank took, and what came of it."""

    def __init__(self):
        self.steps: list[tuple[int, list[tuple[int, ...]], float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        rows = [tuple(ids) for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"], strict=True)
                if (labels >= 0).any()]  # fmt: skip
        self.steps.append((trainer.current_epoch, rows, outputs["loss"].item()))


def fit(data: dict, directory: str, ckpt_path: str | None = None, max_steps: int = -1) -> list:
    seed_everything(11, verbose=False)
    record, save = Record(), {"dirpath": directory, "save_top_k": -1, "enable_version_counter": False}
    world = torch.distributed.get_world_size()
    saves = [
        ModelCheckpoint(filename="{step}", every_n_train_steps=3, **save),
        ModelCheckpoint(filename="end-{epoch}", every_n_epochs=1, save_on_train_epoch_end=True, **save),
    ]
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=Zero3Strategy(),
        max_epochs=2,
        max_steps=max_steps,
        limit_val_batches=0,
        callbacks=[record, *(saves if ckpt_path is None else ())],
        enable_checkpointing=ckpt_path is None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = NeoXLightning(
        tiny(n_vocab=384, n_layers=1, n_hidden=16), lr=1e-2, decay_steps=20 if data.get("streaming") else 0
    )
    trainer.fit(module, TextDataModule(**data), ckpt_path=ckpt_path)
    return record.steps


def together(ranks: list[list]) -> list[list]:
    """By epoch: the windows that all ranks took, in order."""
    epochs = [[], []]
    for parts in zip(*ranks, strict=True):
        most = max(len(rows) for _, rows, _ in parts)
        epochs[parts[0][0]] += [rows[i] for i in range(most) for _, rows, _ in parts if i < len(rows)]
    return epochs


@pytest.fixture
def source(tmp_path) -> tuple[str, str]:
    """Text and tokenizer: 27 windows of 16 targets, no two alike."""
    tokenizer = TextTokenizer.train(["0123456789 "], 257)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    text, n = "", 0
    while len(tokenizer.encode(text)) < WINDOWS * 16 - 6:
        text, n = f"{text}{n} ", n + 1
    (tmp_path / "text.txt").write_text(text)
    return str(tmp_path / "text.txt"), str(tmp_path / "tokenizer.json")


def test_a_run_goes_on_where_it_stopped_at_any_world_size(tmp_path, source):
    data = {"source": source[0], "tokenizer": source[1], "seq_len": 16, "batch_size": 2, "val_fraction": 0.0}
    whole = run(fit, 2, data, str(tmp_path))
    epochs = together(whole)
    assert [len(epoch) for epoch in epochs] == [WINDOWS, WINDOWS]
    assert len(set(epochs[0])) == len(set(epochs[1])) == WINDOWS
    assert epochs[0] != epochs[1]
    assert len(whole[0]) == 14
    for world, checkpoint, taken in ((2, "step=9", 9),):
        again = run(fit, world, data, str(tmp_path), str(tmp_path / f"{checkpoint}.ckpt"))
        for rank in range(2):
            assert [step[:2] for step in again[rank]] == [step[:2] for step in whole[rank][taken:]]
            assert_same([step[2] for step in again[rank]], [step[2] for step in whole[rank][taken:]])
    for world, checkpoint, taken in ((1, "step=3", 12), (3, "step=3", 12), (1, "end-epoch=0", 27)):
        first, second = together(run(fit, world, data, str(tmp_path), str(tmp_path / f"{checkpoint}.ckpt")))
        assert first == epochs[0][taken:], (world, checkpoint)
        assert second == epochs[1], (world, checkpoint)


def test_a_run_that_max_steps_stopped_in_mid_epoch_goes_on_in_it(tmp_path, source):
    """Its last checkpoint is one of an epoch's end, as Lightning sees it."""
    data = {"source": source[0], "tokenizer": source[1], "seq_len": 16, "batch_size": 2, "val_fraction": 0.0}
    epochs = together(run(fit, 1, data, str(tmp_path / "whole")))
    begun = together(run(fit, 1, data, str(tmp_path / "stopped"), None, 4))
    checkpoint = str(tmp_path / "stopped" / "end-epoch=0.ckpt")
    rest = together(run(fit, 1, data, str(tmp_path), checkpoint, 14))
    assert len(begun[0]) == 8
    assert begun[0] + rest[0] + rest[1] == epochs[0]
    # Without max_steps Lightning begins the next epoch.
    assert together(run(fit, 1, data, str(tmp_path), checkpoint)) == [[], epochs[1]]


def test_other_data_begins_the_epoch_anew(tmp_path, source):
    data = {"source": source[0], "tokenizer": source[1], "seq_len": 16, "batch_size": 2, "val_fraction": 0.0}
    run(fit, 1, data, str(tmp_path))
    (first, second), (again, _) = (
        together(run(fit, 1, {**data, "seq_len": 8, **s}, str(tmp_path), str(tmp_path / "step=3.ckpt")))
        for s in ({}, {"order_seed": 5})  # a resumed run keeps its seed
    )
    assert len(first) == len(second) == len(set(first)) == 2 * WINDOWS
    assert first == again


def stream(source: str, tokenizer: str, share: Share, begin=START, place=FIRST, **settings) -> StreamWindows:
    options = {"documents": "joined", "n_samples": 10, "seed": 1, "shuffle_buffer": 0, **settings}
    windows = StreamWindows(Corpus(source), TextTokenizer.from_file(tokenizer), 16, share=share, place=place, **options)
    windows.begin = begin
    return windows


@pytest.mark.parametrize("settings", [{}, {"shuffle_buffer": 5}, {"documents": "whole"}], ids=str)
def test_a_stream_is_the_same_whoever_reads_it(tmp_path, source, settings):
    """Against a single reader: ranks that take turns, and one that comes in at a place."""
    rows = [json.dumps({"text": f"{i} " * (1 + i % 13)}) for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    where = (str(tmp_path / "rows.jsonl"), source[1])
    reader = list(stream(*where, Share(1), n_samples=160, **settings))  # more than the text has: it begins again
    assert reader[-1].place.reading >= 1
    for world in (2, 3):
        ranks = [list(stream(*where, Share(2, rank, world), n_samples=20, **settings)) for rank in range(world)]
        for name in reader[0].batch:
            steps = zip(*[[step.batch[name] for step in rank] for rank in ranks], strict=True)
            dealt = torch.cat([torch.stack(step, 1).flatten(0, 1) for step in steps])
            expected = torch.cat([step.batch[name] for step in reader[:20]])
            assert torch.equal(dealt[:20], expected)
        assert len({tuple(step.place for step in r) for r in ranks}) == 1
        place = ranks[0][1].place  # after 4 * world windows
        later = next(iter(stream(*where, Share(1), Position(0, 4 * world), place, n_samples=20, **settings)))
        assert torch.equal(later.batch["input_ids"], reader[4 * world].batch["input_ids"])


def test_a_bad_row_in_a_stream_is_the_same_one_error_in_a_loader_worker(tmp_path, source):
    (tmp_path / "rows.jsonl").write_text('{"text": "0 1 2 3"}\n' * 20 + '{"text": 5}\n')
    settings = {"tokenizer": source[1], "seq_len": 16, "streaming": True, "epoch_windows": 50, "num_workers": 1}
    data = TextDataModule(source=str(tmp_path / "rows.jsonl"), **settings)
    data.prepare_data()
    data.setup()
    with pytest.raises(NeoXError, match=r"^data.source: bad row at .*rows.jsonl:21: .* int, not text") as error:
        list(data.train_dataloader())
    assert error.value.on_all_ranks
    with pytest.raises(NeoXError, match=r"data.text_column|no column 'body'"):  # before training
        TextDataModule(source=str(tmp_path / "rows.jsonl"), text_column="body", **settings).prepare_data()


def test_streamed_training_resumes_at_another_world_size(tmp_path, source):
    rows = [json.dumps({"text": " ".join(str(n) for n in range(i * 20, i * 20 + 20))}) for i in range(30)]
    Path(tmp_path / "rows.jsonl").write_text("\n".join(rows))
    data = {"source": str(tmp_path / "rows.jsonl"), "tokenizer": source[1], "seq_len": 16, "batch_size": 2}
    data |= {"streaming": True, "epoch_windows": 14, "num_workers": 0, "shuffle_buffer": 4}
    epochs = together(run(fit, 2, data, str(tmp_path)))
    assert len(set(epochs[0] + epochs[1])) == 28
    again = together(run(fit, 1, data, str(tmp_path), str(tmp_path / "step=3.ckpt")))
    assert again == [epochs[0][12:], epochs[1]]


def command(arguments: list[str]) -> object:
    """What `neox-lit` ends with on this rank."""
    try:
        main(arguments)
    except SystemExit as end:
        return end.code
    return None


def test_wrong_data_is_one_error_on_rank_0_before_training(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    fit = ["fit", "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=zero3"]
    fit += ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--data.vocab_size=300"]
    fit += ["--model.config.n_hidden=16", "--model.config.n_layers=1", "--model.config.n_heads=1"]
    fit += [f"--trainer.default_root_dir={tmp_path}"]
    for settings, message in (
        (["--data.seq_len=64", "--model.config.max_seq_len=32"], "data.seq_len=64 is above .*max_seq_len=32"),
        (["--model.config.n_vocab=256"], "tokenizer has 300 tokens, more than the model's config.n_vocab=256"),
        ([f"--data.source={tmp_path}/empty.jsonl"], "data.source='.*empty.jsonl' has no text in it"),
    ):
        first, second = run(command, 2, [*fit, *settings])
        assert re.search(f"^neox-lit: error: .*{message}", str(first)), first
        assert second == 1  # and says nothing
