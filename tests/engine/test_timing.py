"""No result depends on when things happen (E19)."""

import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from lightning_zero3 import shard_module, trainable_chunks
from lightning_zero3.comm import Communicator
from lightning_zero3.slots import SlotPool
from tests.engine.test_graphs import Net, batch, policy
from tests.harness import distributed


class Sleepy(nn.Module):
    """Sleeps before and after its block, a while that depends on the rank."""

    def __init__(self, block, rng):
        super().__init__()
        self.block, self.rng = block, rng

    def forward(self, x):
        time.sleep(self.rng.random() / 200)
        y = self.block(x)
        y.register_hook(lambda _: time.sleep(self.rng.random() / 200))
        return y


def losses(sleep):
    torch.manual_seed(0)
    model, rng = Net(), random.Random(dist.get_rank())
    if sleep:
        model.blocks = nn.ModuleList(Sleepy(b, rng) for b in model.blocks)
    engine = shard_module(model, policy)
    if sleep:
        comm = engine.comm
        for name in ("gather", "reduce"):
            call = getattr(comm, name)
            setattr(comm, name, lambda *a, call=call: (time.sleep(rng.random() / 200), call(*a))[1])
    optimizer = torch.optim.AdamW(trainable_chunks(model), lr=0.01)
    found = []
    for step in range(6):
        x, y = (t.float() for t in batch(dist.get_rank(), step))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@distributed(world=[2, 3])
def test_random_delays_change_no_bit():
    assert losses(sleep=True) == losses(sleep=False)


def test_a_slot_serves_what_is_about_its_size():
    pool, owner = SlotPool(torch.device("cpu")), object()
    big, small = pool.take(1000, owner), pool.take(100, owner)
    pool.give(big)
    pool.give(small)
    assert pool.take(90, owner) is small
    assert pool.take(90, owner) is not big
    assert pool.take(600, owner) is big
    assert len(pool.slots) == 3


def test_a_communicator_of_one_sends_nothing():
    comm = Communicator()
    flat = torch.arange(4.0)
    comm.wait(comm.gather("x", [flat]))
    comm.agree("x")
    comm.together("x")
    assert comm.sum(flat) is flat
    assert comm.all_objects(3) == [3]
    assert comm.traffic.fetch_elements == 0
