"""The engine: which layer is fetched and released when, and what is in flight.

A pass is one forward (with or without gradients) or one backward. Forward passes begin when the outermost layer is
entered. A backward begins with the first gradient that reaches any layer, and ends when autograd says so; nested
backward passes (reentrant checkpoints) belong to the outermost.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_zero3 import compat
from lightning_zero3.chunk import Chunk, PrecisionPolicy
from lightning_zero3.comm import Communicator, Pending
from lightning_zero3.errors import Zero3Error
from lightning_zero3.order import Event, Path
from lightning_zero3.saved import SavedWeights
from lightning_zero3.slots import Slot, SlotPool
from lightning_zero3.state import LayerState

if TYPE_CHECKING:
    from lightning_zero3.layer import Zero3Layer

__all__ = ["Engine", "Reduction", "check_prefetch"]

_REDUCTIONS = 1  # left in flight while the next layer's gradients are collected; its own makes one more, for a moment

_SCOPE = -2  # stands for `Engine.backward_scope` among the graph tasks


class Reduction(NamedTuple):
    """A gradient reduction in flight. Holding `slot` keeps its memory until `pending` is done."""

    pending: Pending
    layer: Zero3Layer
    slot: Slot | None
    arrived: set[tuple[int, int]]  # (trainable chunk, parameter) of gradients that there were on this rank
    flats: list[Tensor]  # per trainable chunk [total]: this rank's gradient; then, in its own part, the sum over ranks


def check_prefetch(prefetch: int) -> None:
    """Raise for a number of layers that cannot be meant."""
    if prefetch < 0:
        raise Zero3Error(f"prefetch={prefetch}: give the number of layers to fetch ahead, 0 or more")


class Engine:
    """The layers of one model, in the order they were added, and their common slots and communicator.

    Args:
        comm: the ranks that share the model.
        device: where slots live.
        policy: dtypes to compute and reduce in.
        prefetch: how many layers ahead to fetch. Each costs one slot.
    """

    def __init__(
        self, comm: Communicator, device: torch.device, policy: PrecisionPolicy | None = None, prefetch: int = 1
    ) -> None:
        check_prefetch(prefetch)
        self.comm = comm
        self.device = device
        self.policy = policy or PrecisionPolicy()
        self.prefetch = prefetch
        self.pool = SlotPool(device)
        self.saved = SavedWeights(self.pool)
        self.layers: list[Zero3Layer] = []
        self.root: Zero3Layer | None = None
        # Where buffers are found, which a module may replace. Overwritten with the first rank's as by DDP: before each
        # forward pass in training, and before the first evaluation after it. Evaluation may count in them.
        self.buffers: list[tuple[dict[str, Tensor | None], str]] = []
        self._buffers_differ = False
        self.bare_state_dicts = False  # let state dicts of sharded modules pass, for `full_state_dict`
        # Called when a backward pass begins, and when its gradients are complete or it has failed.
        self.before_backward: Callable[[], None] = lambda: None
        self.after_backward: Callable[[], None] = lambda: None
        self._forward = {True: Path(), False: Path()}  # with and without gradients
        self._backward = Path()
        self._path = self._forward[True]  # of the forward that is going on, or was last
        self._uses = 0  # calls of layers in progress
        # Not released after their use, but when the forward ends: parameters are read outside of it, or looked at.
        self._borrowed: set[Zero3Layer] = set()
        self._operands: dict[Zero3Layer, None] = {}  # fetched for an operation, until it is another layer's turn
        self._warned: set[Zero3Layer] = set()
        self._tasks: set[int] = set()  # graph tasks of the backward in progress
        self._needed: set[Zero3Layer] = set()  # layers whose backward has begun and not ended
        self._reductions: deque[Reduction] = deque()
        # Of the chunks reduced in this pass: parameters that had no gradient before, and those that one arrived for.
        self._landed: dict[Chunk, tuple[set[int], set[int]]] = {}
        self._holding = False  # gradients are not reduced for now

    def add(self, layer: Zero3Layer) -> int:
        """Take a layer in. Returns its index."""
        self.layers.append(layer)
        return len(self.layers) - 1

    @property
    def trainable(self) -> list[Chunk]:
        """All trainable chunks, layer by layer."""
        return [chunk for layer in self.layers for chunk in layer.trainable]

    # -- forward ------------------------------------------------------------------------------------------------------

    def before_use(self, layer: Zero3Layer) -> None:
        """A layer is about to compute: fetch it, and the next ones ahead."""
        if compat.current_graph_task() != -1:  # activation checkpointing recomputes
            self.before_backward_use(layer)
        else:
            if self._uses == 0:
                self._begin_forward()
            self._end_operations([layer])
            self._operands.pop(layer, None)
            self._fetch(layer, self._path)
        self._uses += 1

    def after_use(self, layer: Zero3Layer, failed: bool) -> None:
        """A layer has computed: release it, unless backward or the next use needs it at once."""
        self._uses -= 1
        if compat.current_graph_task() != -1:
            return
        grad = torch.is_grad_enabled() and not failed
        keep = layer in self._borrowed or (
            grad and (layer is self.root or self._path.last_fetch() or self._path.repeats())
        )
        if not keep:
            layer.release()
        if self._uses == 0:
            self._end_operations()
            for borrowed in self._borrowed:
                borrowed.release()
            self._borrowed.clear()
            if failed:
                self._path.begin()
            elif not self._path.end():
                self.comm.agree("end of forward")

    @property
    def computing(self) -> bool:
        """Whether a forward or backward is going on."""
        return self._uses > 0 or compat.current_graph_task() != -1

    def read(self, layer: Zero3Layer) -> None:
        """A parameter is read outside of its layer's forward: if a model computes, it must be there."""
        if layer.state not in (LayerState.SHARDED, LayerState.FETCHING) or not self.computing:
            return
        if compat.current_graph_task() != -1:
            self.before_backward_use(layer)
        else:
            self._borrowed.add(layer)
            self._fetch(layer, self._path, "read")

    def before_operation(self, layers: Collection[Zero3Layer]) -> None:
        """A torch operation takes parameters of these layers, outside of their use: they must be there.

        They stay for further operations on the same layer. A penalty on all weights has one layer at a time.
        """
        if not self.computing:
            return
        self._end_operations(layers)
        for layer in layers:
            if layer.state not in (LayerState.SHARDED, LayerState.FETCHING):
                continue
            if compat.current_graph_task() != -1:
                self.before_backward_use(layer)
            else:
                self._operands[layer] = None
                self._fetch(layer, self._path, "operation")

    def _end_operations(self, but_on: Collection[Zero3Layer] = ()) -> None:
        for layer in [layer for layer in self._operands if layer not in but_on]:
            del self._operands[layer]
            if not layer.depth and layer not in self._borrowed:
                layer.release()

    def keep_until_pass_ends(self, layer: Zero3Layer) -> None:
        """Do not release a layer after its use: something outside looks into its slot."""
        self._borrowed.add(layer)

    @torch.no_grad()
    def shadow_forward(self) -> None:
        """Take part in the other ranks' forward without data: the fetches of this rank's last evaluation."""
        assert self.root is not None
        self.root.enter()
        for event in self._forward[False].latest():
            layer = self.layers[event.layer]
            if event.what == "read":
                self.read(layer)
            elif event.what == "operation":
                self.before_operation([layer])
            elif layer is not self.root:
                layer.enter()
                layer.leave()
        self.root.leave()

    def _begin_forward(self) -> None:
        if self._tasks and _SCOPE not in self._tasks:
            self._recover()
        self._borrowed.clear()
        self._operands.clear()
        for layer in self.layers:  # left over from a forward without backward; weights may have changed since
            layer.release()
            if torch.is_grad_enabled():
                layer.unfreeze()
        for layer in self.pool.outdated() - self._warned:
            self._warned.add(layer)
            warnings.warn(
                f"a view of a parameter of layer {layer.name!r} (weight.detach(), weight.t(), ...) has been kept over "
                "an update of the weights. Gathered parameters are copies: it shows the old ones for ever. Make the "
                "view anew in each forward, or keep a clone.",
                stacklevel=2,
            )
        self._path = self._forward[torch.is_grad_enabled()]
        self._path.begin()
        if torch.is_grad_enabled() or self._buffers_differ:
            self.broadcast_buffers()
        self._buffers_differ = torch.is_grad_enabled()

    @torch.no_grad()
    def broadcast_buffers(self) -> None:
        """Overwrite buffers with the first rank's."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffers_of_module, name in self.buffers if self.comm.world_size > 1 else ():
            if (buffer := buffers_of_module.get(name)) is not None:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([b.reshape(-1) for b in buffers])
            self.comm.broadcast(flat)
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view_as(buffer))

    def _fetch(self, layer: Zero3Layer, path: Path, what: str = "fetch") -> None:
        expected = path.advance(Event(what, layer.index))
        if layer.sharded:
            if not expected:
                self.comm.agree(f"fetch of layer {layer.name!r}")
            layer.fetch()
        layer.wait()
        for index in path.ahead(self.prefetch):
            if self.layers[index].sharded:
                self.layers[index].fetch()

    # -- backward -----------------------------------------------------------------------------------------------------

    def touch(self) -> None:
        """Something of a backward pass happens: make sure that its end will be noticed."""
        task = compat.current_graph_task()
        if task in self._tasks:
            return
        if not self._tasks:
            self._begin_backward()
        self._tasks.add(task)
        compat.queue_end_of_backward(lambda: self._task_ends(task))

    @contextmanager
    def backward_scope(self) -> Iterator[None]:
        """All that happens inside is one backward pass, however many graph tasks it takes."""
        self._begin_backward()
        self._tasks.add(_SCOPE)
        try:
            yield
        except BaseException:
            self._recover()
            raise
        self._task_ends(_SCOPE)

    def _begin_backward(self) -> None:
        self._backward.begin()
        self.before_backward()

    def before_backward_use(self, layer: Zero3Layer) -> None:
        """Backward needs a layer's weights: fetch it, and the next ones ahead."""
        if layer in self._needed and not layer.sharded:
            layer.wait()
            return
        self.touch()
        self._needed.add(layer)
        self._fetch(layer, self._backward)

    def after_backward_use(self, layer: Zero3Layer) -> None:
        """Backward is done with one use of a layer: release it, unless the next use follows at once."""
        if layer not in self._needed or layer.depth or layer is self.root:
            return
        self._needed.discard(layer)
        if not self._backward.repeats():
            layer.release()

    def grad_slot(self, layer: Zero3Layer, nbytes: int) -> Slot:
        """A slot for a layer's flat gradient. Waits for the oldest reduction when enough are in flight."""
        self._land_all_but(_REDUCTIONS)
        slot = self.pool.take(nbytes, layer)
        if slot.free_event is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.free_event)
        return slot

    def reduce(self, layer: Zero3Layer) -> None:
        """A layer's gradients are complete: start reducing them."""
        if self._holding and self.comm.world_size > 1:
            layer.grads.hold_back()
            return
        if not self._backward.advance(Event("reduce", layer.index)):
            self.comm.agree(f"reduction of layer {layer.name!r}")
        self._land_all_but(_REDUCTIONS)
        slot, arrived, flats = layer.grads.complete()
        self.comm.order_after("reduce")
        with self.comm.on_stream("reduce"):
            pending = self.comm.reduce(f"layer {layer.name!r}", flats)
            reduction = Reduction(pending, layer, slot, arrived, flats)
            if pending.ready is not None or not pending.works:
                self._land(reduction)  # CUDA: queued behind the reduction, nobody waits. One rank: nothing travels.
            else:
                self._reductions.append(reduction)

    def reduce_held(self, layer: Zero3Layer) -> None:
        """Reduce now what is held back of a layer's gradients: it is about to be cut anew."""
        if layer.grads.held:
            before, self._holding = self._holding, False
            self.reduce(layer)
            self._complete_gradients()
            self._holding = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes do not reduce gradients: each rank keeps its own, whole, until the first pass after.

        The least traffic when micro-batches are accumulated, for the memory of all gradients in full.
        """
        self._holding, before = True, self._holding
        try:
            yield
        finally:
            self._holding = before

    def _land_all_but(self, count: int) -> None:
        """Leave at most the `count` latest reductions in flight."""
        while len(self._reductions) > count:
            self._land(self._reductions.popleft())

    def _land(self, reduction: Reduction) -> None:
        """Add a reduced gradient to the chunks' gradients and give the slot back."""
        self.comm.wait(reduction.pending)
        alone = self.comm.world_size == 1
        for place, (chunk, flat) in enumerate(zip(reduction.layer.trainable, reduction.flats, strict=True)):
            scale = 1.0 if chunk.scales_early else 1.0 / self.comm.world_size
            new, arrived = self._landed.setdefault(chunk, (set(), set()))
            new |= chunk.add_grad(self.comm.own(flat), scale, keep=alone)
            arrived |= {index for at, index in reduction.arrived if at == place}
        if reduction.slot is not None:
            self.pool.give(reduction.slot)

    def _complete_gradients(self) -> None:
        """All reductions land. Parameters that no rank had a gradient of are to have none, rather than zeros.

        They were frozen, or the step did not use them. An optimizer would decay them, and count the step.
        """
        self._land_all_but(0)
        landed, self._landed = self._landed, {}
        if not any(chunk.followed for chunk in self.trainable):
            return  # optimizers have chunks as they are, and cannot pass over parameters: no need to ask the ranks
        here = [index in arrived for chunk, (_, arrived) in landed.items() for index in range(len(chunk.params))]
        used = iter(self.comm.any_of("end of gradients", here) if here else ())
        for chunk, (new, _) in landed.items():
            chunk.drop_grad({index for index in range(len(chunk.params)) if not next(used) and index in new})

    def _task_ends(self, task: int) -> None:
        self._tasks.discard(task)
        if self._tasks:
            return
        for layer in self.layers:
            if layer.grads.begun or (layer.grads.held and not self._holding):
                self.reduce(layer)
        self._complete_gradients()
        self.comm.join("reduce")
        self._needed.clear()
        for layer in self.layers:
            if not layer.depth:
                layer.release()
        self.after_backward()
        if not self._backward.end():
            self.comm.agree("end of backward")

    # -- changes from outside -----------------------------------------------------------------------------------------

    def weights_changed(self, layers: Iterable[Zero3Layer]) -> None:
        """An optimizer has updated these layers' chunks: what was gathered from them is stale."""
        for layer in layers:
            layer.updates += 1
            in_use = layer.depth > 0
            layer.release()
            if in_use and layer.sharded:
                layer.fetch()
                layer.wait()

    def dissolve(self) -> None:
        """Let go of the modules."""
        for layer in self.layers:
            layer.leave_module()

    def _recover(self) -> None:
        """Forget a backward that an exception ended."""
        self._tasks.clear()
        self._needed.clear()
        self._landed.clear()
        while self._reductions:
            reduction = self._reductions.popleft()
            with suppress(Zero3Error):  # of a rank that is gone; the exception that ended backward says more
                self.comm.wait(reduction.pending)
            if reduction.slot is not None:
                self.pool.give(reduction.slot)
        for layer in self.layers:
            layer.grads.drop()
            if not layer.depth:
                layer.release()
        self.after_backward()
        self._backward.begin()
