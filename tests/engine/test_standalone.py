"""The seed's way: Zero3Layer and Zero3Sequential in a script under torchrun, without Lightning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero3 import Zero3Error, Zero3Layer, Zero3Sequential
from tests.harness import distributed

README = Path(__file__).parents[2] / "README.md"


def script_in_readme():
    """The README's standalone script: the Python block that starts Zero3Sequential itself."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (found,) = [b for b in blocks if "init_process_group" in b]
    return found


def test_the_readmes_script_trains_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(script_in_readme())
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) >= 3
    assert losses[-1] < 0.5 * losses[0]


def test_the_engine_needs_no_lightning():
    names = "Zero3Layer, Zero3Sequential, full_state_dict, gather_parameters, load_weights, shard_module"
    code = f"import sys; from lightning_zero3 import {names}; import lightning_zero3.optim, lightning_zero3.clip; "
    code += "sys.exit(bool({'lightning', 'pytorch_lightning', 'lightning_fabric'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@distributed(world=2)
def test_ranks_that_do_not_match_are_named():
    with pytest.raises(Zero3Error, match=r"Linear: world_size=4, but the process group says 2"):
        Zero3Layer(nn.Linear(2, 2), dist.get_rank(), 4)
    with pytest.raises(Zero3Error, match=r"Linear: rank=7"):
        Zero3Layer(nn.Linear(2, 2), 7, 2)


def test_without_a_process_group_more_than_one_rank_is_an_error():
    with pytest.raises(Zero3Error, match=r"init_process_group\(\)"):
        Zero3Layer(nn.Linear(2, 2), 0, 2)


def test_nothing_to_shard_is_an_error():
    with pytest.raises(Zero3Error, match="ReLU has no parameters"):
        Zero3Layer(nn.ReLU())
    with pytest.raises(Zero3Error, match="none of the modules has parameters"):
        Zero3Sequential([nn.ReLU()])


@distributed(world=2)
def test_a_single_layer_trains_on_its_own():
    torch.manual_seed(0)
    layer = Zero3Layer(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(layer.get_trainable_chunk(), lr=0.1)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(20):
        loss = (layer(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
