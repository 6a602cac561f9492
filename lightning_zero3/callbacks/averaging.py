"""Averages of weights, on shards: Lightning's callbacks, of which each rank averages its own part.

Averaging works element by element, so it needs no other rank. What each rank holds of a sharded module, its chunks, is
given to the same `torch.optim.swa_utils.AveragedModel` that Lightning gives the whole module to. All else that differs:
the average can begin only when the module is sharded, and checkpoints gather it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_zero3.checkpoints.boxes import copied
from lightning_zero3.chunk import Chunk
from lightning_zero3.comm import Communicator
from lightning_zero3.engine import Engine
from lightning_zero3.errors import Zero3Error
from lightning_zero3.shard import engine_of, load_full_state_dict
from lightning_zero3.strategy import Zero3StrategyMixin

if TYPE_CHECKING:
    from typing import Any as _Base  # it has WeightAveraging's attributes, of one home or the other
else:
    _Base = object

__all__ = ["EMAWeightAveraging", "ShardedAveragingMixin", "WeightAveraging", "lightnings"]


def lightnings(module: Any, name: str) -> Any:
    """Lightning's callback of that name, or where there is none (before 2.6) a class that says so when it is made."""

    class Missing(module.Callback):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise Zero3Error(f"{name} needs Lightning 2.6 or later")

    return getattr(module, name, Missing)


def _engine(module: nn.Module) -> Engine:
    engine = engine_of(module)
    assert engine is not None
    return engine


class _Held(nn.Module):
    """What this rank holds of a sharded module, as far as averages go: its part of the parameters, and buffers."""

    def __init__(self, chunks: list[Chunk], module: nn.Module) -> None:
        super().__init__()
        for i, chunk in enumerate(chunks):
            self.register_parameter(f"chunk{i}", nn.Parameter(chunk.data.detach(), requires_grad=False))
        for i, buffer in enumerate(module.buffers()):
            self.register_buffer(f"buffer{i}", buffer)


class _AverageOfShards(AveragedModel):
    """`AveragedModel` of a sharded module: 1/N of the module's trainable parameters, and its buffers.

    Not of frozen parameters, unless asked for: whatever the weights, the average of what never changes is what it is.
    """

    def __init__(self, module: nn.Module, frozen: bool, **options: Any) -> None:
        chunks = _chunks(module, frozen)
        super().__init__(_Held(chunks, module), **options)
        self._frozen, self._of = frozen, chunks

    def update_parameters(self, model: nn.Module) -> None:
        super().update_parameters(self.same_of(model))

    def same_of(self, module: nn.Module) -> _Held:
        """What the average is of, in the same order. Called on every rank."""
        chunks = _chunks(module, self._frozen)
        held = _Held(chunks, module)
        if chunks != self._of:
            self._follow(chunks, held, _engine(module).comm)
        return held

    @torch.no_grad()
    def _follow(self, chunks: list[Chunk], held: _Held, comm: Communicator) -> None:
        """Parameters were unfrozen and lie in new chunks: their averages go with them, or begin with what they are."""
        had, parts = dict(zip(self._of, self.module.parameters(), strict=True)), {}
        for chunk, now in zip(chunks, held.parameters(), strict=True):
            new = torch.empty_like(now, device=self.n_averaged.device).copy_(now)
            parts[chunk] = had[chunk] if chunk in had else nn.Parameter(new, requires_grad=False)
        for old in (c for c in self._of if c not in parts):
            flat = torch.empty(old.total, dtype=old.dtype, device=old.data.device)
            comm.own(flat).copy_(had[old])
            comm.wait(comm.gather(f"averages of layer {old.layer!r}", [flat]))
            full = dict(zip(old.names, old.views(flat), strict=True))
            for chunk in (c for c in chunks if c not in had):
                for index, elements, here in chunk.pieces():
                    if (average := full.get(chunk.names[index])) is not None:
                        parts[chunk][here] = chunk.layout.spans[index].flatten(average)[elements]
        self.module._parameters = {f"chunk{i}": part for i, part in enumerate(parts.values())}  # type: ignore[assignment]
        self._of = chunks


def _chunks(module: nn.Module, frozen: bool) -> list[Chunk]:
    """The chunks to average."""
    chunks = [chunk for layer in _engine(module).layers for chunk in layer.chunks]
    return [c for c in chunks if c.trainable or (frozen and c.dtype.is_floating_point)]


