"""Bad input: each error names the thing and the remedy, on every rank, before anything hangs."""

from datetime import timedelta

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.nn import functional as F

from lightning_zero3 import Zero3Error, Zero3Strategy, full_state_dict, gather_parameters
from tests.harness import distributed
from tests.harness.models import MLP, Pairs, Task, adamw, loader
from tests.strategy.runs import WIDTHS, make_mlp, mlp_task, trainer, zero3


def data():
    return loader(Pairs(32, WIDTHS[0]))


def fit(module, strategy=None, **options):
    trainer(strategy or zero3(), **{"max_steps": 2, **options}).fit(module, data())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"state_dict_type": "half"}, "state_dict_type='half'.*choose 'full'"),
        ({"start_method": "thread"}, "start_method='thread': choose 'popen'"),
        ({"auto_wrap_policy": "blocks"}, "auto_wrap_policy='blocks': give 'auto', a set of classes"),
        ({"prefetch": -1}, "prefetch=-1: give the number of layers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused_at_once(options, said):
    with pytest.raises(Zero3Error, match=said):
        Zero3Strategy(**options)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({nn.LSTM}, "Task contains no module of class LSTM"),
        ({"Block"}, "auto_wrap_policy=.*its elements must be subclasses of torch.nn.Module"),
    ],
    ids=["class that is not there", "name of a class"],
)
@distributed(world=2)
def test_policies_that_fit_nothing_are_refused_at_set_up(policy, said):
    with pytest.raises(Zero3Error, match=said):
        fit(mlp_task(), Zero3Strategy(auto_wrap_policy=policy))


@pytest.mark.parametrize("devices", [1, 3])
@distributed(world=2)
def test_devices_that_do_not_match_the_processes_are_refused(devices):
    with pytest.raises((Zero3Error, ValueError), match=rf"devices={devices}.*2"):
        fit(mlp_task(), devices=devices)


@distributed(world=2)
def test_nodes_that_do_not_match_the_processes_are_refused():
    with pytest.raises((Zero3Error, ValueError), match="num_nodes=2"):
        fit(mlp_task(), num_nodes=2)


class Nothing(LightningModule):
    def training_step(self, batch, batch_idx):
        return batch[0].sum()

    def configure_optimizers(self):
        return None


@distributed(world=2)
def test_a_module_without_parameters_is_refused():
    with pytest.raises(Zero3Error, match="Nothing has no parameters: there is nothing to shard"):
        fit(Nothing())


class OwnLBFGS(torch.optim.LBFGS):
    pass


