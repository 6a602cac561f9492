"""Comparison of nested results with a message that says where they differ."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def assert_same(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6, what: str = "values") -> None:
    """Assert that two numbers, tensors, or nested dicts and lists of them are equal within rounding.

    Shapes and keys must agree exactly; dtypes need not. `rtol=0, atol=0` asks for equal bits. NaN equals NaN.
    The message names the first and the worst entry that differs.
    """
    __tracebackhide__ = True
    ours, theirs = dict(_entries(actual)), dict(_entries(expected))
    if ours.keys() != theirs.keys():
        missing, extra = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
        raise AssertionError(f"{what}: entries differ; missing: {_short(missing)}; unexpected: {_short(extra)}")
    differing: list[tuple[float, str]] = []
    for name, a in ours.items():
        b = theirs[name]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if a != b:
                raise AssertionError(f"{what}{name}: {a!r} is not {b!r}")
            continue
        if a.shape != b.shape:
            raise AssertionError(f"{what}{name}: shape {tuple(a.shape)} is not {tuple(b.shape)}")
        if (excess := _excess(a, b, rtol, atol)) is not None:
            differing.append((excess[0], f"{name or '.'} {excess[1]}"))
    if differing:
        first, worst = differing[0][1], max(differing)[1]
        raise AssertionError(
            f"{what}: {len(differing)} of {len(ours)} entries differ by more than rtol {rtol:g}, atol {atol:g}\n"
            f"  first: {first}\n  worst: {worst}"
        )


def _entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by path: tensors and numbers as float64 tensors, everything else as it is."""
    if isinstance(value, Mapping):
        for key in value:
            yield from _entries(value[key], f"{name}[{key!r}]")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, item in enumerate(value):
            yield from _entries(item, f"{name}[{index}]")
    elif isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, torch.tensor(value, dtype=torch.float64)
    else:
        yield name, value


def _excess(a: Tensor, b: Tensor, rtol: float, atol: float) -> tuple[float, str] | None:
    """How far a pair lies outside its tolerance, as a ratio and in words; None if inside."""
    a, b = a.to("cpu", torch.float64), b.to("cpu", torch.float64)
    error = (a - b).abs()
    error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, error).nan_to_num(nan=float("inf"))
    allowed = (atol + rtol * b.abs()).nan_to_num(nan=0.0, posinf=0.0)
    outside = error > allowed
    if not bool(outside.any()):
        return None
    ratio = torch.where(outside, error / allowed.clamp(min=1e-300), 0.0)
    at = int(ratio.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), a.shape)] if a.ndim else []
    words = (
        f"at {index}: {a.flatten()[at].item():.9g} is not {b.flatten()[at].item():.9g} "
        f"(off by {error.flatten()[at].item():.3g}; {int(outside.sum())} of {a.numel()} elements differ)"
    )
    return ratio.flatten()[at].item(), words


def _short(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"
