"""Layers one after the other, with the weights of tensor-parallel shards."""

from __future__ import annotations

import pytest
import torch

from neox_lit import (
    Embedding,
    FinalNorm,
    LayerGenerator,
    NeoXError,
    NeoXModule,
    ReadoutLayer,
    TransformerLayer,
    save_neox,
)
from tests.neox.helpers import random_model, tiny

SHAPE = {"n_vocab": 128, "n_hidden": 32, "n_layers": 3, "n_heads": 4}


@pytest.mark.parametrize("tp", [1, 2, 4])
@torch.no_grad()
def test_the_layers_in_sequence_are_the_model(tmp_path, tp, capsys):
    model, ids = random_model(tiny(**SHAPE)), torch.randint(128, (2, 9))
    save_neox(model, tmp_path / "x", tp=tp)
    generator = LayerGenerator(**SHAPE, checkpoint=tmp_path / "x", is_flash_attention=True)
    x, kinds = ids, []
    for layer in generator.load():
        kinds.append(type(layer))
        x = layer(x)
    assert kinds == [Embedding, *[TransformerLayer] * 3, FinalNorm, ReadoutLayer]
    assert all(issubclass(kind, NeoXModule) for kind in kinds)
    assert torch.equal(x, model(ids))
    assert "Loading layers" in capsys.readouterr().out


def test_names_filters_and_clones(tmp_path):
    shape = {**SHAPE, "n_layers": 44}
    generator = LayerGenerator(**shape, filter_layers={46, 0, 1, 44, 45})
    assert generator.total_layers == 47
    names = [names for _, names in generator.get_layers()]
    assert names == [(f"layer_{i:02d}-model_00-model_states.pt",) for i in (0, 2, 45, 47, 48)]
    save_neox(random_model(tiny(**SHAPE)), tmp_path / "x", tp=2)
    kept = LayerGenerator(**SHAPE, filter_layers={2, 3}, checkpoint=tmp_path / "x", dtype=torch.bfloat16)
    pairs = list(kept.get_layers())
    assert pairs[1][1] == ("layer_04-model_00-model_states.pt", "layer_04-model_01-model_states.pt")
    (a, _), (b, _) = pairs
    assert a.mlp.dense_h_to_4h.weight.dtype == torch.bfloat16
    assert a.mlp.dense_h_to_4h.weight.equal(b.mlp.dense_h_to_4h.weight)
    assert a.mlp.dense_h_to_4h.weight.data_ptr() != b.mlp.dense_h_to_4h.weight.data_ptr()
    drawn = [layer for layer, _ in LayerGenerator(**SHAPE, filter_layers={2, 3}, is_clone_layers=False).get_layers()]
    assert not drawn[0].mlp.dense_h_to_4h.weight.equal(drawn[1].mlp.dense_h_to_4h.weight)
    with pytest.raises(NeoXError, match=r"filter_layers has \[6\]; positions are 0 to 5"):
        LayerGenerator(**SHAPE, filter_layers={0, 6})


def test_what_load_needs(tmp_path):
    with pytest.raises(NeoXError, match=r"load\(\) needs a checkpoint"):
        next(LayerGenerator(**SHAPE).load())
    with pytest.raises(NeoXError, match="nowhere': no such directory"):
        LayerGenerator(**SHAPE, checkpoint=tmp_path / "nowhere")
    save_neox(random_model(tiny(**SHAPE)), tmp_path / "x", tp=2)
    wide = LayerGenerator(**{**SHAPE, "n_hidden": 64}, checkpoint=tmp_path / "x")
    with pytest.raises(
        NeoXError, match=r"layer_00-model_01-model_states.pt: 'word_embeddings.weight' has shape \[128, 32\]"
    ):
        next(wide.load())
    (tmp_path / "x" / "layer_03-model_01-model_states.pt").unlink()
    layers = LayerGenerator(**SHAPE, checkpoint=tmp_path / "x").load()
    next(layers), next(layers)
    with pytest.raises(NeoXError, match="layer_03-model_01-model_states.pt: no such file"):
        next(layers)


def test_load_state_changes_nothing_when_shards_do_not_fit():
    layer = TransformerLayer(32, 4)
    state = {name: value + 1 for name, value in layer.state_dict().items()}
    before = layer.attention.dense.weight.clone()
    for change, message in (
        ({"mlp.dense_4h_to_h.bias": None}, "'mlp.dense_4h_to_h.bias' is missing in shard 0"),
        ({"other": torch.zeros(1)}, "'other' in shard 0 does not belong to TransformerLayer"),
        ({"mlp.dense_4h_to_h.bias": torch.zeros(3)}, r"'mlp.dense_4h_to_h.bias' has shape \[3\] after merging 1 shard"),
    ):
        wrong = {name: value for name, value in {**state, **change}.items() if value is not None}
        with pytest.raises(NeoXError, match=message):
            layer.load_state(wrong)
    with pytest.raises(NeoXError, match="at least one shard"):
        layer.load_state()
    with pytest.raises(NeoXError, match="has no memory"):
        TransformerLayer(32, 4).to("meta").load_state(state)
    assert layer.attention.dense.weight.equal(before)
    layer.load_state(state)
    assert layer.attention.dense.weight.equal(before + 1)


def test_int8_of_the_blocks_only(tmp_path):
    pytest.importorskip("bitsandbytes")
    save_neox(random_model(tiny(**SHAPE)), tmp_path / "x", tp=2)
    layers = list(LayerGenerator(**SHAPE, checkpoint=tmp_path / "x", is_llm_int8=True).load())
    for layer in layers:
        int8 = [name for name, value in layer.named_parameters() if value.dtype == torch.int8]
        assert len(int8) == (4 if isinstance(layer, TransformerLayer) else 0)
