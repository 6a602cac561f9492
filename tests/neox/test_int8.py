"""int8: values of bitsandbytes, gradients of dequantised weights; sharded as int8, trained beside, saved, loaded."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_zero3 import empty_parameters, load_weights, shard_module, until_sharded
from lightning_zero3.shard import full_state_dict
from lightning_zero3.tools.plan import plan
from neox_lit import Int8Linear, NeoXError, NeoXLightning, NeoXModel, add_lora, to_int8
from neox_lit.finetune import set_trainable
from neox_lit.int8 import LINEARS
from neox_lit.ranks import on_ranks
from tests.harness import assert_same, distributed
from tests.harness.oracles import fit
from tests.neox.helpers import random_model, tiny
from tests.neox.tuning import EXACT, Windows, built, loader, module, zero3
from tests.strategy.runs import same_run, trainer

bnb = pytest.importorskip("bitsandbytes")

IDS = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))


def with_outliers(*shape: int) -> torch.Tensor:
    """Two columns hold values far above the threshold of 6."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    x[..., 5] *= 40
    x[0, 0, 17] = -1e5  # more than float16 has
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_those_of_bitsandbytes_s_own_layer(dtype):
    torch.manual_seed(0)
    linear = nn.Linear(64, 48)
    theirs = bnb.nn.Linear8bitLt(64, 48, has_fp16_weights=False, threshold=6.0)
    theirs.load_state_dict(linear.state_dict())
    theirs = theirs.to("cpu").eval()  # training on the CPU, it does not quantise the input
    ours = Int8Linear.of(linear).to(dtype)
    x = with_outliers(2, 5, 64).to(dtype) if dtype is not torch.float16 else with_outliers(2, 5, 64)[:, 1:].half()
    kept, version = x.clone(), x._version
    out = ours(x)
    assert torch.equal(ours.weight, theirs.weight)
    assert ours.scale.dtype is torch.float32
    assert out.dtype is dtype
    assert torch.equal(x, kept)
    assert x._version == version
    rounding = torch.finfo(dtype).eps
    assert_same(out, theirs(x), rtol=4 * rounding, atol=8 * rounding)
    assert torch.equal(ours.train()(x), out)


def test_outliers_stay_out_of_int8_and_gradients_are_those_of_the_dequantised_weight():
    torch.manual_seed(0)
    linear = nn.Linear(64, 48).double()
    x = with_outliers(2, 5, 64).double().requires_grad_()
    with_threshold, without = (Int8Linear.of(linear, threshold) for threshold in (6.0, 0.0))
    plain = nn.Linear(64, 48).double()
    plain.weight = nn.Parameter(with_threshold.weight.double() * with_threshold.scale[:, None].double() / 127)
    plain.bias = linear.bias
    exact = plain(x)
    errors = [
        (layer(x.clamp(-6e4, 6e4)) - plain(x.clamp(-6e4, 6e4))).abs().mean() for layer in (with_threshold, without)
    ]
    assert errors[0] < 0.05 * errors[1]
    out = with_threshold(x)
    weights = torch.randn(out.shape, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((y * weights).sum(), (x, linear.bias)) for y in (out, exact))
    assert_same(list(ours), list(theirs), rtol=1e-6, atol=1e-9)


@torch.no_grad()
def test_a_trained_model_keeps_its_logits_at_a_quarter_of_the_memory(trained):
    converted = NeoXLightning.load_from_checkpoint(trained.checkpoint, int8=True, weights_only=True).eval()
    plain = trained.module.eval().cpu()
    ids = torch.randint(0, 512, (4, 32), generator=torch.Generator().manual_seed(0))
    ours, theirs = converted(ids), plain(ids)
    assert 0 < (ours - theirs).norm() < 0.02 * theirs.norm()
    for mine, its in zip(converted.model.blocks, plain.model.blocks, strict=True):
        for name in LINEARS:
            sizes = [sum(p.nbytes for p in b.get_submodule(name).parameters()) for b in (mine, its)]
            assert sizes[0] < 0.3 * sizes[1]
    again = to_int8(NeoXModel(plain.config))
    again.load_state_dict(plain.model.state_dict(), strict=False)  # quantised on the way
    assert_same(again.state_dict(), converted.model.state_dict(), rtol=0, atol=0)
    assert_same(to_int8(again).state_dict(), converted.model.state_dict(), rtol=0, atol=0)


