"""LLM.int8(): weights of the large linears in 8 bits, columns of outliers in full precision.

A row of the weight is stored as int8 and one float32 scale. In forward the rows of the input are quantised the same
way, but for the columns that hold an outlier, which are multiplied in the input's own precision.

`bitsandbytes` computes this. Its own layer keeps weight and scales beside the parameters, made when the module moves to
a device; here they are plain parameters that do not train, so that they shard, travel, save and load like any other.

Source: Dettmers et al. 2022, arXiv:2208.07339, sections 2.1 and 3.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_zero3.shard import engine_of
from lightning_zero3.weights import LazyTensor, load_weights, read, waiting_for
from neox_lit.errors import NeoXError
from neox_lit.layers import TransformerLayer

LINEARS = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
"""The linears of a `TransformerLayer`: nearly all of a large model."""


class Int8Linear(nn.Module):
    """A linear layer with an int8 weight. The bias, if any, is as it was and may train; the gradient passes through.

    Args:
        weight: int8 `[n_out, n_in]`.
        scale: float32 `[n_out]`; row i of the weight stands for `weight[i] * scale[i] / 127`.
        bias: `[n_out]`, or None.
        threshold: A column of the input with a value at least this large stays out of int8; 0: none does.
        init_std: Standard deviation of the weights that `reset_parameters` draws.
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        bias: nn.Parameter | None,
        *,
        threshold: float = 6.0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = bias
        self.threshold = threshold
        self.init_std = init_std

    @classmethod
    def of(cls, linear: nn.Linear, threshold: float = 6.0) -> Int8Linear:
        """The int8 form of a linear layer, whose bias it takes over.

        A weight on the meta device that waits for its values (`lightning_zero3.load_weights`) goes on waiting: each
        rank quantises the rows that it reads.
        """
        weight = linear.weight
        init_std = getattr(linear, "init_std", 0.02)
        if not weight.is_meta:
            return cls(*quantize(weight), linear.bias, threshold=threshold, init_std=init_std)
        rows = torch.empty(weight.shape[0], dtype=torch.float32, device="meta")
        new = cls(torch.empty_like(weight, dtype=torch.int8), rows, linear.bias, threshold=threshold, init_std=init_std)
        if (source := waiting_for(weight)) is not None:
            load_weights(new, {part: _Quantized(source, weight.shape, part) for part in ("weight", "scale")}, False)
        return new

    def forward(self, x: Tensor) -> Tensor:
        """`[..., n_in]` to `[..., n_out]`."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        out = torch.ops.neox_lit.int8_linear(x, self.weight, self.scale, self.threshold)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def reset_parameters(self) -> None:
        """Draw weights as `NormalLinear` does, and quantise them."""
        weight, scale = quantize(torch.empty(self.weight.shape, device=self.weight.device).normal_(std=self.init_std))
        with torch.no_grad():
            self.weight.copy_(weight)
            self.scale.copy_(scale)
            if self.bias is not None:
                self.bias.zero_()

    def extra_repr(self) -> str:
        n_out, n_in = self.weight.shape
        return f"in_features={n_in}, out_features={n_out}, bias={self.bias is not None}, threshold={self.threshold}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """Move, but keep the scales float32 under `.to(dtype)`: rounded they would be wrong for ever."""
        scale = self.scale

        def but_scales(tensor: Tensor) -> Tensor:
            return fn(tensor.view(torch.int32)).view(torch.float32) if tensor is scale else fn(tensor)

        return super()._apply(but_scales, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Quantise the weight of a state dict that was saved before the conversion."""
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and weight.is_floating_point():
            state_dict[f"{prefix}weight"], state_dict[f"{prefix}scale"] = quantize(weight)
        super()._load_from_state_dict(state_dict, prefix, *args)


