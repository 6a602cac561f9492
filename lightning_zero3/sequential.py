"""Layers in sequence, without Lightning."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_zero3.errors import Zero3Error
from lightning_zero3.layer import Zero3Layer

__all__ = ["Zero3Sequential"]


class Zero3Sequential(nn.Sequential):
    """Run modules one after another, each fetched while the one before computes.

    Args:
        modules: `Zero3Layer`s, or modules to wrap; those without parameters are taken as they are.

    Example::

        model = Zero3Sequential([nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)])
        optimizer = torch.optim.AdamW(model.get_trainable_chunk())
        model(x).mean().backward()  # gradients: the mean over ranks, on the chunks
        optimizer.step()
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        engine = None
        for i, module in enumerate(modules):
            if not isinstance(module, Zero3Layer) and next(module.parameters(), None) is not None:
                module = Zero3Layer(module, engine=engine, name=str(i))
            if isinstance(module, Zero3Layer):
                if engine is None:
                    engine = module.engine
                elif module.engine is not engine:
                    module.join(engine)
            self.append(module)
        if engine is None:
            raise Zero3Error("Zero3Sequential: none of the modules has parameters to shard")
        # A layer that owns nothing makes the whole sequence one pass: with an order to prefetch by.
        engine.root = Zero3Layer(self, engine=engine, name="root", owned=[], device=engine.device)

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """What to build an optimizer from: every layer's trainable chunks."""
        return [p for m in self if isinstance(m, Zero3Layer) for p in m.get_trainable_chunk()]
