"""Tokenizers: the real one, a trained one, and files that several processes make at once."""

from __future__ import annotations

import threading

import pytest

from neox_lit import NeoXError, TextTokenizer
from neox_lit.files import publish

TEXTS = ["the cat sat on the mat\n", "def f(x):\n        return x\n", "naïve café, 漢字 and 🙂"]


@pytest.fixture(scope="module")
def real(real_data) -> TextTokenizer:
    return TextTokenizer.from_file(real_data / "20B_tokenizer.json")


def test_real_tokenizer(real):
    text = "def f(x):\n        return x\n"
    ids = [1545, 269, 9, 89, 2262, 187, 50270, 2309, 1269, 187]
    assert real.encode(text) == ids
    assert real.encode_batch([text, text]) == [ids, ids]
    assert real.decode(ids) == text
    assert (real.n_tokens, real.n_vocab, real.end_of_text) == (50_277, 50_304, 0)


def test_n8_runs_of_spaces_and_no_bos(real):
    for token in range(50_254, 50_277):
        text = real.decode([token])
        assert text
        assert not text.strip(" ")
        assert real.encode("x" + text + "x")[1:-1] == [token]
    assert real.encode("") == []


def test_trained_tokenizer_is_lossless_and_adds_nothing():
    tokenizer = TextTokenizer.train(TEXTS, 300)
    assert tokenizer.n_tokens <= 300
    assert tokenizer.n_vocab == 384
    for text in [*TEXTS, " leading", "", "\t\n ", "\x00\x7f"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text not in ids
    assert tokenizer.decode([tokenizer.end_of_text]) == "<|endoftext|>"


def test_training_is_deterministic_and_json_round_trips():
    a, b = TextTokenizer.train(TEXTS * 5, 320), TextTokenizer.train(TEXTS * 5, 320)
    assert a.hash == b.hash == TextTokenizer.from_json(a.to_json()).hash


def test_trained_once_per_content(tmp_path, monkeypatch):
    first = TextTokenizer.train_cached(TEXTS, 300, "a" * 64, tmp_path)
    monkeypatch.setattr(TextTokenizer, "train", lambda *_: pytest.fail("trained twice"))
    assert TextTokenizer.train_cached(TEXTS, 300, "a" * 64, tmp_path).hash == first.hash
    assert len(list(tmp_path.iterdir())) == 1


def test_of_several_writers_the_first_wins_and_all_read_the_same(tmp_path):
    path, start = tmp_path / "file", threading.Barrier(8)
    seen = []

    def write(number: int) -> None:
        start.wait()
        publish(path, lambda file: file.write(bytes([number]) * 100_000))
        seen.append(path.read_bytes())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1
    assert len(set(seen[0])) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        publish(tmp_path / "file", lambda file: file.write(b"half") // 0)
    assert not list(tmp_path.iterdir())


def test_bad_input_is_named(tmp_path):
    with pytest.raises(NeoXError, match=r"vocab_size must be above 256 .*, got 100"):
        TextTokenizer.train(TEXTS, 100)
    with pytest.raises(NeoXError, match=r"tokenizer '.*none.json' cannot be read: No such file"):
        TextTokenizer.from_file(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(NeoXError, match=r"bad.json': not a tokenizer.json"):
        TextTokenizer.from_file(tmp_path / "bad.json")
