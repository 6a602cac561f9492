"""Perplexity, generation and evaluation, in one process and sharded over ranks."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from neox_lit import NeoXLightning, save_hf
from neox_lit.cli import main
from neox_lit.errors import NeoXError
from neox_lit.evaluate import perplexity
from neox_lit.ranks import on_ranks
from neox_lit.scoring import Row, score, windows
from tests.harness import run
from tests.neox.helpers import random_model, tiny, to_hf
from tests.strategy.runs import zero3

ROOT = Path(__file__).parents[2]
TEXT = "The value of a name is what it is bound to. Statements are executed in order, and so on.\n" * 3


@pytest.fixture(scope="module")
def files(trained, tmp_path_factory):
    """The trained model as Hugging Face would have it."""
    path = tmp_path_factory.mktemp("evaluated") / "hf"
    save_hf(trained.module.model, path)
    (path / "tokenizer.json").write_text(trained.module.tokenizer.to_json())
    return path


def test_windows_ask_for_each_token_once_with_context():
    ids = list(range(23))
    for seq_len, stride in ((8, 8), (8, 4), (8, 1), (30, 5), (1, 1)):
        rows = windows(ids, seq_len, stride)
        assert [token for row in rows for token in row.targets] == ids[1:]
        for row in rows:
            before = ids[: row.targets[0]]
            assert list(row.context) == before[len(before) - len(row.context) :]
            assert len(row.context) + len(row.targets) - 1 <= seq_len
        for row in rows[1:]:
            assert len(row.context) + len(row.targets) - 1 == seq_len or row.targets[-1] == 22


@pytest.mark.parametrize("stride", [None, 7])
def test_perplexity_is_that_of_a_plain_loop_over_hugging_face(trained, stride):
    found = perplexity(trained.module, TEXT, stride=stride, batch_size=3)
    ids = trained.module.tokenizer.encode(TEXT)
    model, limit, total, done = to_hf(trained.module.model), trained.module.config.max_seq_len, 0.0, 1
    while done < len(ids):
        end = min(done + (limit if done == 1 else stride or limit // 2), len(ids))
        given = torch.tensor([ids[max(0, end - 1 - limit) : end]])
        with torch.no_grad():
            scores = model(given[:, :-1]).logits[0].log_softmax(-1)
        total -= scores[torch.arange(scores.shape[0]), given[0, 1:]][done - end :].sum().item()
        done = end
    assert (found.n_tokens, found.n_bytes) == (len(ids) - 1, len(TEXT))
    assert found.loss == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(total / len(TEXT) / math.log(2), rel=1e-5)


def some_rows():
    generator = torch.Generator().manual_seed(0)
    lengths = [(1, 3), (5, 1), (9, 9), (30, 4), (2, 12), (1, 1), (60, 3)]
    draw = [torch.randint(128, (n,), generator=generator).tolist() for pair in lengths for n in pair]
    return [Row(*pair) for pair in zip(draw[::2], draw[1::2], strict=True)]


def of_rank(rank, world):
    """Prompts of its own, to be continued for longer the higher the rank; none of the last."""
    return [[7 + rank] * (3 - rank), [rank]][: 2 * (rank < world - 1)], 3 + 9 * rank


def score_and_write(path):
    def work(module):
        module.tokenizer = None
        scores = score(module, some_rows(), batch_size=2, device=module.device)
        texts = module.generate([[1, 2, 3], [4]], 8)
        own = module.generate(*of_rank(dist.get_rank(), dist.get_world_size()), shared=True)
        return scores, texts, own

    from neox_lit import TransformerLayer

    return on_ranks(str(path), work, dist.get_world_size(), accelerator="cpu", strategy=zero3(TransformerLayer))


def test_ranks_score_and_generate_together_as_one_process_does(tmp_path):
    """Four batches are no multiple of three ranks."""
    model = random_model(tiny())
    save_hf(model, tmp_path / "hf")
    module = NeoXLightning(model.config)
    module.model = model
    expected = score(module, some_rows(), batch_size=7)
    for row, one in zip(some_rows(), expected, strict=True):  # each alone, in a plain forward
        tokens = torch.tensor([[*row.context, *row.targets]][0][-model.config.max_seq_len - 1 :])
        scores = model(tokens[None, :-1])[0].log_softmax(-1)[-len(row.targets) :]
        targets = torch.tensor(row.targets)
        assert one.logprob == pytest.approx(scores.gather(1, targets[:, None]).sum().item(), rel=1e-4)
        assert one.greedy == torch.equal(scores.argmax(-1), targets)
    for world in (2, 3):
        for rank, (scores, texts, own) in enumerate(run(score_and_write, world, tmp_path / "hf")):
            assert [one.logprob for one in scores] == pytest.approx([one.logprob for one in expected], rel=1e-4)
            assert [one.greedy for one in scores] == [one.greedy for one in expected]
            assert texts == module.generate([[1, 2, 3], [4]], 8)
            assert own == module.generate(*of_rank(rank, world))


def start(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "neox_lit", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_ranks_say_what_one_says(files, tmp_path, capsys):
    (tmp_path / "prompts").write_text("The value\n\nOnce\nA\nwhere of\n")  # three batches, for two ranks
    command = ["generate", "--checkpoint", files, "--prompts_file", tmp_path / "prompts", "--batch_size", 2]
    command += ["--max_new_tokens", 12, "--seed", 4]
    ranks = start(*command, "--devices", 2, "--device", "cpu")
    main([str(argument) for argument in command])
    assert ranks == capsys.readouterr().out


def test_evaluate_prints_what_it_found(files, trained, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    main(["evaluate", "--checkpoint", str(files), "--text", str(tmp_path / "text.txt"), "--stride", "9"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["text"]
    found = perplexity(trained.module, TEXT, stride=9)
    assert told["perplexity"] == pytest.approx(found.perplexity, rel=1e-5)
    assert told["n_tokens"] == found.n_tokens


def test_a_tokenizer_is_trained_for_a_text(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "tokenizer.json"
    main(["tokenizer", str(tmp_path / "text.txt"), "--vocab-size", "300", "--out", str(out)])
    assert "n_vocab: 384" in capsys.readouterr().out
    from neox_lit import TextTokenizer

    made = TextTokenizer.from_file(out)
    assert 257 < made.n_tokens <= 300
    assert made.decode(made.encode(TEXT)) == TEXT
    with pytest.raises(SystemExit, match=r"out='.*tokenizer.json' exists"):
        main(["tokenizer", str(tmp_path / "text.txt"), "--out", str(out)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither text nor tasks is given"),
        (["--text", "none.txt"], "text='none.txt' cannot be read"),
        (["--text", "blank.txt"], "text='blank.txt' is empty"),
        (["--text", "text.txt", "--seq_len", "999"], "seq_len=999 is above the model's max_seq_len=64"),
        (["--text", "text.txt", "--stride", "65"], "stride must be from 1 to seq_len=64, got 65"),
        (["--text", "text.txt", "--batch_size", "0"], "batch_size must be at least 1"),
        (["--tasks", "[lambada_openai]", "--include_path", "nowhere"], "include_path='nowhere': no such directory"),
    ],
)
def test_mistakes_are_one_line_before_any_work(arguments, message, files, tmp_path, monkeypatch):
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"neox-lit: error: {message}"):
        main(["evaluate", "--checkpoint", str(files), *arguments])


def test_rows_that_cannot_be_scored(trained):
    with pytest.raises(NeoXError, match="row 1 has no context"):
        score(trained.module, [Row([1], [2]), Row([], [1])])
    with pytest.raises(NeoXError, match="row 0 has 65 targets, more than the model's max_seq_len=64"):
        score(trained.module, [Row([1], [2] * 65)])
    assert score(trained.module, []) == []
