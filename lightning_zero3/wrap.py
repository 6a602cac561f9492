"""Which modules become layers, and which layer owns which parameter."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_zero3 import compat
from lightning_zero3.errors import Zero3Error

__all__ = ["AutoWrapPolicy", "Plan", "check_memory", "check_policy", "choose", "plan_layers"]

AutoWrapPolicy = str | Collection[type[nn.Module]] | Callable[..., bool] | None

MIN_NUMEL = 2**16
"""Parameters below which "auto" makes no layer of its own: gathering 256 KiB costs less than starting to."""


@dataclass
class Plan:
    """One layer to be: parameters by full name, and the modules whose forward uses them together."""

    name: str
    owned: list[tuple[str, nn.Parameter]]
    entries: list[nn.Module]


def plan_layers(root: nn.Module, policy: AutoWrapPolicy = "auto") -> tuple[list[Plan], Plan]:
    """Divide a model into layers.

    Args:
        root: the whole model.
        policy: "auto": the elements of ModuleLists and Sequentials that repeat a class, Hugging Face's
            `_no_split_modules`, and large modules without children (embeddings, readouts). Or classes. Or a function
            `module -> bool`, or one of torch FSDP's, `(module, recurse, nonwrapped_numel) -> bool`. Or None: everything
            is fetched as one.

    Returns:
        The layers, in order of their first module, and the root layer: what none of them owns.
        A parameter that several modules share (tied weights) makes one layer of them if they have no children, such as
        an embedding and a readout; otherwise the root layer owns it.

    Raises:
        Zero3Error: no such policy; no parameters at all; a set of classes of which the model has none.
    """
    named = dict(root.named_parameters())
    if not named:
        raise Zero3Error(f"{type(root).__name__} has no parameters: there is nothing to shard")
    names = {id(p): name for name, p in named.items()}
    module_names = {m: n for n, m in root.named_modules()}
    wrapped = [m for m in choose(root, policy) if m is not root]

    # The innermost wrapped module around each use of a parameter is a candidate to own it.
    users: dict[int, list[nn.Module]] = {id(p): [] for p in named.values()}
    _visit(root, root, set(wrapped), users, set())

    together: dict[nn.Module, nn.Module] = {m: m for m in wrapped}  # to the first of the modules it shares a layer with
    in_root: set[int] = set()
    for param, modules in users.items():
        if root in modules or (len(modules) > 1 and any(True for m in modules for _ in m.children())):
            in_root.add(param)
        elif len(modules) > 1:
            first, others = together[modules[0]], {together[m] for m in modules[1:]}
            together = {m: first if t in others else t for m, t in together.items()}

    plans = {m: Plan(module_names[m], [], []) for m in wrapped if together[m] is m}
    for module in wrapped:
        plans[together[module]].entries.append(module)
    top = Plan("root", [], [])
    for param_id, name in names.items():
        owner = top if param_id in in_root else plans[together[users[param_id][0]]]
        owner.owned.append((name, named[name]))
    kept = {id(p) for _, p in top.owned}
    top.entries = [m for m in root.modules() if m is root or any(id(p) in kept for p in m.parameters())]
    return [plan for plan in plans.values() if plan.owned], top


def check_memory(root: nn.Module) -> None:
    """Raise if tensors of a model share memory without being one parameter: sharding would part them silently.

    Or if they cannot be sharded at all.
    """
    for name in (n for n, m in root.named_modules() if isinstance(m, torch.jit.ScriptModule)):
        raise Zero3Error(f"module {name!r} is a torch.jit.ScriptModule, which takes no hooks: script it after training")
    for name in (n for n, p in root.named_parameters() if is_lazy(p)):
        raise Zero3Error(f"parameter {name!r} has no shape yet: run the lazy module once before it is sharded")
    held: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in root.named_modules():
        for name, value in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
            if isinstance(value, Tensor) and value.layout is torch.strided and value.numel() and compat.address(value):
                held.setdefault(id(value), (f"{prefix}.{name}".lstrip("."), value))
    spans = sorted((t.data_ptr(), t.data_ptr() + _extent(t), name, t) for name, t in held.values())
    for (_, stop, one, first), (start, _, other, second) in pairwise(spans):
        if start < stop and any(isinstance(t, nn.Parameter) for t in (first, second)):
            raise Zero3Error(
                f"{one!r} and {other!r} share memory without being the same parameter; once sharded they would part. "
                "Tie weights by assigning the parameter itself (a.weight = b.weight), and make views in forward."
            )


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def check_policy(policy: AutoWrapPolicy) -> None:
    """Raise for a name that is no policy; all else depends on the model."""
    if isinstance(policy, str) and policy != "auto":
        raise Zero3Error(f"auto_wrap_policy={policy!r}: give 'auto', a set of classes, a function or None")


def _visit(
    module: nn.Module, inside: nn.Module, wrapped: set[nn.Module], users: dict[int, list[nn.Module]], seen: set
) -> None:
    if module in wrapped:
        inside = module
    if (module, inside) in seen:
        return
    seen.add((module, inside))
    for param in module._parameters.values():
        if param is not None and inside not in users[id(param)]:
            users[id(param)].append(inside)
    for child in module.children():
        _visit(child, inside, wrapped, users, seen)


def choose(root: nn.Module, policy: AutoWrapPolicy) -> list[nn.Module]:
    """The modules that a policy means, from the outside in."""
    if policy is None:
        return []
    if isinstance(policy, str):
        check_policy(policy)
        return _auto(root)
    if callable(policy):
        if len(inspect.signature(policy).parameters) == 1:
            return [m for m in root.modules() if policy(m)]
        return [m for m in root.modules() if policy(m, False, sum(p.numel() for p in m.parameters()))]
    classes = tuple(policy)
    if not classes or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        raise Zero3Error(f"auto_wrap_policy={policy!r}: its elements must be subclasses of torch.nn.Module")
    chosen = [m for m in root.modules() if isinstance(m, classes)]
    if not chosen:
        told = ", ".join(c.__name__ for c in classes)
        raise Zero3Error(f"auto_wrap_policy: {type(root).__name__} contains no module of class {told}")
    return chosen


def _auto(root: nn.Module) -> list[nn.Module]:
    """Repeated blocks, outermost first; then large leaves that lie in none of them."""

    def numel(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    no_split: set[str] = set()
    for module in root.modules():
        named: Any = getattr(module, "_no_split_modules", None)
        no_split |= {named} if isinstance(named, str) else set(named or ())

    chosen: list[nn.Module] = []

    def descend(module: nn.Module) -> None:
        repeated: Counter = Counter()
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            repeated.update(type(child) for child in module)
        for child in module.children():
            block = type(child).__name__ in no_split or repeated[type(child)] > 1
            leaf = next(child.children(), None) is None
            if (block or leaf) and numel(child) >= MIN_NUMEL:
                if child not in chosen:
                    chosen.append(child)
            else:
                descend(child)

    descend(root)
    return chosen
