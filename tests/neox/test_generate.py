"""Decoding with the cache is the full forward; sampling keeps its promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from neox_lit import KVCache, NeoXError, Sampling, generate
from neox_lit.generate import GREEDY, Continuation
from tests.neox.helpers import random_model, tiny


@pytest.fixture(scope="module")
def model():
    return random_model(tiny(n_layers=3))


@pytest.mark.parametrize("sizes", [[1] * 12, [5, 1, 1, 5], [12]])
@torch.no_grad()
def test_n6_steps_with_the_cache_equal_the_full_forward(model, sizes):
    ids = torch.randint(128, (2, 12))
    cache = KVCache(3, 12)
    parts = [model(part, cache) for part in ids.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids), atol=1e-5, rtol=1e-5)
    assert cache.length == 12


@torch.no_grad()
def by_full_forwards(model, prompt, n_new):
    ids = list(prompt)
    for _ in range(n_new):
        ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    return ids[len(prompt) :]


def test_n6_a_second_longer_generation_after_a_first(model):
    first, second = [5, 6, 7], list(range(20))
    assert generate(model, [first], 4) == [by_full_forwards(model, first, 4)]
    assert generate(model, [second], 30) == [by_full_forwards(model, second, 30)]
    assert generate(model, [first], 4) == [by_full_forwards(model, first, 4)]


def test_n6_a_ragged_batch_is_each_prompt_alone(model):
    prompts = [[1], list(range(40, 52)), [9, 8, 7, 6, 5], list(range(12))]
    assert generate(model, prompts, 20) == [generate(model, [p], 20)[0] for p in prompts]


def test_rows_stop_at_the_stop_token_and_the_others_go_on(model):
    prompts = [[1, 2, 3], [4, 5, 6]]
    free = generate(model, prompts, 16)
    stop = free[0][3]
    cut = [row[: row.index(stop)] if stop in row else row for row in free]
    assert cut[0] != free[0]
    assert generate(model, prompts, 16, stop_id=stop) == cut


def test_padding_ids_are_never_sampled(model):
    hot = Sampling(temperature=50.0, seed=3)
    ids = [token for row in generate(model, [[1]] * 8, 40, hot, n_tokens=7) for token in row]
    assert len(ids) == 8 * 40
    assert set(ids) == set(range(7))
    assert max(generate(model, [[1]], 10, n_tokens=7)[0]) < 7


def test_a_seed_fixes_the_text(model):
    a, b, c = (generate(model, [[1, 2]], 30, Sampling(seed=seed))[0] for seed in (0, 0, 1))
    assert a == b != c


def test_top_k_and_top_p_keep_the_likeliest():
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log().expand(4_000, -1)

    def frequencies(**settings):
        chosen = Sampling(**settings).choose(logits.clone(), torch.Generator().manual_seed(0))
        return (chosen.bincount(minlength=4) / 4_000).tolist()

    assert frequencies(temperature=0) == [0, 1, 0, 0]
    assert frequencies() == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=0.03)
    assert frequencies(top_k=2) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.03)
    assert frequencies(top_p=0.5) == [0, 1, 0, 0]
    assert frequencies(top_p=0.76) == pytest.approx([0, 5 / 9, 1.5 / 9, 2.5 / 9], abs=0.03)
    assert frequencies(temperature=0.5) == pytest.approx([0.029, 0.725, 0.065, 0.181], abs=0.03)


def test_repetition_penalty_is_that_of_transformers(model):
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, seen = torch.randn(2, 128), [[3, 3, 7, 100], [0, 127, 5, 5]]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(seen), logits.clone())
    for row, ids in enumerate(seen):
        Sampling(repetition_penalty=1.3).penalise(logits[row], ids)
    torch.testing.assert_close(logits, expected)
    free, penalised = (generate(model, [[5, 6]], 40, Sampling(0.0, repetition_penalty=p))[0] for p in (1.0, 1e9))
    assert len(set(free)) < 40
    assert len({5, 6, *penalised}) == 42  # until all positive logits are used up, nothing comes twice


def test_a_sampled_row_is_the_row_alone(model):
    prompts, hot = [[1], list(range(12)), [9, 8, 7]], Sampling(top_k=50, top_p=0.95, repetition_penalty=1.2, seed=4)
    alone = [generate(model, [p], 20, replace(hot, seed=4 + i))[0] for i, p in enumerate(prompts)]
    assert generate(model, prompts, 20, hot) == alone


def test_a_continuation_ends_at_a_stop_text_and_is_written_as_it_comes():
    """Against the text as a whole: bytes as tokens, a character of several bytes, stops over several tokens."""

    def decode(ids):
        return bytes(ids).decode(errors="replace")

    for text, stop, expected in (
        ("na\u00efve \u20ac text", (), "na\u00efve \u20ac text"),
        ("one STO two STOP three", ("STOP", "three"), "one STO two "),
        ("ends with ST", ("STOP",), "ends with ST"),
        ("aaab", ("aab",), "a"),
    ):
        pieces: list[str] = []
        continuation = Continuation(decode, stop, pieces.append)
        ended = [continuation.add(byte) for byte in text.encode()]
        assert any(ended) == (expected != text)
        assert "\ufffd" not in "".join(pieces)
        assert len(pieces) > 1 or len(expected) == 1
        assert continuation.end() == "".join(pieces) == expected
    with pytest.raises(NeoXError, match="stop sequence is empty"):
        Continuation(decode, [""])


def test_dropout_is_off_while_generating_and_back_on_after():
    model = random_model(tiny(dropout=0.5)).train()
    assert generate(model, [[1, 2, 3]], 10) == generate(model, [[1, 2, 3]], 10)
    assert model.training


def test_nothing_to_do(model):
    assert generate(model, [], 5) == []
    assert generate(model, [[1]], 0) == [[]]


def test_bad_input_is_named(model):
    with pytest.raises(NeoXError, match="prompt 1 has no token"):
        generate(model, [[1], []], 5)
    with pytest.raises(NeoXError, match=r"prompt 0 has 60 tokens, with max_new_tokens=5 .* max_seq_len=64"):
        generate(model, [[1] * 60], 5)
    with pytest.raises(NeoXError, match=r"prompt 0 has 70 tokens, which leaves none of the model's max_seq_len=64"):
        generate(model, [[1] * 70], 1)
    with pytest.raises(NeoXError, match="token 128, outside the model's vocabulary n_vocab=128"):
        generate(model, [[128]], 5)
    with pytest.raises(NeoXError, match="max_new_tokens must be at least 0, got -1"):
        generate(model, [[1]], -1)
    for field, value in (
        ("temperature", -1.0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("repetition_penalty", 0.0),
        ("temperature", float("nan")),
    ):
        with pytest.raises(NeoXError, match=f"{field} must be"):
            Sampling(**{field: value})
    assert Sampling(temperature=0.0) == GREEDY


@torch.no_grad()
def test_the_cache_refuses_what_does_not_fit(model):
    with pytest.raises(NeoXError, match="holds max_len=4 tokens, and 5 are to be kept"):
        model(torch.zeros(1, 5, dtype=torch.int64), KVCache(3, 4))
    cache = KVCache(3, 8)
    model(torch.zeros(1, 2, dtype=torch.int64), cache)
    with pytest.raises(NeoXError, match="batch of 1, got a batch of 2"):
        model(torch.zeros(2, 2, dtype=torch.int64), cache)
