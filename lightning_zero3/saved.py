"""Weights saved for backward are handles, not tensors.

Autograd saves the weights that an operation needs in its backward pass. Saved as tensors they would be views of a slot
that meanwhile serves another layer: stale, or pinned in memory if we let autograd own them. So while a layer computes,
a saved-tensors hook replaces each saved view of a slot by a `SavedWeight`: which layer, and where in its slot. When
backward asks for it, the layer is fetched if it is not there, into whatever slot is free, and the view is made anew.
Correctness then rests on this alone. The hooks on outputs and inputs (`layer.py`) only make fetches early and releases
prompt; a model whose outputs they do not see (views, in-place operations, exotic containers) is slower, never wrong.

Tensors that are no weights go to the enclosing hook pair, if there is one, as they would without us: activation
checkpointing and `save_on_cpu` depend on it. Without one they are kept as they are, with their version, so that
modifying them in place before backward is still the error that it is in plain PyTorch.

Double backward (`create_graph=True`) costs memory: the graph of the first backward holds copies of the weights in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero3 import compat
from lightning_zero3.errors import Zero3Error

if TYPE_CHECKING:
    from lightning_zero3.layer import Zero3Layer
    from lightning_zero3.slots import SlotPool

__all__ = ["SavedWeights"]


class SavedWeight(NamedTuple):
    """A view of a layer's slot: geometry in elements of `dtype`, counted from the slot's first byte."""

    layer: Zero3Layer
    version: int  # of the layer's weights
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    tensor: Tensor
    version: int


class _Passed(NamedTuple):
    unpack: Callable[[Any], Tensor]
    packed: Any


class SavedWeights:
    """The hook pair of one engine, pushed while any of its layers computes."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._active: list[torch.autograd.graph.saved_tensors_hooks | None] = []
        self._packs: set[Callable] = set()

    def push(self) -> None:
        """Start replacing weights. Nested layers share the outermost pair."""
        enclosing = compat.enclosing_saved_tensor_hooks()
        wanted = torch.is_grad_enabled() and compat.saved_tensor_hooks_enabled()
        if not wanted or (enclosing is not None and enclosing[0] in self._packs):
            self._active.append(None)
            return
        pool = self._pool

        # Between compiled graphs (where a module inside the layer has a hook) torch.compile would trace this function,
        # too, and take the version that it sees then for a constant.
        @torch.compiler.disable
        def pack(tensor: Tensor) -> Any:
            slot = pool.of_tensor(tensor)
            if slot is not None and slot.owner is not None:
                layer = slot.owner
                return SavedWeight(
                    layer, layer.version, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
                )
            if enclosing is not None:
                return _Passed(enclosing[1], enclosing[0](tensor))
            return _Kept(tensor, tensor._version)

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _unpack)
        self._packs.add(pack)
        hooks.__enter__()
        self._active.append(hooks)

    def pop(self) -> None:
        """Undo the last `push`."""
        hooks = self._active.pop()
        if hooks is not None:
            hooks.__exit__()
            self._packs.discard(hooks.pack_hook)


def _unpack(saved: SavedWeight | _Kept | _Passed) -> Tensor:
    if isinstance(saved, _Passed):
        return saved.unpack(saved.packed)
    if isinstance(saved, _Kept):
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{saved.tensor.type()} {list(saved.tensor.shape)} is at version {saved.tensor._version}; expected "
                f"version {saved.version} instead."
            )
        return saved.tensor
    layer = saved.layer
    if layer.version != saved.version:
        raise Zero3Error(
            f"layer {layer.name!r} was updated, or unfrozen, between a forward and its backward. Compute the forward "
            "again after that, or step after all backward passes that need the old weights."
        )
    slot = layer.needed_in_backward()
    with torch.no_grad():
        view = torch.empty(0, dtype=saved.dtype, device=slot.bytes.device)
        view.set_(slot.bytes.untyped_storage(), saved.offset, saved.size, saved.stride)
    # With create_graph, backward itself saves what it uses, past our hooks: that graph gets a copy of its own.
    return view.clone() if torch.is_grad_enabled() else view
