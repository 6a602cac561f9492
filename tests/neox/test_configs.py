"""Each YAML in configs/: run, on two ranks, with files where it says they must be, a tiny model and two steps."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from neox_lit import PRESETS, NeoXConfig, save_hf, save_neox
from neox_lit.cli import main
from tests.harness import run
from tests.neox.helpers import random_model

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def fit(config: str, directory: str, arguments: list[str]) -> None:
    """A rank's part of `neox-lit fit`, in a directory of the user's."""
    os.chdir(directory)
    torch._dynamo.reset()
    with contextlib.redirect_stdout(None):
        main(["fit", "--config", config, "--trainer.devices", str(dist.get_world_size()), *arguments])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_runs_with_a_tiny_model(path, tmp_path, trained):
    config = read(path)
    model, data = config["model"], config["data"]
    small = {"n_vocab": 512, "n_layers": 2, "n_hidden": 32, "n_heads": 2, "max_seq_len": 128}
    arguments = ["--data.seq_len=16", "--data.batch_size=2", "--trainer.max_steps=2", "--trainer.log_every_n_steps=1"]
    arguments += ["--trainer.accelerator=cpu", "--trainer.num_nodes=1", "--trainer.accumulate_grad_batches=1"]
    arguments += ["--trainer.val_check_interval=2", "--trainer.limit_val_batches=1", "--trainer.num_sanity_val_steps=0"]
    if "preset" in model:
        assert model["preset"] in PRESETS
        arguments.append(f"--model.overrides={small}")
    elif "config" in model:
        arguments += [f"--model.config.{name}={value}" for name, value in small.items()]
    if model.get("compile"):
        arguments.append("--model.compile_backend=aot_eager")
    if "pretrained" in model:
        (tmp_path / model["pretrained"]).parent.mkdir()
        begun = random_model(NeoXConfig(**small))
        if "preset" in model:
            save_neox(begun, tmp_path / model["pretrained"], tp=2)
        else:
            save_hf(begun, tmp_path / model["pretrained"])
    if "tokenizer" in data:
        tokenizer, source = tmp_path / data["tokenizer"], tmp_path / data["source"]
        tokenizer.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.write_text(trained.module.tokenizer.to_json())
        text = source if source.suffix else source / "a.txt"
        text.parent.mkdir(parents=True)
        text.write_text("It was the best of times, it was the worst of times. " * 200)
        arguments.append("--data.val_fraction=0.1")
    else:
        arguments += ["--data.vocab_size=512", "--data.val_fraction=0.002"]
    run(fit, 2, str(path), str(tmp_path), arguments)

    rows = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "train_loss" in rows
    if path.stem != "quickstart":
        assert {"tokens_per_s", "memory_gib", "grad_2.0_norm_total"} <= set(rows.splitlines()[0].split(","))
    assert list(tmp_path.rglob("*.ckpt")) or list(tmp_path.rglob("adapter_model.safetensors"))


def test_settings_are_those_of_the_sources(real_data):
    """What a YAML takes from the published ones."""
    for name, source, n_gpus in (("pythia-160m", "160M", 8), ("multi-node", "1-4B", 16)):
        ours = read(next(path for path in CONFIGS if path.stem == name))
        text = (real_data / "neox-configs" / f"{source}.yml").read_text()
        theirs = yaml.safe_load(text.replace("\t", " "))
        model, trainer, data = ours["model"], ours["trainer"], ours["data"]
        optimizer = theirs["optimizer"]["params"]
        assert model["lr"] == optimizer["lr"]
        assert model["betas"] == optimizer["betas"]
        assert model["eps"] == float(optimizer["eps"])
        assert model["weight_decay"] == theirs["weight_decay"]
        assert model["min_lr_ratio"] * model["lr"] == pytest.approx(theirs["min_lr"])
        assert model["warmup_steps"] == theirs["warmup"] * theirs["train_iters"]
        assert trainer["max_steps"] == theirs["train_iters"] == theirs["lr_decay_iters"]
        assert trainer["gradient_clip_val"] == theirs["gradient_clipping"]
        assert data["batch_size"] == theirs["train_micro_batch_size_per_gpu"]
        assert data["seq_len"] == theirs["seq_length"]
        assert n_gpus * data["batch_size"] * trainer["accumulate_grad_batches"] == 1024
        assert trainer["devices"] * trainer.get("num_nodes", 1) == n_gpus
        preset = NeoXConfig.preset(model["preset"])
        assert (preset.n_layers, preset.n_hidden) == (theirs["num_layers"], theirs["hidden_size"])


def test_the_job_script_starts_what_its_config_says():
    script = (CONFIGS[0].parent / "multi-node.sbatch").read_text()
    trainer = read(CONFIGS[0].parent / "multi-node.yaml")["trainer"]
    assert re.findall(r"--(?:nodes|ntasks-per-node)=(\d+)", script) == [
        str(trainer["num_nodes"]),
        str(trainer["devices"]),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pythia-160m", r"data.(source='./data/pile'|tokenizer='models/20B_tokenizer.json'): no such"),
        ("pythia-1.4b-finetune", r"'models/pythia-1.4b'.*no such"),
        ("gpt-neox-20b-biases", r"(data.source='./data|'models/gpt-neox-20b).*no such"),
    ],
)
def test_what_must_be_set_is_named(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["neox-lit"])
    with pytest.raises(SystemExit, match=f"neox-lit: error: .*{message}"):
        main(["fit", "--config", str(CONFIGS[0].parent / f"{name}.yaml"), "--trainer.accelerator=cpu"])
