"""Norms of gradients, logged, whatever the strategy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_zero3.errors import Zero3Error

__all__ = ["GradientNorms"]


class GradientNorms(Callback):
    """Log the norms of the gradients that an optimizer is about to use, averaged over ranks, not clipped, not scaled.

    Under every strategy with the keys of Lightning's `grad_norm`: "grad_2.0_norm/net.blocks.0" and, for all of the
    optimizer's parameters together, "grad_2.0_norm_total".

    Args:
        norm_type: p of the p-norm; "inf" for the largest absolute value.
        per: "parameter", or "layer": all parameters whose names agree up to the first number ("net.blocks.0"), or,
            without one, up to the last dot ("net.head"). Or "total": the norm of all alone.
        prog_bar: show the total in the progress bar, too.
        every_n_steps: default the Trainer's `log_every_n_steps`. (With a larger number Lightning repeats the last norms
            in the rows between.)

    Raises:
        Zero3Error: an argument that cannot be meant.
    """

    def __init__(
        self,
        norm_type: float | str = 2.0,
        per: Literal["layer", "parameter", "total"] = "layer",
        every_n_steps: int | None = None,
        prog_bar: bool = False,
    ) -> None:
        self.norm_type = float(norm_type)
        if not self.norm_type > 0:
            raise Zero3Error(f"norm_type={norm_type!r}: give a positive number, or 'inf'")
        if per not in ("layer", "parameter", "total"):
            raise Zero3Error(f"per={per!r}: choose 'layer', 'parameter' or 'total'")
        if every_n_steps is not None and every_n_steps < 1:
            raise Zero3Error(f"every_n_steps={every_n_steps}: give 1 or more")
        self.per, self.every_n_steps, self.prog_bar = per, every_n_steps, prog_bar

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        every = self.every_n_steps or trainer.log_every_n_steps
        if not every or (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every:  # as the logger counts
            return
        norms = self._by_parameter(trainer.strategy, pl_module, optimizer)
        if trainer.scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scale = trainer.scaler.get_scale()  # a fused optimizer takes it off itself, later
            norms = {name: norm / scale for name, norm in norms.items()}
        groups: dict[str, list[Tensor]] = {}
        for name, norm in norms.items():
            groups.setdefault(name if self.per == "parameter" else _layer_name(name), []).append(norm)
        key = f"grad_{self.norm_type}_norm"
        logged = {f"{key}/{name}": self._together(group) for name, group in groups.items()}
        if self.per != "total":
            pl_module.log_dict(logged)
        pl_module.log(f"{key}_total", self._together(norms.values()), prog_bar=self.prog_bar)

    def _by_parameter(self, strategy: Any, module: Any, optimizer: Any) -> dict[str, Tensor]:
        p, key = self.norm_type, f"grad_{self.norm_type}_norm/"
        if hasattr(strategy, "grad_norms"):
            norms = strategy.grad_norms(p, optimizer)
            return {name.removeprefix(key): norm for name, norm in norms.items() if name.startswith(key)}
        mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
        norms = {}
        for name, param in module.named_parameters():
            if id(param) in mine and param.requires_grad:
                grad = torch.zeros((), device=param.device) if param.grad is None else param.grad
                norm = torch.linalg.vector_norm(grad, p, dtype=torch.promote_types(grad.dtype, torch.float32))
                norms[name] = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of FSDP2's DTensor
        return norms

    def _together(self, norms: Iterable[Tensor]) -> Tensor:
        return torch.stack(list(norms)).norm(self.norm_type)


def _layer_name(parameter: str) -> str:
    numbered = re.match(r"(?:.*?\.)?\d+(?=\.)", parameter)
    return numbered.group() if numbered else parameter.rpartition(".")[0] or parameter
