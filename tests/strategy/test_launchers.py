"""Real processes, started every way Lightning has: scripts, torchrun, spawn, notebooks, LightningCLI; L14, L18, L19."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch
from torch.utils.data import DataLoader

from tests.harness import assert_same, distributed, run
from tests.harness.models import MLP, Block, Pairs, adamw
from tests.strategy.runs import trainer, weights_of
from tests.strategy.scripts.fit import Small

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(*command: object, timeout: float = 150) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def ddp() -> list[dict]:
    """What `scripts/fit.py` does, under "ddp" on the ranks of this job."""
    module, kept = Small(), []
    data = DataLoader(Pairs(32, 7), batch_size=16)
    for _ in range(2):
        t = trainer("ddp", max_epochs=2)
        t.fit(module, data, data)
        kept.append({"loss": t.callback_metrics["val_loss"], "weights": deepcopy(weights_of(module))})
    return kept


@pytest.mark.parametrize(("strategy", "fits"), [("zero3", 2), ("zero3_spawn", 1)])
def test_a_script_trains_and_goes_on_in_a_second_trainer(tmp_path, strategy, fits):
    done = start(SCRIPTS / "fit.py", strategy, fits, tmp_path / "result.pt")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(torch.load(tmp_path / "result.pt"), run(ddp, 2)[0][:fits], rtol=1e-4)


NOTEBOOK = (
    """
import torch, lightning_zero3
from lightning.pytorch import Trainer
from tests.strategy.scripts.fit import Small
from tests.harness.models import MLP, Block, Pairs, adamw

module, kept = Small(), []
data = torch.utils.data.DataLoader(Pairs(32, 7), batch_size=16)
options = dict(accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False)
""",
    """
for _ in range(2):
    trainer = Trainer(strategy="zero3_notebook", **options)
    trainer.fit(module, data, data)
    weights = {k: v.clone() for k, v in module.state_dict().items()}
    kept.append({"loss": trainer.callback_metrics["val_loss"], "weights": weights})
""",
    """
scores = Trainer(strategy="zero3_notebook", **options).validate(module, data, verbose=False)
torch.save([kept, scores, module.net(torch.ones(1, 7)).detach()], RESULT)
trainer.save_checkpoint(RESULT + ".ckpt")
""",
    """
class Late(Small):  # whose model is made in the processes
    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = Small().net

late = Late()
Trainer(strategy="zero3_notebook", **options).fit(late, data)
torch.save(late.state_dict(), RESULT + ".late")
""",
)


def test_a_jupyter_kernel_has_the_trained_weights_afterwards(tmp_path, monkeypatch):
    """L18."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cells = [f"RESULT = {str(tmp_path / 'result.pt')!r}", *NOTEBOOK]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(notebook, timeout=150, kernel_name="python3").execute()
    kept, scores, output = torch.load(tmp_path / "result.pt")
    assert_same(kept, run(ddp, 2)[0], rtol=1e-4)
    assert_same(scores[0]["val_loss"], kept[1]["loss"], rtol=1e-5)
    plain = Small()
    plain.load_state_dict(kept[1]["weights"])
    assert_same(output, plain.net(torch.ones(1, 7)))
    saved = torch.load(f"{tmp_path / 'result.pt'}.ckpt", weights_only=True)["state_dict"]
    assert_same(saved, dict(plain.state_dict()), rtol=0, atol=0)
    assert_same(torch.load(tmp_path / "result.pt.late"), kept[0]["weights"], rtol=1e-6)


CONFIG = """
trainer:
  strategy:
    class_path: lightning_zero3.Zero3Strategy
    init_args:
      auto_wrap_policy: [torch.nn.Linear]
      prefetch: 2
      reduce_dtype: bfloat16
      broadcast_buffers: false
      timeout: 00:02:00
  accelerator: cpu
  devices: 2
  precision: bf16-mixed
  max_steps: 2
  enable_progress_bar: false
  logger: false
  default_root_dir: {root}
  callbacks:
    - class_path: lightning_zero3.MemoryReport
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: {root}, filename: end, save_last: true}}
model: {{width: 14}}
"""


def test_a_lightning_cli_under_torchrun_takes_the_strategy_from_yaml(tmp_path):
    """L19."""
    config = tmp_path / "given.yaml"
    config.write_text(CONFIG.format(root=tmp_path))
    done = start(*TORCHRUN, SCRIPTS / "cli.py", "fit", "--config", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ZeRO-3 on 2 ranks") == 1
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["state_dict"]["net.blocks.0.linear.weight"].shape == (14, 7)
    assert saved["global_step"] == 2


@pytest.mark.parametrize(("rank", "callback"), [(0, "none"), (1, "OnExceptionCheckpoint")])
def test_when_one_rank_fails_all_end_and_its_error_is_seen(tmp_path, rank, callback):
    """L14."""
    done = start(SCRIPTS / "one_fails.py", rank, callback, tmp_path, timeout=100)
    assert done.returncode != 0
    assert "ValueError: no such luck on this rank" in done.stderr
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.parametrize(
    ("strategy", "whom", "signum"),
    [
        ("zero3", "all", signal.SIGTERM),
        ("zero3", "all", signal.SIGINT),
        ("zero3", "first", signal.SIGTERM),
        ("zero3_spawn", "all", signal.SIGTERM),
    ],
    ids=str,
)
def test_a_signal_ends_all_processes(tmp_path, strategy, whom, signum):
    """What `timeout`, a scheduler or Ctrl-C sends, to the whole group of processes or to the one that was started."""
    mark = tmp_path / "mark"
    command = [sys.executable, str(SCRIPTS / "goes_on.py"), strategy, str(mark)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with open(tmp_path / "output", "w") as output:
        started = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        files = [tmp_path / f"mark.{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), 100)
        ranks = [int(file.read_text()) for file in files]
        os.killpg(started.pid, signum) if whom == "all" else os.kill(started.pid, signum)
        wait_until(lambda: started.poll() is not None and not any(map(alive, ranks)), 60)
    except TimeoutError:
        pytest.fail((tmp_path / "output").read_text()[-3000:])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(done, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)


def test_pytorch_lightning_is_not_imported_for_those_who_do_not_use_it():
    code = "import sys, lightning_zero3; sys.exit('pytorch_lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0


@distributed(world=2)
def test_pytorch_lightning_has_the_strategy_too():
    """L19: its classes and registry are others than those of `lightning.pytorch`."""
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import StrategyRegistry

    assert {"zero3", "zero3_spawn", "zero3_notebook"} <= set(StrategyRegistry.available_strategies())

    class Plain(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = MLP(7, 15, 16)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return adamw(self.net)

    from lightning_zero3.pytorch_lightning import Zero3Strategy

    results = []
    for strategy in ("zero3", Zero3Strategy(auto_wrap_policy={Block}), "ddp"):
        t = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_epochs=2,
            precision="bf16-true",
            gradient_clip_val=0.1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        module = Plain()
        t.fit(module, DataLoader(Pairs(32, 7), batch_size=8))
        assert isinstance(t.precision_plugin, pl.plugins.Precision)
        results.append(weights_of(module))
    assert_same(results[0], results[2], rtol=0.02, atol=0.01)
    assert_same(results[1], results[2], rtol=0.02, atol=0.01)
