"""Every `precision`: results as "ddp" gives them, and where each dtype lives."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn
from torch.nn import functional as F

from lightning_zero3 import Zero3Error, Zero3Strategy
from tests.harness import assert_same, distributed
from tests.harness.models import Pairs, Task, loader
from tests.harness.oracles import fit
from tests.strategy.runs import make_mlp, make_plain_mlp, mlp_task, same_run, trainer, weights_of, zero3

# In true half precision a flat chunk's update rounds differently from a parameter's own: allow two roundings.
TRUE = {"32-true": (1e-5, 1e-6), "64-true": (1e-12, 1e-12), "bf16-true": (2**-6, 2**-6), "16-true": (2**-9, 2**-10)}
DTYPES = {"32-true": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


def momentum(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


class Recording(Task):
    """Notes the dtypes that the model computes with."""

    def training_step(self, batch, batch_idx):
        self.seen = (batch[0].dtype, self.net.head.weight.dtype, self.net(batch[0]).dtype, torch.get_default_dtype())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("precision", TRUE)
@distributed(world=[1, 2])
def test_true_precisions_train_like_ddp(precision):
    rtol, atol = TRUE[precision]
    ours, ddp = (
        fit(s, lambda: Recording(make_mlp(), momentum), loader(Pairs(64, 7)), steps=8, precision=precision)
        for s in (zero3(), "ddp")
    )
    same_run(ours, ddp, rtol, atol)
    for name, weight in ours.weights.items():
        assert weight.dtype is ddp.weights[name].dtype is DTYPES[precision]
        assert ours.optimizer_state[name]["momentum_buffer"].dtype is DTYPES[precision]
    assert ours.trainer.lightning_module.seen == ddp.trainer.lightning_module.seen


def mixed(precision):
    """Trainer options: on the CPU `precision="16-mixed"` would become "bf16-mixed"."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if precision == "16-mixed" else None  # overflows nowhere
    return {"plugins": MixedPrecision(precision, "cpu", scaler)}


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("make_model", [make_plain_mlp, make_mlp], ids=["plain", "awkward"])
@distributed(world=[1, 2, 3])
def test_mixed_precision_is_ddps_within_its_noise(precision, make_model):
    """Noise is how far DDP's mixed precision is from its full precision.

    The awkward net has scalars that multiply. Autocast leaves those in float32 while here they travel in the small
    dtype like all weights: that is noise of its own. The plain net computes what DDP's does.
    """
    data, share = loader(Pairs(400, 7)), 0.01 if make_model is make_plain_mlp else 2.0
    ours, ddp, full = (
        fit(s, lambda: Task(make_model(), momentum), data, steps=20, **options)
        for s, options in ((zero3(), mixed(precision)), ("ddp", mixed(precision)), ("ddp", {}))
    )
    for kind in ("losses", "weights"):
        mine, theirs, exact = (flat(getattr(run, kind)) for run in (ours, ddp, full))
        noise = (theirs - exact).norm()
        assert 0 < noise < 0.02 * exact.norm()
        assert (mine - theirs).norm() < share * noise
        assert 0 < (mine - exact).norm() < 3 * noise  # and it did compute in that precision
    assert {w.dtype for w in ours.weights.values()} == {torch.float32}


@distributed(world=2)
def test_frozen_matrices_travel_in_the_small_dtype_too():
    def frozen_task():
        task = Task(make_plain_mlp(), momentum)
        next(task.parameters()).requires_grad_(False)
        return task

    strategy, data = zero3(), loader(Pairs(400, 7))
    ours, ddp = (fit(s, frozen_task, data, steps=20, **mixed("bf16-mixed")) for s in (strategy, "ddp"))
    same_run(ours, ddp, rtol=1e-3, atol=1e-4)
    fixed = [c for layer in strategy.engine.layers for c in layer.chunks if not c.trainable]
    assert [(len(c.params), c.dtype, c.compute_dtype) for c in fixed] == [(1, torch.float32, torch.bfloat16)]


