"""The harness itself: what a broken test does to the pool, and that it does nothing to the next one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import DistributedError, assert_same, distributed, run
from tests.harness import pool as pool_module

SEEN = []  # state of a worker that outlives a job, and so shows that processes are reused


def whoami() -> tuple[int, int, int, float]:
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), os.getpid(), total.item()


def rank_tensors() -> dict[str, torch.Tensor]:
    return {"filled": torch.full((2, 3), float(dist.get_rank()))}


def fail_on(rank: int, join: bool = False) -> int:
    print(f"hello from {dist.get_rank()}")
    if dist.get_rank() == rank:
        raise ValueError("broken on purpose")
    if join:
        dist.barrier()
    return dist.get_rank()


def hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.01)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def spoil() -> None:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(99)
    os.environ["SPOILED"] = "1"
    os.environ["RANK"] = "17"
    torch.set_num_threads(2)
    torch.autograd.grad_mode.set_grad_enabled(False)
    os.chdir("/")


def state() -> tuple:
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.initial_seed(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        "SPOILED" in os.environ,
        os.environ["RANK"] == str(dist.get_rank()),
        os.getcwd() != "/",
    )


def test_ranks_return_their_values():
    assert [(rank, world, total) for rank, world, _, total in run(whoami, 3)] == [(0, 3, 6), (1, 3, 6), (2, 3, 6)]


def test_tensors_come_back():
    for rank, value in enumerate(run(rank_tensors, 2)):
        assert_same(value, {"filled": torch.full((2, 3), float(rank))}, rtol=0, atol=0)


def test_worlds_change_and_processes_stay():
    pids: dict[int, set[int]] = {}
    for world in (2, 4, 1, 3):
        answers = run(whoami, world)
        assert [(rank, size) for rank, size, _, _ in answers] == [(rank, world) for rank in range(world)]
        for rank, _, pid, _ in answers:
            pids.setdefault(rank, set()).add(pid)
    assert all(len(of_rank) == 1 for of_rank in pids.values())
    assert len(set().union(*pids.values())) == 4


def test_an_exception_on_one_rank_is_named(capsys):
    with pytest.raises(DistributedError, match="broken on purpose") as error:
        run(fail_on, 3, 1)
    assert list(error.value.failures) == [1]
    assert "in fail_on" in str(error.value)
    assert "---- output of rank 2 ----\nhello from 2" in capsys.readouterr().out


def test_peers_of_a_failed_rank_do_not_hang():
    start = time.monotonic()
    with pytest.raises(DistributedError, match="broken on purpose") as error:
        run(fail_on, 3, 1, join=True)
    assert sorted(error.value.failures) == [0, 1, 2]
    assert next(iter(error.value.failures)) == 1, "the cause comes first"
    assert "barrier" in error.value.failures[0]
    assert time.monotonic() - start < 30


def test_a_hang_meets_the_deadline_and_shows_the_stack():
    with pytest.raises(DistributedError, match="did not answer within 5 s") as error:
        run(hang_on, 3, 2, deadline=5)
    assert list(error.value.failures) == [2]
    assert "in hang_on" in error.value.failures[2]
    assert len(run(whoami, 3)) == 3, "the next job works"


def test_a_dead_rank_is_named():
    with pytest.raises(DistributedError, match=r"rank 1 died \(exit code 7\)"):
        run(die_on, 2, 1)
    assert len(run(whoami, 2)) == 2


def test_global_state_is_put_back():
    clean = run(state, 2)
    run(spoil, 2)
    assert run(state, 2) == clean
    assert clean[0] == (torch.float32, False, 0, 1, True, False, True, True)


def test_what_cannot_travel_is_refused():
    with pytest.raises(TypeError, match="top of a module"):
        run(lambda: None, 2)
    with pytest.raises(TypeError, match="cannot be sent"):
        run(fail_on, 2, lambda: None)
    with pytest.raises(DistributedError, match="cannot start another job"):
        run(nested, 1)


def nested() -> None:
    run(whoami, 1)


@distributed(world=[1, 2, 4])
def test_body_runs_on_every_rank(world):
    assert whoami()[1] == world == dist.get_world_size()
    assert int(os.environ["RANK"]) == dist.get_rank() == int(os.environ["LOCAL_RANK"])


@pytest.mark.parametrize("factor", [2, 3])
@distributed(world=2)
def test_parameters_and_fixtures_reach_the_body(factor, tmp_path):
    assert factor in (2, 3)
    assert tmp_path.is_dir()
    with pytest.raises(ZeroDivisionError):
        _ = factor / 0


def skip_on(rank: int) -> None:
    if dist.get_rank() == rank:
        pytest.skip("not here")


def test_a_skip_on_one_rank_skips_the_test():
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run(skip_on, 2, 1)


@distributed(world=2)
def test_trainer_uses_the_group_of_the_pool(tmp_path):
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    group = dist.group.WORLD
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(BoringModel())
    assert trainer.world_size == 2
    assert trainer.global_rank == dist.get_rank()
    assert dist.group.WORLD is group


FAILING = """
from tests.harness import distributed