class ShardedAveragingMixin(_Base):
    """What `WeightAveraging` does otherwise under `Zero3Strategy`. Under other strategies it is Lightning's own."""

    _average_model: Any
    _on_shards = False
    _due = False  # a fit has begun, and the average begins as soon as the module is sharded
    _loaded: dict[str, Any] | None = None  # the checkpoint to begin it from

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._on_shards = isinstance(trainer.strategy, Zero3StrategyMixin)
        if not self._on_shards:
            super().setup(trainer, pl_module, stage)
        elif stage == "fit":
            self._average_model, self._loaded, self._due = None, None, True

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        self._begin(pl_module)

    def _begin(self, pl_module: Any) -> None:
        """Begin the average, if it is due and the module is sharded."""
        if not self._due or engine_of(pl_module) is None:
            return
        loaded, self._loaded, self._due = self._loaded, None, False
        frozen = False
        if loaded is not None:
            averages, current = loaded["state_dict"], loaded["current_model_state"]
            names = [n for n, p in pl_module.named_parameters() if not p.requires_grad and n in averages]
            frozen = any(n in current and not torch.allclose(averages[n], current[n]) for n in names)  # only since then
            load_full_state_dict(pl_module, averages, strict=pl_module.strict_loading)
        self._average_model = _AverageOfShards(
            pl_module, frozen, device=self._device or pl_module.device, use_buffers=self._use_buffers, **self._kwargs
        )
        if loaded is not None:
            load_full_state_dict(pl_module, current, strict=pl_module.strict_loading)
            self._average_model.load_state_dict(loaded["averaging_state"], strict=False)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        if self._on_shards and self._average_model is not None:
            self._average_model.same_of(pl_module)  # the average of what is unfrozen begins before its first step

    def _swap_models(self, pl_module: Any) -> None:
        self._exchange(super()._swap_models, pl_module)

    def _copy_average_to_current(self, pl_module: Any) -> None:
        self._exchange(super()._copy_average_to_current, pl_module)

    def _exchange(self, copy: Any, pl_module: Any) -> None:
        """Let Lightning copy contents; tensors stay what they are, since optimizers see views of the chunks."""
        if not self._on_shards:
            copy(pl_module)
            return
        copy(self._average_model.same_of(pl_module))
        engine = _engine(pl_module)
        engine.weights_changed(layer for layer in engine.layers if layer.chunks)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._begin(pl_module)
        if not self._on_shards or self._average_model is None:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            return
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        self._swap_models(pl_module)
        try:
            averages = trainer.strategy.lightning_module_state_dict()
            checkpoint["state_dict"] = {name: copied(value) for name, value in averages.items()}
        finally:
            self._swap_models(pl_module)
        state = self._average_model.state_dict()
        checkpoint["averaging_state"] = {k: v.clone() for k, v in state.items() if not k.startswith("module.")}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if not self._on_shards or (self._average_model is None and not self._due):
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
            return
        # The module has the averages ("state_dict") now, and is not sharded yet if this is its first fit.
        self._loaded = checkpoint if "current_model_state" in checkpoint and "averaging_state" in checkpoint else None
        if self._loaded is None:
            rank_zero_warn(
                "The checkpoint was not created with WeightAveraging. The average begins with the weights in it."
            )
        self._due = True
        self._begin(pl_module)


class WeightAveraging(ShardedAveragingMixin, lightnings(callbacks, "WeightAveraging")):  # type: ignore[misc]
    """Lightning's `WeightAveraging`, also under `Zero3Strategy`: the same arguments, results and checkpoints.

    Each rank averages its own part of the trainable parameters, in 1/N of the memory and without communication;
    frozen parameters take none, until they are unfrozen. Buffers are averaged whole on every rank.
    A checkpoint of either callback can be resumed with the other, at any number of ranks.

    Args:
        device: where the average lives; default with the model.
        use_buffers: average buffers, too; otherwise they are those of the current model.
        **kwargs: `avg_fn` or `multi_avg_fn`, as of `torch.optim.swa_utils.AveragedModel`: functions that work element
            by element. Default the equally weighted average.

    Example::

        class Stochastic(WeightAveraging):  # SWA, from epoch 10 on
            def should_update(self, step_idx=None, epoch_idx=None):
                return epoch_idx is not None and epoch_idx >= 10

        Trainer(strategy="zero3", callbacks=[Stochastic(avg_fn=get_swa_avg_fn())])
    """


class EMAWeightAveraging(WeightAveraging, lightnings(callbacks, "EMAWeightAveraging")):  # type: ignore[misc]
    """Lightning's `EMAWeightAveraging`, also under `Zero3Strategy`; see `WeightAveraging`.

    Args:
        device, use_buffers: as of `WeightAveraging`.
        decay: weight of the average so far.
        update_every_n_steps, update_starting_at_step, update_starting_at_epoch: when to update.
    """
