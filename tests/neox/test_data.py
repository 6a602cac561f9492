"""Text to windows: no target lost, deterministic, cached by content, wrong settings named."""

from __future__ import annotations

import json
import pickle
import re

import numpy as np
import pytest
import torch

from neox_lit import NeoXError, NeoXLightning, TextDataModule, TextTokenizer
from neox_lit.corpus import Corpus
from neox_lit.encode import ID, START, encode_all, open_words
from neox_lit.loss import IGNORE, token_loss
from neox_lit.masks import document_mask
from neox_lit.windows import PackedWindows, count_windows, cuts
from tests.neox.helpers import random_model, tiny


def ready(**settings) -> TextDataModule:
    data = TextDataModule(**{"vocab_size": 300, "seq_len": 16, "batch_size": 4, **settings})
    data.prepare_data()
    data.setup()
    return data


def stream(data: TextDataModule) -> np.ndarray:
    return open_words(data._ready.path) & ID


@pytest.mark.parametrize("n_tokens", [2, 8, 9, 15, 16, 17, 24, 25])
def test_n10_no_target_is_lost(tmp_path, n_tokens):
    """24 tokens are an exact multiple of seq_len 8: 23 targets, the last window one short."""
    np.arange(n_tokens, dtype=np.uint32).tofile(tmp_path / "t.bin")
    windows = PackedWindows(tmp_path / "t.bin", 8, range(count_windows(n_tokens, 8)))
    targets = torch.cat([item["labels"] for item in map(windows.__getitem__, range(len(windows)))])
    assert targets[targets != IGNORE].tolist() == list(range(1, n_tokens))
    for item in map(windows.__getitem__, range(len(windows))):
        real = item["labels"] != IGNORE
        assert torch.equal(item["input_ids"][real] + 1, item["labels"][real])


def test_loss_leaves_out_what_is_no_target():
    logits, labels = torch.randn(2, 4, 9), torch.randint(9, (2, 4))
    labels[0, 2:] = IGNORE
    loss = token_loss(logits, labels)
    assert loss.n_targets == 6
    kept = torch.cat((logits[0, :2], logits[1])), torch.cat((labels[0, :2], labels[1]))
    torch.testing.assert_close(loss.mean, torch.nn.functional.cross_entropy(*kept))
    assert token_loss(logits, torch.full_like(labels, IGNORE)).mean == 0


def test_default_text_is_english_and_split_without_overlap():
    data = ready(seq_len=64)
    text = data.tokenizer.decode(stream(data).tolist())
    assert len(text) > 300_000
    assert "statement" in text
    assert text.count("<|endoftext|>") > 50
    train, held_out = set(data._ready.train), set(data._ready.held_out)
    assert not train & held_out
    assert len(train | held_out) == count_windows(len(stream(data)), 64)
    assert len(held_out) == pytest.approx(0.05 * len(train | held_out), abs=1)


def test_documents_end_with_end_of_text(tmp_path):
    for name, text in {"b": "second document " * 20, "a": "first document " * 20}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    data = ready(source=str(tmp_path))
    expected = "first document " * 20 + "<|endoftext|>" + "second document " * 20 + "<|endoftext|>"
    assert data.tokenizer.decode(stream(data).tolist()) == expected


def test_same_settings_give_the_same_batches():
    def batches(**settings):
        data = ready(**settings)
        loader = iter(data.train_dataloader())
        return [next(loader)["input_ids"] for _ in range(3)], data._ready.held_out.tolist()

    (a, a_held), (b, b_held), (_, c_held) = batches(), batches(), batches(split_seed=1)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], batches(order_seed=1)[0][0])
    assert a_held == b_held != c_held


def test_tokenised_once(tmp_path, monkeypatch):
    source = tmp_path / "a.txt"
    source.write_text("some text, and more of it. " * 100)
    cache = tmp_path / "cache"
    ready(source=str(source), cache_dir=str(cache))
    files = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert len(files) == 2  # tokenizer and tokens
    monkeypatch.setattr(TextTokenizer, "encode_batch", lambda *_: pytest.fail("tokenised twice"))
    ready(source=str(source), cache_dir=str(cache), seq_len=32)  # packing is arithmetic, not a new file
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == files
    monkeypatch.undo()
    source.write_text("another text, and more of it. " * 100)
    data = ready(source=str(source), cache_dir=str(cache))
    assert data.tokenizer.decode(stream(data)[:4].tolist()).startswith("ano")
    assert len(list(cache.iterdir())) == 4


