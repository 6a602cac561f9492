"""Checkpoints of GPT-NeoX, Hugging Face and our own training, read, written and refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

from lightning_zero3 import Zero3Error, full_state_dict, gather_parameters, shard_module, until_sharded
from neox_lit import NeoXError, NeoXModel, TransformerLayer, open_checkpoint, save_hf, save_neox
from neox_lit.checkpoints import convert
from neox_lit.checkpoints.lazy import InFile, whole
from neox_lit.cli import main
from tests.harness import distributed
from tests.harness.memory import needs_linux
from tests.neox.helpers import random_model, tiny, to_hf

ROOT = Path(__file__).resolve().parents[2]
FORMATS = {
    "tp1": lambda model, path: save_neox(model, path, tp=1),
    "tp2": lambda model, path: save_neox(model, path, tp=2),
    "tp4": lambda model, path: save_neox(model, path, tp=4),
    "mp_rank": lambda model, path: save_neox(model, path, tp=2, layout="sequential"),
    "safetensors": save_hf,
    "safetensors, sharded": lambda model, path: save_hf(model, path, shard_bytes=1),
    "bin": lambda model, path: save_hf(model, path, "bin"),
    "bin, sharded": lambda model, path: save_hf(model, path, "bin", shard_bytes=1),
}


def same_bits(model: NeoXModel, other: NeoXModel) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    return all(
        a.dtype == b.dtype and a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip_values(ours, theirs)
    )


def zip_values(ours, theirs):
    return zip(ours.values(), theirs.values(), strict=True)


def file(folder: Path, number: int, rank: int) -> Path:
    return folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt"


def change(path: Path, edit) -> None:
    """Load a file of a layer, edit its state dict, save it under the same name."""
    state = torch.load(path, weights_only=True)
    edit(state)
    torch.save(state, path)


# -- N1: round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        (torch.float16, {}),
        (torch.bfloat16, {"parallel_residual": False, "gelu": "exact", "d_ff": 96, "rotary_base": 5_000.0}),
        (torch.float32, {"tied_readout": True, "layer_norm_eps": 1e-6, "rotary_pct": 0.5}),
    ],
    ids=["parallel", "sequential", "tied"],
)
def test_n1_every_format_gives_back_the_same_bits(tmp_path, dtype, fields):
    model = random_model(tiny(n_heads=4, n_vocab=64, n_layers=3, **fields)).to(dtype)
    with torch.no_grad():  # what dividing and adding again would lose: odd last bits, subnormals, signs of zero
        bias = model.blocks[1].mlp.dense_4h_to_h.bias
        bias[:4] = torch.tensor([-0.0, torch.finfo(dtype).smallest_normal, torch.finfo(dtype).tiny / 2, 0.0])
        bias[4:8] = torch.tensor([1.0, -3.0, 5.0, 7.0]) * (1 + torch.finfo(dtype).eps)
    source = model
    for name, save in FORMATS.items():  # each from the last one's files, so that every pair of neighbours is converted
        save(source, tmp_path / name)
        source = open_checkpoint(tmp_path / name)
        loaded = NeoXModel.from_checkpoint(tmp_path / name)
        assert same_bits(model, loaded), name
        told = {k: v for k, v in loaded.config.to_dict().items() if "init" not in k and k != "d_ff"}
        assert told == {k: v for k, v in model.config.to_dict().items() if "init" not in k and k != "d_ff"}, name
        assert (loaded.config.d_ff or 128) == (model.config.d_ff or 128)
        assert (
            loaded.readout.final_linear.weight is loaded.embedding.word_embeddings.weight
        ) is model.config.tied_readout


@pytest.mark.parametrize("parallel", [True, False])
def test_n1_bias_shards_that_are_not_equal(tmp_path, parallel):
    model = random_model(tiny(n_heads=4, parallel_residual=parallel)).half()
    save_neox(model, tmp_path / "2", tp=2)
    key = "attention.dense.bias"
    parts = [torch.load(file(tmp_path / "2", 2, rank), weights_only=True)[key] for rank in (0, 1)]
    parts[1] = parts[1] + 1e-3 * torch.randn(32).half()
    change(file(tmp_path / "2", 2, 1), lambda state: state.update({key: parts[1]}))
    if parallel:
        merged, expected = NeoXModel.from_checkpoint(tmp_path / "2"), parts[0] + parts[1]
    else:
        with pytest.warns(UserWarning, match=r"layer_02-model_00.*'attention.dense.bias' differs among its 2 shards"):
            merged = NeoXModel.from_checkpoint(tmp_path / "2")
        expected = ((parts[0].float() + parts[1].float()) / 2).half()
    assert merged.blocks[0].attention.dense.bias.equal(expected)
    for tp in (1, 4):
        save_neox(merged, tmp_path / str(tp) / "again", tp=tp)
        assert same_bits(merged, NeoXModel.from_checkpoint(tmp_path / str(tp) / "again"))
        # ... and for a reader that adds in half precision, one after the other
        states = [torch.load(file(tmp_path / str(tp) / "again", 2, rank), weights_only=True) for rank in range(tp)]
        total = states[0][key]
        for state in states[1:]:
            total = total + state[key] if parallel else total
        assert total.equal(expected)


@torch.no_grad()
def test_n1_shards_compute_what_the_layer_computes(tmp_path):
    """Oracle: tensor-parallel arithmetic, each rank with its heads and its part of the feed-forward's width."""
    model = random_model(tiny(n_heads=4, n_layers=1))
    save_neox(model, tmp_path / "x", tp=2)
    layer, x = model.blocks[0], torch.randn(5, 32)
    shards = [torch.load(file(tmp_path / "x", 2, rank), weights_only=True) for rank in (0, 1)]
    qkv = [F.linear(x, s["attention.query_key_value.weight"], s["attention.query_key_value.bias"]) for s in shards]
    heads = [part.view(5, 2, 3, 8) for part in qkv]  # of each rank
    torch.testing.assert_close(torch.cat(heads, 1), layer.attention.query_key_value(x).view(5, 4, 3, 8))
    out = sum(
        F.linear(h[:, :, 2].flatten(1), s["attention.dense.weight"], s["attention.dense.bias"])
        for h, s in zip(heads, shards, strict=True)
    )
    torch.testing.assert_close(out, layer.attention.dense(torch.cat(heads, 1)[:, :, 2].flatten(1)))
    inner = [F.linear(x, s["mlp.dense_h_to_4h.weight"], s["mlp.dense_h_to_4h.bias"]) for s in shards]
    out = sum(
        F.linear(F.gelu(h, approximate="tanh"), s["mlp.dense_4h_to_h.weight"], s["mlp.dense_4h_to_h.bias"])
        for h, s in zip(inner, shards, strict=True)
    )
    torch.testing.assert_close(out, layer.mlp(x), atol=1e-5, rtol=1e-5)


