"""What the README shows works as shown. (Its script without Lightning: tests/engine/test_standalone.py.)"""

import re
import subprocess
import sys
from pathlib import Path

import torch

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
        assert name == "train.py" or (root / "lightning_zero3" / name).exists(), name
