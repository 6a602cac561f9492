"""Batches when ranks have different numbers of them.

Under DDP a rank that evaluates more batches than another just does. Here every forward needs every rank. For data whose
sampler Lightning made, all ranks have equally many. For anything else this wrapper asks, before each batch, who has one.
In evaluation a rank that has none takes part in the others' forward without data: it repeats the fetches of the last
forward. In training, where gradients need every rank too, all stop with the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DistributedSampler

from lightning_zero3.errors import Zero3Error

if TYPE_CHECKING:
    from lightning_zero3.strategy import Zero3StrategyMixin

__all__ = ["EvenBatches"]

_END = object()


class EvenBatches:
    """A data loader that keeps ranks together.

    Its length is not told, so that Lightning asks for batches until there are no more on any rank.

    Args:
        loader: any iterable.
        strategy: whose ranks.
        training: stop with the first rank that has no batch, instead of going on without data.
    """

    def __init__(self, loader: Any, strategy: Zero3StrategyMixin, training: bool) -> None:
        self._loader = loader
        self._strategy = strategy
        self._training = training

    @classmethod
    def around(cls, loader: Any, strategy: Zero3StrategyMixin) -> Any:
        """`loader` itself if all ranks have equally many batches, else wrapped."""
        trainer = strategy.lightning_module.trainer
        if strategy.world_size == 1 or (trainer.training and _has_length(loader)):
            return loader  # training on data of known but different lengths is an error under DDP, too
        batch_sampler = getattr(loader, "batch_sampler", None)
        for sampler in (batch_sampler, getattr(batch_sampler, "sampler", None), getattr(loader, "sampler", None)):
            even = isinstance(sampler, DistributedSampler) and "Unrepeated" not in type(sampler).__name__
            if even and not getattr(sampler, "drop_last", False):
                return loader
        return cls(loader, strategy, trainer.training)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        engine, limit = self._strategy.engine, self._limit()
        batches, count = iter(self._loader), 0
        while count < limit:
            batch = next(batches, _END)
            mine = batch is not _END
            said = engine.comm.all_objects((mine, mine or engine.can_shadow()))
            if not any(has for has, _ in said) or (self._training and not all(has for has, _ in said)):
                return
            stuck = [rank for rank, (_, able) in enumerate(said) if not able]
            if stuck:
                raise Zero3Error(
                    f"ranks {stuck} have no batch at all, others have; give every rank at least one, or let Lightning "
                    "set the sampler (Trainer(use_distributed_sampler=True))"
                )
            if mine:
                yield batch
            else:
                engine.shadow_forward()
            count += 1

    def _limit(self) -> float:
        """Batches after which Lightning stops asking, on every rank."""
        trainer = self._strategy.lightning_module.trainer
        if self._training:
            given = trainer.limit_train_batches
        elif trainer.testing:
            given = trainer.limit_test_batches
        elif trainer.predicting:
            given = trainer.limit_predict_batches
        else:
            given = trainer.limit_val_batches
        limit = float(given) if isinstance(given, int) else float("inf")
        return min(limit, trainer.num_sanity_val_steps) if trainer.sanity_checking else limit


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
