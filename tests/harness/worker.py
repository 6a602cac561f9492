"""The life of one worker process of the pool: wait for a job, run it, answer, put global state back.

Jobs run inside a pytest session without tests of its own: that gives `assert` its explanations.
"""

import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import pytest

STACK_SIGNAL = signal.SIGUSR2
_IS_WORKER = False


class Job(NamedTuple):
    """What the parent sends to each rank."""

    module: str
    name: str
    arguments: bytes  # pickled (args, kwargs)
    world: int
    store: str  # path of the file store of this job's group
    port: int
    timeout: float
    path: list[str]


class Reply(NamedTuple):
    """What a rank answers: kind is "ready" (once, before the first job), "return", "skip", "xfail" or "raise"."""

    kind: str
    text: str = ""
    value: bytes = b""


def is_worker() -> bool:
    return _IS_WORKER


def main(conn: Connection, rank: int, output: str, stacks: str, environment: dict[str, str]) -> None:
    """Serve jobs until the parent closes the pipe or dies."""
    global _IS_WORKER
    _IS_WORKER = True
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _redirect_output(output)
    stacks_file = open(stacks, "w")  # noqa: SIM115 - the fault handler keeps it
    faulthandler.enable(stacks_file, all_threads=True)
    faulthandler.register(STACK_SIGNAL, stacks_file, all_threads=True)
    os.environ.clear()
    os.environ.update(environment)

    class Server:
        """Pytest's hooks for collecting and running tests, replaced by serving jobs."""

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection(self) -> bool:
            return True

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtestloop(self) -> bool:
            _serve(conn, rank, environment)
            return True

    options = "-qq -s --noconftest --no-header -o addopts= -o testpaths="
    plugins = [f"-pno:{name}" for name in ("faulthandler", "cacheprovider", "threadexception", "unraisableexception")]
    pytest.main([*options.split(), *plugins], plugins=[Server()])
    os._exit(0)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _redirect_output(path: str) -> None:
    """Send file descriptors 1 and 2 to a file, so that C++ messages and child processes are seen too."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _serve(conn: Connection, rank: int, environment: dict[str, str]) -> None:
    import torch
    import torch.distributed as dist

    directory = os.getcwd()
    gc.freeze()  # half a million objects of modules, which no collection need look at again: 0.3 s less for each job
    conn.send_bytes(pickle.dumps(Reply("ready")))
    while True:
        try:
            job: Job = conn.recv()
        except EOFError:
            return
        os.truncate(1, 0)
        # The group of the previous job ends here and not with that job: now every rank is known to be through with it.
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(job.world),
            LOCAL_WORLD_SIZE=str(job.world),
            GROUP_RANK="0",
            MASTER_PORT=str(job.port),
            TORCHELASTIC_RUN_ID="harness",  # what Lightning takes as the sign of processes created by torchrun
        )
        os.chdir(directory)
        sys.path[:] = job.path
        _reset(rank)
        with warnings.catch_warnings():
            reply = _run(job, rank)
        gc.collect()
        sys.stdout.flush()
        sys.stderr.flush()
        conn.send_bytes(pickle.dumps(reply))
        del reply
        torch.set_grad_enabled(True)


def _run(job: Job, rank: int) -> Reply:
    import torch.distributed as dist

    from tests.harness.pool import resolve

    try:
        store = dist.FileStore(job.store, job.world)
        timeout = timedelta(seconds=job.timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=timeout)
        args, kwargs = pickle.loads(job.arguments)
        return Reply("return", value=pickle.dumps(resolve(job.module, job.name)(*args, **kwargs)))
    except pytest.skip.Exception as outcome:
        return Reply("skip", str(outcome))
    except pytest.xfail.Exception as outcome:
        return Reply("xfail", str(outcome))
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a body are failures of that rank as well
        return Reply("raise", _format(error))


def _format(error: BaseException) -> str:
    """The traceback from the test body on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__)).rstrip()


def _reset(rank: int) -> None:
    """Global state as in a new process."""
    import numpy
    import torch
    from lightning_utilities.core.rank_zero import rank_zero_only

    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_anomaly_enabled(False)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.benchmark = False
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    for name in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides on Ctrl-C
    logging.disable(logging.NOTSET)
    rank_zero_only.rank = rank  # Lightning's idea of this process, which a Trainer sets for good