def test_named_data_set(monkeypatch):
    import datasets

    rows = datasets.Dataset.from_dict({"body": ["one text " * 50, None, " ", "two texts " * 50], "n": [1, 2, 3, 4]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: rows)
    with pytest.raises(NeoXError, match="bad row at someone/something:2: 'body' is null, not text"):
        ready(source="someone/something", text_column="body")
    with pytest.warns(
        UserWarning, match=r"left out 2 bad row\(s\): someone/something:2: .*; someone/something:3: .* empty"
    ):
        data = ready(source="someone/something", text_column="body", bad_rows="skip")
    assert data.tokenizer.decode(stream(data).tolist()).count("<|endoftext|>") == 2
    with pytest.raises(NeoXError, match=r"data.text_column='text' is no column of 'someone/something', .* body, n"):
        ready(source="someone/something")


def test_named_data_set_is_streamed(monkeypatch, tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"text number {i} " * 9 for i in range(30)]})
    asked = []

    def load_dataset(name, config, split, streaming=False):
        asked.append((name, config, split, streaming))
        return rows.to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    tokenizer = TextTokenizer.train(rows["text"], 300)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    data = ready(source="someone/something", tokenizer=str(tmp_path / "tokenizer.json"), streaming=True,
                 epoch_windows=12, dataset_config="small")  # fmt: skip
    labels = torch.cat([batch["labels"].flatten() for batch in data.train_dataloader()])
    assert "".join(f"{text}<|endoftext|>" for text in rows["text"]).startswith(
        tokenizer.decode([tokenizer.encode("text")[0], *labels.tolist()])
    )
    assert set(asked) == {("someone/something", "small", "train", True)}


def test_content_hash_knows_boundaries_and_settings_but_not_names(tmp_path):
    def of(*texts, **settings):
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return Corpus(str(file), **settings).hash()

    assert of("ab", "c") == of("ab", "c")
    assert len({of("ab", "c"), of("a", "bc"), of("abc"), of("c", "ab"), of("ab", "c", bad_rows="skip")}) == 5


def test_windows_are_pickled_as_a_path():
    data = ready()
    windows = data.train_dataloader()._loader.dataset
    assert len(pickle.dumps(windows)) < stream(data).nbytes / 2
    copy = pickle.loads(pickle.dumps(windows))
    assert torch.equal(copy[3]["labels"], windows[3]["labels"])


def test_loader_workers():
    data = ready(num_workers=1, val_fraction=0.001)
    (batch,) = list(data.val_dataloader()[0])[:1]
    assert batch["input_ids"].shape[1] == 16


def test_tinyshakespeare_with_the_real_tokenizer(real_data):
    data = ready(source=str(real_data / "tinyshakespeare.txt"), tokenizer=str(real_data / "20B_tokenizer.json"))
    text = (real_data / "tinyshakespeare.txt").read_text()
    assert stream(data).tolist() == [*data.tokenizer.encode(text), data.tokenizer.end_of_text]  # though in parts
    assert data.tokenizer.n_vocab == 50_304


