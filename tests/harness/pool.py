"""Run a test body on several ranks, in worker processes that are started once per test run.

Starting a process with torch and Lightning costs seconds; a job on the pool costs about 0.1 s. A server process
imports the heavy modules once and forks the workers, so that killing and restarting them is cheap too. After any
failure the pool does exactly that: no test inherits the state of one that failed.

A job at world `w` runs on workers 0 to w-1. Each makes a fresh gloo group on a file store (no port to race for) and
sees the environment variables that torchrun sets, so that a `Trainer(devices=w)` inside believes that its processes
were created for it and uses the group that exists.

Function and arguments travel by name and by pickle: the function lives at the top of a module, and the arguments (of
a test: its fixtures and parameters) can be pickled.
"""

import atexit
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness import worker

START = 120.0  # seconds that the workers may take to start
DEADLINE = 120.0  # seconds that a job may take
TIMEOUT = 60.0  # seconds after which a collective gives up; less than the deadline, so that its own error is seen
GRACE = 2.0  # seconds that the other ranks get after the first failure

# Imported once, in the server that forks the workers. None of them starts a thread: a fork copies only one.
PRELOAD = [
    "pytest",
    "torch.distributed.fsdp",
    "lightning.pytorch",
    "transformers.models.gpt_neox.modeling_gpt_neox",
]
# One thread everywhere: two cores are shared by all ranks, and results do not depend on how a sum was split.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "MASTER_ADDR": "127.0.0.1",
    "COLUMNS": "120",
}


class DistributedError(AssertionError):
    """At least one rank failed, died or hung. `failures` holds the text per rank, in order of arrival."""

    def __init__(self, title: str, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n\n".join([title, *failures.values()]))


class Worker(NamedTuple):
    """A worker process, the parent's end of the pipe to it, and the files it writes to."""

    process: BaseProcess
    conn: Connection
    output: Path
    stacks: Path


class Pool:
    """Worker processes, started on demand. Use `distributed` and `run`; tests do not touch the pool."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._directory = Path(tempfile.mkdtemp(prefix="worker-pool-"))
        self._workers: list[Worker] = []
        self._jobs = 0
        self._owner = os.getpid()
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        return [w.process.pid for w in self._workers if w.process.pid is not None]

    def run(self, function: Callable, world: int, args: tuple, kwargs: dict, deadline: float, timeout: float) -> list:
        """What each rank returned.

        Raises:
            DistributedError: a rank raised, died, or did not answer within `deadline` seconds.
            pytest.skip.Exception, pytest.xfail.Exception: a rank said so and none failed.
        """
        __tracebackhide__ = True
        name = f"{function.__module__}.{function.__qualname__}"
        self._start(world)
        self._jobs += 1
        job = worker.Job(
            module=function.__module__,
            name=function.__qualname__,
            arguments=_pickle((args, kwargs), f"an argument of {name}"),
            world=world,
            store=str(self._directory / f"store-{self._jobs}"),
            port=_free_port(),
            timeout=timeout,
            path=sys.path,
        )
        replies, failures = self._collect(job, world, name, deadline)
        self._forward_output(world)
        if failures:
            self.stop()
            raise DistributedError(_title(name, world, failures), failures)
        for reply in replies:
            if reply.kind == "skip":
                pytest.skip(reply.text)
            if reply.kind == "xfail":
                pytest.xfail(reply.text)
        return [pickle.loads(reply.value) for reply in replies]

    def stop(self) -> None:
        """Kill all workers. The next job starts new ones."""
        workers, self._workers = self._workers, []
        for w in workers:
            w.process.kill()
        for w in workers:
            w.process.join()
            w.conn.close()

    def close(self) -> None:
        """Kill all workers and remove what they wrote. Does nothing in a fork of the pool's process."""
        if os.getpid() == self._owner:
            self.stop()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, world: int) -> None:
        """Have at least `world` workers that are ready; how long they take to start is nobody's deadline."""
        started = range(len(self._workers), world)
        for rank in started:
            parent, child = self._context.Pipe()
            output, stacks = (self._directory / f"rank{rank}.{kind}" for kind in ("output", "stacks"))
            environment = {**os.environ, **ENVIRONMENT}
            process = self._context.Process(
                target=worker.main, args=(child, rank, str(output), str(stacks), environment), name=f"rank {rank}"
            )
            with _environment(ENVIRONMENT):  # the first start also starts the server, which imports torch
                process.start()
            child.close()
            self._workers.append(Worker(process, parent, output, stacks))
        for rank in started:
            w = self._workers[rank]
            if not wait([w.conn, w.process.sentinel], START) or self._receive(rank) is None:
                output = w.output.read_text(errors="replace") if w.output.exists() else ""
                self.stop()
                raise RuntimeError(f"worker {rank} did not start within {START:g} s\n{output}")

    def _collect(
        self, job: worker.Job, world: int, name: str, deadline: float
    ) -> tuple[list[worker.Reply], dict[int, str]]:
        """Send the job and wait for the answers, but for no longer than the deadline, or `GRACE` after a failure."""
        failures: dict[int, str] = {}
        replies: dict[int, worker.Reply] = {}
        for w in self._workers[:world]:
            try:
                w.conn.send(job)
            except OSError:  # died between two jobs; what it left is found below
                continue
        end = time.monotonic() + deadline
        overdue = f"did not answer within {deadline:g} s"
        while missing := [r for r in range(world) if r not in replies and r not in failures]:
            by_handle = {h: r for r in missing for h in (self._workers[r].conn, self._workers[r].process.sentinel)}
            ready = wait(by_handle, max(0.0, end - time.monotonic()))
            if not ready:
                break
            for rank in sorted({by_handle[handle] for handle in ready}):
                reply = self._receive(rank)
                if reply is None:
                    failures[rank] = f"---- rank {rank} died ({self._exit(rank)}) ----{self._stacks(rank, False)}"
                elif reply.kind == "raise":
                    failures[rank] = f"---- rank {rank} raised ----\n{reply.text}"
                else:
                    replies[rank] = reply
            if failures and end > time.monotonic() + GRACE:
                end = time.monotonic() + GRACE
                overdue = f"did not answer within {GRACE:g} s of the first failure (it may be waiting for that rank)"
        for rank in missing:
            failures[rank] = f"---- rank {rank} {overdue} ----{self._stacks(rank)}"
        return [replies[r] for r in sorted(replies)], failures

    def _receive(self, rank: int) -> worker.Reply | None:
        with suppress(EOFError, OSError):
            if self._workers[rank].conn.poll():
                return pickle.loads(self._workers[rank].conn.recv_bytes())
        return None

    def _exit(self, rank: int) -> str:
        process = self._workers[rank].process
        process.join(1.0)
        code = process.exitcode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"

    def _stacks(self, rank: int, ask: bool = True) -> str:
        """The Python stacks of a rank, which its fault handler writes on a signal even while it sits in C code."""
        w = self._workers[rank]
        if ask:
            with suppress(ProcessLookupError):
                os.kill(w.process.pid or 0, worker.STACK_SIGNAL)
            time.sleep(0.3)
        text = w.stacks.read_text(errors="replace") if w.stacks.exists() else ""
        return f"\n{_trim(text)}" if text else ""

    def _forward_output(self, world: int) -> None:
        """Print what the ranks printed, for pytest to show when the test fails."""
        for rank, w in enumerate(self._workers[:world]):
            text = w.output.read_text(errors="replace") if w.output.exists() else ""
            if text.strip():
                print(f"---- output of rank {rank} ----\n{text.rstrip()}")


