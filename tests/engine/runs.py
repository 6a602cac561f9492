"""Training with the engine alone, as a plain loop with the arguments and the result of the oracles."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero3.chunk import PrecisionPolicy
from lightning_zero3.clip import clip_grad_norm_
from lightning_zero3.comm import Traffic
from lightning_zero3.engine import Engine
from lightning_zero3.optim import ShardedOptimizers
from lightning_zero3.shard import engine_of, full_state_dict, shard_module
from tests.harness.models import default_loss
from tests.harness.oracles import Batches, Run, mean_over_ranks, train_loop


def train_zero3(
    make_model: Callable[[], nn.Module],
    batches: Batches,
    make_optimizer: Callable[[nn.Module], Any],
    steps: int,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    loss: Callable[[nn.Module, Any], Tensor] = default_loss,
    policy: Any = "auto",
    prefetch: int = 1,
    precision: PrecisionPolicy | None = None,
    each_step: Callable[[Engine], None] = lambda engine: None,
) -> Run:
    """The loop of `train_ddp` with the model sharded. `each_step` is called after each optimizer step."""
    model = make_model()
    engine = shard_module(model, policy, prefetch=prefetch, precision=precision)
    optimizer = make_optimizer(model)
    sharded = ShardedOptimizers([optimizer], engine)

    def before_step() -> None:
        if clip is not None:
            clip_grad_norm_(sharded.segments(optimizer), engine.comm, clip)

    @contextmanager
    def backward(last: bool) -> Iterator[None]:
        sharded.stand_ins.remove()
        yield
        sharded.stand_ins.place()

    losses = train_loop(
        model,
        optimizer,
        batches,
        steps,
        accumulation=accumulation,
        loss=loss,
        syncing=backward,
        before_step=before_step,
        after_step=lambda: each_step(engine),
    )
    grads = full_grads(model)
    names = dict(enumerate(_names_in_order(make_model(), make_optimizer)))
    saved = [sharded.state_dict(optimizer)["state"], full_state_dict(model)]
    dist.broadcast_object_list(saved)
    state = {names[i]: s for i, s in saved[0].items()}
    return Run(mean_over_ranks(losses), saved[1], grads, state)


def full_grads(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of all trainable parameters in full, on every rank. Those of untouched chunks are left out."""
    engine = engine_of(model)
    assert engine is not None
    found = {}
    for layer in engine.layers:
        for chunk in layer.trainable:
            flat = torch.zeros(chunk.total, dtype=chunk.dtype)
            any_grad = False
            for segment in chunk.segments:
                if segment.param.grad is not None:
                    engine.comm.own(flat)[segment.lo : segment.hi] = segment.param.grad
                    any_grad = True
            if not any(engine.comm.all_objects(any_grad)):
                continue
            engine.comm.wait(engine.comm.gather("gradients", [flat]))
            for name, span in zip(chunk.names, chunk.layout.spans, strict=True):
                found[name] = span.view(flat).clone()
    return found


def _names_in_order(model: nn.Module, make_optimizer: Callable[[nn.Module], Any]) -> list[str]:
    name_of = {p: name for name, p in model.named_parameters()}
    return [name_of[p] for group in make_optimizer(model).param_groups for p in group["params"]]


def counts(engine: Engine) -> Traffic:
    """The traffic since the last call."""
    traffic = Traffic(**vars(engine.comm.traffic))
    engine.comm.traffic.reset()
    return traffic
