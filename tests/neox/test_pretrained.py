"""Training begins with checkpoints of others, straight into shards."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_zero3 import full_state_dict
from neox_lit import NeoXLightning, NeoXModel, TransformerLayer, save_hf, save_neox
from neox_lit.checkpoints import lazy
from neox_lit.cli import main
from neox_lit.errors import NeoXError
from tests.harness import assert_same, distributed
from tests.neox.helpers import random_model, tiny
from tests.strategy.runs import trainer, zero3

FORMATS = {"neox": lambda model, path: save_neox(model, path, tp=2), "hf": save_hf}


def batches():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 128, (8, 17), generator=generator)
    return DataLoader([{"input_ids": row[:-1], "labels": row[1:]} for row in ids], batch_size=2)


def fit(strategy, path, **options):
    torch.manual_seed(0)
    module = NeoXLightning(pretrained=str(path), lr=1e-3, **options)
    t = trainer(strategy, max_epochs=1, precision="64-true")
    t.fit(module, batches())
    return module, t


@pytest.mark.parametrize("kind", FORMATS)
@distributed(world=[2, 3])
def test_training_begins_with_files_of_others_as_under_ddp(kind, tmp_path, world):
    model = random_model(tiny(tied_readout=kind == "hf"))
    if dist.get_rank() == 0:
        FORMATS[kind](model, tmp_path / "x")
    dist.barrier()

    read = []
    whole = lazy.Merged.read if kind == "neox" else None
    with pytest.MonkeyPatch.context() as patch:
        if whole is not None:
            patch.setattr(lazy.Merged, "read", lambda self, a, b: (read.append(b - a), whole(self, a, b))[1])
        module, t = fit(zero3(TransformerLayer), tmp_path / "x")
    if whole is not None:  # each rank reads its part of what tensor-parallel ranks had in two
        assert 0 < sum(read) < 1.2 * sum(p.numel() for p in model.parameters()) / world
    other, _ = fit("ddp", tmp_path / "x")
    ours, theirs = full_state_dict(module, rank0_only=False), other.state_dict()
    assert_same(ours, theirs, rtol=1e-9, atol=1e-12)
    start = {f"model.{name}": value for name, value in model.state_dict().items()}
    assert any(not torch.allclose(ours[name].float(), start[name], atol=1e-4) for name in start)
    assert all(torch.allclose(ours[name].float(), start[name], atol=0.05) for name in start)  # and not anew

    # A resumed run needs the files no more, and what was loaded is nobody's hyperparameter.
    path = t.strategy.broadcast(str(tmp_path / "own.ckpt"))
    t.save_checkpoint(path)
    (tmp_path / "x").rename(tmp_path / "gone") if dist.get_rank() == 0 else None
    dist.barrier()
    again = NeoXLightning.load_from_checkpoint(path, weights_only=True)
    assert_same(again.state_dict(), {name: value.float() for name, value in ours.items()}, rtol=0, atol=0)


def test_generating_from_files_of_others(tmp_path, capsys, trained):
    save_hf(trained.module.model, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(trained.module.tokenizer.to_json())
    arguments = ["--prompt", "The value", "--max_new_tokens", "8", "--temperature", "0"]
    main(["generate", "--checkpoint", str(tmp_path / "hf"), *arguments])
    first = capsys.readouterr().out
    main(["generate", "--checkpoint", str(trained.checkpoint), *arguments])
    assert capsys.readouterr().out == first


def test_files_of_another_shape_are_refused_before_training(tmp_path):
    save_hf(random_model(tiny()), tmp_path / "x")
    module = NeoXLightning(tiny(n_hidden=64), pretrained=str(tmp_path / "x"))
    with pytest.raises(NeoXError, match="n_hidden=64"):
        module.configure_model()
    with pytest.raises(NeoXError, match="no such file"):
        NeoXLightning(pretrained=str(tmp_path / "none"))


def test_the_shape_comes_from_the_files(tmp_path):
    config = tiny(gelu="exact", parallel_residual=False)
    save_hf(NeoXModel(config), tmp_path / "x")
    module = NeoXLightning(pretrained=str(tmp_path / "x"))
    assert (module.config.n_layers, module.config.gelu, module.config.parallel_residual) == (2, "exact", False)
    assert "pretrained" not in module.hparams