@distributed(world=2)
def test_wrong():
    import torch.distributed as dist
    print("printed by", dist.get_rank())
    assert dist.get_rank() + 1 == 5
"""


def test_a_failing_test_is_readable_and_leaves_no_process(tmp_path):
    """In a pytest of its own: the report explains the assertion and shows output; no worker outlives it."""
    root = Path(__file__).parents[1]
    (tmp_path / "test_wrong.py").write_text(FAILING)
    (tmp_path / "conftest.py").write_text((root / "tests/conftest.py").read_text())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_wrong.py")],
        env={**os.environ, "PYTHONPATH": str(root), "WORKER_POOL_TEST": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_wrong failed at world 2 on ranks 0, 1" in done.stdout
    assert "assert (1 + 1) == 5" in done.stdout
    assert "---- output of rank 1 ----\nprinted by 1" in done.stdout
    assert _all_end(f"WORKER_POOL_TEST={tmp_path}")


def test_workers_end_when_the_parent_is_killed(tmp_path):
    script = "import sys, time; from tests.harness.pool import pool, run; from tests.test_harness import whoami\n"
    script += "if __name__ == '__main__':\n    run(whoami, 2); print('up', flush=True); time.sleep(60)\n"
    (tmp_path / "script.py").write_text(script)
    root = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": str(root), "WORKER_POOL_TEST": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert _all_end(f"WORKER_POOL_TEST={tmp_path}")


def _all_end(variable: str) -> bool:
    """Whether, within 20 s, no process is left that was started with this setting in its environment."""
    end = time.monotonic() + 20
    while left := _processes_with(variable):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return not left


def _processes_with(variable: str) -> list[int]:
    if not Path("/proc/self/environ").exists():
        pytest.skip("needs /proc")
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_assert_same_names_first_and_worst():
    good = {"a": torch.zeros(3), "b": [1.0, torch.ones(2, 2)], "c": float("nan")}
    assert_same(good, good)
    bad = {"a": torch.tensor([0.0, 1e-3, 0.0]), "b": [1.0, torch.tensor([[1.0, 1.0], [1.0, 5.0]])], "c": float("nan")}
    with pytest.raises(AssertionError) as error:
        assert_same(bad, good, what="weights")
    assert "2 of 4 entries" in str(error.value)
    assert "first: ['a'] at [1]" in str(error.value)
    assert "worst: ['b'][1] at [1, 1]: 5 is not 1" in str(error.value)
    for change in ({"a": torch.zeros(4)}, {"c": 0.0}, {"a": torch.full((3,), torch.inf)}, {"d": 1}):
        with pytest.raises(AssertionError):
            assert_same({**good, **change}, good)


def test_the_pool_is_one():
    assert pool_module.pool() is pool_module.pool()