def test_no_held_out_windows():
    data = ready(val_fraction=0.0)
    assert data.val_dataloader() == []
    assert len(data._ready.train) == count_windows(len(stream(data)), 16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "./nowhere.txt"}, r"data.source='./nowhere.txt': no such file or directory"),
        ({"source": "nowhere.txt"}, r"data.source='nowhere.txt': no such file"),
        ({"tokenizer": "nowhere.json"}, r"data.tokenizer='nowhere.json': no such file"),
        ({"seq_len": 0}, "data.seq_len must be at least 1, got 0"),
        ({"batch_size": 0}, "data.batch_size must be at least 1, got 0"),
        ({"num_workers": -1}, "data.num_workers must be at least 0, got -1"),
        ({"val_fraction": 1.0}, r"data.val_fraction must be in \[0, 1\), got 1.0"),
        (
            {"seq_len": 10**7},
            r"'python-docs' has \d+ tokens, fewer than one window of data.seq_len=10000000",
        ),
        ({"val_fraction": 0.99999}, r"data.val_fraction=0.99999 leaves none to train on"),
        ({"rows": "texts"}, "data.rows must be one of 'text', 'prompt', 'chat', got 'texts'"),
        ({"streaming": True}, "data.streaming needs data.tokenizer .*, data.epoch_windows"),
        ({"epoch_windows": 5}, "data.epoch_windows and data.shuffle_buffer are for data.streaming"),
        ({"val_split": "x", "val_fraction": 0.1}, "data.val_fraction=0.1 .* does not go with a validation text"),
        ({"vocab_size": 200}, "vocab_size must be above 256"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(NeoXError, match=message):
        ready(**settings)


BAD_LINES = [
    (b'{"text": "good one"}', None),
    (b"", "empty"),
    (b'{"text": "na\xefve"}', r"not UTF-8 \(byte 12\)"),
    (b'{"text": 5}', "'text' is of type int, not text"),
    (b'{"text": null}', "'text' is null, not text"),
    (b'{"text": "  "}', "'text' is empty"),
    (b'{"body": "x"}', "no column 'text', but body"),
    (b'["text"]', "of type list, not an object"),
    (b'{"text": ', "not JSON: Expecting value"),
    (b'{"text": "\\ud800"}', "'text' is text that is not Unicode"),
    (b'{"text": "another"}', None),
]


def test_bad_rows_are_reported_with_file_and_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    for line, reason in BAD_LINES:
        if reason:
            file.write_bytes(BAD_LINES[0][0] + b"\n" + line + b"\n")
            with pytest.raises(NeoXError, match=f"bad row at {file}:2: {reason}.* set data.bad_rows to 'skip'"):
                list(Corpus(str(file)).documents())
    file.write_bytes(b"\n".join(line for line, _ in BAD_LINES))
    with pytest.warns(UserWarning, match="left out") as warned:
        documents = list(Corpus(str(file), bad_rows="skip").documents())
    assert [d.pieces[0].text for d in documents] == ["good one", "another"]
    report = str(warned[0].message)
    assert "left out 9 bad row(s)" in report
    for number, (_, reason) in enumerate(BAD_LINES, 1):
        assert bool(reason) == bool(re.search(f"{file}:{number}: {reason}", report))


def test_parquet_and_directories(tmp_path):
    import pyarrow
    from pyarrow.parquet import write_table

    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, pyarrow.array([b"one", b"tw\xff", b"three"]).buffers())
    write_table(pyarrow.table({"text": texts, "n": [1, 2, 3]}), tmp_path / "b.parquet")
    (tmp_path / "a.txt").write_bytes(b"fine\nna\xefve\nfine too\n")
    (tmp_path / "c.jsonl").write_text('{"text": "last"}\n')
    with pytest.raises(NeoXError, match=r"a.txt:2: not UTF-8 \(byte 2\)"):
        list(Corpus(str(tmp_path)).documents())
    with pytest.warns(UserWarning, match=r"2 bad row\(s\): .*a.txt:2: not UTF-8 .*; .*b.parquet:2: not UTF-8"):
        documents = list(Corpus(str(tmp_path), bad_rows="skip").documents())
    assert [d.pieces[0].text for d in documents] == ["fine\nfine too\n", "one", "three", "last"]
    with pytest.raises(NeoXError, match=r"data.text_column='body' is no column of '.*b.parquet', which has text, n"):
        list(Corpus(str(tmp_path / "b.parquet"), text_column="body").documents())


def instructions(tmp_path, **settings) -> TextDataModule:
    file = tmp_path / "chat.jsonl"
    rows = [
        {"prompt": f"Question {i}? ", "response": f"Answer {i}.", "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": f"Question {i}?"},
            {"role": "assistant", "content": f"Answer {i}."},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": "No more."},
        ]}
        for i in range(10)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ready(source=str(file), seq_len=160, vocab_size=257, val_fraction=0.2, **settings)


@pytest.mark.parametrize("rows", ["prompt", "chat"])
def test_instructions_learn_the_response_only(tmp_path, rows):
    data = instructions(tmp_path, rows=rows)
    decode = data.tokenizer.decode
    if rows == "prompt":
        documents = [(f"Question {i}? Answer {i}.<|endoftext|>", f"Answer {i}.<|endoftext|>") for i in range(10)]
    else:
        documents = [
            (
                f"system: Be short.\n\nuser: Question {i}?\n\nassistant: Answer {i}.<|endoftext|>\n\n"
                "user: And then?\n\nassistant: No more.<|endoftext|>",
                f" Answer {i}.<|endoftext|> No more.<|endoftext|>",
            )
            for i in range(10)
        ]
    assert decode(stream(data).tolist()) == "".join(whole for whole, _ in documents)
    seen = []
    windows = PackedWindows(data._ready.path, 160, range(len(data._ready.train) + len(data._ready.held_out)), "whole")
    for item in windows:
        for number in item["documents"].unique().tolist():
            labels = item["labels"][(item["documents"] == number) & (item["labels"] != IGNORE)]
            if len(labels):
                seen.append(decode(labels.tolist()))
    assert seen == [learnt for _, learnt in documents]  # each whole, in a document of its own


