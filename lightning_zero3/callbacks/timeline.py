"""What happens when: fetches, compute, reductions and waits of each layer, for a few steps of a run.

The engine knows nothing of it. While it records, the few methods through which all of this goes are wrapped, on that
engine only.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_zero3 import compat
from lightning_zero3.comm import Pending
from lightning_zero3.engine import Engine
from lightning_zero3.errors import Zero3Error

__all__ = ["Span", "Timeline", "draw", "exposed", "recorded", "write_trace"]

TRACKS = ("forward", "backward", "wait", "fetch", "reduce")  # from top to bottom


class Span(NamedTuple):
    """Something that lasted. Times in seconds since the recording began."""

    track: str
    name: str
    start: float
    end: float


class _Recording:
    """Wraps an engine's methods, and collects spans. Collectives end on threads of their own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.spans: list[Span] = []
        self._lock = threading.Lock()
        self._zero = time.perf_counter()
        self._open: list[tuple[str, float]] = []
        self._backwards: dict[str, float] = {}

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def add(self, track: str, name: str, start: float) -> None:
        with self._lock:
            self.spans.append(Span(track, name, start, self.now()))

    def collective(self, track: str, start_it: Callable[..., Pending]) -> Callable[..., Pending]:
        @wraps(start_it)
        def call(what: str, flats: Any) -> Pending:
            start = self.now()
            pending = start_it(what, flats)
            left = len(pending.works)

            def one_done(_: Any) -> None:
                nonlocal left
                with self._lock:
                    left -= 1
                    last = left == 0
                if last:
                    self.add(track, _layer_in(what), start)

            for work in pending.works:
                work.get_future().add_done_callback(one_done)
            return pending

        return call

    def wait(self, wait: Callable[[Pending], None]) -> Callable[[Pending], None]:
        @wraps(wait)
        def call(pending: Pending) -> None:
            start = self.now()
            wait(pending)
            if pending.works:
                self.add("wait", pending.what, start)

        return call

    def before_use(self, before: Callable[..., None]) -> Callable[..., None]:
        @wraps(before)
        def call(layer: Any) -> None:
            before(layer)
            self._open.append((layer.name, self.now()))

        return call

    def after_use(self, after: Callable[..., None]) -> Callable[..., None]:
        @wraps(after)
        def call(layer: Any, failed: bool) -> None:
            if self._open:
                name, start = self._open.pop()
                again = compat.current_graph_task() != -1
                self.add("backward" if again else "forward", f"{name} again" if again else name, start)
            after(layer, failed)

        return call

    def before_backward(self, before: Callable[..., None]) -> Callable[..., None]:
        @wraps(before)
        def call(layer: Any) -> None:
            before(layer)
            self._backwards.setdefault(layer.name, self.now())

        return call

    def ends_backward(self, end: Callable[..., None]) -> Callable[..., None]:
        @wraps(end)
        def call(layer: Any) -> None:
            start = self._backwards.pop(layer.name, None)
            if start is not None:
                self.add("backward", layer.name, start)
            end(layer)

        return call


@contextmanager
def recorded(engine: Engine) -> Iterator[list[Span]]:
    """Record what an engine does inside. The list is complete afterwards. On the CPU; CUDA has its own profilers.

    Raises:
        Zero3Error: the model is on CUDA, where the host only queues work.
    """
    if engine.device.type == "cuda":
        raise Zero3Error("a timeline times the host, which only queues work on CUDA. Use torch.profiler there.")
    recording = _Recording(engine)
    comm = engine.comm
    wrapped: list[tuple[Any, str, Any]] = [
        (comm, "gather", recording.collective("fetch", comm.gather)),
        (comm, "reduce", recording.collective("reduce", comm.reduce)),
        (comm, "wait", recording.wait(comm.wait)),
        (engine, "before_use", recording.before_use(engine.before_use)),
        (engine, "after_use", recording.after_use(engine.after_use)),
        (engine, "before_backward_use", recording.before_backward(engine.before_backward_use)),
        (engine, "after_backward_use", recording.ends_backward(engine.after_backward_use)),
        (engine, "reduce", recording.ends_backward(engine.reduce)),
    ]
    for owner, name, method in wrapped:
        setattr(owner, name, method)
    try:
        yield recording.spans
    finally:
        for owner, name, _ in wrapped:
            delattr(owner, name)


