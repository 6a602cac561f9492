"""NeoXLightning on one device and under DDP: it learns, logs, saves, loads, samples."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero3 import Zero3Strategy
from neox_lit import NeoXConfig, NeoXError, NeoXLightning, SampleText, Sampling, TextDataModule
from neox_lit.loss import token_loss
from neox_lit.optim import decay_groups, lr_factor
from neox_lit.windows import PackedWindows
from tests.harness import distributed
from tests.neox.helpers import tiny


def quiet(**settings) -> Trainer:
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**{"accelerator": "cpu", "devices": 1, **off, **settings})


def test_training_lowers_the_loss(trained):
    assert trained.last_loss < 0.75 * trained.first_loss


def test_checkpoint_is_plain_data_and_loads_in_one_line(trained):
    checkpoint = torch.load(trained.checkpoint, weights_only=True)
    assert checkpoint["hyper_parameters"]["config"]["n_vocab"] == 512
    module = NeoXLightning.load_from_checkpoint(trained.checkpoint, weights_only=True)
    assert module.config == trained.module.config
    assert module.tokenizer.hash == trained.module.tokenizer.hash
    for name, value in trained.module.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name


def test_state_dict_has_the_plain_names(trained):
    assert "model.blocks.1.mlp.dense_4h_to_h.bias" in trained.module.state_dict()
    assert all(name.startswith("model.") for name in trained.module.state_dict())


def test_resuming_goes_on_where_it_stopped(trained, cache, tmp_path):
    module = NeoXLightning(trained.module.config, lr=1e-2, warmup_steps=5)
    trainer = quiet(max_steps=62, default_root_dir=tmp_path)
    data = TextDataModule(seq_len=32, batch_size=8, vocab_size=512, val_fraction=0.002)
    trainer.fit(module, data, ckpt_path=trained.checkpoint)
    assert trainer.global_step == 62
    assert trainer.callback_metrics["train_loss"].item() < trained.last_loss + 0.5


def test_resuming_with_another_tokenizer_is_refused(trained, tmp_path):
    data = TextDataModule(seq_len=32, batch_size=8, vocab_size=400)
    with pytest.raises(NeoXError, match=r"another tokenizer \(400 and 512 tokens\)"):
        quiet(max_steps=62).fit(NeoXLightning(trained.module.config), data, ckpt_path=trained.checkpoint)


def test_validation_is_the_mean_over_all_targets(trained):
    metrics = quiet().validate(trained.module, trained.data, verbose=False)[0]
    expected = held_out_loss(trained.module, trained.data)
    assert metrics["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["val_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert quiet().test(trained.module, trained.data, verbose=False)[0]["test_loss"] == metrics["val_loss"]
    losses = torch.cat(quiet().predict(trained.module, trained.data))
    assert losses.shape == (len(trained.data._ready.held_out),)


@torch.no_grad()
def held_out_loss(module: NeoXLightning, data: TextDataModule) -> float:
    windows = PackedWindows(data._ready.path, data.seq_len, data._ready.held_out)
    losses = [token_loss(module(item["input_ids"][None]), item["labels"][None]) for item in windows]
    return (sum(loss.total for loss in losses) / sum(loss.n_targets for loss in losses)).item()


@distributed(world=2)
def test_two_ranks_count_each_target_once(cache):
    """An odd number of windows, the last one short: no window counts twice, and each by its targets."""
    seed_everything(1)
    module = NeoXLightning(tiny(n_vocab=512), lr=1e-2)
    data = TextDataModule(seq_len=32, batch_size=3, vocab_size=512, cache_dir=str(cache), val_fraction=0.0011)
    trainer = quiet(strategy="ddp", devices=2, max_steps=3, num_sanity_val_steps=0, val_check_interval=3)
    trainer.fit(module, data)
    assert len(data._ready.held_out) % 2 == 1
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(held_out_loss(module, data), rel=1e-5)
    assert trainer.callback_metrics["train_loss"].item() == trainer.strategy.broadcast(
        trainer.callback_metrics["train_loss"].item()
    )
    text = module.complete("The", 8, Sampling(seed=5))
    assert text == trainer.strategy.broadcast(text)


@distributed(world=2)
def test_a_sharded_model_generates_what_its_checkpoint_does(cache, tmp_path):
    seed_everything(1)
    texts = []

    class Complete(Callback):
        def on_train_epoch_end(self, trainer, module):
            module.train()
            texts.append(module.complete("The", 12, Sampling(seed=5)))
            assert module.training

    module = NeoXLightning(tiny(n_vocab=512), lr=1e-2)
    data = TextDataModule(seq_len=32, batch_size=4, vocab_size=512, cache_dir=str(cache))
    trainer = quiet(
        strategy=Zero3Strategy(),
        devices=2,
        max_epochs=2,
        limit_train_batches=3,
        limit_val_batches=1,
        enable_checkpointing=True,
        callbacks=[Complete(), ModelCheckpoint(tmp_path, filename="last")],
    )
    trainer.fit(module, data)
    loaded = NeoXLightning.load_from_checkpoint(tmp_path / "last.ckpt")
    assert texts[0] != texts[1] == loaded.complete("The", 12, Sampling(seed=5))
    assert texts == trainer.strategy.broadcast(texts)


def test_configure_model_twice_is_once():
    module = NeoXLightning(tiny())
    module.configure_model()
    model = module.model
    module.configure_model()
    assert module.model is model


def test_three_ways_to_say_the_shape():
    assert NeoXLightning(preset="pythia-14m", overrides={"n_layers": 1}).config.n_layers == 1
    assert NeoXLightning(tiny()).config == tiny()
    assert NeoXLightning(tiny().to_dict()).config == tiny()
    with pytest.raises(NeoXError, match=r"none of model.config, model.preset and model.pretrained is given"):
        NeoXLightning()
    with pytest.raises(NeoXError, match=r"model.preset='pythia-14m' and model.config are both given"):
        NeoXLightning(tiny(), preset="pythia-14m")
    with pytest.raises(NeoXError, match=r"model.overrides=\{'n_layers': 1\} replaces fields of a preset"):
        NeoXLightning(tiny(), overrides={"n_layers": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("weight_decay", -1.0),
        ("schedule", "cosin"),
        ("warmup_steps", -1),
        ("loss_chunk", -1),
        ("decay_steps", -1),
        ("min_lr_ratio", 2.0),
    ],
)
def test_a_wrong_setting_is_named(field, value):
    with pytest.raises(NeoXError, match=f"model.{field} must be"):
        NeoXLightning(tiny(), **{field: value})


def test_data_that_does_not_fit_the_model_is_refused_before_training():
    def fit(config: NeoXConfig, **settings) -> None:
        quiet(max_steps=1).fit(NeoXLightning(config), TextDataModule(vocab_size=512, **settings))

    with pytest.raises(NeoXError, match=r"512 tokens, more than the model's config.n_vocab=384; set it to 512"):
        fit(tiny(n_vocab=384), seq_len=32)
    with pytest.raises(NeoXError, match=r"data.seq_len=65 is above the model's config.max_seq_len=64"):
        fit(tiny(n_vocab=512), seq_len=65)


@distributed(world=2)
def test_unusable_text_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(NeoXError, match=r"bad row at .*empty.txt: 'text' is empty"):
        quiet(strategy="ddp", devices=2).fit(NeoXLightning(tiny()), TextDataModule(str(tmp_path / "empty.txt")))


def test_matrices_decay_and_vectors_do_not():
    module = NeoXLightning(tiny())
    module.configure_model()
    module.model.embedding.requires_grad_(False)
    decay, rest = decay_groups(module.parameters(), 0.1)
    assert all(p.ndim >= 2 for p in decay["params"])
    assert all(p.ndim == 1 for p in rest["params"])
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert len(decay["params"]) + len(rest["params"]) == len(list(module.parameters())) - 1


def test_schedules_warm_up_and_fall():
    def at(step, total=110.0, schedule="cosine"):
        return lr_factor(step, schedule, warmup=10, total=total, floor=0.1)

    assert [at(0), at(4), at(9), at(10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert [at(60), at(110), at(500)] == pytest.approx([0.55, 0.1, 0.1])
    assert at(10**6, math.inf) == 1
    assert [at(i, 110.0, "linear") for i in (4, 10, 35, 110, 500)] == pytest.approx([0.5, 1.0, 0.775, 0.1, 0.1])
    assert [at(i, 110.0, "constant") for i in (4, 10, 500)] == [0.5, 1.0, 1.0]


def test_learning_rate_follows_the_schedule_by_step(trained):
    rates = []

    class Record(NeoXLightning):
        def on_train_batch_end(self, *_):
            rates.append(self.optimizers().param_groups[0]["lr"])

    module = Record(trained.module.config, lr=1.0, warmup_steps=4, schedule="linear")
    quiet(max_steps=8, limit_val_batches=0).fit(module, trained.data)
    assert rates == pytest.approx([lr_factor(i, "linear", warmup=4, total=8, floor=0.1) for i in range(1, 9)])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_clipping_works_in_every_precision(trained, precision):
    """Lightning refuses to clip a fused optimizer under autocast."""
    trainer = quiet(max_steps=2, precision=precision, gradient_clip_val=1.0, limit_val_batches=0)
    trainer.fit(NeoXLightning(trained.module.config), trained.data)
    assert trainer.global_step == 2


def test_generate_and_complete(trained):
    module = NeoXLightning.load_from_checkpoint(trained.checkpoint)
    ids = module.tokenizer.encode("The value of")
    greedy = module.generate([ids], 8)[0]
    assert module.complete("The value of", 8) == module.tokenizer.decode(greedy)
    assert module.complete("", 8, Sampling(seed=1))
    other = NeoXLightning(tiny())
    other.configure_model()
    with pytest.raises(NeoXError, match="no tokenizer is known"):
        other.complete("x", 8)
    with pytest.raises(NeoXError, match="not built yet"):
        NeoXLightning(tiny()).generate([[1]], 8)


def test_samples_during_training_and_at_its_end(trained, capsys):
    callback = SampleText("The", max_new_tokens=None, every_n_epochs=1)
    trainer = quiet(max_epochs=2, limit_train_batches=2, limit_val_batches=0, callbacks=[callback])
    trainer.fit(NeoXLightning(trained.module.config), trained.data)
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("Sample after")] == [
        "Sample after 2 steps:",
        "Sample after 4 steps:",
    ]


def test_a_sample_that_does_not_fit_is_refused_before_training(trained):
    callback = SampleText("The " * 30, max_new_tokens=40)
    with pytest.raises(NeoXError, match=r"SampleText.prompt has .* max_new_tokens=40 .* max_seq_len=64"):
        quiet(max_steps=1, callbacks=[callback]).fit(NeoXLightning(trained.module.config), trained.data)


def test_sample_text_needs_a_language_model():
    with pytest.raises(NeoXError, match="SampleText samples from a NeoXLightning, not from a LightningModule"):
        SampleText().setup(None, LightningModule(), "fit")
    with pytest.raises(NeoXError, match=r"SampleText.max_new_tokens must be at least 1, got 0"):
        SampleText(max_new_tokens=0)
    with pytest.raises(NeoXError, match=r"SampleText.every_n_epochs must be at least 0, got -1"):
        SampleText(every_n_epochs=-1)
