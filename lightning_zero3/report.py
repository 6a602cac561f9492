"""What ZeRO-3 saves: bytes per rank, counted from the tensors that exist, beside what DDP would hold."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero3.engine import Engine

__all__ = ["Report", "human"]


@dataclass(frozen=True)
class Report:
    """Bytes on this rank. Each pair is (ZeRO-3, DDP).

    Model states take (2 + 2 + K) * Psi / N bytes per rank in 16-bit mixed precision, K = 12 for Adam with float32
    copies (arXiv:1910.02054, section 3.1 and 5.3); in float32 throughout (4 + 4 + 8) * Psi / N. DDP's figures are
    those of the same dtypes without the division by N.
    """

    world_size: int
    numel: int
    trainable: int
    parameters: tuple[int, int]
    gradients: tuple[int, int]
    optimizer: tuple[int, int]
    slots: tuple[int, int]

    @classmethod
    def of(cls, engine: Engine, optimizers: list[Optimizer]) -> Report:
        """Count an engine's chunks and slots, and the optimizers' state, as they are now."""
        chunks = [c for layer in engine.layers for c in layer.chunks]
        numel = {c: sum(p.numel() for p in c.params) for c in chunks}
        ours = elements = 0
        per_element = 0.0
        for optimizer in optimizers:
            for param, held in optimizer.state.items():
                state = [v for v in held.values() if isinstance(v, Tensor)]
                ours += sum(v.nbytes for v in state)
                per_element += sum(v.nbytes for v in state if v.shape == param.shape)
                elements += param.numel()
        trainable = sum(n for c, n in numel.items() if c.trainable)
        return cls(
            world_size=engine.comm.world_size,
            numel=sum(numel.values()),
            trainable=trainable,
            parameters=(sum(c.data.nbytes for c in chunks), sum(n * c.dtype.itemsize for c, n in numel.items())),
            gradients=(
                sum(c.grad_nbytes for c in chunks),
                sum(n * c.dtype.itemsize for c, n in numel.items() if c.trainable),
            ),
            optimizer=(ours, round(per_element / elements * trainable) if elements else 0),
            slots=(engine.pool.nbytes, 0),
        )

    @property
    def total(self) -> tuple[int, int]:
        """Sum of all rows."""
        rows = (self.parameters, self.gradients, self.optimizer, self.slots)
        return sum(r[0] for r in rows), sum(r[1] for r in rows)

    def rows(self) -> list[tuple[str, int, int]]:
        """(what, ZeRO-3 bytes, DDP bytes), the total last."""
        return [
            ("parameters", *self.parameters),
            ("gradients", *self.gradients),
            ("optimizer state", *self.optimizer),
            ("gathered slots", *self.slots),
            ("total", *self.total),
        ]

    def __str__(self) -> str:
        lines = [
            f"ZeRO-3 on {self.world_size} ranks: {self.numel:,} parameters, {self.trainable:,} of them trainable",
            f"{'bytes per rank':<16}{'ZeRO-3':>14}{'DDP':>14}{'ZeRO-3 / DDP':>14}",
        ]
        for what, ours, ddp in self.rows():
            ratio = f"{ours / ddp:.2f}" if ddp else "-"
            lines.append(f"{what:<16}{human(ours):>14}{human(ddp):>14}{ratio:>14}")
        return "\n".join(lines)


def human(nbytes: int) -> str:
    """Bytes for people: in units of 1,024."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{nbytes} B"
        size /= 1024
    return f"{size:.2f} GiB"