def flat(values):
    items = values.values() if isinstance(values, dict) else values
    return torch.cat([torch.as_tensor(v, dtype=torch.float64).flatten() for v in items])


@pytest.mark.parametrize(
    ("precision", "stored", "gathered", "reduced"),
    [
        ("32-true", torch.float32, torch.float32, torch.float32),
        ("64-true", torch.float64, torch.float64, torch.float64),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("16-true", torch.float16, torch.float16, torch.float16),
        ("16-mixed", torch.float32, torch.float16, torch.float32),
        ("bf16-mixed", torch.float32, torch.bfloat16, torch.float32),
    ],
)
@distributed(world=2)
def test_dtypes_of_parameter_gradient_and_optimizer_state(precision, stored, gathered, reduced):
    """L13."""
    strategy = zero3()
    options = mixed(precision) if precision == "16-mixed" else {"precision": precision}
    fit(strategy, mlp_task, loader(Pairs(64, 7)), steps=2, **options)
    chunks = [c for layer in strategy.engine.layers for c in layer.chunks]
    assert {c.dtype for c in chunks} == {c.data.dtype for c in chunks} == {stored}
    for chunk in chunks:  # autocast casts no vectors of norms
        matrices = {p.ndim > 1 for p in chunk.params}
        assert chunk.compute_dtype is (gathered if True in matrices or gathered is stored else stored)
        assert len(matrices) == 1 or gathered is stored
    assert {c.reduce_dtype for c in chunks} == {reduced}
    (optimizer,) = strategy.optimizers
    for segment in strategy.segments(optimizer):
        assert segment.dtype is segment.grad.dtype is stored
        assert {v.dtype for k, v in optimizer.state[segment].items() if k != "step"} == {stored}


class Inside(Task):
    """Notes the dtypes that autocast chooses, and the weight's while it is gathered."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.seen = out.dtype, F.mse_loss(out, batch[1]).dtype, self.net.head.weight.dtype
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("precision", "small"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
@distributed(world=2)
def test_autocast_chooses_dtypes_and_weights_travel_small(precision, small):
    module = Inside(make_mlp())
    fit(zero3(), lambda: module, loader(Pairs(64, 7)), steps=1, **mixed(precision))
    assert module.seen == (small, torch.float32, small)
    assert module.net.head.weight.dtype is torch.float32  # sharded, it says what is stored


def test_a_mixed_precision_that_the_cpu_lacks_becomes_the_one_it_has():
    built = Trainer(strategy=Zero3Strategy(), accelerator="cpu", devices=1, precision="16-mixed")
    assert built.precision == "bf16-mixed"


class Custom(Precision):
    precision = "32-true"


class OwnScaler(torch.amp.GradScaler):
    pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"plugins": MixedPrecision("16-mixed", "cpu", OwnScaler("cpu"))},
            "gradient scaler OwnScaler is not supported.*Give that, or none",
        ),
        ({"plugins": Custom()}, "precision plugin Custom is not supported.*Trainer\\(precision"),
        ({"strategy": Zero3Strategy, "precision_plugin": Custom()}, "precision plugin Custom"),
    ],
    ids=["custom scaler", "custom plugin", "custom plugin of the strategy"],
)
def test_unsupported_precisions_are_refused_when_the_trainer_is_built(options, said):
    with pytest.raises(Zero3Error, match=said):
        if "strategy" in options:
            Zero3Strategy(precision_plugin=options["precision_plugin"])
        else:
            Trainer(strategy=Zero3Strategy(), accelerator="cpu", devices=2, **options)


# -- reduce_dtype -----------------------------------------------------------------------------------------------------


class LocalGradients(Task):
    """Notes each rank's own gradients, before they are reduced, as float32."""

    def __init__(self):
        super().__init__(make_mlp(), lambda net: torch.optim.SGD(net.parameters(), lr=1.0))
        self.local = {}

    def training_step(self, batch, batch_idx):
        if not self.local:
            for name, param in self.named_parameters():
                param.register_hook(lambda grad, name=name: self.local.__setitem__(name, grad.float().clone()))
        return super().training_step(batch, batch_idx)