def test_n10_documents_do_not_see_each_other(tmp_path):
    """Logits, loss and gradients of documents in one window are those of each alone, after its end-of-text token."""
    file = tmp_path / "text.jsonl"
    texts = ["the first document", "another, of other length entirely", "a third"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = ready(source=str(file), seq_len=60, vocab_size=257, documents="apart", val_fraction=0.0)
    module = NeoXLightning(tiny(n_vocab=384))
    module.model = random_model(module.config)
    batch = next(iter(data.train_dataloader()))
    assert (batch["labels"] != IGNORE).sum() == len(stream(data)) - 1  # no target is lost
    logits, total = module(batch["input_ids"], mask=document_mask(batch["documents"]))[0], torch.zeros(())
    end, start = data.tokenizer.end_of_text, 0
    for i, text in enumerate(texts):
        ids = [*([end] if i else []), *data.tokenizer.encode(text)]
        alone = module.model(torch.tensor([ids]))[0]
        torch.testing.assert_close(logits[start : start + len(ids)], alone, rtol=1e-5, atol=1e-5)
        total = total + torch.nn.functional.cross_entropy(alone, torch.tensor([*ids[1:], end]), reduction="sum")
        start += len(ids)
    loss, parameters = module._loss(batch).mean, list(module.parameters())
    expected = torch.autograd.grad(total / start, parameters)
    torch.testing.assert_close(loss, total / start)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), expected, rtol=1e-4, atol=1e-6)
    joined = module(batch["input_ids"])[0]
    assert not torch.allclose(joined[start - 2], logits[start - 2], atol=1e-3)


@pytest.mark.parametrize("documents", ["joined", "apart", "whole"])
def test_cuts_lose_nothing(documents):
    rng = np.random.default_rng(0)
    for _ in range(20):
        words = np.arange(rng.integers(2, 200), dtype=np.uint32)
        starts = [0, *sorted(rng.integers(0, len(words), 12).tolist())]
        words[starts] |= START
        edges = cuts(words, 17, documents)
        assert (edges[0], edges[-1]) == (0, len(words) - 1)
        assert ((np.diff(edges) > 0) & (np.diff(edges) <= 17)).all()
        if documents == "whole":
            for edge in edges[1:-1]:  # a document is cut only if it does not fit
                before, after = max(s for s in starts if s <= edge), min([s for s in starts if s > edge] + [len(words)])
                assert edge + 1 in starts or after - before > 17


def test_tokenising_in_parts_and_at_once_is_the_same(tmp_path):
    """Many documents, taken in batches, and one that is cut for several cores: the tokens of each alone."""
    texts = [f"document {i} " * (i % 7 + 1) for i in range(1_500)] + ["a long one,\n\n  cut \tat  spaces \n" * 6_000]
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = TextTokenizer.train(["document 0123456789,\n\n  a long one cut \tat  spaces"], 300)
    words = list(encode_all(Corpus(str(file)).documents(), tokenizer))
    assert [(some & ID).tolist() for some in words] == [
        [*tokenizer.encode(text), tokenizer.end_of_text] for text in texts
    ]
    assert [np.flatnonzero(some & START).tolist() for some in words] == [[0]] * len(texts)


def test_a_validation_text_of_its_own(tmp_path):
    (tmp_path / "a.txt").write_text("some text to train on " * 50)
    (tmp_path / "b.txt").write_text("other text " * 20)
    data = ready(source=str(tmp_path / "a.txt"), val_source=str(tmp_path / "b.txt"))
    assert len(data._ready.train) == count_windows(len(stream(data)), 16)
    labels = torch.cat([batch["labels"].flatten() for batch in data.val_dataloader()[0]])
    assert data.tokenizer.decode(labels[labels != IGNORE].tolist()).endswith("other text <|endoftext|>")


def test_bad_files_are_named(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(NeoXError, match=r"empty.txt: 'text' is empty"):
        ready(source=str(tmp_path / "empty.txt"))
    with pytest.raises(NeoXError, match=r"empty.txt' has no text in it \(1 bad rows\)"):
        ready(source=str(tmp_path / "empty.txt"), bad_rows="skip")
    (tmp_path / "none").mkdir()
    with pytest.raises(NeoXError, match=r"no \*.txt, \*.jsonl, \*.json, \*.parquet file in this directory"):
        list(Corpus(str(tmp_path / "none")).documents())
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(NeoXError, match=r"bad.parquet is not a parquet file"):
        ready(source=str(tmp_path / "bad.parquet"))
    (tmp_path / "some.txt").write_text("text")
    with pytest.raises(NeoXError, match=r"data.rows='chat' needs columns, and .*some.txt is plain text"):
        ready(source=str(tmp_path / "some.txt"), rows="chat")


def test_a_name_that_datasets_cannot_load(monkeypatch):
    import datasets

    def fail(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(NeoXError, match=r"data.source='nobody/nothing' is neither .* cannot load it .*: no network"):
        list(Corpus("nobody/nothing").documents())


def test_tokenizer_before_setup():
    with pytest.raises(NeoXError, match=r"no data yet; call prepare_data"):
        _ = TextDataModule().tokenizer
