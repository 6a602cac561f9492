"""Activation checkpointing: chosen modules keep their inputs only, and compute again in backward what they need."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero3.errors import Zero3Error
from lightning_zero3.wrap import choose

__all__ = ["ActivationCheckpointingPolicy", "check_checkpointing", "checkpoint_activations"]

ActivationCheckpointingPolicy = Collection[type[nn.Module]] | Callable[[nn.Module], bool] | None


def check_checkpointing(policy: ActivationCheckpointingPolicy) -> None:
    """Raise for what cannot be a policy."""
    classes = not isinstance(policy, str) and isinstance(policy, Collection)
    if policy is not None and not callable(policy) and not classes:
        raise Zero3Error(
            f"activation_checkpointing_policy={policy!r}: give a set of module classes, a function or None"
        )


def checkpoint_activations(root: nn.Module, policy: ActivationCheckpointingPolicy) -> None:
    """Checkpoint the forward of the modules that a policy chooses; of those inside one another, the outermost.

    Their `forward` is replaced on the instance; modules and names stay as they are. Called again it changes nothing.

    Args:
        root: the model.
        policy: a set of classes, or a function `module -> bool`.

    Raises:
        Zero3Error: a class of which the model has no module.
    """
    inside: set[nn.Module] = set()
    for module in choose(root, policy):
        if module not in inside:
            inside.update(module.modules())
            _checkpoint(module)


def _checkpoint(module: nn.Module) -> None:
    original = module.forward
    if hasattr(original, "checkpoints"):
        return

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        return checkpoint(original, *args, use_reentrant=False, **kwargs)

    forward.checkpoints = True  # type: ignore[attr-defined]
    module.forward = forward  # type: ignore[method-assign]
