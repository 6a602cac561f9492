"""What a run will take, before it runs: the engine itself, with tensors without memory and ranks that do not exist.

A step of training runs as the first of N ranks, through the strategy's own code: layers are cut, fetched, released and
reduced as they will be. What is counted is therefore not a model of the engine that could differ from it.
"""

from __future__ import annotations

import inspect
import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zero3.comm import Communicator, Traffic
from lightning_zero3.errors import Zero3Error
from lightning_zero3.report import Report, human
from lightning_zero3.weights import empty_parameters, rehearsal

__all__ = ["ImaginedRanks", "Plan", "Rehearsal", "largest_micro_batch", "plan"]


class ImaginedRanks(Communicator):
    """The first of `world_size` ranks, the others of which do not exist: what is sent is counted, and no more.

    Args:
        world_size: of the run.
        streams: whether collectives are ordered by streams, as on CUDA, or waited for, as on the CPU.
    """

    def __init__(self, world_size: int, streams: bool = False) -> None:
        self.device = torch.device("cpu")
        self.traffic = Traffic()
        self.rank, self.world_size = 0, world_size
        self._streams = {}
        self._works = [] if streams else [None]

    def _log(self, what: str) -> None:
        pass

    def _all_gather(self, flat: Tensor) -> list[Any]:
        return self._works

    def _reduce_scatter(self, flat: Tensor) -> list[Any]:
        return self._works

    def _wait(self, work: Any, what: str) -> None:
        pass

    def scatter(self, flat: Tensor | None, out: Tensor) -> None:
        assert flat is not None
        out.copy_(self.own(flat))

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        return tensor

    def any_of(self, what: str, mine: list[bool]) -> list[bool]:
        return mine

    def all_objects(self, obj: Any) -> list[Any]:
        return [obj] * self.world_size

    def together(self, what: str, timeout: Any = None) -> None:
        pass

    def agree(self, what: str) -> None:
        self.traffic.agreements += 1


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that operations inside have made and that are still held; `peak` is the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._live:
            return

        def gone(_: Any) -> None:
            del self._live[key]
            self.now -= nbytes

        self._live[key] = weakref.ref(storage, gone)
        self.now += nbytes
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True)
class Plan:
    """What each rank takes for a step of training, in bytes.

    Attributes:
        report: parameters, gradients, optimizer state and slots, as `Zero3Strategy.report()` of the run will say.
        peak: the most bytes of tensors at once.
        traffic: collectives of one step, and what one rank sends in them.
    """

    report: Report
    peak: int
    traffic: Traffic

    @property
    def activations(self) -> int:
        """What the peak has beside model states and slots: activations and whatever else a step makes."""
        return self.peak - self.report.total[0]

    def rows(self) -> list[tuple[str, int]]:
        """(what, bytes per rank), the peak last."""
        states = [(what, ours) for what, ours, _ in self.report.rows()[:-1]]
        return [*states, ("activations", self.activations), ("peak", self.peak)]

    def __str__(self) -> str:
        report, sent = self.report, self.traffic
        lines = [
            f"ZeRO-3 on {report.world_size} ranks: {report.numel:,} parameters, {report.trainable:,} of them trainable",
            *(f"{what:<16}{human(nbytes):>14}" for what, nbytes in self.rows()),
            f"a step sends {human(sent.fetch_bytes)} in {sent.fetches} fetches and {human(sent.reduce_bytes)} in "
            f"{sent.reduces} reductions per rank",
        ]
        return "\n".join(lines)


