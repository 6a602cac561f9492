"""One file made of a sharded checkpoint, without holding the model; and looks into what was made."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor

from lightning_zero3 import Zero3Error
from lightning_zero3.checkpoints import safetensors, sharded_checkpoint
from lightning_zero3.checkpoints.boxes import FlatRange
from lightning_zero3.checkpoints.consolidate import consolidate, parse_size
from lightning_zero3.checkpoints.durable import saved
from lightning_zero3.checkpoints.inspection import inspect_checkpoint
from lightning_zero3.tools.cli import main
from tests.harness import assert_same, run
from tests.harness.memory import needs_linux
from tests.strategy.runs import trainer, weights_of, zero3
from tests.strategy.test_checkpoints import Saved, Trusting, common_batches, make_mlp, with_schedule

ROOT = Path(__file__).parents[2]


class Scheduled(Saved):
    def configure_optimizers(self):
        return with_schedule(self.net)


def save_both(path: Path, precision: str) -> dict[str, Tensor]:
    """The same state, sharded and full."""
    keep = ModelCheckpoint(path / "kept", "{step}", monitor="train_loss")  # has tensors in its state
    strategy = zero3(state_dict_type="sharded")
    t = trainer(strategy, max_epochs=1, callbacks=[keep], precision=precision)
    module = Scheduled(width=14)
    t.fit(module, common_batches())
    t.save_checkpoint(path / "sharded.ckpt")
    strategy.state_dict_type = "full"
    t.save_checkpoint(path / "full.ckpt")
    return weights_of(module)


def leaves(value, at: str = "") -> Iterator[tuple[str, object]]:
    """Everything in nested containers, in order, with types and the layout of tensors."""
    if isinstance(value, dict):
        yield at, type(value)
        for key in value if "optimizer_states" not in at else sorted(value, key=str):
            yield from leaves(value[key], f"{at}.{key}")
    elif isinstance(value, (list, tuple)):
        yield at, type(value)
        for i, one in enumerate(value):
            yield from leaves(one, f"{at}.{i}")
    elif isinstance(value, Tensor):
        yield at, (value.dtype, value.shape, value.stride(), value.untyped_storage().nbytes(), value.tolist())
    else:
        yield at, value


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_it_is_what_a_full_save_wrote(tmp_path, precision, capsys):
    """In every entry, and as files of other formats. Under another process count, of course."""
    weights = run(save_both, 3, tmp_path, precision)[0]
    source = tmp_path / "sharded.ckpt"
    capsys.readouterr()
    assert main(["consolidate", str(source), str(tmp_path / "one.ckpt")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/one.ckpt\n"
    ours, full = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("one", "full"))
    assert sorted(leaves(ours), key=lambda leaf: leaf[0]) == sorted(leaves(full), key=lambda leaf: leaf[0])
    assert list(ours["state_dict"]) == list(full["state_dict"])
    assert list(ours["optimizer_states"][0]["state"]) == list(full["optimizer_states"][0]["state"])
    assert any(isinstance(v, Tensor) for state in ours["callbacks"].values() for v in state.values())
    assert_same(dict(Scheduled.load_from_checkpoint(tmp_path / "one.ckpt").state_dict()), weights, rtol=0, atol=0)
    assert main(["inspect", str(source)]) == main(["inspect", str(tmp_path / "one.ckpt")]) == 0
    told = capsys.readouterr().out
    assert "written by 3 ranks" in told
    assert told.count("net.blocks.0.linear.weight") == 2

    for name, load in (("w.pt", torch.load), ("w.safetensors", load_file)):
        consolidate(source, tmp_path / name, weights_only=name.endswith(".pt"))
        assert_same(load(tmp_path / name), weights, rtol=0, atol=0)
    files = consolidate(source, tmp_path / "several", max_shard_size=700)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    found = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / "several" / name)
        assert all(index["weight_map"][key] == name for key in part)
        assert len(part) == 1 or sum(value.nbytes for value in part.values()) <= 700
        found.update(part)
    assert_same(found, weights, rtol=0, atol=0)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    assert files == sorted(str(path) for path in (tmp_path / "several").iterdir())
    assert f"model-00001-of-0000{len(files) - 1}.safetensors" in files[0]
    assert [Path(f).name for f in consolidate(source, f"{tmp_path}/a.b/")] == ["model.safetensors"]
    assert {p.name for p in tmp_path.iterdir() if p.name.startswith(".")} == set()  # nothing half is left

    one, several = (inspect_checkpoint(str(tmp_path / name)) for name in ("w.safetensors", "several"))
    table = inspect_checkpoint(str(tmp_path / "w.pt")).split("\n")
    assert one.split("\n") == [f"epoch: {full['epoch']}", f"global_step: {full['global_step']}", *table]
    assert sorted(several.split("\n")) == sorted([*one.split("\n"), f"files: {len(files) - 1}"])


# -- without a run ----------------------------------------------------------------------------------------------------


def write(path: Path, tensors: dict[str, Tensor], **extra: object) -> Path:
    entries: dict[str, object] = {}
    for name, t in tensors.items():
        entries[f"state_dict.{name}"] = FlatRange(t.shape, t.stride(), 0, t.reshape(-1)) if t.ndim else t
    content = {"epoch": 1, sharded_checkpoint.PARAM_GROUPS: [], **extra}
    sharded_checkpoint.write(path, entries, saved(content), None)
    return path


def test_what_is_there_is_kept_unless_told_otherwise(tmp_path, capsys):
    source = write(tmp_path / "x.ckpt", {"w": torch.ones(3, 5)})
    for out in ("one.ckpt", "one.pt", "one.safetensors", "several/"):
        given = str(tmp_path / out)
        assert main(["consolidate", str(source), given]) == 0
        before = inspect_checkpoint(given.rstrip("/"))
        assert main(["consolidate", str(source), given]) == 1
        assert main(["consolidate", str(source), given, "--force"]) == 0
        assert inspect_checkpoint(given.rstrip("/")) == before
        told = capsys.readouterr().err
        assert told == f"zero3: {given.rstrip('/')} is there already; --force (force=True) replaces it\n"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    for out, options, match in (
        ("home", {"force": True}, "'thesis.tex'"),
        ("x.ckpt", {"force": True}, "x.ckpt is a directory"),
        ("x.onnx", {}, r"\.safetensors"),
        ("y.ckpt", {"weights_only": True}, "name it .pt"),
        ("y.pt", {"max_shard_size": 3}, "is one file"),
        ("one.pt/y.pt", {}, "cannot write .*one.pt/y.pt"),
    ):
        with pytest.raises(Zero3Error, match=match):
            consolidate(source, tmp_path / out, **options)
    assert (tmp_path / "home" / "thesis.tex").exists()
    for given, match in ((tmp_path / "none.ckpt", "none.ckpt: no such"), (tmp_path / "one.ckpt", "is a file already")):
        with pytest.raises(Zero3Error, match=match):
            consolidate(given, tmp_path / "y.pt")
    assert [parse_size(text) for text in ("5GB", "1.5 MiB", "17", "2kb")] == [5 * 10**9, 3 << 19, 17, 2000]
    with pytest.raises(SystemExit):
        main(["consolidate", str(source), "y", "--max-shard-size", "many"])


@pytest.mark.parametrize("out", ["y.ckpt", "y.pt", "y.safetensors", "y"])
def test_damage_is_one_line_that_names_the_file_and_leaves_nothing(tmp_path, out, capsys):
    source = write(tmp_path / "x.ckpt", {"w": torch.ones(30, 5)})
    file = source / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    assert main(["consolidate", str(source), str(tmp_path / out)]) == 1
    told = capsys.readouterr().err
    assert "__0_0.distcp is damaged" in told
    assert told.count("\n") == 1
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_classes_of_the_users_own_are_refused_unless_trusted(tmp_path):
    """L12: of a sharded checkpoint. Weights can be had without."""
    run(save_trusting, 2, tmp_path / "x.ckpt")
    with pytest.raises(Zero3Error, match=r"meta.pt.*weights_only=False"):
        consolidate(tmp_path / "x.ckpt", tmp_path / "y.ckpt")
    with pytest.raises(AssertionError, match=r"meta.pt.*weights_only=False"):
        run(resume_trusting, 2, tmp_path / "x.ckpt", None)
    consolidate(tmp_path / "x.ckpt", tmp_path / "y.safetensors")
    consolidate(tmp_path / "x.ckpt", tmp_path / "y.ckpt", trust=True)
    assert torch.load(tmp_path / "y.ckpt", weights_only=False)["trust"].level == 3
    assert run(resume_trusting, 2, tmp_path / "x.ckpt", False) == [3, 3]


def save_trusting(path):
    t = trainer(zero3(state_dict_type="sharded"), max_epochs=1)
    t.fit(Trusting(make_mlp()), common_batches())
    t.save_checkpoint(path)


def resume_trusting(path, weights_only):
    module = Trusting(make_mlp())
    trainer(zero3(), max_epochs=2).fit(module, common_batches(), ckpt_path=path, weights_only=weights_only)
    return module.trust.level


def test_safetensors_of_every_dtype_are_those_of_the_library(tmp_path):
    dtypes = [getattr(torch, name) for name in (*safetensors.DTYPES.values(),)]
    tensors = {str(d)[6:]: torch.arange(6).view(2, 3).to(d) for d in dtypes} | {"s": torch.tensor(2.0)}
    consolidate(write(tmp_path / "x.ckpt", tensors), tmp_path / "y.safetensors")
    found = load_file(tmp_path / "y.safetensors")
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert bytes(found[name].reshape(-1).view(torch.uint8)) == bytes(value.reshape(-1).view(torch.uint8))
    entries, _ = safetensors.read_header(str(tmp_path / "y.safetensors"))
    assert {name: (e.dtype, e.shape, e.nbytes) for name, e in entries.items()} == {
        name: (str(t.dtype)[6:], tuple(t.shape), t.nbytes) for name, t in tensors.items()
    }
    with pytest.raises(Zero3Error, match="'c' is of complex128"):
        consolidate(write(tmp_path / "c.ckpt", {"c": torch.ones(2, dtype=torch.complex128)}), tmp_path / "c")


def test_damaged_safetensors_are_named(tmp_path):
    consolidate(
        write(tmp_path / "x.ckpt", {"w": torch.ones(30, 5), "v": torch.ones(9)}), tmp_path / "y", max_shard_size=99
    )
    first, second, index = sorted((tmp_path / "y").iterdir())
    whole = first.read_bytes()
    for content in (whole[:-1], whole[:20], b"", whole.replace(b"[30,5]", b"[30,6]"), b"\xff" * 50):
        first.write_bytes(content)
        for path in (first, tmp_path / "y"):
            with pytest.raises(Zero3Error, match=first.name):
                inspect_checkpoint(str(path))
    first.write_bytes(whole)
    second.rename(tmp_path / "elsewhere")
    with pytest.raises(Zero3Error, match=f"{second.name} is missing"):
        inspect_checkpoint(str(tmp_path / "y"))
    index.write_text("{")
    with pytest.raises(Zero3Error, match=index.name):
        inspect_checkpoint(str(tmp_path / "y"))


BOUND = """
import sys
from lightning_zero3.checkpoints.consolidate import consolidate
from tests.harness.memory import PeakMemory

