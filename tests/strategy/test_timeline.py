"""Timelines: what is recorded is what happened, and recording changes nothing."""

import json
import time

import pytest
import torch
from torch import nn

from lightning_zero3 import Timeline
from lightning_zero3.comm import Communicator
from tests.harness import assert_same, distributed
from tests.harness.models import Block
from tests.strategy.runs import mlp_task, trainer, weights_of, zero3
from tests.strategy.test_checkpoints import common_batches


def fit(callbacks, **options):
    torch.manual_seed(0)
    module, t = mlp_task(), trainer(zero3(Block, nn.Linear, **options), max_epochs=2, callbacks=callbacks)
    t.fit(module, common_batches())
    return module, t


@distributed(world=2)
def test_every_layers_life_is_in_the_trace(tmp_path):
    timeline = Timeline(str(tmp_path), first_step=2, steps=2)
    module, t = fit([timeline])
    assert_same(weights_of(module), weights_of(fit([])[0]), rtol=0, atol=0)
    assert not {"gather", "reduce", "wait"} & set(vars(t.strategy.engine.comm))
    assert not {"before_use", "reduce"} & set(vars(t.strategy.engine))
    if t.global_rank:
        return

    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert (tmp_path / "timeline.png").stat().st_size > 5_000
    spans = [e for e in events if e["ph"] == "X"]
    layers = {layer.name for layer in t.strategy.engine.layers if layer.chunks and layer.name != "root"}
    for rank in range(2):
        for track in ("forward", "backward", "fetch", "reduce"):
            found = [e["name"] for e in spans if e["cat"] == track and e["pid"] == rank]
            assert layers <= set(found), track
            if track in ("forward", "reduce"):
                assert all(found.count(name) == 2 for name in layers), track  # two steps
        for name in layers:  # fetched before it computes, reduced after its backward began
            first = {
                track: min(e["ts"] for e in spans if (e["cat"], e["name"], e["pid"]) == (track, name, rank))
                for track in ("forward", "backward", "fetch", "reduce")
            }
            assert first["fetch"] <= first["forward"] < first["backward"] < first["reduce"]
    assert 0 < timeline.exposed < 1


@distributed(world=2)
def test_slow_communication_is_seen_as_exposed(tmp_path):
    quick = Timeline(str(tmp_path), draw=False)
    fit([quick])
    slow = Timeline(str(tmp_path), draw=False)
    wait = Communicator._wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "_wait", lambda *args: (time.sleep(0.02), wait(*args))[1])
        fit([slow])
    assert slow.exposed > 0.8
    assert slow.exposed > quick.exposed


@distributed(world=2)
def test_what_training_leaves_unfinished_is_written_too(tmp_path):
    timeline = Timeline(str(tmp_path), first_step=3, steps=50)
    fit([timeline])
    assert timeline.exposed is not None
