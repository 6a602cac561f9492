"""Text to windows: no target lost, deterministic, cached by content, wrong settings named."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from neox_lit import NeoXError, TextDataModule, TextTokenizer
from neox_lit.corpus import content_hash, load_corpus
from neox_lit.loss import IGNORE, token_loss
from neox_lit.windows import PackedWindows, count_windows


def ready(**settings) -> TextDataModule:
    data = TextDataModule(**{"vocab_size": 300, "seq_len": 16, "batch_size": 4, **settings})
    data.prepare_data()
    data.setup()
    return data


def stream(data: TextDataModule) -> np.ndarray:
    return np.load(data._ready.path)


@pytest.mark.parametrize("n_tokens", [2, 8, 9, 15, 16, 17, 24, 25])
def test_n10_no_target_is_lost(tmp_path, n_tokens):
    """24 tokens are an exact multiple of seq_len 8: 23 targets, the last window one short."""
    np.save(tmp_path / "t.npy", np.arange(n_tokens, dtype=np.int32))
    windows = PackedWindows(tmp_path / "t.npy", 8, range(count_windows(n_tokens, 8)))
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
    for name, text in {"b": "second document " * 20, "a": "first document " * 20, "c": "  \n"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    data = ready(source=str(tmp_path))
    expected = "first document " * 20 + "<|endoftext|>" + "second document " * 20 + "<|endoftext|>"
    assert data.tokenizer.decode(stream(data).tolist()) == expected


def test_same_settings_give_the_same_batches():
    def batches(**settings):
        data = ready(**settings)
        torch.manual_seed(7)
        loader = iter(data.train_dataloader())
        return [next(loader)["input_ids"] for _ in range(3)], data._ready.held_out

    (a, a_held), (b, b_held), (_, c_held) = batches(), batches(), batches(split_seed=1)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
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
    data = ready(source="someone/something", text_column="body")
    assert data.tokenizer.decode(stream(data).tolist()).count("<|endoftext|>") == 2
    with pytest.raises(NeoXError, match=r"data.text_column='text' is no column of 'someone/something', .* body, n"):
        ready(source="someone/something")


def test_content_hash_knows_boundaries():
    import datasets

    def of(*texts):
        return content_hash(datasets.Dataset.from_dict({"text": list(texts)}))

    assert len({of("ab", "c"), of("a", "bc"), of("abc"), of("c", "ab")}) == 4


def test_windows_are_pickled_as_a_path():
    data = ready()
    windows = data.train_dataloader().dataset
    assert len(pickle.dumps(windows)) < 200_000 < stream(data).nbytes
    copy = pickle.loads(pickle.dumps(windows))
    assert torch.equal(copy[3]["labels"], windows[3]["labels"])


def test_loader_workers():
    data = ready(num_workers=1, val_fraction=0.001)
    (batch,) = list(data.val_dataloader()[0])[:1]
    assert batch["input_ids"].shape[1] == 16


def test_tinyshakespeare_with_the_real_tokenizer(real_data):
    data = ready(source=str(real_data / "tinyshakespeare.txt"), tokenizer=str(real_data / "20B_tokenizer.json"))
    text = (real_data / "tinyshakespeare.txt").read_text()
    assert data.tokenizer.decode(stream(data).tolist()) == text + "<|endoftext|>"
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
        ({"vocab_size": 200}, "vocab_size must be above 256"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(NeoXError, match=message):
        ready(**settings)


def test_bad_files_are_named(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(NeoXError, match=r"empty.txt' has no text in it"):
        ready(source=str(tmp_path / "empty.txt"))
    (tmp_path / "latin.txt").write_bytes("fine\nna\xefve".encode("latin-1"))
    with pytest.raises(NeoXError, match=r"latin.txt is not UTF-8 at line 2"):
        ready(source=str(tmp_path / "latin.txt"))
    (tmp_path / "none").mkdir()
    with pytest.raises(NeoXError, match=r"no \*.txt file in this directory"):
        load_corpus(str(tmp_path / "none"))


def test_a_name_that_datasets_cannot_load(monkeypatch):
    import datasets

    def fail(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(NeoXError, match=r"data.source='nobody/nothing' is neither .* cannot load it .*: no network"):
        load_corpus("nobody/nothing")


def test_tokenizer_before_setup():
    with pytest.raises(NeoXError, match=r"no data yet; call prepare_data"):
        _ = TextDataModule().tokenizer