def mean_of_local(gradients):
    total = {name: grad.clone() for name, grad in gradients.items()}
    for grad in total.values():
        dist.all_reduce(grad)
    return {name: grad / dist.get_world_size() for name, grad in total.items()}


@pytest.mark.parametrize("given", [torch.float32, "float32", "torch.float32"], ids=str)
@distributed(world=4)
def test_gradients_reduce_in_the_dtype_that_is_asked_for(given):
    """Four ranks: sums of two would be rounded once in either dtype. SGD with lr 1 shows the mean in the weights."""
    weights, bytes_sent, exact = [], [], None
    for dtype in (given, None):
        strategy, module = zero3(reduce_dtype=dtype), LocalGradients()
        run = fit(strategy, lambda module=module: module, loader(Pairs(64, 7)), steps=1, precision="bf16-true")
        before = {f"net.{k}": v.bfloat16() for k, v in make_mlp().named_parameters()}
        mean = {k: v.bfloat16() for k, v in mean_of_local(module.local).items()}
        assert {c.reduce_dtype for layer in strategy.engine.layers for c in layer.trainable} == {
            torch.float32 if dtype else torch.bfloat16
        }
        weights.append(run.weights)
        exact = {k: before[k] - mean[k] for k in before}
        bytes_sent.append(strategy.engine.comm.traffic.reduce_bytes)
    assert_same(weights[0], exact, rtol=0, atol=0)
    assert bytes_sent[0] == 2 * bytes_sent[1]
    with pytest.raises(AssertionError):
        assert_same(weights[1], exact, rtol=0, atol=0)


@distributed(world=2)
def test_mixed_precision_may_reduce_in_half_the_bytes():
    runs, bytes_sent = [], []
    for dtype in (None, "bfloat16"):
        strategy = zero3(reduce_dtype=dtype)
        runs.append(fit(strategy, mlp_task, loader(Pairs(64, 7)), steps=4, precision="bf16-mixed"))
        bytes_sent.append(strategy.engine.comm.traffic.reduce_bytes)
    assert bytes_sent[0] == 2 * bytes_sent[1]
    assert_same(runs[0].losses, runs[1].losses, rtol=0.02)


@pytest.mark.parametrize("given", ["float33", "nn", torch.int32, 32], ids=str)
def test_a_reduce_dtype_that_is_none_is_refused(given):
    with pytest.raises(Zero3Error, match=f"reduce_dtype={given!r}: give a floating-point dtype"):
        Zero3Strategy(reduce_dtype=given)


@distributed(world=1)
def test_a_second_trainer_with_another_reduce_dtype_is_an_error():
    module = mlp_task()
    fit(zero3(), lambda: module, loader(Pairs(16, 7)), steps=1)
    with pytest.raises(Zero3Error, match="sharded by an earlier Trainer in another precision"):
        trainer(zero3(reduce_dtype="float64"), max_steps=1).fit(module, loader(Pairs(16, 7)))


class OwnNorm(nn.Module):
    """As many models have it; the kernel wants weights in the dtype of the input, or in float32."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return nn.functional.layer_norm(x, self.weight.shape, self.weight)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(7, 7)
        self.norms = nn.ModuleList([nn.LayerNorm(7), OwnNorm(7), nn.GroupNorm(1, 7)])
        self.register_buffer("offset", torch.ones(7))

    def forward(self, x):
        x = x + self.offset
        for norm in self.norms:
            x = x + self.inner(norm(x))
        return x


@distributed(world=2)
def test_norms_of_a_float32_residual_stream_compute_in_float32_as_under_ddp():
    runs = []
    for strategy in ("ddp", zero3(Residual, nn.Linear)):
        module = Task(Residual(), loss=lambda net, batch: net(batch[0]).square().mean())
        t = trainer(strategy, max_steps=4, precision="bf16-mixed")
        t.fit(module, loader(Pairs(64, 7)))
        runs.append(weights_of(module))
    assert_same(runs[0], runs[1], rtol=1e-2, atol=1e-4)