def to_int8(module: nn.Module, threshold: float = 6.0) -> nn.Module:
    """Convert the four linears (`LINEARS`) of every `TransformerLayer` in a module, in place.

    Args:
        module: With real weights, or on the meta device (they are quantised when they are read).
        threshold: See `Int8Linear`.

    Returns:
        `module`.

    Raises:
        NeoXError: bitsandbytes is not installed; a negative threshold; no TransformerLayer inside; the module is
            sharded, or has adapters.
    """
    require_bitsandbytes()
    if threshold < 0:
        raise NeoXError(f"int8_threshold must be at least 0, got {threshold}")
    if engine_of(module) is not None:
        raise NeoXError("the module is sharded already; call to_int8() before, at the end of configure_model()")
    blocks = [m for m in module.modules() if isinstance(m, TransformerLayer)]
    if not blocks:
        raise NeoXError(f"{type(module).__name__} has no TransformerLayer in it; to_int8() would change nothing")
    for block in blocks:
        for name in LINEARS:
            linear = block.get_submodule(name)
            if isinstance(linear, Int8Linear):
                linear.threshold = threshold
                continue
            if any(True for _ in linear.children()):
                raise NeoXError(f"{name} has an adapter; call to_int8() first, then add or load the adapter")
            assert isinstance(linear, nn.Linear)
            owner, _, last = name.rpartition(".")
            setattr(block.get_submodule(owner), last, Int8Linear.of(linear, threshold).train(linear.training))
    return module


@torch.no_grad()
def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A float matrix `[n_out, n_in]` as int8 of the same shape and a float32 scale `[n_out]`."""
    quantized, scale, _ = require_bitsandbytes().int8_vectorwise_quant(weight.detach().to(torch.float16, copy=True))
    return quantized, scale


def require_bitsandbytes() -> Any:
    """`bitsandbytes.functional`.

    Raises:
        NeoXError: It is not installed.
    """
    # At its import it says that its 4-bit kernels could not be fetched from the network. They are not used here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise NeoXError(f"int8 needs bitsandbytes ({error}); pip install 'lightning-zero3[int8]'") from error
    return functional


class _Quantized:
    """One part, "weight" or "scale", of a matrix in a file, as a `LazyTensor`: whole rows are read and quantised."""

    def __init__(self, source: LazyTensor | Tensor, shape: torch.Size, part: Literal["weight", "scale"]) -> None:
        self._source = source
        self._n_in = shape[1] if part == "weight" else 1  # elements of this part in a row
        self._row = shape[1]
        self.part = part
        self.shape = shape if part == "weight" else shape[:1]
        self.dtype = torch.int8 if part == "weight" else torch.float32

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), flat."""
        first, last = start // self._n_in, -(-stop // self._n_in)
        rows = read(self._source, first * self._row, last * self._row).view(-1, self._row)
        quantized = quantize(rows)[0 if self.part == "weight" else 1].reshape(-1)
        return quantized[start - first * self._n_in : stop - first * self._n_in]


# One operator, so that torch.compile and plans without memory see its shape and need not look inside, where the number
# of outlier columns depends on values.


@torch.library.custom_op("neox_lit::int8_linear", mutates_args=())
def _int8_linear(x: Tensor, weight: Tensor, scale: Tensor, threshold: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    # A copy, for the CPU's kernel writes to its input and restores it.
    half = rows.to(torch.float16, copy=not x.is_cuda)
    quantized, row_scale, outliers = require_bitsandbytes().int8_vectorwise_quant(half, threshold=threshold)
    if outliers is None:
        outliers = torch.empty(0, dtype=torch.int64, device=x.device)
    mixed = torch.ops.bitsandbytes.int8_mixed_scaled_mm
    out, _ = mixed(rows, quantized, weight, row_scale, scale.float(), outliers, None)
    return out.reshape(*x.shape[:-1], weight.shape[0])


@_int8_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, threshold: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    """As if the input had not been quantised: its rounding has no useful gradient."""
    weight, scale = ctx.saved_tensors
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad @ weight.to(grad.dtype).mul_(scale.to(wide)[:, None] / 127), None, None, None


_int8_linear.register_autograd(_backward, setup_context=_setup)
