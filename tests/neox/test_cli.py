"""The command line: help, configs, errors, and the quickstart as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from neox_lit import NeoXError, open_checkpoint
from neox_lit.checkpoints.lazy import whole
from neox_lit.cli import main
from neox_lit.commands import load_module

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.fixture
def neox_lit(monkeypatch, capsys, tmp_path):
    """Run the command in this process, in an empty directory; returns what it printed."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["neox-lit", *map(str, arguments)])
        try:
            main()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    return run


def test_help_explains_commands_and_settings(neox_lit):
    top = neox_lit("--help")
    assert all(command in top for command in ("fit", "validate", "test", "predict", "generate"))
    fit = neox_lit("fit", "--help")
    assert "Peak learning rate" in fit
    assert "Tokens per window" in fit
    assert "Rows of the embedding" in neox_lit("fit", "--model.config.help")
    assert "Most tokens to add" in neox_lit("generate", "--help")


def test_print_config_gives_a_config_that_is_read_back(neox_lit, tmp_path):
    printed = neox_lit("fit", "--config", QUICKSTART, "--model.lr", "0.5", "--print_config")
    config = yaml.safe_load(printed)
    assert config["model"]["lr"] == 0.5
    assert config["trainer"]["strategy"]["class_path"] == "lightning_zero3.Zero3Strategy"
    (tmp_path / "again.yaml").write_text(printed)
    assert neox_lit("fit", "--config", "again.yaml", "--print_config") == printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.config.n_heads", "5"], "NeoXConfig.n_heads must be a divisor of n_hidden=192, got 5"),
        (["--model.preset", "pythia-14m"], "model.preset='pythia-14m' and model.config are both given"),
        (["--model.lr", "0"], "model.lr must be positive, got 0.0"),
        (["--data.source", "./nowhere.txt"], "data.source='./nowhere.txt': no such file"),
    ],
)
def test_wrong_values_give_our_error(neox_lit, arguments, message):
    with pytest.raises(SystemExit, match=f"neox-lit: error: {re.escape(message)}"):
        neox_lit("fit", "--config", QUICKSTART, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ckpt_path", "none.ckpt"], "checkpoint 'none.ckpt': no such file"),
        (["--ckpt_path", "bad.ckpt"], "'bad.ckpt' is not a checkpoint, or is damaged"),
        (["--ckpt_path", "trained.ckpt"], "ckpt_path='trained.ckpt' has model.config.n_hidden="),
        (["--trainer.devices", "0"], "`Trainer(devices='0')` value is not a valid input"),
        (["--trainer.enable_progress_bar", "false"], "Trainer was configured with `enable_progress_bar=False`"),
    ],
)
def test_other_mistakes_are_one_line_before_any_work(neox_lit, tmp_path, trained, arguments, message):
    (tmp_path / "bad.ckpt").write_text("not a checkpoint")
    os.symlink(trained.checkpoint, tmp_path / "trained.ckpt")
    with pytest.raises(SystemExit, match=f"neox-lit: error: {re.escape(message)}"):
        neox_lit("fit", "--config", QUICKSTART, *arguments)


def test_mistyped_keys_give_lightnings_error_and_what_was_meant(neox_lit, capsys, tmp_path):
    text = QUICKSTART.read_text()
    (tmp_path / "mistyped.yaml").write_text(text.replace("warmup_steps:", "warmup_step:"))
    for arguments, message, meant in (
        (
            ["--model.config.n_head", "5"],
            "Option 'n_head' is not accepted",
            "n_head: did you mean model.config.n_heads?",
        ),
        (["--data.seqlen=5"], "unrecognized arguments: --data.seqlen", "data.seqlen: did you mean data.seq_len?"),
        (
            ["--config", "mistyped.yaml"],
            "does not accept option 'model.warmup_step'",
            "model.warmup_step: did you mean model.warmup_steps?",
        ),
    ):
        with pytest.raises(SystemExit) as end:
            neox_lit("fit", "--config", QUICKSTART, *arguments)
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.rstrip().endswith(meant)


def test_generate_from_a_checkpoint(neox_lit, trained):
    arguments = ("generate", "--checkpoint", trained.checkpoint, "--prompt", "The", "--max-new-tokens", "8")
    text = neox_lit(*arguments)
    assert text.startswith("The")
    assert len(text) > 6
    assert neox_lit(*arguments) == text
    with pytest.raises(SystemExit, match=r"error: prompt 0 has 1 tokens, with max_new_tokens=100 .* max_seq_len=64"):
        neox_lit("generate", "--checkpoint", trained.checkpoint, "--prompt", "T", "--max-new-tokens", "100")