def _layer_in(what: str) -> str:
    """The layer of "fetch of layer 'blocks.0'"."""
    return what.partition("'")[2].rpartition("'")[0] or what


def exposed(spans: list[Span], seconds: float) -> float:
    """The part of the time in which this rank did nothing but wait for others, or for data on their way."""
    return sum(s.end - s.start for s in spans if s.track == "wait") / seconds if seconds else 0.0


def write_trace(path: str | Path, spans: list[list[Span]]) -> None:
    """Write spans, by rank, for https://ui.perfetto.dev or chrome://tracing (the Trace Event Format)."""
    events: list[dict[str, Any]] = []
    for rank, of_rank in enumerate(spans):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for thread, track in enumerate(TRACKS):
            events.append({"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": track}})
        for span in sorted(of_rank, key=lambda s: s.start):
            events.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": TRACKS.index(span.track),
                    "name": span.name,
                    "cat": span.track,
                    "ts": round(span.start * 1e6, 1),
                    "dur": round((span.end - span.start) * 1e6, 1),
                }
            )
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def draw(path: str | Path, spans: list[Span]) -> None:
    """Draw one rank's spans: a line for each track, a colour for each layer.

    Raises:
        Zero3Error: matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Zero3Error("drawing a timeline needs matplotlib: pip install matplotlib") from error
    names = sorted({s.name for s in spans if s.track in ("fetch", "reduce")})
    colors = {name: colormaps["tab20"](i % 20) for i, name in enumerate(names)}
    figure = Figure(figsize=(12, 3), layout="constrained")
    axes = figure.subplots()
    for line, track in enumerate(reversed(TRACKS)):
        for span in (s for s in spans if s.track == track and s.name != "root"):
            color = "lightgray" if track == "wait" else colors.get(span.name.removesuffix(" again"), "gray")
            axes.broken_barh([(1e3 * span.start, 1e3 * (span.end - span.start))], (line - 0.4, 0.8), color=color)
    axes.set_yticks(range(len(TRACKS)), list(reversed(TRACKS)))
    axes.set_xlabel("ms; one colour for each layer")
    figure.savefig(path, dpi=110)


class Timeline(Callback):
    """Record a few training steps, and write `timeline.json` (for ui.perfetto.dev) and `timeline.png`.

    `exposed` is the part of those steps, from 0 to 1, in which the first rank only waited for communication.

    Args:
        dirpath: where to write; default the Trainer's `default_root_dir`.
        first_step: the first to record; those before warm up.
        steps: how many.
        draw: whether to draw the picture, which needs matplotlib.

    Raises:
        Zero3Error: a strategy that is not Zero3Strategy, or a model on CUDA.
    """

    def __init__(self, dirpath: str | None = None, first_step: int = 3, steps: int = 1, draw: bool = True) -> None:
        self.dirpath, self.first_step, self.steps, self.draw = dirpath, first_step, steps, draw
        self.exposed: float | None = None
        self._recording: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._recording is None and self.exposed is None and trainer.global_step >= self.first_step:
            engine = getattr(trainer.strategy, "engine", None)
            if engine is None:
                raise Zero3Error("Timeline records Zero3Strategy; leave it out under other strategies")
            engine.comm.together("a timeline")  # times of all ranks begin at once
            self._recording = recorded(engine)
            self._spans, self._began = self._recording.__enter__(), time.perf_counter()
            self._last = trainer.global_step + self.steps

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._recording is not None and trainer.global_step >= self._last:
            self._finish(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._recording is not None:  # training ended first
            self._finish(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._recording is not None:
            self._recording.__exit__(None, None, None)
            self._recording = None

    def _finish(self, trainer: Any) -> None:
        seconds = time.perf_counter() - self._began
        self._recording.__exit__(None, None, None)
        self._recording = None
        spans = trainer.strategy.engine.comm.all_objects([tuple(s) for s in self._spans])
        by_rank = [[Span(*s) for s in of_rank] for of_rank in spans]
        self.exposed = exposed(by_rank[0], seconds)
        if trainer.is_global_zero:
            directory = Path(self.dirpath or trainer.default_root_dir)
            directory.mkdir(parents=True, exist_ok=True)
            write_trace(directory / "timeline.json", by_rank)
            if self.draw:
                draw(directory / "timeline.png", by_rank[0])
            rank_zero_info(
                f"timeline of {1e3 * seconds:.0f} ms in {directory}: communication was exposed for {self.exposed:.0%} "
                "of the time on the first rank"
            )
