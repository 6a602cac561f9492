"""How the same training is computed and watched: chunks of logits, compiled layers, throughput, samples."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.loss_memory import Memory, step
from lightning_zero3 import GradientNorms, Zero3Strategy
from neox_lit import LoRAOptions, NeoXError, NeoXLightning, SampleText, Throughput, callbacks, compiling
from neox_lit.finetune import set_trainable
from neox_lit.flops import flops_per_token, peak_flops
from neox_lit.lora import add_lora
from neox_lit.loss import IGNORE, token_loss
from tests.harness import assert_same, distributed
from tests.harness.memory import needs_linux
from tests.harness.oracles import fit
from tests.neox.helpers import random_model, tiny
from tests.neox.test_module import quiet
from tests.neox.tuning import EXACT, Tuned, Windows, loader, module, zero3
from tests.strategy.runs import same_run

# -- chunks of logits -------------------------------------------------------------------------------------------------


def batch(rows: int = 3, seq_len: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids, labels = torch.randint(128, (2, rows, seq_len))
    labels[1, 2:5] = IGNORE
    return ids, labels


@pytest.mark.parametrize("chunk", [1, 4, 21, 100])
@pytest.mark.parametrize("tied", [False, True])
def test_chunks_give_the_plain_loss_and_gradients(tied, chunk):
    model = random_model(tiny(tied_readout=tied))
    ids, labels = batch()
    results = []
    for size in (chunk, 0):
        model.zero_grad()
        loss = model(ids, labels=labels, loss_chunk=size)
        (3 * loss.mean).backward(retain_graph=True)
        loss.mean.backward()  # again, with another factor
        results.append({"loss": loss.mean, **{n: p.grad for n, p in model.named_parameters()}})
        assert loss.n_targets == 18
    assert_same(*results, rtol=1e-5, atol=1e-6)
    assert_same(results[1]["loss"], token_loss(model(ids), labels).mean, rtol=0, atol=0)


def test_chunks_compute_what_is_asked_in_the_dtypes_of_the_plain_loss():
    model = random_model(tiny())
    ids, labels = batch()
    with torch.no_grad():
        assert not model(ids, labels=labels, loss_chunk=4).total.requires_grad
    model.readout.requires_grad_(False)
    model(ids, labels=labels, loss_chunk=4).mean.backward()
    assert model.readout.final_linear.weight.grad is None
    assert model(ids, labels=torch.full_like(labels, IGNORE), loss_chunk=4).mean == 0

    model.requires_grad_(True)
    grads = []
    for chunk in (4, 0):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=labels, loss_chunk=chunk)
        assert loss.total.dtype == torch.float32
        loss.mean.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(*grads, rtol=0.05, atol=2e-3)  # bfloat16's rounding


def test_logits_never_exist_whole():
    tokens, vocab, hidden, chunk = 256, 1000, 8, 16
    x, weight = torch.randn(tokens, hidden, requires_grad=True), torch.randn(vocab, hidden, requires_grad=True)
    labels = torch.randint(vocab, (tokens,))
    seen = {}
    for size in (chunk, 0):
        with Memory(x, weight, labels) as seen[size]:
            step(x, weight, labels, size)
    assert seen[0].largest == 4 * tokens * vocab
    assert seen[0].peak >= 3 * seen[0].largest
    assert seen[chunk].largest == 4 * chunk * vocab
    assert seen[chunk].peak < 5 * seen[chunk].largest


@pytest.mark.parametrize("tied", [False, True])
@distributed(world=2)
def test_chunks_train_like_whole_logits_and_gather_the_readout_once(tied):
    class Counted(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            self.counts = dataclasses.replace(trainer.strategy.engine.comm.traffic)

    def make(chunk: int) -> Tuned:
        return Tuned(tiny(tied_readout=tied), loss_chunk=chunk)

    counted = Counted(), Counted()
    # Every leaf a layer, the readout too: a loop of calls would gather it for each chunk.
    everything = {"auto_wrap_policy": lambda m: not any(True for _ in m.children())}
    options = {"steps": 3, "precision": "64-true"}
    chunks = fit(zero3(**everything), lambda: make(5), loader(), callbacks=[counted[0]], **options)
    whole = fit(zero3(**everything), lambda: make(0), loader(), callbacks=[counted[1]], **options)
    same_run(chunks, whole, **EXACT)
    same_run(chunks, fit("ddp", lambda: make(0), loader(), **options), **EXACT)
    assert counted[0].counts == counted[1].counts


# -- compiled layers --------------------------------------------------------------------------------------------------


@distributed(world=2, deadline=180)
def test_compiled_layers_train_like_plain_ones_and_leave_no_trace(tmp_path):
    torch._dynamo.reset()

    def make() -> Tuned:
        return module(compile=True, compile_backend="aot_eager")

    ours = fit(zero3(), make, loader(), steps=3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    same_run(ours, fit("ddp", module, loader(), steps=3))
    assert "compile" not in make().hparams


def test_compile_needs_a_backend_and_a_compiler(monkeypatch):
    with pytest.raises(NeoXError, match=r"model.compile_backend='fast' is not a backend of torch.compile: .*inductor"):
        NeoXLightning(tiny(), compile=True, compile_backend="fast")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with pytest.raises(NeoXError, match=r"model.compile=true needs a C\+\+ compiler, and there is no g\+\+ or clang"):
        NeoXLightning(tiny(), compile=True)
    NeoXLightning(tiny(), compile=True, compile_backend="aot_eager")


# -- throughput -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("trains", ["all", "lora", "last"])
def test_operations_per_token_are_those_that_run(tied, trains):
    model = random_model(tiny(n_layers=3, d_ff=48, tied_readout=tied))
    if trains == "lora":
        add_lora(model, LoRAOptions(rank=2))
    set_trainable(model, {"last": [r"blocks\.2\."]}.get(trains, trains))
    for block in model.blocks:
        block.attention.is_flash_attention = False  # the counter sees products, not kernels
    ids, labels = batch(2, 8)
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=labels).mean.backward()
    expected = counter.get_total_flops() / ids.numel()
    ours = flops_per_token(model.config, model, 8)
    if trains == "all":
        assert ours == expected
        c, h = model.config, model.config.n_hidden
        matrices = c.n_layers * (4 * h * h + 2 * h * c.d_ff) + h * c.n_vocab
        assert ours == 6 * matrices + 12 * c.n_layers * h * 8
    elif trains == "last":
        assert ours == expected
    else:  # the gradient of what the very first adapter reads is not needed
        assert expected < ours < 1.1 * expected


def test_devices_are_known_by_their_names():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA A10G") is None


class Clock(Callback):
    """A clock that moves by what a run does: a batch of rank r takes 2 + r seconds, an item 0.5, a validation 100."""

    def __init__(self):
        self.now = 0.0

    def on_train_batch_start(self, trainer, module, batch, index):
        self.now += 2 + trainer.global_rank

    def on_validation_end(self, trainer, module):
        self.now += 100

    def slowly(self, data):
        class Data(torch.utils.data.Dataset):
            def __len__(_):
                return len(data)

            def __getitem__(_, index):
                self.now += 0.5
                return data[index]

        return Data()


@distributed(world=2)
def test_throughput_counts_tokens_of_all_ranks_and_training_alone(tmp_path):
    watch, clock = Throughput(peak_flops=1e9, every_n_steps=7), Clock()
    trainer = quiet(
        strategy=Zero3Strategy(),
        devices=2,
        max_steps=7,
        val_check_interval=3,
        num_sanity_val_steps=0,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        callbacks=[watch, clock, GradientNorms(per="total", prog_bar=True)],
    )
    tuned = module()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        trainer.fit(tuned, DataLoader(clock.slowly(Windows(28)), batch_size=2), loader(2))
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    # 2 ranks, 6 batches after the first, 2 windows of 12 targets. They take what the slower rank takes, 3 s each, and
    # 1 s of loading the next, but where validation comes between.
    assert logged["tokens_per_s"] == pytest.approx(2 * 6 * 2 * 12 / (6 * 3 + 4 * 1))
    flops = logged["tokens_per_s"] / 2 * flops_per_token(tuned.config, tuned.model, 12)
    assert logged["tflops_per_s"] == pytest.approx(flops / 1e12, rel=1e-4)
    assert logged["mfu"] == pytest.approx(flops / 1e9, rel=1e-4)
    assert 0.05 < logged["memory_gib"] < 20
    assert {"tokens_per_s", "mfu", "memory_gib", "train_loss", "grad_2.0_norm_total"} <= set(
        trainer.progress_bar_metrics
    )
    assert logged == trainer.strategy.broadcast(logged)
    trainer.logger.save()
    if trainer.is_global_zero:
        header = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0]
        assert {"tokens_per_s", "tflops_per_s", "mfu", "memory_gib", "grad_2.0_norm_total"} < set(header.split(","))


@needs_linux
def test_the_memory_of_a_process_is_its_own_and_not_its_parents():
    ask = "import torch; from neox_lit.callbacks import _peak_memory; print(_peak_memory(torch.device('cpu')))"
    ballast = torch.ones(2**28)  # 1 GiB
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=100, check=True)
    assert 0.05 < float(done.stdout) < 1 < callbacks._peak_memory(ballast.device)


@distributed(world=2)
def test_a_sharded_model_writes_samples_after_validations(cache, tmp_path):
    from neox_lit import TextDataModule

    data = TextDataModule(seq_len=32, batch_size=4, vocab_size=512, cache_dir=str(cache))
    trainer = quiet(
        strategy=Zero3Strategy(),
        devices=2,
        max_steps=5,
        limit_val_batches=1,
        val_check_interval=1,
        logger=TensorBoardLogger(tmp_path),
        callbacks=[SampleText("The", 4, every_n_validations=2)],
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer.fit(NeoXLightning(tiny(n_vocab=512)), data)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("Sample after")]
    assert lines == [f"Sample after {n} steps:" for n in (2, 4, 5)] * trainer.is_global_zero
    if trainer.is_global_zero:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        trainer.logger.finalize("success")
        events = EventAccumulator(trainer.logger.log_dir).Reload()
        assert [event.step for event in events.Tensors("sample/text_summary")] == [2, 4, 5]
