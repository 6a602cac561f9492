"""How GPT-NeoX divides each parameter among tensor-parallel ranks, and how the parts come together again.

| rule    | parameters                                                        | merged                               |
|---------|-------------------------------------------------------------------|--------------------------------------|
| ROWS    | embedding, readout, qkv and h->4h (weight and bias)               | concatenated along dim 0             |
| COLUMNS | attention.dense.weight, mlp.dense_4h_to_h.weight                  | concatenated along dim 1             |
| SUM     | attention.dense.bias, mlp.dense_4h_to_h.bias, parallel residual   | added: each rank adds its own before |
|         |                                                                   | the one all-reduce of the block      |
| SAME    | LayerNorms; those two biases with sequential residual             | copies on every rank                 |

Copies that training let drift apart a little are averaged, with a warning.

Source: GPT-NeoX `megatron/mpu/layers.py` and `megatron/model/transformer.py` (ParallelTransformerLayer).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from neox_lit.errors import NeoXError

MOST_DRIFT = 0.25  # of the largest value; copies further apart than that are not of one model


class Rule(Enum):
    """How the parts of one parameter come together."""

    ROWS = auto()
    COLUMNS = auto()
    SUM = auto()
    SAME = auto()


def rule_of(name: str, parallel_residual: bool) -> Rule:
    """The rule of a parameter, by its name in the layer or in the whole model."""
    if name.endswith(("attention.dense.weight", "mlp.dense_4h_to_h.weight")):
        return Rule.COLUMNS
    if name.endswith(("attention.dense.bias", "mlp.dense_4h_to_h.bias")):
        return Rule.SUM if parallel_residual else Rule.SAME
    return Rule.SAME if "norm." in name else Rule.ROWS


def parameters_of(state: Mapping[str, object]) -> dict[str, str]:
    """Keys of one layer's parameters in a file's state dict, by the names they have here.

    Newer files call the linears of the MLP linear1 and linear2; older ones hold constants beside the parameters.
    """
    constants = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")
    return {
        key.replace("mlp.linear1.", "mlp.dense_h_to_4h.").replace("mlp.linear2.", "mlp.dense_4h_to_h."): key
        for key in state
        if not key.endswith(constants)
    }


def merged_shape(rule: Rule, shapes: Sequence[torch.Size], where: str) -> torch.Size:
    """Shape of the whole parameter.

    Raises:
        NeoXError: The parts do not fit together; names `where`.
    """
    dim = {Rule.ROWS: 0, Rule.COLUMNS: 1}.get(rule)
    alike = {tuple(n for d, n in enumerate(shape) if d != dim) for shape in shapes}
    if len(alike) > 1 or (dim is not None and len(shapes[0]) <= dim):
        told = ", ".join(str(list(shape)) for shape in shapes)
        raise NeoXError(f"{where} has shards of shapes {told}, which do not fit")
    whole = list(shapes[0])
    if dim is not None:
        whole[dim] = sum(shape[dim] for shape in shapes)
    return torch.Size(whole)


def merge(rule: Rule, shards: Sequence[Tensor], where: str, warn: Callable[[str], None] = warnings.warn) -> Tensor:
    """The whole parameter from its parts, those of tensor-parallel ranks 0, 1, ... in order.

    Args:
        rule: See `rule_of`.
        shards: All of one dtype.
        where: What errors and warnings call it: file and key.
        warn: Gets the warning that copies differ.

    Raises:
        NeoXError: The parts differ in dtype or do not fit, or copies differ too much to be of one model.
    """
    if len({shard.dtype for shard in shards}) > 1:
        raise NeoXError(f"{where} has shards of dtypes {', '.join(str(s.dtype) for s in shards)}; they must have one")
    merged_shape(rule, [shard.shape for shard in shards], where)
    if len(shards) == 1:
        return shards[0]
    if rule in (Rule.ROWS, Rule.COLUMNS):
        return torch.cat(list(shards), dim=0 if rule is Rule.ROWS else 1)
    if rule is Rule.SUM:
        return _sum(shards).to(shards[0].dtype)
    if all(torch.equal(shard, shards[0]) for shard in shards[1:]):
        return shards[0]
    stacked = torch.stack([shard.double() for shard in shards])
    drift = (stacked.amax(0) - stacked.amin(0)).max() / stacked.abs().max()
    if not drift <= MOST_DRIFT:
        raise NeoXError(
            f"{where} should be the same in all {len(shards)} shards, but differs by {drift:.0%} of its largest value; "
            "are these files of one checkpoint, and is parallel_residual right?"
        )
    warn(
        f"{where} differs among its {len(shards)} shards by {drift:.2g} of its largest value: training let it drift. "
        "The mean is taken"
    )
    return stacked.mean(0).to(shards[0].dtype)


def split(rule: Rule, tensor: Tensor, tp: int, where: str) -> list[Tensor]:
    """The parts of a parameter for `tp` ranks. `merge` gives back the same bits.

    Raises:
        NeoXError: `tp` does not divide the dimension that is cut.
    """
    if rule is Rule.SAME or tp == 1:
        return [tensor] * tp
    if rule is Rule.SUM:
        return _shares(tensor, tp)
    dim = 0 if rule is Rule.ROWS else 1
    if tensor.shape[dim] % tp:
        raise NeoXError(f"{where} of shape {list(tensor.shape)} cannot be divided in dim {dim} by tp={tp}")
    return [part.contiguous() for part in tensor.chunk(tp, dim)]


def _sum(shards: Sequence[Tensor]) -> Tensor:
    """Added in more digits than the shards have, so that it is rounded once."""
    wide = torch.float64 if shards[0].dtype == torch.float32 else torch.float32
    return _added([shard.to(wide) for shard in shards])


def _added(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]  # not Python's sum, which begins with +0 and loses the sign of -0
    for part in parts[1:]:
        total = total + part
    return total


def _shares(bias: Tensor, tp: int) -> list[Tensor]:
    """`bias / tp` for each rank where those add up to `bias` again, whoever adds them: here in more digits, elsewhere
    (GPT-NeoX's own tools) in the dtype of the files. Where division or addition would round, rank 0 has all."""
    shares = [bias / tp for _ in range(tp)]
    exact = (_sum(shares).to(bias.dtype) == bias) & (_added(shares) == bias)
    return [torch.where(exact, share, bias if rank == 0 else 0) for rank, share in enumerate(shares)]
