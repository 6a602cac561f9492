"""`report()`: bytes of model states, by formula and by counting what exists."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero3 import MemoryReport, Report
from lightning_zero3.layout import ALIGN
from tests.harness import distributed
from tests.harness.models import MLP, Pairs, Task, loader
from tests.harness.oracles import fit
from tests.strategy.runs import WIDTHS, mlp_task, trainer, zero3


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def padded(numel: int, world: int) -> int:
    """Elements of a chunk: a rank's part of a flat space of so many, rounded up."""
    return -(-numel // (world * ALIGN)) * ALIGN


@distributed(world=[1, 2, 3, 4])
def test_bytes_are_those_of_the_tensors_and_of_the_formula(world):
    strategy = zero3(nn.Linear)
    fit(strategy, lambda: Task(MLP(*WIDTHS, awkward=False), adamw), loader(Pairs(64, 7)), steps=2)
    report, engine = strategy.report(), strategy.engine

    sizes = {"parameters": 0, "gradients": 0, "optimizer state": 0}
    for segment in strategy.segments(strategy.optimizers[0]):
        sizes["parameters"] += segment.nbytes
        sizes["gradients"] += segment.grad.nbytes
        sizes["optimizer state"] += sum(v.nbytes for v in strategy.optimizers[0].state[segment].values())
    rows = {what: (ours, ddp) for what, ours, ddp in report.rows()}
    assert rows["optimizer state"][0] == sizes["optimizer state"]
    # Segments end with the last parameter; chunks with their padding.
    chunk_bytes = sum(c.data.nbytes for layer in engine.layers for c in layer.chunks)
    assert sizes["parameters"] <= chunk_bytes == rows["parameters"][0] == rows["gradients"][0]

    psi = sum(p.numel() for p in MLP(*WIDTHS, awkward=False).parameters())
    assert (report.world_size, report.numel, report.trainable) == (world, psi, psi)
    assert rows["parameters"][1] == rows["gradients"][1] == 4 * psi
    assert rows["optimizer state"][1] == 8 * psi
    flat = [sum(-(-p.numel() // ALIGN) * ALIGN for _, p in owned(layer)) for layer in engine.layers]
    assert rows["parameters"][0] == 4 * sum(padded(n, world) for n in flat)
    assert 8 * psi / world <= rows["optimizer state"][0] + 8 * ALIGN * len(flat)

    assert rows["gathered slots"] == (engine.pool.nbytes, 0)
    assert (engine.pool.nbytes == 0) == (world == 1)
    assert report.total == tuple(sum(r[i] for k, r in rows.items() if k != "total") for i in (0, 1))


def owned(layer):
    return [(name, param) for chunk in layer.chunks for name, param in zip(chunk.names, chunk.params, strict=True)]


@distributed(world=2)
def test_mixed_precision_and_frozen_parameters_are_counted_as_they_are():
    def task():
        net = MLP(*WIDTHS, awkward=False)
        net.blocks[0].requires_grad_(False)
        return Task(net, lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

    strategy = zero3(nn.Linear)
    fit(strategy, task, loader(Pairs(64, 7)), steps=2, precision="bf16-mixed")
    report, net = strategy.report(), task().net
    psi, frozen = (sum(p.numel() for p in m.parameters()) for m in (net, net.blocks[0]))
    assert (report.numel, report.trainable) == (psi, psi - frozen)
    assert report.parameters[1] == 4 * psi
    assert report.gradients[1] == report.optimizer[1] == 4 * (psi - frozen)
    assert report.gradients[0] < report.parameters[0]


@distributed(world=2)
def test_before_a_step_there_is_no_optimizer_state_yet():
    strategy = zero3()
    t = trainer(strategy)
    t.validate(mlp_task(), loader(Pairs(8, 7)), verbose=False)
    assert strategy.report().optimizer == (0, 0)
    assert strategy.report().parameters[0] > 0


@distributed(world=2)
def test_the_callback_prints_the_table_once_and_is_silent_elsewhere():
    printed = []
    for strategy in (zero3(), "ddp"):
        callback = MemoryReport()
        callback._print = printed.append
        trainer(strategy, max_steps=2, callbacks=[callback]).fit(mlp_task(), loader(Pairs(64, 7)))
    (text,) = printed
    assert "ZeRO-3 on 2 ranks: 779 parameters" in text or re.match(r"ZeRO-3 on 2 ranks: \d+ parameters", text)
    assert [line.split()[0] for line in text.splitlines()[2:]] == [
        "parameters",
        "gradients",
        "optimizer",
        "gathered",
        "total",
    ]
    assert dist.get_world_size() == 2


@pytest.mark.parametrize(("nbytes", "said"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.00 GiB")])
def test_bytes_are_told_in_readable_units(nbytes, said):
    report = Report(2, 1, 1, (nbytes, 10), (0, 0), (0, 0), (0, 0))
    assert said in str(report)