def test_tp_that_does_not_divide_and_places_that_are_taken(tmp_path):
    model = random_model(tiny(n_heads=4))
    with pytest.raises(NeoXError, match="tp=3 does not divide n_heads=4"):
        save_neox(model, tmp_path / "a", tp=3)
    (tmp_path / "b").mkdir()
    with pytest.raises(NeoXError, match="b exists already"):
        save_hf(model, tmp_path / "b")
    assert os.listdir(tmp_path) == ["b"]


# -- N2: Hugging Face --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"parallel_residual": False, "gelu": "exact", "tied_readout": True}])
@torch.no_grad()
def test_n2_transformers_reads_what_we_write_and_we_read_what_it_writes(tmp_path, fields):
    from transformers import AutoModelForCausalLM

    model, ids = random_model(tiny(**fields)), torch.randint(128, (2, 9))
    for name, options in {"one": {}, "many": {"shard_bytes": 1}, "bin": {"format": "bin"}}.items():
        save_hf(model, tmp_path / name, **options)
        theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(report.values()), report
        torch.testing.assert_close(theirs.eval()(ids).logits, model(ids), atol=2e-5, rtol=2e-5)
    to_hf(model).save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    loaded = NeoXModel.from_checkpoint(tmp_path / "theirs")
    assert same_bits(model, loaded)
    torch.testing.assert_close(loaded(ids), model(ids))


