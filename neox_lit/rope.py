"""Rotary position embedding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class RotaryTables(NamedTuple):
    """Cosines and sines for positions 0 to length - 1, each `[length, 1, d_rope]`: ready to broadcast over heads."""

    cos: Tensor
    sin: Tensor


def rotary_tables(
    length: int,
    d_rope: int,
    base: float = 10_000.0,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> RotaryTables:
    """Cosine and sine tables, the second half of the last dimension repeating the first.

    Angles are computed in float32 whatever `dtype` is, and the tables cast at the end: positions above 256 are not
    exact in bfloat16, and a table made of rounded angles is off by up to 2.0.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34; half-split layout as in GPT-NeoX.
    """
    # Outside inference mode even when called in it: the tables outlive the call and training will save them.
    with torch.inference_mode(False), torch.no_grad():
        theta = base ** (-torch.arange(0, d_rope, 2, dtype=torch.float32, device=device) / d_rope)
        angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), theta).repeat(1, 2)[:, None]
        return RotaryTables(angles.cos().to(dtype), angles.sin().to(dtype))


class RoPE(nn.Module):
    """Turns the first `d_rope` dimensions of each head by an angle proportional to the position.

    The tables are built on first use for the device and dtype at hand, kept, and grown when a longer sequence comes.
    They are constants, so they are neither parameters nor buffers: nothing to save, to materialise from the meta
    device, to cast by `.to(bfloat16)`, or to broadcast between ranks.

    Args:
        d_rope: Dimensions to turn, an even number.
        base: Base of the wavelengths.
        max_seq_len: Positions that the first table covers.
    """

    def __init__(self, d_rope: int, base: float = 10_000.0, *, max_seq_len: int = 2_048) -> None:
        super().__init__()
        self.d_rope = d_rope
        self.base = base
        self.max_seq_len = max_seq_len
        self._tables: RotaryTables | None = None

    def tables(self, length: int, x: Tensor) -> RotaryTables:
        """Tables for at least `length` positions on the device and in the dtype of `x`."""
        held = self._tables
        if held is None or held.cos.device != x.device or held.cos.dtype != x.dtype or len(held.cos) < length:
            size = max(length, self.max_seq_len)
            held = rotary_tables(size, self.d_rope, self.base, device=x.device, dtype=x.dtype)
            self._tables = held
        return held

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Rotate queries or keys.

        Args:
            x: `[..., seq, n_heads, d_k]`, any float dtype.
            offset: Position of the first token, e.g. the number of tokens in the cache.
        """
        end = offset + x.shape[-3]
        cos, sin = (table[offset:end] for table in self.tables(end, x))
        turned, rest = x[..., : self.d_rope], x[..., self.d_rope :]
        turned = turned * cos + self.rotate_half(turned) * sin
        return torch.cat((turned, rest), dim=-1)

    @staticmethod
    def rotate_half(x: Tensor) -> Tensor:
        """`[a, b] -> [-b, a]` over the two halves of the last dimension."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)

    def extra_repr(self) -> str:
        return f"d_rope={self.d_rope}, base={self.base}"