def test_prompts_of_a_file_are_continued_as_each_alone(neox_lit, trained, tmp_path):
    """In batches of 2, whose rows differ in length."""
    prompts = ["The", "", "A statement is something", "If", "In Python"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    options = ("generate", "--checkpoint", trained.checkpoint, "--max-new-tokens", "12", "--top-k=20")
    options += ("--repetition-penalty=1.1", '--stop=["\\n"]')
    lines = neox_lit(*options, "--prompts-file", "prompts.txt", "--batch-size=2").splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == prompts
    for i, line in enumerate(map(json.loads, lines)):
        alone = neox_lit(*options, "--prompt", line["prompt"], "--seed", i)
        assert alone == f"{line['prompt']}{line['text']}\n"
        assert "\n" not in line["text"]
    for wrong, message in (
        (("--prompts-file=none.txt",), "prompts_file='none.txt' cannot be read"),
        (("--prompts-file=prompts.txt", "--prompt=a"), "prompt and prompts_file are both given"),
        (("--prompts-file=prompts.txt", "--batch-size=0"), "batch_size must be at least 1, got 0"),
    ):
        with pytest.raises(SystemExit, match=f"neox-lit: error: {message}"):
            neox_lit(*options, *wrong)


def test_generate_from_a_sharded_checkpoint_and_open_it_consolidated(tmp_path, trained):
    from lightning_zero3.checkpoints import sharded_checkpoint
    from lightning_zero3.checkpoints.consolidate import consolidate
    from lightning_zero3.checkpoints.durable import saved

    content = torch.load(trained.checkpoint, weights_only=True)
    entries = {f"state_dict.{name}": value for name, value in content.pop("state_dict").items()}
    content.pop("optimizer_states", None)
    extra = saved({**content, sharded_checkpoint.PARAM_GROUPS: []})
    sharded_checkpoint.write(tmp_path / "sharded.ckpt", entries, extra, None)
    ours, file = (load_module(str(path)) for path in (tmp_path / "sharded.ckpt", trained.checkpoint))
    assert ours.complete("The", 8) == file.complete("The", 8)
    consolidate(tmp_path / "sharded.ckpt", tmp_path / "model.safetensors")
    direct = open_checkpoint(trained.checkpoint)
    weights = open_checkpoint(tmp_path / "model.safetensors").tensors
    assert weights.keys() == direct.tensors.keys()
    assert all(torch.equal(whole(weights[name]), whole(tensor)) for name, tensor in direct.tensors.items())


def test_bad_checkpoints_are_named(tmp_path, trained):
    with pytest.raises(NeoXError, match=r"none.ckpt': no such file"):
        load_module(str(tmp_path / "none.ckpt"))
    with pytest.raises(NeoXError, match="has no checkpoint of a known format"):
        load_module(str(tmp_path))
    (tmp_path / "bad.ckpt").write_text("not a checkpoint")
    with pytest.raises(NeoXError, match=r"bad.ckpt' is not a checkpoint, or is damaged"):
        load_module(str(tmp_path / "bad.ckpt"))
    checkpoint = torch.load(trained.checkpoint, weights_only=True)
    checkpoint["state_dict"] = {"other.weight": torch.zeros(1)}
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(NeoXError, match=r"(?s)other.ckpt' is not one of NeoXLightning: .*other.weight"):
        load_module(str(tmp_path / "other.ckpt"))


def test_a_checkpoint_gives_the_shape_and_the_user_the_rest(neox_lit, trained, tmp_path):
    """Lightning's own rule would silently take every model option from the checkpoint."""
    data = ("--data.vocab_size=512", "--data.seq_len=32", "--data.val_fraction=0.002")
    where = ("--trainer.accelerator=cpu", "--trainer.devices=1", f"--trainer.default_root_dir={tmp_path}")
    quiet = (
        "--trainer.logger=CSVLogger",
        f"--trainer.logger.save_dir={tmp_path}",
        "--trainer.enable_progress_bar=false",
    )
    neox_lit(
        "fit", *data, *where, *quiet, "--ckpt_path", trained.checkpoint, "--trainer.max_steps=61", "--model.lr=0.5"
    )
    config = yaml.safe_load(next(tmp_path.rglob("config.yaml")).read_text())
    assert config["model"]["lr"] == 0.5
    assert config["model"]["config"]["n_hidden"] == trained.module.config.n_hidden


@pytest.mark.slow
def test_quickstart_as_a_user_runs_it(neox_lit, tmp_path):
    """Two processes under ZeRO-3: the table, the sample, the checkpoint, and text from it in one process."""
    command = [sys.executable, "-m", "neox_lit", "fit", "--config", str(QUICKSTART), "--trainer.max_steps", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "optimizer state" in done.stdout
    assert "Sample after 4 steps:\nThe value of" in done.stdout
    checkpoint = tmp_path / "runs" / "quickstart" / "checkpoints" / "last.ckpt"
    assert neox_lit("generate", "--checkpoint", checkpoint, "--prompt", "The value of").startswith("The value of")
