"""`zero3 plan`, as a user calls it."""

import re
from pathlib import Path

import pytest
import yaml

from lightning_zero3.tools.cli import main
from lightning_zero3.tools.plan_command import plan_config
from neox_lit.config import NeoXConfig

TINY = {
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "num_nodes": 2,
        "precision": "bf16-mixed",
        "strategy": {"class_path": "lightning_zero3.Zero3Strategy", "init_args": {"prefetch": 2}},
    },
    "model": {"config": {"n_vocab": 512, "n_hidden": 128, "n_layers": 3, "n_heads": 4, "max_seq_len": 32}},
    "data": {"batch_size": 3, "seq_len": 16},
}


@pytest.fixture
def config(tmp_path):
    def write(**sections):
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({**TINY, **sections}))
        return str(path)

    return write


def test_what_the_yaml_says_is_planned(config, capsys, tmp_path):
    path = config()
    planned = plan_config(path, {})
    assert (planned.world_size, planned.precision, planned.batch_size) == (4, "bf16-mixed", 3)
    assert planned.strategy == {"prefetch": 2}
    picture = tmp_path / "plan.png"
    numel = NeoXConfig(**TINY["model"]["config"]).n_parameters
    assert main(["plan", "--config", path, "--memory", "8MB", "--bandwidth", "1GB", "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"ZeRO-3 on 4 ranks: {numel:,} parameters, {numel:,} of them trainable")
    assert "with micro-batches of 3 (1 a step) in bf16-mixed" in said
    fits = int(re.search(r"largest micro-batch in 7.6 MiB: (\d+)", said)[1])
    assert planned.of(fits).peak <= 8_000_000 < planned.of(fits + 1).peak
    assert picture.stat().st_size > 5_000


@pytest.mark.parametrize("name", ["gpt-neox-20b-biases", "gpt-neox-20b-int8-lora"])
def test_what_is_fine_tuned_is_planned_before_its_files_are_there(name, config, capsys):
    path = Path(__file__).parents[2] / "configs" / f"{name}.yaml"
    small = [
        "--set",
        "model.overrides={n_layers: 1, n_hidden: 64, n_heads: 2, n_vocab: 128}",
        "--set",
        "data.seq_len=16",
    ]
    assert main(["plan", "--config", str(path), *small]) == 0
    assert "ZeRO-3 on " in capsys.readouterr().out
    assert main(["plan", "--config", str(path), "--set", "model.preset=null"]) == 1
    said = capsys.readouterr().err
    assert "models/gpt-neox-20b" in said
    assert "no such file" in said
    assert said.count("\n") == 1


def test_what_would_change(config, capsys):
    assert main(["plan", "--config", config(), "--compare", "--batch-size", "64"]) == 0
    table = capsys.readouterr().out.split("\n\n")[1].split("\n")[1:]
    cells = {row[:28].strip(): [float(n) for n in re.findall(r"([\d.]+) [KM]iB", row)] for row in table if row}
    base, checkpointed = cells["as configured"], cells["activation checkpointing"]
    assert {"32-true", "bf16-true"} < set(cells)
    assert checkpointed[0] == base[0]
    assert checkpointed[2] < base[2] < cells["32-true"][2]  # activations
    assert cells["bf16-true"][0] == pytest.approx(base[0] / 2, rel=0.01)  # states


def test_arguments_replace_what_the_yaml_says(config, capsys):
    assert main(["plan", "--config", config(), "--devices", "8", "--set", "model.config.n_layers=1"]) == 0
    assert (
        f"ZeRO-3 on 8 ranks: {NeoXConfig(**{**TINY['model']['config'], 'n_layers': 1}).n_parameters:,} parameters"
        in capsys.readouterr().out
    )


OWN = """
import torch
from lightning.pytorch import LightningModule

class Own(LightningModule):
    def __init__(self, width: int = 64):
        super().__init__()
        self.net = torch.nn.Linear(width, width)
        {sample}

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def test_any_module_that_tells_what_a_batch_looks_like(config, capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_with.py").write_text(OWN.format(sample="self.example_input_array = torch.zeros(1, width)"))
    (tmp_path / "own_without.py").write_text(OWN.format(sample=""))
    model = {"class_path": "own_with.Own", "init_args": {"width": 128}}
    assert main(["plan", "--config", config(model=model)]) == 0
    assert "16,512 parameters" in capsys.readouterr().out
    assert main(["plan", "--config", config(model={"class_path": "own_without.Own"})]) == 1
    assert "Own does not tell what a batch looks like" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"trainer": {"strategy": "ddp", "devices": 2}}, "trainer.strategy is ddp; what can be planned is zero3"),
        ({"trainer": {"devices": "auto"}}, "trainer.devices='auto'; say how many with --devices"),
        ({"trainer": {"devices": 2, "strategy": {"class_path": "Zero3Strategy", "init_args": {"x": 1}}}}, "'x'"),
        ({"model": {"lr2": 3}}, "does not accept option 'lr2'"),
        ({"model": None}, "no section `model`"),
    ],
)
def test_mistakes_are_one_line(sections, message, config, capsys):
    assert main(["plan", "--config", config(**sections)]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
