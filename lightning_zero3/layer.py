"""The life of a layer: sharded, fetched for use, released, its gradients reduced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_zero3 import compat
from lightning_zero3.access import WatchedParameters, as_they_are, disown, layer_of, own
from lightning_zero3.chunk import Chunk
from lightning_zero3.collect import GradientCollector
from lightning_zero3.comm import Communicator, Pending
from lightning_zero3.engine import Engine
from lightning_zero3.errors import Zero3Error
from lightning_zero3.gradients import ShardedGrad
from lightning_zero3.meta import materialize
from lightning_zero3.slots import Slot, SlotViews
from lightning_zero3.state import LayerState
from lightning_zero3.weights import waiting_for

__all__ = ["Zero3Layer", "layer_of"]

TRAINING_PARAMS_IDX = 0  # in `Zero3Layer.chunk`


class Zero3Layer(nn.Module):
    """A module whose parameters are sharded over ranks and fetched together when it is used.

    The wrapped module stays what it was: the same parameters under the same names, no prefix in `named_parameters()` or
    state dicts, its attributes readable here. It may be called itself, or through this wrapper.

    A forward waits for the layer's own fetch, starts the next layer's, computes and releases. A backward fetches when
    the first gradient reaches an output, and when all gradients are there releases and reduce-scatters their mean into
    the gradient of the trainable chunk, which accumulates as `.grad` does.

    Args:
        module: what to wrap; its parameters (those no inner layer has) are flattened, padded and scattered from the
            first rank, and the originals freed.
        rank, world_size: checked against the process group when given.
        device: where chunks and slots live; default the parameters' own.
        dtype: what floating-point parameters are cast to first; default as they are.
        engine: which engine it belongs to; default one of its own.
        name: for errors and reports; default the class name.
        owned: names and parameters to own, when not all of `module`'s.
        entries: modules whose forward is a use of the layer, when not `module` alone.

    Raises:
        Zero3Error: no parameters, ranks that do not match, a parameter that another layer owns.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3 (P_os+g+p) and 7.2.2 (its communication).
    """

    def __init__(
        self,
        module: nn.Module,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        engine: Engine | None = None,
        name: str | None = None,
        owned: list[tuple[str, nn.Parameter]] | None = None,
        entries: Iterable[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.__dict__["module"] = module  # not a child: names stay as they were
        self.training = module.training
        self.name = name or type(module).__name__

        if owned is None:
            owned = [(n, p) for n, p in module.named_parameters() if layer_of(p) is None]
            if not owned:
                raise Zero3Error(f"{self.name} has no parameters to shard; use it as it is, without Zero3Layer")
        if device is None:
            device = next((p.device for _, p in owned), torch.device("cpu"))
            device = torch.device("cpu") if device.type == "meta" else device
        device = torch.device(device)
        if engine is None:
            engine = Engine(Communicator(device=device), device)
        comm = engine.comm
        for what, given, actual in (("rank", rank, comm.rank), ("world_size", world_size, comm.world_size)):
            if given is not None and given != actual:
                raise Zero3Error(
                    f"{self.name}: {what}={given}, but the process group says {actual}. Call "
                    "torch.distributed.init_process_group() first (torchrun sets its environment), or leave it out."
                )

        self.entries = list(entries) if entries is not None else [module]
        owned = materialize([module, *self.entries], owned, device)
        if dtype is not None:
            for _, param in owned:
                if param.is_floating_point():
                    param.data = param.data.to(dtype)
        self.join(engine)
        self.state = LayerState.SHARDED
        self.updates = 0  # of the weights, or of where they lie
        self.depth = 0  # calls in progress
        self._slot: Slot | None = None
        self._fetch: Pending | None = None
        self._releases_by_input = False  # this use's input gradients will tell when backward is done with it
        for _, param in owned:
            own(self, param)
        self._hooks: list[Any] = []
        self._grad_hooks: list[Any] = []
        waits = any(waiting_for(p) is not None for _, p in owned)
        self._arrange(self._chunks_of(owned, device))
        if waits:
            self._fill()
        for entry in self.entries:
            self._hooks.append(entry.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True))
            self._hooks.append(entry.register_forward_hook(self._after_forward, always_call=True))
        self._guard_owners()
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[shared] = getattr(module, shared)

    def _chunks_of(self, named: list[tuple[str, nn.Parameter]], device: torch.device) -> list[Chunk]:
        """Shard full parameters: one chunk for each dtype of those that train, and of those that do not.

        In mixed precision only matrices are cast. Autocast would cast biases where it uses them, and never the vectors
        of norms, which kernels may want in float32.
        """
        engine, as_stored = self.engine, replace(self.engine.policy, param_dtype=None)
        mixed = engine.policy.param_dtype is not None
        kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
        for name, param in sorted(named, key=lambda item: (not item[1].requires_grad, str(item[1].dtype))):
            cast = mixed and param.ndim > 1
            kinds.setdefault((param.requires_grad, param.dtype, cast), []).append((name, param))
        return [
            Chunk(
                members,
                layer=self.name,
                trainable=trains,
                comm=engine.comm,
                device=device,
                policy=engine.policy if cast else as_stored,
            )
            for (trains, _, cast), members in kinds.items()
        ]

    def _fill(self) -> None:
        """Read the weights from their files. If a rank cannot, all raise."""
        failure, cause = None, None
        try:
            for chunk in self.chunks:
                chunk.fill()
        except Exception as error:
            failure, cause = str(error), error
        told = [f"rank {r}: {why}" for r, why in enumerate(self.engine.comm.all_objects(failure)) if why is not None]
        if told:
            raise Zero3Error(f"cannot read the weights of layer {self.name!r}: {'; '.join(told)}") from cause

    def _arrange(self, chunks: list[Chunk]) -> None:
        """Let these be the layer's chunks."""
        self.chunks = sorted(chunks, key=lambda chunk: not chunk.trainable)
        self.trainable = [c for c in self.chunks if c.trainable]
        self._views = SlotViews([(c, c.compute_dtype) for c in self.chunks])
        self.grads = GradientCollector(self)
        for hook in self._grad_hooks:
            hook.remove()
        self._grad_hooks = []
        for place, chunk in enumerate(self.trainable):
            for index, param in enumerate(chunk.params):
                trains = param.requires_grad  # not if it was frozen again; torch hooks only what does
                hook = param.requires_grad_(True).register_post_accumulate_grad_hook(
                    partial(_grad_is_there, ref(self), place, index)
                )
                self._grad_hooks.append(hook)
                param.requires_grad_(trains)
        alone = self.engine.comm.world_size == 1 and all(c.compute_dtype == c.dtype for c in self.chunks)
        self.state = LayerState.RESIDENT if alone or not self.chunks else LayerState.SHARDED
        for chunk in self.chunks:
            if alone:
                chunk.point_to(chunk.views(chunk.data.detach()))
            else:
                chunk.park()

    @torch.no_grad()
    def unfreeze(self) -> None:
        """Let fixed parameters train that `requires_grad` now: they move to a trainable chunk of their own.

        What was trainable stays where it is, so that optimizers keep their state. A parameter that is frozen again
        stays in its trainable chunk and gets no gradient.
        """
        chunks: list[Chunk] = []
        for chunk in self.chunks if self.state is not LayerState.GATHERED else ():
            with as_they_are():
                wanting = [n for n, p in zip(chunk.names, chunk.params, strict=True) if p.requires_grad]
            if chunk.trainable or not wanting:
                chunks.append(chunk)
                continue
            self.engine.reduce_held(self)
            self.engine.comm.agree(f"unfreezing of {len(wanting)} parameters from {wanting[0]!r} on")
            chunk.point_to(chunk.views(self.gather([chunk])[0]))
            chunks += self._chunks_of(list(zip(chunk.names, chunk.params, strict=True)), chunk.data.device)
        if not set(chunks) <= set(self.chunks):
            self._arrange(chunks)
            self.updates += 1  # weights saved for backward lay elsewhere

    def gather(self, chunks: list[Chunk]) -> list[Tensor]:
        """Full flat spaces as stored (masters, not the compute dtype), one `[total]` per chunk, in new memory."""
        comm = self.engine.comm
        flats = []
        with torch.no_grad(), torch.inference_mode(False):
            for chunk in chunks:
                flat = torch.empty(chunk.total, dtype=chunk.dtype, device=chunk.data.device)
                comm.own(flat).copy_(chunk.data.detach())
                flats.append(flat)
            comm.wait(comm.gather(f"layer {self.name!r}", flats))
        return flats

    def join(self, engine: Engine) -> None:
        """Become the next layer of `engine`, before the first use."""
        self.engine = engine
        self.index = engine.add(self)

    def leave_module(self) -> None:
        """Take the hooks off the module, which is then on its own; its parameters stay as they are."""
        for hook in self._hooks + self._grad_hooks:
            hook.remove()
        for chunk in self.chunks:
            for param in chunk.params:
                disown(param)
            chunk.unpark()
        for owner in self._modules_inside():
            owner.__dict__["_parameters"] = dict(owner._parameters)

    def _modules_inside(self) -> Iterable[nn.Module]:
        """Every module that may own some of the layer's parameters, once."""
        return {m: None for top in (self.module, *self.entries) for m in top.modules()}

    # -- the seed's interface -----------------------------------------------------------------------------------------

    @property
    def chunk(self) -> list[Tensor]:
        """This rank's chunks as tensors: the trainable ones (an empty one if nothing trains), then the fixed ones."""
        nothing = [] if self.trainable else [torch.empty(0)]
        return nothing + [c.data for c in self.chunks]

    @property
    def chunk_size(self) -> list[int]:
        """Elements of each of `chunk`."""
        return [c.numel() for c in self.chunk]

    @property
    def param_refs(self) -> list[list[nn.Parameter]]:
        """The parameters themselves, in the order of `chunk`."""
        return ([] if self.trainable else [[]]) + [c.params for c in self.chunks]

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """What to build an optimizer from: the trainable chunks, or nothing."""
        return [s.param for c in self.chunks for s in c.segments]

    def fetch_params(self) -> None:
        """Gather the full parameters, on every rank, if they are not there. They stay until the next pass begins."""
        self.fetch()
        self.wait()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    # -- transparency -------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["module"], name)

    def train(self, mode: bool = True) -> Zero3Layer:
        self.module.train(mode)
        self.training = mode
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Zero3Layer:
        self.module.apply(fn)
        return self

    def extra_repr(self) -> str:
        return f"{type(self.module).__name__}, {self.state.name}"

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise Zero3Error(
            f"layer {self.name!r} is sharded over ranks and cannot be copied or pickled. Copy the module before it is "
            "sharded, or build a new one and load full_state_dict(module) into it."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__(None)

    def _guard_owners(self) -> None:
        """Turn uses of a sharded parameter that would silently read NaN into errors."""
        mine = {id(p) for c in self.chunks for p in c.params}
        there = (LayerState.FETCHED, LayerState.GATHERED, LayerState.RESIDENT)

        def needs_parameters(what: str) -> Callable[..., None]:
            def check(owner: nn.Module, *_: Any) -> None:
                if self.state not in (LayerState.GATHERED, LayerState.RESIDENT) and not self.engine.bare_state_dicts:
                    raise Zero3Error(
                        f"{what} of {type(owner).__name__} in layer {self.name!r} while its parameters are sharded. "
                        "Use full_state_dict(module), or call it inside "
                        "`with gather_parameters(module, writeback=...):`, on every rank."
                    )

            return check

        def before_forward(owner: nn.Module, _: Any) -> None:
            if self.engine.computing or self.state in there:
                return  # what is not there is fetched when it is read (`access.py`)
            raise Zero3Error(
                f"{type(owner).__name__} in layer {self.name!r} was called on its own, outside of the module that is "
                "wrapped. Call the wrapped module, choose smaller modules in `auto_wrap_policy`, or call it inside "
                "`with gather_parameters(module):`."
            )

        entries = set(self.entries)
        before_forward = torch.compiler.disable(before_forward)
        for owner in self._modules_inside():
            if not WatchedParameters.watch(owner, mine, self):
                continue
            self._hooks.append(owner.register_state_dict_pre_hook(needs_parameters("state_dict()")))
            self._hooks.append(owner.register_load_state_dict_pre_hook(needs_parameters("load_state_dict()")))
            if owner not in entries:
                self._hooks.append(owner.register_forward_pre_hook(before_forward, prepend=True))

    # -- fetch and release --------------------------------------------------------------------------------------------

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the slot that the layer needs."""
        return self._views.nbytes

    @property
    def version(self) -> int:
        """A number that changes with every update of the weights."""
        return self.updates + sum(chunk.data._version for chunk in self.chunks)

    @property
    def sharded(self) -> bool:
        """Whether using the layer needs a fetch first."""
        return self.state is LayerState.SHARDED

    @torch.no_grad()
    def fetch(self) -> None:
        """SHARDED -> FETCHING: start gathering all chunks into a slot. Called in the order that the engine keeps."""
        if self.state is not LayerState.SHARDED:
            return
        with as_they_are():
            for chunk in self.chunks:
                chunk.check_parked()
        comm, slot = self.engine.comm, self.engine.pool.take(self.slot_nbytes, self)
        comm.order_after("fetch", slot.free_event)
        with comm.on_stream("fetch"):
            flats = self._views.of(slot).flats
            slot.mark(self.version)
            for chunk, flat in zip(self.chunks, flats, strict=True):
                comm.own(flat).copy_(chunk.data)  # casts to the compute dtype
            self._fetch = comm.gather(f"layer {self.name!r}", flats)
        self._slot = slot
        self.state = LayerState.FETCHING

    def wait(self) -> None:
        """FETCHING -> FETCHED: the gather is done; parameters become views of the slot."""
        if self.state is not LayerState.FETCHING:
            return
        assert self._fetch is not None
        assert self._slot is not None
        self.engine.comm.wait(self._fetch)
        self._fetch = None
        for chunk, views in zip(self.chunks, self._views.of(self._slot).params, strict=True):
            chunk.point_to(views)
        self.state = LayerState.FETCHED

    def release(self) -> None:
        """FETCHED -> SHARDED: parameters become placeholders and the slot serves others."""
        self.wait()  # a gather cannot be called back
        if self.state is not LayerState.FETCHED:
            return
        assert self._slot is not None
        for chunk in self.chunks:
            chunk.check_unwritten()
            chunk.park()
        self.engine.pool.give(self._slot)
        self._slot = None
        self.state = LayerState.SHARDED

    def hold(self, full: list[Tensor]) -> None:
        """SHARDED -> GATHERED: parameters are views of `full`, one `[total]` per chunk, until `let_go`."""
        for chunk, flat in zip(self.chunks, full, strict=True):
            chunk.point_to(chunk.views(flat))
        self.state = LayerState.GATHERED

    def let_go(self) -> None:
        """GATHERED -> SHARDED."""
        for chunk in self.chunks:
            chunk.park()
        self.state = LayerState.SHARDED

    # -- forward ------------------------------------------------------------------------------------------------------

    # torch.compile of a module takes in its hooks. Ours stay outside of the graph, which then is the module's forward.

    @torch.compiler.disable
    def _before_forward(self, entry: nn.Module, args: Any, kwargs: Any) -> None:
        self.enter(args, kwargs)

    @torch.compiler.disable
    def _after_forward(self, entry: nn.Module, args: Any, output: Any) -> None:
        # The backward of an embedding needs no weight: what reaches its output is no reason to fetch.
        self.leave(output, fetch_in_backward=type(entry) not in (nn.Embedding, nn.EmbeddingBag))

    def enter(self, *inputs: Any) -> None:
        """A use begins: parameters are there when this returns. Calls inside of it are part of it."""
        if self.depth == 0:
            if self.sharded and compat.in_functional_transform():
                raise Zero3Error(
                    f"layer {self.name!r} was called under a torch.func transform (grad, vjp, vmap, ...), which "
                    "cannot see sharded parameters. Call it inside `with gather_parameters(module):`."
                )
            if self.state is LayerState.RESIDENT:  # no fetch will notice
                for chunk in self.chunks:
                    chunk.check_in_place()
            self.engine.before_use(self)
            self._releases_by_input = False
            if torch.is_grad_enabled():
                for tensor in tensors_in(inputs):
                    if tensor.grad_fn is not None:
                        tensor.register_hook(self._on_input_grad)
                        self._releases_by_input = True
        self.engine.saved.push()  # each time: activation checkpointing around this call may have pushed its own
        self.depth += 1

    def leave(self, output: Any = None, fetch_in_backward: bool = True) -> None:
        """A use ends, normally or by an exception."""
        if self.depth == 0:  # `enter` failed
            return
        self.depth -= 1
        self.engine.saved.pop()
        if self.depth == 0:
            if self._slot is not None and any(self.engine.pool.of_tensor(t) is self._slot for t in tensors_in(output)):
                self.engine.keep_until_pass_ends(self)  # a weight, or a part of one, is what it returned
            if torch.is_grad_enabled() and fetch_in_backward and self.chunks:
                for tensor in tensors_in(output):
                    if tensor.grad_fn is not None:
                        tensor.register_hook(self._on_output_grad)
            self.engine.after_use(self, failed=output is None and sys.exc_info()[0] is not None)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _on_output_grad(self, _: Tensor) -> None:
        """The gradient of an output of a use is there: backward of the use begins."""
        self.engine.before_backward_use(self)

    def _on_input_grad(self, _: Tensor) -> None:
        """All gradients of an input of a use are there.

        Autograd runs first what was computed last, so it is done with the use. What is left after all fetches again.
        """
        self.engine.after_backward_use(self)

    def needed_in_backward(self) -> Slot:
        """Fetch for backward. Returns where the weights are."""
        self.engine.before_backward_use(self)
        if self._slot is None:
            raise Zero3Error(
                f"backward through layer {self.name!r} inside gather_parameters(): its forward was outside. Leave the "
                "context first, or compute the forward inside as well."
            )
        return self._slot

    @torch.no_grad()
    def _on_grad(self, place: int, index: int, param: Tensor) -> None:
        """A parameter's gradient is complete: move it to the flat gradient. With the last one, release and reduce."""
        grad = param.grad
        if isinstance(grad, ShardedGrad):  # of before this pass, which begins here
            grad = grad.take_arrived()
        else:
            param.grad = None
        if grad is None:
            return
        self.engine.touch()
        param.grad = None
        last = self.grads.waits_for_only(place, index)
        if last and not (self._releases_by_input and len(self.trainable) < len(self.chunks)):
            # Every use of a weight contributes to its gradient: nobody needs the slot any more, and the gradient may
            # take it. (Not so with fixed parameters in the layer; then the input's gradient tells.)
            self.engine.after_backward_use(self)
        self.grads.put(place, index, grad)
        if last:
            self.engine.reduce(self)


def _grad_is_there(layer: ref[Zero3Layer], place: int, index: int, param: Tensor) -> None:
    """The hook of a parameter's gradient. torch keeps it where no garbage collector looks, so it holds nobody."""
    held = layer()
    if held is not None:
        held._on_grad(place, index, param)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):  # also Hugging Face's ModelOutput
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))