source, *outs = sys.argv[1:]
consolidate(source + ".small", source + ".pt", weights_only=True)  # what is imported on the way does not count
for out in outs:
    peak = PeakMemory()
    consolidate(source, out)
    print(peak())
"""


@needs_linux
def test_memory_is_bounded_by_the_largest_tensor_not_by_the_model(tmp_path):
    tensors = {f"{i}": torch.full((1000, 5000), float(i)) for i in range(24)}  # 20 MB each, 480 MB
    write(tmp_path / "x", tensors)
    write(tmp_path / "x.small", {"w": torch.ones(3)})
    outs = [str(tmp_path / name) for name in ("y.ckpt", "y.safetensors")]
    done = subprocess.run(
        [sys.executable, "-c", BOUND, str(tmp_path / "x"), *outs],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    peaks = [int(line) for line in done.stdout.split()]
    assert len(peaks) == 2
    # A group of 60 MB, torch's copies of what it reads, and some: 120 to 160 MB were seen. The whole would be 480.
    assert max(peaks) < 220e6, peaks
    assert torch.load(outs[0], mmap=True)["state_dict"]["23"][-1, -1] == 23
    assert os.path.getsize(outs[1]) > 480e6


def test_help_does_not_wait_for_torch():
    code = "import sys; from lightning_zero3.tools.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(bool({'torch', 'lightning'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "consolidate" in done.stdout
