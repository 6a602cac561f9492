"""What trains: each choice as under DDP, with states of what trains only; wrong choices; structure in checkpoints."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from neox_lit import LoRAOptions, NeoXError, NeoXLightning
from neox_lit.cli import NeoXCLI
from neox_lit.data import TextDataModule
from tests.harness import assert_same, distributed
from tests.harness.oracles import fit
from tests.neox.helpers import tiny
from tests.neox.tuning import EXACT, built, loader, module, zero3
from tests.strategy.runs import same_run

LORA = LoRAOptions(rank=4, targets=("query_key_value", "dense_4h_to_h"))

CHOICES = {
    "biases": ({"trainable": "biases"}, 2 * (96 + 32 + 128)),
    "lora": ({"trainable": "lora", "lora": LORA}, 2 * 4 * (32 + 96 + 128 + 32)),
    "expressions": ({"trainable": ["norm", r"blocks\.1\..*dense\.weight"]}, (2 * 2 + 1) * 2 * 32 + 32 * 32),
}


class Reported(Callback):
    def on_train_end(self, trainer, module):
        self.report = trainer.strategy.report()


@pytest.mark.parametrize("choice", CHOICES)
@distributed(world=2)
def test_a_choice_trains_like_ddp_and_costs_what_trains(choice):
    options, numel = CHOICES[choice]
    reported = Reported()
    ours = fit(zero3(), lambda: module(**options), loader(), steps=4, precision="64-true", callbacks=[reported])
    ddp = fit("ddp", lambda: module(**options), loader(), steps=4, precision="64-true")
    same_run(ours, ddp, **EXACT)
    start = built(**options)
    trains = {name for name, p in start.named_parameters() if p.requires_grad}
    assert set(ours.optimizer_state) == trains
    moved = {name for name, value in start.state_dict().items() if not torch.equal(value, ours.weights[name])}
    assert moved == trains
    report = reported.report
    assert report.trainable == numel == sum(p.numel() for p in start.parameters() if p.requires_grad)
    assert report.gradients[1] == 8 * numel
    assert report.optimizer[1] == 16 * numel  # AdamW's two moments
    assert report.optimizer[0] < report.optimizer[1]


@distributed(world=2)
def test_resuming_and_loading_rebuild_the_structure(tmp_path):
    options = {"trainable": "lora", "lora": LORA}
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    settings = {"steps": 8, "precision": "64-true", "enable_checkpointing": True}
    whole = fit(zero3(), lambda: module(**options), loader(), callbacks=[saving], **settings)
    path = tmp_path / "step=4.ckpt"
    resumed = fit(zero3(), lambda: module(**options), loader(), ckpt_path=str(path), steps=8, precision="64-true")
    same_run(whole._replace(losses=whole.losses[4:]), resumed, **EXACT)

    loaded = NeoXLightning.load_from_checkpoint(tmp_path / "step=8.ckpt", weights_only=True)
    assert (loaded.trainable, loaded.lora) == ("lora", LORA)
    assert_same(loaded.double().state_dict(), whole.weights, rtol=1e-6, atol=1e-7)  # loaded as float32
    assert {n for n, p in loaded.named_parameters() if p.requires_grad} == set(whole.optimizer_state)
    with pytest.raises(NeoXError, match=r"the checkpoint has model.lora=\{'rank': 4, .*, this run None; set it to"):
        fit(zero3(), module, loader(), steps=8, ckpt_path=str(path))
    with pytest.raises(NeoXError, match=r"the checkpoint has model.int8=False, this run True"):
        fit(zero3(), lambda: module(**options, int8=True), loader(), steps=8, ckpt_path=str(path))


def test_adapters_start_from_a_base_model_s_checkpoint(trained):
    tuned = NeoXLightning.load_from_checkpoint(trained.checkpoint, trainable="lora", weights_only=True)
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(tuned.eval()(ids), trained.module.eval()(ids))
    assert all(("lora" in name) == p.requires_grad for name, p in tuned.named_parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainable": "bias"}, r"model.trainable='bias' is not a choice; give one of all, biases, lora, or a list"),
        ({"trainable": []}, r"model.trainable=\[\] leaves nothing to train"),
        ({"trainable": ["("]}, r"model.trainable: '\(' is not a regular expression"),
        (
            {"trainable": ["norm", "attn"]},
            r"'attn' matches no parameter; there are embedding\.word_embeddings\.weight, ",
        ),
        ({"trainable": ["dense"], "int8": True}, r"'dense' matches 'blocks.0.attention.dense.weight', which is int8"),
        ({"lora": LoRAOptions()}, r"model.lora is given, but model.trainable='all' makes no adapters; set it to lora"),
        ({"trainable": "lora", "lora": {"rank": 0}}, r"model.lora.rank must be a positive integer, got 0"),
        ({"trainable": "lora", "lora": {"targets": ["qkv"]}}, r"model.lora.targets must be some of query_key_value, "),
        ({"int8_threshold": -1.0}, r"model.int8_threshold must be at least 0, got -1.0"),
    ],
)
def test_a_wrong_choice_is_named(options, message):
    with pytest.raises(NeoXError, match=message):
        NeoXLightning(tiny(), **options).configure_model()


def test_the_command_line_has_the_choices_and_a_checkpoint_gives_them(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["neox-lit"])
    lora = ["--model.trainable=lora", "--model.lora.rank=2", "--model.lora.targets=[dense]"]
    module = cli("--model.preset=pythia-14m", *lora).model
    assert (module.trainable, module.lora) == ("lora", LoRAOptions(rank=2, targets=("dense",)))
    assert cli("--model.preset=pythia-14m", "--model.trainable=['norm', 'bias$']").model.trainable == ["norm", "bias$"]
    checkpoint = torch.load(trained.checkpoint, weights_only=True)
    checkpoint["hyper_parameters"] |= {"trainable": "lora", "lora": LORA.to_dict()}
    torch.save(checkpoint, tmp_path / "tuned.ckpt")
    module = cli(f"--ckpt_path={tmp_path / 'tuned.ckpt'}").model
    assert (module.trainable, module.lora) == ("lora", LORA)


def cli(*arguments: str) -> NeoXCLI:
    """What the command would run, not run."""

    class Stopped(NeoXCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            pass

    return Stopped(
        NeoXLightning,
        TextDataModule,
        args=["fit", *arguments],
        auto_configure_optimizers=False,
        save_config_callback=None,
    )


def test_variants_of_a_plan_are_smaller_and_new():
    both = {"model.trainable": "lora", "model.int8": True}
    assert module().plan_variants() == {"LoRA": {"model.trainable": "lora"}, "int8 and LoRA": both}
    assert module(trainable="lora").plan_variants() == {"int8 and LoRA": {"model.int8": True}}
    assert module(trainable="biases").plan_variants() == {"int8": {"model.int8": True}}
    assert module(trainable=["norm"]).plan_variants() == {"int8 and LoRA": both}
    assert module(trainable="lora", int8=True).plan_variants() == {}