class Traffic(Callback):
    """What the last step sent, and what there was to send."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.strategy.engine.comm.traffic.reset()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.sent = replace(trainer.strategy.engine.comm.traffic)

    def on_train_end(self, trainer, module):
        layers = trainer.strategy.engine.layers
        self.chunks = [(c.dtype, c.trainable, c.size) for c in layers[0].chunks]
        self.layers = [sum(c.data.nbytes for c in layer.chunks) for layer in layers]
        self.report = trainer.strategy.report()


@pytest.mark.parametrize("trainable", ["lora", "biases"])
@distributed(world=2)
def test_what_trains_beside_int8_trains_like_ddp_and_int8_travels(trainable):
    def make():
        return module(int8=True, trainable=trainable)

    traffic = Traffic()
    ours = fit(zero3(), make, loader(), steps=4, precision="64-true", callbacks=[traffic])
    ddp = fit("ddp", make, loader(), steps=4, precision="64-true")
    same_run(ours, ddp, **EXACT)
    assert ours.losses[-1] < ours.losses[0] or trainable == "biases"
    start = built(int8=True, trainable=trainable)
    frozen = {name: p.detach() for name, p in start.named_parameters() if not p.requires_grad}
    assert_same({name: ours.weights[name] for name in frozen}, frozen, rtol=0, atol=0)
    assert sum(p.numel() for p in frozen.values() if p.dtype is torch.int8) == 2 * 12 * 32 * 32

    fixed = {dtype: size for dtype, trains, size in traffic.chunks if not trains}
    assert fixed[torch.int8] == 12 * 32 * 32 // 2  # of one block, of one rank, and so many bytes
    assert fixed[torch.float32] * 2 >= 32 * (3 + 1 + 4 + 1)  # the scales, kept in float32
    first, second, root = traffic.layers
    # A step fetches every block, and in backward the first one again: the last is still there, and so is the root.
    assert traffic.sent.fetch_bytes == 2 * first + second + root
    assert traffic.sent.reduce_bytes == traffic.report.gradients[0]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
@distributed(world=2)
def test_other_precisions_keep_the_scales(precision):
    def make():
        return module(int8=True, trainable="lora")

    ours, ddp = (fit(s, make, loader(), steps=2, precision=precision) for s in (zero3(), "ddp"))
    assert_same(ours.losses, ddp.losses, rtol=2e-2)
    torch.set_default_dtype({"16-true": torch.float16, "bf16-true": torch.bfloat16}.get(precision, torch.float32))
    try:
        start = make()
        start.configure_model()
    finally:
        torch.set_default_dtype(torch.float32)
    scales = {name: p.detach() for name, p in start.named_parameters() if name.endswith("scale")}
    assert {p.dtype for p in scales.values()} == {torch.float32}
    assert_same({name: ours.weights[name] for name in scales}, scales, rtol=0, atol=0)


@distributed(world=2)
def test_int8_beside_adapters_is_saved_loaded_and_resumed_in_either_form(tmp_path):
    def make():
        return module(int8=True, trainable="lora")

    settings = {"precision": "64-true", "enable_checkpointing": True}
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    whole = fit(zero3(), make, loader(), steps=8, callbacks=[saving], **settings)
    parts = ModelCheckpoint(tmp_path / "parts", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer(zero3(state_dict_type="sharded"), max_steps=4, callbacks=[parts], precision="64-true").fit(make(), loader())
    expected = whole._replace(losses=whole.losses[4:])
    for path in (tmp_path / "step=4.ckpt", tmp_path / "parts" / "step=4.ckpt"):
        resumed = fit(zero3(), make, loader(), steps=8, ckpt_path=str(path), precision="64-true")
        same_run(expected, resumed, **EXACT)
    for path in (tmp_path / "step=4.ckpt", tmp_path / "parts" / "step=4.ckpt"):
        loaded = NeoXLightning.load_from_checkpoint(path, weights_only=True)
        frozen = {k: v for k, v in loaded.state_dict().items() if v.dtype is torch.int8 or k.endswith("scale")}
        assert len(frozen) == 2 * 2 * 4
        assert_same(frozen, {k: whole.weights[k] for k in frozen}, rtol=0, atol=0)
        texts = on_ranks(str(path), lambda m: m.generate([[1, 2, 3]], 8), 2, accelerator="cpu", strategy=zero3())
        assert texts == loaded.generate([[1, 2, 3]], 8)


@distributed(world=2)
def test_weights_go_from_files_into_int8_shards():
    source = random_model(tiny())
    with empty_parameters():
        model = NeoXModel(tiny())
    with until_sharded():
        load_weights(model, source.state_dict())
        add_lora(to_int8(model))
    set_trainable(model, "lora")
    assert all(p.is_meta for name, p in model.named_parameters() if ".lora." not in name)
    shard_module(model, zero3().auto_wrap_policy)
    expected = to_int8(source)
    full = full_state_dict(model, rank0_only=False)
    assert len(full) == len(expected.state_dict()) + 2 * 2 * 4
    assert_same({k: v for k, v in full.items() if ".lora." not in k}, expected.state_dict(), rtol=0, atol=0)
    assert all(value.any() == k.endswith("A") for k, value in full.items() if ".lora." in k)
    with torch.no_grad():
        assert_same(model.eval()(IDS), expected(IDS), rtol=1e-5, atol=1e-5)

    with empty_parameters():
        drawn = to_int8(NeoXModel(tiny()))
    shard_module(drawn, zero3().auto_wrap_policy)  # without a file: drawn anew
    weight = full_state_dict(drawn, rank0_only=False)["blocks.0.attention.dense.weight"]
    assert weight.float().std() > 20
    with pytest.raises(NeoXError, match=r"the module is sharded already; call to_int8\(\) before"):
        to_int8(model)


def test_a_plan_sees_that_int8_and_adapters_are_smaller():
    def planned(**options):
        batch = torch.utils.data.default_collate([Windows(1)[0]] * 2)
        return plan(lambda: module(**options), lambda _: batch, world_size=2, strategy=zero3(), precision="bf16-mixed")

    plain, lora, both = planned(), planned(trainable="lora"), planned(trainable="lora", int8=True)
    assert both.report.total[0] < lora.report.total[0] < plain.report.total[0]
    assert both.report.trainable == lora.report.trainable < plain.report.trainable
    assert both.peak < lora.peak < plain.peak


def test_mistakes_are_named(monkeypatch):
    with pytest.raises(NeoXError, match="Linear has no TransformerLayer in it"):
        to_int8(nn.Linear(2, 2))
    with pytest.raises(NeoXError, match="int8_threshold must be at least 0, got -1"):
        to_int8(NeoXModel(tiny()), -1)
    with pytest.raises(NeoXError, match="with model.int8=true most weights cannot train; set model.trainable to lora"):
        Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False).fit(module(int8=True), loader())
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(NeoXError, match=r"int8 needs bitsandbytes \(.*\); pip install 'lightning-zero3\[int8\]'"):
        NeoXLightning(tiny(), int8=True)