def _title(name: str, world: int, failures: dict[int, str]) -> str:
    ranks = ", ".join(map(str, sorted(failures)))
    return f"{name} failed at world {world} on rank{'s' * (len(failures) > 1)} {ranks}"


def _trim(stacks: str) -> str:
    """A fault handler's dump without the harness's own frames, and without threads that have no others."""
    threads = []
    for block in re.split(r"\n(?=(?:Current thread|Thread) )|\n\n", stacks):
        lines = []
        for line in block.splitlines():
            if worker.__file__ in line:
                break
            lines.append(line)
        if any(line.startswith("  File") for line in lines):
            threads.append("\n".join(lines))
    return "\n".join(threads)


def _free_port() -> int:
    """A port for code that makes its own group from the environment. The harness itself uses none."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _pickle(value: Any, what: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"{what} cannot be sent to the workers: {error}") from error


@contextmanager
def _environment(values: dict[str, str]):
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@functools.cache
def pool() -> Pool:
    """The pool of this process, made on first use."""
    if worker.is_worker():
        raise RuntimeError("a test body on the pool cannot start another job; call `run` from a plain test")
    return Pool()


def run(
    function: Callable[..., Any],
    world: int,
    /,
    *args: Any,
    deadline: float = DEADLINE,
    timeout: float = TIMEOUT,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on ranks 0 to world-1 of a gloo group; returns what each rank returned."""
    __tracebackhide__ = True
    function = getattr(function, "__body__", function)
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or "<" in name:
        raise TypeError(f"{function!r} must be a function at the top of a module: workers import it by name")
    return pool().run(function, world, args, kwargs, deadline, timeout)


def distributed(
    world: int | Sequence[int], *, deadline: float = DEADLINE, timeout: float = TIMEOUT
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a test into one that runs on every rank of a group of `world` ranks, or of each of several worlds.

    Fixtures and parameters reach the body as pickled keyword arguments. A body with an argument `world` gets it.
    `pytest.skip`, `pytest.xfail` and `pytest.raises` work inside.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)
        wants_world = "world" in signature.parameters
        several = not isinstance(world, int)

        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            __tracebackhide__ = True
            ranks = kwargs.pop("world") if several else world
            if wants_world:
                kwargs["world"] = ranks
            pool().run(body, ranks, (), kwargs, deadline, timeout)

        parameters = [p for p in signature.parameters.values() if p.name != "world"]
        if several:
            parameters.append(inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY))
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        test.__body__ = body  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", world, ids="world{}".format)(test) if several else test

    return decorate


def resolve(module: str, name: str) -> Callable[..., Any]:
    """The function of that name, without the decorator that would send it to the pool again."""
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    return getattr(function, "__body__", function)