def plan(
    make_module: Callable[[], Any],
    make_batch: Callable[[Any], Any],
    *,
    world_size: int,
    strategy: Any = None,
    precision: Any = "32-true",
    micro_batches: int = 1,
    accelerator: str = "cpu",
) -> Plan:
    """What a step of training will take on each of `world_size` ranks. Allocates and computes nothing.

    Args:
        make_module: makes the LightningModule; its `configure_model`, if any, is called too.
        make_batch: makes what `training_step` gets, of any values, for that module.
        world_size: ranks of the run.
        strategy: the run's `Zero3Strategy`; default one with default options.
        precision: the Trainer's.
        micro_batches: the Trainer's `accumulate_grad_batches`.
        accelerator: "cpu" or "cuda", which has a slot less in flight. Sizes are those of the CPU's operations.

    Raises:
        Zero3Error: training needs values, which there are none of; or the run itself would raise.
    """
    rehearsal = Rehearsal(
        make_module,
        world_size=world_size,
        strategy=strategy,
        precision=precision,
        micro_batches=micro_batches,
        accelerator=accelerator,
    )
    return rehearsal.plan(make_batch)


class Rehearsal:
    """A run without memory, of which steps can be planned with one batch after the other. Arguments as for `plan`."""

    def __init__(
        self,
        make_module: Callable[[], Any],
        *,
        world_size: int,
        strategy: Any = None,
        precision: Any = "32-true",
        micro_batches: int = 1,
        accelerator: str = "cpu",
    ) -> None:
        from lightning_zero3.strategy import Zero3Strategy

        self._strategy = strategy = strategy or Zero3Strategy()
        self._micro_batches = micro_batches
        with _quiet():
            trainer = _trainer(strategy, precision)
            with strategy.tensor_init_context(), empty_parameters(), rehearsal():
                self._module = module = make_module()
                trainer.strategy.connect(module)
                module._trainer = trainer
                module.configure_model()
                strategy.precision_plugin.convert_module(module)
        self._comm, self._live = ImaginedRanks(world_size, streams=accelerator == "cuda"), LiveBytes()
        self._steps = 0
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            _pretend(module)
            with self._live:
                self._engine = strategy.shard(self._comm)
            self._optimizers = _optimizers(module, strategy)
            module.train()
        self._peak_before = self._live.peak

    def plan(self, make_batch: Callable[[Any], Any]) -> Plan:
        """What a step takes with a batch. See `plan`."""
        live, module = self._live, self._module
        live.peak = live.now
        with self._mode, _quiet():
            batch = tree_map_only(Tensor, torch.empty_like, make_batch(module))
            try:
                steady = False
                while not steady:  # the first step records the order of layers; fetching ahead then takes more slots
                    slots = self._engine.pool.nbytes
                    self._comm.traffic.reset()
                    with live:
                        _step(module, self._strategy, self._optimizers, batch, self._micro_batches)
                    self._steps += 1
                    steady = self._steps > 1 and self._engine.pool.nbytes == slots
            except Exception as error:
                if "DataDependent" in type(error).__name__ or "DataDependent" in str(error):
                    raise Zero3Error(
                        f"{type(module).__name__}.training_step looks at values ({error}), and a plan has none. Keep "
                        ".item() and `if tensor` out of it, or plan a module that leaves them out."
                    ) from error
                raise
            optimizer = _optimizer_bytes(self._strategy, self._optimizers)
            report = replace(Report.of(self._engine, []), optimizer=optimizer)
        peak = max(self._peak_before, live.peak) + optimizer[0]
        return Plan(report, peak, replace(self._comm.traffic))