class Factored(torch.optim.Optimizer):
    """Keeps a row for each parameter, as matrix optimizers do; nobody knows its name."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["row"] = torch.zeros(3)
        return loss


OPTIMIZERS = {
    "LBFGS": (lambda net: torch.optim.LBFGS(net.parameters()), "LBFGS cannot run on shards: its line search"),
    "subclass": (lambda net: OwnLBFGS(net.parameters()), "LBFGS cannot run on shards"),
    "Adafactor": (lambda net: torch.optim.Adafactor(net.parameters()), "Adafactor cannot run on shards: it factors"),
    "SparseAdam": (lambda net: torch.optim.SparseAdam(list(net.parameters())), "SparseAdam cannot run on shards"),
    "unknown": (
        lambda net: Factored(net.parameters()),
        "Factored keeps 'row' of shape .3. .* not work element by element",
    ),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = (
        lambda net: torch.optim.Muon([p for p in net.parameters() if p.ndim == 2]),
        "Muon cannot run on shards: it orthogonalises whole matrices",
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world=2)
def test_optimizers_that_need_whole_tensors_are_refused_with_the_reason(name):
    make, said = OPTIMIZERS[name]
    with pytest.raises(Zero3Error, match=said):
        fit(mlp_task(make_optimizer=make))


class Shared(Task):
    def __init__(self):
        super().__init__(make_mlp())
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.SGD(self.net.head.parameters(), lr=0.1)], []


@distributed(world=2)
def test_a_parameter_in_two_optimizers_is_named():
    with pytest.raises(Zero3Error, match="parameter 'net.head.weight' is in two optimizers"):
        fit(Shared())


CALLBACKS = {
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(swa_lrs=1e-2),
    "WeightAveraging": WeightAveraging,
    "EMAWeightAveraging": EMAWeightAveraging,
    "ModelPruning": lambda: ModelPruning("l1_unstructured", amount=0.5),
}


class Pretrained(Task):
    @property
    def backbone(self):
        return self.net.blocks


@pytest.mark.parametrize("name", CALLBACKS)
@distributed(world=2)
def test_callbacks_that_would_be_silently_wrong_are_refused(name):
    with pytest.raises(
        Zero3Error,
        match=f"callback {name} does not work with Zero3Strategy: it .*(Leave it out|Use )",
    ):
        fit(Pretrained(make_mlp()), callbacks=[CALLBACKS[name]()], max_epochs=1)


@distributed(world=2)
def test_state_dicts_of_a_sharded_module_are_errors_that_name_the_way():
    module = mlp_task()
    fit(module)
    for call in (module.state_dict, module.net.blocks[0].state_dict, lambda: module.load_state_dict({}, strict=False)):
        with pytest.raises(
            Zero3Error, match=r"state_dict\(\) of .* while its parameters are sharded. Use full_state_dict"
        ):
            call()
    with gather_parameters(module):
        assert len(module.state_dict()) == 13


@distributed(world=2)
def test_writing_to_a_sharded_parameter_is_noticed_at_the_next_use():
    class Writing(Task):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                self.net.blocks[0].linear.bias.data.zero_()

    with pytest.raises(Zero3Error, match=r"'net.blocks.0.linear.bias' .*was written while sharded.*gather_parameters"):
        fit(Writing(make_mlp()))


@distributed(world=2)
def test_casting_a_sharded_module_is_noticed():
    module = mlp_task()
    fit(module)
    with pytest.raises(Zero3Error, match="was replaced, moved or cast while sharded"):
        module.half()
        fit(module)


class NaN(Task):
    def training_step(self, batch, batch_idx):
        return self.loss(self.net, batch) * float("nan")


@distributed(world=2)
def test_a_norm_that_is_not_finite_is_so_on_all_ranks():
    module = NaN(make_mlp())
    fit(module, gradient_clip_val=1.0)
    assert all(w.isnan().all() for w in full_state_dict(module, rank0_only=False).values())


class TwoWays(Task):
    """Rank 1 skips a block."""

    def training_step(self, batch, batch_idx):
        x = self.net.blocks[0](batch[0])
        if self.global_rank == 0 or batch_idx == 0:
            x = self.net.blocks[1](x)
        return self.net.head(F.pad(x, (0, 17 - x.shape[1]))).sum()


@distributed(world=2, deadline=60)
def test_ranks_that_take_different_layers_get_an_error_that_says_so():
    module = TwoWays(MLP(7, 15, 17))
    with pytest.raises(Zero3Error, match=r"ranks went different ways \(rank 0: .*; rank 1: .*\)"):
        fit(module, zero3(timeout=timedelta(seconds=30)))


@distributed(world=2)
def test_training_goes_on_after_an_error_that_the_user_caught():
    """A Trainer that failed leaves the module usable for the next."""

    class Once(Task):
        fail = True

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1 and self.fail:
                raise ValueError("once")
            return loss

    module = Once(make_mlp(), adamw)
    with pytest.raises(ValueError, match="once"):
        fit(module, max_steps=4)
    module.fail = False
    fit(module, max_steps=4)
    assert all(w.isfinite().all() for w in full_state_dict(module, rank0_only=False).values())


def test_a_report_before_set_up_is_an_error():
    with pytest.raises(Zero3Error, match="not sharded yet"):
        Zero3Strategy().report()
