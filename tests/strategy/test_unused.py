"""E6: parameters that a step, or a rank, does not use, in layers of which it uses others."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn

from lightning_zero3 import shard_module, trainable_chunks
from tests.harness import distributed
from tests.harness.models import Pairs, loader
from tests.harness.oracles import fit
from tests.strategy.runs import same_run, zero3

WIDTH = 7


class Experts(nn.Module):
    """A layer of three matrices, each with a scale, of which a step uses some. Odd sizes: ranks share parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(3))

    def forward(self, x, which):
        for i in which:
            x = x + self.experts[i](x) * self.scales[i]
        return x


class Sometimes(LightningModule):
    """Steps, and ranks within a step, use different parameters; some nobody ever uses, the root's among them."""

    def __init__(self, choose) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.choose = choose
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.mixture = Experts()
        self.spare = nn.Parameter(torch.ones(5))
        self.double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.mixture(self.block(x.double()), self.choose(batch_idx))
        return nn.functional.mse_loss(out[:, :3], y.double())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.3)


def by_step(batch_idx):
    """The third expert never; the second in every second step."""
    return [0, 1] if batch_idx % 2 else [0]


def by_rank(batch_idx):
    """Each rank another one; the third in a late step only, on one rank."""
    rank = dist.get_rank()
    return [rank % 2] if batch_idx < 3 else [0, 2] if rank == 0 else [1]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["each batch", "accumulated"])
@pytest.mark.parametrize("choose", [by_step, by_rank])
@distributed(world=[1, 2, 3, 4])
def test_optimizers_pass_over_what_no_rank_used(world, choose, options):
    """Their steps are counted, and weights decay, in the steps in which some rank used them."""
    steps = 4
    data = loader(Pairs(4 * world * steps * 2, WIDTH))
    ours = fit(zero3(nn.Sequential, Experts), lambda: Sometimes(choose), data, steps=steps, **options)
    ddp = fit("ddp_find_unused_parameters_true", lambda: Sometimes(choose), data, steps=steps, **options)
    same_run(ours, ddp)
    assert "spare" not in ours.optimizer_state
    assert torch.equal(ours.weights["spare"], torch.ones(5).double())
    counted = {name: int(state["step"]) for name, state in ours.optimizer_state.items()}
    assert counted == {name: int(state["step"]) for name, state in ddp.optimizer_state.items()}
    assert len(set(counted.values())) > 1 or options or world == 1


@pytest.mark.parametrize("accumulation", ["sharded", "full"])
@distributed(world=2)
def test_a_gradient_outlives_micro_batches_without_one(accumulation):
    """The second expert's comes with the first micro-batch of each window, or with the second, or not at all."""

    def choose(batch_idx):
        return ([0, 1], [0], [0], [0, 1], [0], [0])[batch_idx % 6]

    data = loader(Pairs(4 * 2 * 12, WIDTH))
    ours, ddp = (
        fit(s, lambda: Sometimes(choose), data, steps=6, accumulate_grad_batches=2)
        for s in (zero3(nn.Sequential, Experts, accumulation=accumulation), "ddp_find_unused_parameters_true")
    )
    same_run(ours, ddp)
    assert int(ours.optimizer_state["mixture.experts.1.weight"]["step"]) == 4


@distributed(world=2)
def test_without_a_trainer_it_is_zero():
    """Chunks are not divided there: an optimizer has each as one. So ranks need not ask what was used, either."""
    torch.manual_seed(0)
    whole, model = Experts(), Experts()
    model.load_state_dict(whole.state_dict())
    engine = shard_module(model)
    for each in (whole, model):
        each(torch.ones(2, WIDTH), [0]).sum().backward()
    used = torch.cat([p.grad.flatten() for p in whole.parameters() if p.grad is not None])
    parts = [chunk.grad for chunk in trainable_chunks(model)]
    assert all(part is not None for part in parts)
    assert engine.comm.sum(sum(part.count_nonzero() for part in parts)) == used.count_nonzero() > 0
    assert "end of gradients" not in [what for _, what in engine.comm._groups.steps.last]