def _pretend(module: nn.Module) -> None:
    """Let parameters and buffers be on the CPU, without memory there."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None and param.is_meta:
                new = made.setdefault(
                    id(param), nn.Parameter(torch.empty_like(param, device="cpu"), param.requires_grad)
                )
                owner._parameters[name] = new
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = torch.empty_like(buffer, device="cpu")


def _trainer(strategy: Any, precision: Any) -> Any:
    """A Trainer that never fits: what modules ask their Trainer about."""
    from lightning.pytorch import Trainer

    strategy._start_method = "fork"  # nothing is started; but in Jupyter a Trainer would refuse the others
    return Trainer(
        strategy=strategy,
        precision=precision,
        accelerator="cpu",
        devices=1,
        barebones=True,
        max_epochs=-1,
        max_steps=1000,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Lightning says about Trainers that lack everything."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*barebones")
            warnings.filterwarnings("ignore", message=".*AMP with fp16 is not supported on CPU")  # sizes are the same
            yield
    finally:
        log.setLevel(level)


def _optimizers(module: Any, strategy: Any) -> list[Optimizer]:
    from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers

    optimizers, _ = _init_optimizers_and_lr_schedulers(module)
    strategy.adopt(optimizers)
    return optimizers


def _step(module: Any, strategy: Any, optimizers: list[Optimizer], batch: Any, micro_batches: int) -> None:
    """Forward and backward of each micro-batch. As in Lightning's loop, forward finds the last step's gradients."""
    traffic = strategy.engine.comm.traffic
    few = min(micro_batches, 3)  # the first, those in the middle, which are all alike, and the last
    for micro in range(few):
        before = replace(traffic)
        with torch.enable_grad() if micro == few - 1 else strategy.block_backward_sync():
            output = strategy.training_step(batch, micro)
            for optimizer in optimizers if micro == 0 else ():
                optimizer.zero_grad()
            loss = output["loss"] if isinstance(output, dict) else output
            strategy.backward(loss, optimizers[0] if optimizers else None)
        if few == 3 and micro == 1:
            for field in fields(traffic):
                more = (micro_batches - few) * (getattr(traffic, field.name) - getattr(before, field.name))
                setattr(traffic, field.name, getattr(traffic, field.name) + more)
    for optimizer in optimizers:
        strategy.segments(optimizer)  # as they are shown for a step


def _optimizer_bytes(strategy: Any, optimizers: list[Optimizer]) -> tuple[int, int]:
    """State that a step makes: what the same optimizer keeps for a few real elements, for as many as there are."""
    ours = ddp = 0
    for optimizer in optimizers:
        segments = strategy.segments(optimizer)
        real = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        for dtype, count in Counter(p.dtype for p in segments for _ in range(1)).items():
            per_element, scalars = _state_of(optimizer, dtype)
            numel = sum(p.numel() for p in segments if p.dtype is dtype)
            ours += per_element * numel + scalars * count
            ddp += per_element * real
    return ours, ddp


def _state_of(optimizer: Optimizer, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that an optimizer keeps for an element, and beside that for a parameter."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        param = nn.Parameter(torch.ones(64, dtype=dtype))
        param.grad = torch.ones_like(param)
        takes = inspect.signature(type(optimizer)).parameters
        options = {
            k: v for k, v in optimizer.param_groups[0].items() if k in takes and k not in ("params", "capturable")
        }
        small = type(optimizer)([param], **options)
        small.step()
        state = [v for v in small.state[param].values() if isinstance(v, Tensor)]
        return (
            sum(v.element_size() for v in state if v.shape == param.shape),
            sum(v.nbytes for v in state if v.shape != param.shape),
        )


def largest_micro_batch(plan_of: Callable[[int], Plan], memory: int) -> int:
    """The largest micro-batch with a peak of at most `memory` bytes; 0 if not even one sample fits.

    Args:
        plan_of: plans a micro-batch of that many samples. What it takes grows with them, nearly in proportion.
    """
    one, two = plan_of(1).peak, plan_of(2).peak
    if one > memory:
        return 0
    fits, fails, guess = 1, None, 1 + (memory - one) // max(1, two - one)
    while fails is None or fails - fits > 1:
        peak = plan_of(guess).peak
        if peak <= memory:
            fits = guess
        else:
            fails = guess
        slope = max(1, (peak - one) // max(1, guess - 1))
        guess = 1 + (memory - one) // slope  # where the line through one sample and this guess meets the limit
        guess = max(fits + 1, guess if fails is None else min(guess, fails - 1))
    return fits