# -- N3, N5: what is wrong is named ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("written") / "tp2"
    save_neox(random_model(tiny(n_heads=4)), path, tp=2)
    return path


class Code:
    """Whoever unpickles it makes a file."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self):
        return os.system, (f"touch '{self.evidence}'",)


def swap(a: Path, b: Path) -> None:
    a.rename(a.with_suffix(".tmp"))
    b.rename(a)
    a.with_suffix(".tmp").rename(b)


def swap_content(a: Path, b: Path) -> None:
    states = [torch.load(path, weights_only=True) for path in (b, a)]
    for path, state in zip((a, b), states, strict=True):
        torch.save(state, path)


def edit_yml(folder: Path, **fields: object) -> None:
    path = folder / "configs" / "model.yml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **fields}))


def drop(key):
    return lambda state: state.pop(key)


QKV = "attention.query_key_value.weight"
FAULTS = {
    "a file is missing": (
        lambda d: file(d, 3, 1).unlink(),
        r"layer_03-model_01-model_states.pt is missing, or has .* n_layers=2 has layers 0, 2 to 3, 5 and 6, .* 2 shard",
    ),
    "truncated": (
        lambda d: os.truncate(file(d, 3, 1), 3_000),
        r"layer_03-model_01-model_states.pt is damaged or truncated",
    ),
    "blocks swapped": (
        lambda d: swap(file(d, 2, 1), file(d, 3, 1)),
        r"layer_02-model_01-model_states.pt was written as layer_03-model_01-model_states.pt",
    ),
    "blocks swapped and saved again": (
        lambda d: swap_content(file(d, 2, 1), file(d, 3, 1)),
        r"layer_02-model_00-model_states.pt: 'input_layernorm.weight' should be the same in all 2 shards",
    ),
    "kinds of layers swapped": (
        lambda d: [swap_content(file(d, 2, rank), file(d, 5, rank)) for rank in (0, 1)],
        r"layer_02-model_00-model_states.pt: 'blocks.0.input_layernorm.weight' is missing",
    ),
    "shards lost": (
        lambda d: [f.unlink() for f in d.glob("*-model_01-*")],
        rf"layer_02-model_00.*'{QKV}' has shape \[48, 32\], expected \[96, 32\] .*are all tensor-parallel shards there",
    ),
    "more layers than the yml": (
        lambda d: edit_yml(d, num_layers=1),
        r"layer_03-model_00-model_states.pt: a model with n_layers=1 has no layer number 3",
    ),
    "fewer layers than the yml": (
        lambda d: edit_yml(d, num_layers=4),
        r"layer_06-model_00-model_states.pt: a model with n_layers=4 has no layer number 6; here are 0, 2, 3, 5, 6\.",
    ),
    "another width than the yml": (
        lambda d: edit_yml(d, hidden_size=64),
        r"layer_00-model_00-model_states.pt: 'word_embeddings.weight' has shape \[128, 32\], expected \[128, 64\]",
    ),
    "dtypes of shards": (
        lambda d: change(file(d, 3, 1), lambda s: s.update({QKV: s[QKV].half()})),
        r"layer_03-model_00-model_states.pt: '" + QKV + r"' and the same key .* torch.float32, torch.float16",
    ),
    "dtypes of parameters": (
        lambda d: [
            change(file(d, 5, rank), lambda s: s.update({k: v.half() for k, v in s.items()})) for rank in (0, 1)
        ],
        r"several dtypes .*layer_05-model_00-model_states.pt: 'norm.weight' is torch.float16.* dtype=",
    ),
    "a key is missing in one shard": (
        lambda d: change(file(d, 2, 1), drop(QKV)),
        rf"layer_02-model_01-model_states.pt: '{QKV}' is missing",
    ),
    "a key is missing in all": (
        lambda d: [change(file(d, 2, rank), drop(QKV)) for rank in (0, 1)],
        rf"layer_02-model_00-model_states.pt: 'blocks.0.{QKV}' is missing",
    ),
    "a key too many": (
        lambda d: [change(file(d, 2, rank), lambda s: s.update(other=torch.zeros(1))) for rank in (0, 1)],
        r"layer_02-model_00-model_states.pt: 'other' does not belong",
    ),
    "integers": (
        lambda d: [change(file(d, 2, rank), lambda s: s.update({QKV: s[QKV].to(torch.int8)})) for rank in (0, 1)],
        rf"layer_02-model_00-model_states.pt: '{QKV}' is torch.int8",
    ),
    "code": (
        lambda d: change(file(d, 2, 0), lambda s: s.update(code=Code(d / "code has run"))),
        r"layer_02-model_00-model_states.pt is refused: .*code that would run.*system.* Get the weights as safetensors",
    ),
    "the yml": (
        lambda d: shutil.rmtree(d / "configs"),
        r"2 shards of each layer and no configs/\*.yml that says whether the residual is parallel",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_n3_n5_faults_are_named(tmp_path, written, fault):
    shutil.copytree(written, tmp_path / "x")
    inflict, message = FAULTS[fault]
    inflict(tmp_path / "x")
    with pytest.raises(NeoXError, match=message):
        NeoXModel.from_checkpoint(tmp_path / "x")
    assert not (tmp_path / "x" / "code has run").exists()


def test_n3_norms_that_drifted_are_averaged_with_one_warning(tmp_path, written):
    shutil.copytree(written, tmp_path / "x")
    key = "input_layernorm.weight"
    for number in (2, 3):
        change(file(tmp_path / "x", number, 1), lambda s: s.update({key: s[key] + 0.01}))
    with pytest.warns(UserWarning, match="layer_02-model_00.*'input_layernorm.weight' differs among") as caught:
        loaded = NeoXModel.from_checkpoint(tmp_path / "x")
    assert len(caught) == 1
    expected = NeoXModel.from_checkpoint(written).blocks[1].input_layernorm.weight + 0.005
    torch.testing.assert_close(loaded.blocks[1].input_layernorm.weight, expected)


def test_without_a_config_shapes_come_from_the_tensors(tmp_path):
    model = random_model(tiny())
    save_neox(model, tmp_path / "x", tp=1)
    shutil.rmtree(tmp_path / "x" / "configs")
    checkpoint = open_checkpoint(tmp_path / "x")
    assert checkpoint.config is None
    assert all(whole(t).equal(model.state_dict()[name]) for name, t in checkpoint.tensors.items())
    with pytest.raises(NeoXError, match=r"no config beside the weights.*NeoXConfig.preset"):
        NeoXModel.from_checkpoint(tmp_path / "x")
    assert same_bits(model, NeoXModel.from_checkpoint(tmp_path / "x", model.config))
    change(file(tmp_path / "x", 3, 0), lambda s: s.update({QKV: s[QKV][:48].clone()}))
    with pytest.raises(NeoXError, match=rf"layer_03-model_00.*'{QKV}' has shape \[48, 32\], expected \[96, 32\]"):
        open_checkpoint(tmp_path / "x")


@pytest.mark.parametrize("name", ["/etc/passwd", "../out/model.safetensors", "link.safetensors"])
def test_an_index_stays_in_its_directory(tmp_path, name):
    model = random_model(tiny())
    for folder in ("in", "out"):
        save_hf(model, tmp_path / folder, shard_bytes=1 if folder == "in" else 1 << 30)
    (tmp_path / "in" / "link.safetensors").symlink_to(tmp_path / "out" / "model.safetensors")
    index = tmp_path / "in" / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    told["weight_map"]["embed_out.weight"] = name
    index.write_text(json.dumps(told))
    with pytest.raises(NeoXError, match=f"index.json names '{name}', which lies outside"):
        open_checkpoint(tmp_path / "in")


def test_a_hub_cache_whose_files_are_links_is_read(tmp_path):
    model = random_model(tiny())
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "1234", tmp_path / "models--x" / "blobs"
    save_hf(model, snapshot, shard_bytes=1)
    blobs.mkdir()
    for i, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(i))
        path.symlink_to(f"../../blobs/{i}")
    assert same_bits(model, NeoXModel.from_checkpoint(snapshot))


def test_safetensors_with_a_wrong_header_are_refused_before_memory_is_taken(tmp_path):
    save_hf(random_model(tiny()), tmp_path / "x")
    path = tmp_path / "x" / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    huge = {**header["embed_out.weight"], "shape": [1 << 40, 32]}

    def write(header: dict, body: bytes = content[8 + length :]) -> None:
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + body)

    for entry, message in (
        (huge, "cannot lie in bytes"),
        ({**huge, "data_offsets": [0, 1 << 47]}, "it is truncated"),
        ({**header["embed_out.weight"], "dtype": "F5"}, "unknown dtype"),
    ):
        write({**header, "embed_out.weight": entry})
        with pytest.raises(NeoXError, match=f"'embed_out.weight'.*{message}"):
            open_checkpoint(tmp_path / "x")
    path.write_bytes(content[:-1])
    with pytest.raises(NeoXError, match=r"model.safetensors: '.*ends at byte .* it is truncated"):
        open_checkpoint(tmp_path / "x")
    path.write_bytes(content[:100])
    with pytest.raises(NeoXError, match="model.safetensors is truncated"):
        open_checkpoint(tmp_path / "x")


# -- N4: names of other versions ---------------------------------------------------------------------------------------


def test_n4_constants_are_ignored_and_newer_names_known(tmp_path, written):
    model = NeoXModel.from_checkpoint(written)
    constants = {
        "attention.rotary_emb.inv_freq": torch.ones(4),
        "attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(),
        "attention.masked_bias": torch.tensor(-1e9),
    }

    def older(state):
        state.update(constants)

    def newer(state):
        for key in [key for key in state if "mlp" in key]:
            new = key.replace("dense_h_to_4h", "linear1").replace("dense_4h_to_h", "linear2")
            state[new] = state.pop(key)

    for edit in (older, newer):
        shutil.copytree(written, tmp_path / edit.__name__)
        for rank in (0, 1):
            change(file(tmp_path / edit.__name__, 3, rank), edit)
        assert same_bits(model, NeoXModel.from_checkpoint(tmp_path / edit.__name__))
    save_hf(model, tmp_path / "hf", "bin")
    change(
        tmp_path / "hf" / "pytorch_model.bin",
        lambda s: s.update({f"gpt_neox.layers.1.{key}": value for key, value in constants.items()}),
    )
    assert same_bits(model, NeoXModel.from_checkpoint(tmp_path / "hf"))


def test_files_of_other_layouts_inside(tmp_path):
    """Transposed tensors, views of a larger storage, torch's format before 1.6, NumPy's random state beside."""
    import numpy as np

    model = random_model(tiny())
    save_neox(model, tmp_path / "x", tp=1, layout="sequential")
    path = tmp_path / "x" / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=True)
    module = content["module"]
    key = f"sequential.2.{QKV}"
    module[key] = module[key].t().contiguous().t()
    module["sequential.6.final_linear.weight"] = torch.cat((torch.ones(3, 32), model.readout.final_linear.weight))[3:]
    for is_zip in (True, False):
        torch.save({**content, "np_rng_state": np.random.get_state()}, path, _use_new_zipfile_serialization=is_zip)
        assert same_bits(model, NeoXModel.from_checkpoint(tmp_path / "x"))


# -- N11: tied weights -------------------------------------------------------------------------------------------------


def test_n11_tied_weights(tmp_path):
    model = random_model(tiny(n_heads=4))
    save_hf(model, tmp_path / "both")
    config = json.loads((tmp_path / "both" / "config.json").read_text())
    (tmp_path / "both" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(NeoXError, match=r"'gpt_neox.embed_in.weight' and .*'embed_out.weight' differ; give config="):
        NeoXModel.from_checkpoint(tmp_path / "both")
    assert same_bits(model, NeoXModel.from_checkpoint(tmp_path / "both", model.config))

    tied = random_model(tiny(n_heads=4, tied_readout=True))
    save_neox(tied, tmp_path / "tied", tp=2)
    assert not file(tmp_path / "tied", 6, 0).exists()
    for rank in (0, 1):  # a copy of the embedding as a readout of its own
        weight = torch.load(file(tmp_path / "tied", 0, rank), weights_only=True)["word_embeddings.weight"]
        torch.save({"final_linear.weight": weight}, file(tmp_path / "tied", 6, rank))
    assert same_bits(tied, NeoXModel.from_checkpoint(tmp_path / "tied"))
    for rank in (0, 1):
        file(tmp_path / "tied", 6, rank).unlink()
    edit_yml(tmp_path / "tied", no_weight_tying=True)
    with pytest.raises(NeoXError, match=r"layer_06-model_00-model_states.pt is missing.*or the model is tied"):
        NeoXModel.from_checkpoint(tmp_path / "tied")


# -- our own checkpoints, the command, memory, shards ------------------------------------------------------------------


def test_checkpoints_of_training_and_the_command(tmp_path, trained, capsys):
    from lightning_zero3.checkpoints import sharded_checkpoint
    from lightning_zero3.checkpoints.durable import saved

    model = trained.module.model
    assert same_bits(model, NeoXModel.from_checkpoint(trained.checkpoint))
    content = torch.load(trained.checkpoint, weights_only=True)
    entries = {f"state_dict.{name}": value for name, value in content.pop("state_dict").items()}
    content.pop("optimizer_states")
    sharded_checkpoint.write(
        tmp_path / "sharded.ckpt", entries, saved({**content, sharded_checkpoint.PARAM_GROUPS: []}), None
    )
    assert same_bits(model, NeoXModel.from_checkpoint(tmp_path / "sharded.ckpt"))
    weight = open_checkpoint(tmp_path / "sharded.ckpt").tensors["readout.final_linear.weight"]
    assert weight.read(70, 333).equal(model.readout.final_linear.weight.detach().view(-1)[70:333])

    source = trained.checkpoint
    for to in ("neox", "neox-sequential", "hf"):
        main(["convert", str(source), str(tmp_path / to), "--to", to, "--tp", "2"])
        source = tmp_path / to
        assert same_bits(model, NeoXModel.from_checkpoint(source))
        assert open_checkpoint(source).tokenizer == trained.module.tokenizer.to_json()
    assert capsys.readouterr().out.splitlines() == [
        f"Wrote {tmp_path / to}" for to in ("neox", "neox-sequential", "hf")
    ]
    with pytest.raises(SystemExit, match=r"neox-lit: error: .*hf exists already"):
        main(["convert", str(source), str(tmp_path / "hf")])


def test_latest_and_wrong_places(tmp_path, written):
    shutil.copytree(written, tmp_path / "run" / "global_step7")
    (tmp_path / "run" / "latest").write_text("global_step7\n")
    assert open_checkpoint(tmp_path / "run").path == tmp_path / "run" / "global_step7"
    (tmp_path / "run" / "latest").write_text("../run/global_step7")
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "run", "names '../run/global_step7', which is no directory beside it"),
        (tmp_path / "none", "none': no such file"),
        (tmp_path / "empty", "empty has no checkpoint of a known format"),
        (file(tmp_path / "run" / "global_step7", 2, 0), "is one file of a checkpoint; give its directory"),
        (Path(__file__), "test_formats.py is"),
    ):
        with pytest.raises(NeoXError, match=message):
            open_checkpoint(path)


@needs_linux
def test_converting_takes_the_memory_of_about_one_layer(tmp_path):
    """A model of 8 layers of 12.6 MB, in a process of its own."""
    script = """
        import safetensors.torch
        from neox_lit import open_checkpoint, save_hf, save_neox
        from tests.harness.memory import PeakMemory

        open_checkpoint("neox").tensors["embedding.word_embeddings.weight"].read(0, 10)
        peak = PeakMemory()
        save_hf(open_checkpoint("neox"), "hf", shard_bytes=1)
        save_neox(open_checkpoint("hf"), "4", tp=4)
        print(peak() // 2**20)
    """
    save_neox(NeoXModel(tiny(n_hidden=512, n_layers=8, n_heads=8)), tmp_path / "neox", tp=2)
    size = sum(path.stat().st_size for path in (tmp_path / "neox").iterdir())
    assert 100e6 < size < 103e6  # no file holds what another's tensors were cut from
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40  # MB; three layers' worth


def test_a_range_of_a_merged_tensor_reads_its_rows_only(written, monkeypatch):
    counted, read = [], InFile.read
    monkeypatch.setattr(InFile, "read", lambda self, a, b: counted.append(b - a) or read(self, a, b))
    tensors = open_checkpoint(written).tensors
    for name in (
        "blocks.1.mlp.dense_4h_to_h.weight",
        "blocks.1.mlp.dense_h_to_4h.weight",
        "blocks.1.mlp.dense_4h_to_h.bias",
    ):
        all_of_it, width = whole(tensors[name]).flatten(), tensors[name].shape[-1]
        for start, stop in ((0, 0), (5, 9), (width - 1, width + 1), (all_of_it.numel() - 3, all_of_it.numel())):
            counted.clear()
            assert tensors[name].read(start, stop).equal(all_of_it[start:stop])
            assert sum(counted) <= max(stop - start, 2 * width)


@distributed(world=[2, 3])
def test_each_rank_reads_its_part_of_tensor_parallel_shards(world, tmp_path):
    import torch.distributed as dist

    model = random_model(tiny(n_heads=4))
    path = tmp_path / "x"
    if dist.get_rank() == 0:
        save_neox(model, path, tp=2)
    dist.barrier()
    counted, read = [], InFile.read
    InFile.read = lambda self, start, stop: counted.append(stop - start) or read(self, start, stop)
    try:
        with until_sharded():
            loaded = NeoXModel.from_checkpoint(path)
        assert not counted
        assert all(parameter.is_meta for parameter in loaded.parameters())
        shard_module(loaded, {TransformerLayer})
    finally:
        InFile.read = read
    found = full_state_dict(loaded, rank0_only=False)
    assert all(found[name].equal(value) for name, value in model.state_dict().items())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sum(counted) < 1.15 * total / world  # rows that a boundary cuts, and vectors in two shards, are read twice

    with pytest.raises(Zero3Error, match="full_state_dict"):
        save_hf(loaded, tmp_path / "wrong")
    with gather_parameters(loaded):
        if dist.get_rank() == 0:
            save_hf(loaded, tmp_path / "hf")
            assert same_bits(model, NeoXModel.from_checkpoint(tmp_path / "hf"))


def test_adapters_must_be_merged_and_int8_is_not_written(tmp_path):
    from neox_lit.lora import add_lora, merge_lora, remove_lora

    model = random_model(tiny())
    add_lora(model)
    with pytest.raises(NeoXError, match=r"lora.A' does not belong .*merge_lora\(model\) and remove_lora\(model\)"):
        save_hf(model, tmp_path / "x")
    remove_lora(merge_lora(model))
    save_hf(model, tmp_path / "x")
    model.blocks[0].mlp.dense_h_to_4h.weight = nn.Parameter(torch.zeros(128, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(NeoXError, match=r"dense_h_to_4h.weight' is torch.int8.*take the checkpoint"):
        save_neox(model, tmp_path / "y")


def test_convert_rejects_other_names(tmp_path, written):
    with pytest.raises(NeoXError, match="to must be 'neox', 'neox-sequential' or 'hf', got 'gguf'"):
        convert(written, tmp_path / "x", "gguf")
