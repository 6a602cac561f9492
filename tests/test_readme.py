"""What the README shows works as shown. (Its script without Lightning: tests/engine/test_standalone.py.)"""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy

from tests.harness import distributed
from tests.strategy.runs import trainer

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_lightning_example_trains_and_saves_a_plain_checkpoint(tmp_path):
    (script,) = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "__main__" in b]
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ZeRO-3 on 2 ranks" in done.stdout
    checkpoint = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert checkpoint["state_dict"]["blocks.0.0.weight"].shape == (512, 512)
    assert len(checkpoint["optimizer_states"][0]["state"]) == 14


def test_every_file_it_names_exists():
    root = Path(__file__).parents[1]
    for name in re.findall(r"`(\w+\.py)`", README):
        assert name in ("train.py", "zero_to_fp32.py") or (root / "lightning_zero3" / name).exists(), name
    for name in re.findall(r"`([\w.-]+\.(?:yaml|sbatch))`", README):
        assert (root / "configs" / name).exists(), name


def test_what_it_says_of_other_strategies():
    """By running them where that needs no GPU, else by Lightning's own words."""
    with pytest.raises(ValueError, match="requires a GPU accelerator"):
        Trainer(strategy="fsdp", accelerator="cpu", devices=2)
    with pytest.raises(MisconfigurationException, match="'norm'` is currently not supported"):
        FSDPPrecision("32-true").clip_grad_by_norm()
    deepspeed = inspect.getsource(DeepSpeedStrategy)
    for said in ("only supported on CUDA GPUs", "only one optimizer", "does not support clipping gradients by value"):
        assert said in deepspeed


@distributed(world=2)
def test_model_parallel_strategy_wants_configure_model():
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    with pytest.raises(TypeError, match=r"required to override the `configure_model\(\)` hook"):
        trainer(strategy).fit(BoringModel())
