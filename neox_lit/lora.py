"""LoRA: a frozen linear and a trainable product of two thin matrices beside it.

The product is a module of its own, a child of the linear that it adapts, so that the linear's parameters keep their
names: `attention.dense.weight` as ever, and `attention.dense.lora.A`, `attention.dense.lora.B` beside it.

Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero3.shard import engine_of, gather_parameters
from neox_lit.errors import NeoXError
from neox_lit.int8 import LINEARS, Int8Linear
from neox_lit.layers import TransformerLayer

TARGETS = tuple(name.rpartition(".")[2] for name in LINEARS)


@dataclass(frozen=True)
class LoRAOptions:
    """How a model is adapted.

    Args:
        rank: Rows of A and columns of B.
        alpha: The product is scaled by `alpha / rank`.
        dropout: Probability, in [0, 1), of dropping an element of A's input in training.
        targets: The linears of each block: some of query_key_value, dense, dense_h_to_4h, dense_4h_to_h.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        for name, ok, what in (
            ("rank", isinstance(self.rank, int) and self.rank > 0, "a positive integer"),
            ("alpha", self.alpha > 0, "positive"),
            ("dropout", 0 <= self.dropout < 1, "in [0, 1)"),
            ("targets", bool(self.targets) and set(self.targets) <= set(TARGETS), f"some of {', '.join(TARGETS)}"),
        ):
            if not ok:
                raise NeoXError(f"model.lora.{name} must be {what}, got {getattr(self, name)!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "targets": list(self.targets)}


class LoRA(nn.Module):
    """`B A dropout(x) * alpha / rank`; zero at first, for B is.

    Args:
        linear: What it will adapt, with a weight `[n_out, n_in]`.
        options: See `LoRAOptions`.
    """

    def __init__(self, linear: nn.Module, options: LoRAOptions) -> None:
        super().__init__()
        weight = linear.weight
        assert isinstance(weight, Tensor)
        n_out, n_in = weight.shape
        where: dict[str, Any] = {
            "device": "cpu" if weight.is_meta else weight.device,  # small, and in no file of the base model
            "dtype": weight.dtype if weight.is_floating_point() else torch.get_default_dtype(),
        }
        self.options = options
        self.merged = False
        self.A = nn.Parameter(torch.empty(options.rank, n_in, **where))
        self.B = nn.Parameter(torch.empty(n_out, options.rank, **where))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """`[..., n_in]` to `[..., n_out]`."""
        return F.linear(F.linear(F.dropout(x, self.options.dropout, self.training), self.A), self.B) * self.scale

    @property
    def scale(self) -> float:
        """Factor on the product."""
        return self.options.alpha / self.options.rank

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        nn.init.zeros_(self.B)

    def product(self) -> Tensor:
        """What it adds to the weight, `[n_out, n_in]`, at least float32."""
        wide = torch.promote_types(self.A.dtype, torch.float32)
        return self.B.detach().to(wide) @ self.A.detach().to(wide) * self.scale


def add_lora(module: nn.Module, options: LoRAOptions | None = None) -> nn.Module:
    """Put a `LoRA` beside the target linears of every `TransformerLayer` in a module, in place. Freezes nothing.

    Call it outside of `lightning_zero3.empty_parameters()`; linears may be without memory, LoRA's own matrices are not.

    Raises:
        NeoXError: The module is sharded, has adapters already, or has no TransformerLayer.
    """
    options = options or LoRAOptions()
    if engine_of(module) is not None:
        raise NeoXError("the module is sharded already; add adapters before, at the end of configure_model()")
    if any(True for _ in adapted(module)):
        raise NeoXError("the module has adapters already; merge_lora() and remove_lora() first")
    blocks = [m for m in module.modules() if isinstance(m, TransformerLayer)]
    if not blocks:
        raise NeoXError(f"{type(module).__name__} has no TransformerLayer in it to adapt")
    for block in blocks:
        for name in LINEARS:
            if name.rpartition(".")[2] in options.targets:
                linear = block.get_submodule(name)
                linear.add_module("lora", LoRA(linear, options).train(linear.training))
                linear.register_forward_hook(_add)
    return module


def _add(linear: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The forward hook of an adapted linear."""
    lora = linear.lora
    assert isinstance(lora, LoRA)
    if lora.merged:
        if linear.training and torch.is_grad_enabled():
            raise NeoXError("adapters do not train while they are merged; call unmerge_lora() first")
        return output
    return output + lora(args[0])


def adapted(module: nn.Module) -> Iterator[tuple[str, nn.Module, LoRA]]:
    """Name, linear and LoRA of every adapted linear."""
    for name, linear in module.named_modules():
        if isinstance(lora := linear._modules.get("lora"), LoRA):
            yield name, linear, lora


def merge_lora(module: nn.Module) -> nn.Module:
    """Add every adapter to its linear's weight, which then computes the same alone. On every rank, if sharded.

    Raises:
        NeoXError: A weight is int8; nothing has been changed then.
    """
    _add_products(module, merged=True)
    return module


def unmerge_lora(module: nn.Module) -> nn.Module:
    """Undo `merge_lora`, up to rounding."""
    _add_products(module, merged=False)
    return module


@torch.no_grad()
def _add_products(module: nn.Module, merged: bool) -> None:
    layers = [(name, linear, lora) for name, linear, lora in adapted(module) if lora.merged is not merged]
    for name, linear, _ in layers:
        if isinstance(linear, Int8Linear):
            raise NeoXError(
                f"{name}.weight is int8, in which the adapter would be rounded away. Save the adapter, load it into a "
                "model that is not int8, merge there, and convert the result with to_int8()."
            )
    for _, linear, lora in layers:
        weight = linear.weight
        assert isinstance(weight, Tensor)
        with gather_parameters(linear, writeback=True) if engine_of(linear) is not None else nullcontext():
            linear.weight.add_(lora.product().to(weight.dtype), alpha=1 if merged else -1)  # type: ignore[operator]
        lora.merged = merged


def remove_lora(module: nn.Module) -> nn.Module:
    """Take all adapters off, in place. After `merge_lora` what they did stays.

    Raises:
        NeoXError: The module is sharded.
    """
    if engine_of(module) is not None:
        raise NeoXError("the module is sharded; remove adapters after training, or from a module that is loaded anew")
    for _, linear, _ in list(adapted(module)):
        del linear.lora
        for key in [key for key, hook in linear._forward_hooks.items() if hook is _add]:
            del linear._forward_hooks[key]
    return module
