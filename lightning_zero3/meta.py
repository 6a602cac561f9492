"""Parameters and buffers on the meta device: given memory and values just before their layer is sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightning_zero3.errors import Zero3Error
from lightning_zero3.weights import hand_over, waiting_for

__all__ = ["materialize"]


def materialize(
    modules: Iterable[nn.Module], owned: list[tuple[str, nn.Parameter]], device: torch.device
) -> list[tuple[str, nn.Parameter]]:
    """Replace parameters on the meta device by real ones on `device`, initialised by their module's `reset_parameters`.

    Those that wait for weights from a file (`weights.load_weights`) get no memory here, only a place to wait at.

    Args:
        modules: where the parameters are used; a tied parameter is replaced in all of them.
        owned: names and parameters of one layer.
        device: where the new ones live.

    Returns:
        `owned` with the new parameters; the same list if none was on the meta device.

    Raises:
        Zero3Error: a module with a meta parameter has no `reset_parameters`.
    """
    if not any(p.is_meta for _, p in owned):
        return owned
    meta = {id(p): p for _, p in owned if p.is_meta}
    name_of = {id(p): name for name, p in owned}
    owners = {
        owner: mine
        for owner in dict.fromkeys(m for module in modules for m in module.modules())
        if (mine := {name: p for name, p in owner._parameters.items() if p is not None and id(p) in meta})
    }
    to_reset = {
        owner
        for owner, mine in owners.items()
        if any(waiting_for(p) is None for p in mine.values())
        or any(b is not None and b.is_meta for b in owner._buffers.values())
    }
    with_memory = {id(p) for owner in to_reset for p in owners[owner].values()}
    new: dict[int, nn.Parameter] = {}
    for i, param in meta.items():
        empty = torch.empty if i in with_memory else torch.zeros
        shape = param.shape if i in with_memory else ()
        new[i] = nn.Parameter(empty(shape, dtype=param.dtype, device=device).expand(param.shape), param.requires_grad)
        hand_over(param, new[i])
    for owner, mine in owners.items():
        for name, param in mine.items():
            owner._parameters[name] = new[id(param)]
        if owner not in to_reset:
            continue
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=device)
        reset = getattr(owner, "reset_parameters", None)
        if reset is None:
            raise Zero3Error(
                f"parameter {name_of[id(next(iter(mine.values())))]!r} is on the meta device and its module "
                f"{type(owner).__name__} has no reset_parameters() to initialise it. Add one, or build the "
                "model on the CPU."
            )
        reset()
    return [(name, new.get(id(p), p)) for name, p in owned]
