"""Freezing, unfreezing and added parameter groups in mid-training.

The oracle is one process with the batches of all ranks: DDP itself never reduces what is unfrozen after it wrapped.
"""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch.utils.data import DataLoader

from lightning_zero3 import LayerState, gather_parameters, shard_module, trainable_chunks
from tests.harness import assert_same, distributed
from tests.harness.models import MLP, AdamW, Block, Pairs, Task, adamw, default_loss, loader
from tests.strategy.runs import make_mlp, trainer, weights_of, zero3

DATA = Pairs(96, 7)


def fit(module, alone: bool, ckpt_path=None, **options):
    """A trainer that has fitted `module` on all ranks' data: sharded, or in one process on every rank."""
    data = DataLoader(DATA, batch_size=4 * dist.get_world_size()) if alone else loader(DATA)
    devices = {"devices": 1} if alone else {}
    t = trainer("auto" if alone else zero3(), use_distributed_sampler=False, **devices, **options)
    t.fit(module, data, ckpt_path=ckpt_path)
    return t


def states(t):
    """What a checkpoint would hold, on the first rank."""
    return [t.strategy.optimizer_state(o) for o in t.optimizers]


def same(make_module, make_callbacks=tuple, **options):
    """Weights, optimizer state and groups equal one process's."""
    ours, alone = make_module(), make_module()
    t, u = (fit(m, a, callbacks=list(make_callbacks()), **options) for m, a in ((ours, False), (alone, True)))
    assert_same(weights_of(ours), dict(alone.state_dict()))
    mine, theirs = states(t), states(u)
    assert [s["param_groups"] for s in mine] == [s["param_groups"] for s in theirs]
    if dist.get_rank() == 0:
        assert_same([s["state"] for s in mine], [s["state"] for s in theirs])
    engine = t.strategy.engine
    assert all(layer.state in (LayerState.SHARDED, LayerState.RESIDENT) for layer in engine.layers)
    assert engine.pool.taken == 0
    return t


class Finetuned(Task):
    """A frozen backbone under a head that trains."""

    def __init__(self, made=adamw):
        super().__init__(make_mlp(), made)

    @property
    def backbone(self):
        return self.net.blocks


@distributed(world=[1, 2, 3])
def test_backbone_finetuning_unfreezes_and_adds_a_group(world):
    """L6."""

    def callbacks():
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.5, train_bn=True)]

    t = same(Finetuned, callbacks, max_epochs=3)
    assert len(t.optimizers[0].param_groups) > 2
    assert all(c.trainable for layer in t.strategy.engine.layers for c in layer.chunks)


class StepByStep(BaseFinetuning):
    """A further block at every epoch, from the last to the first, each in a group of its own."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net.blocks)

    def finetune_function(self, pl_module, epoch, optimizer):
        blocks = list(pl_module.net.blocks)[::-1]
        if 0 < epoch <= len(blocks):
            self.unfreeze_and_add_param_group(blocks[epoch - 1], optimizer, lr=1e-3 * epoch)


@distributed(world=2)
def test_gradual_unfreezing_resumes_with_its_groups(tmp_path):
    """Lightning restores the groups and not `requires_grad`: what it makes of that in one process is what we make."""
    saved = []
    for alone in (False, True):
        t = fit(Finetuned(), alone, callbacks=[StepByStep()], max_epochs=2)
        saved.append(str(tmp_path / f"{alone}.ckpt"))
        if dist.get_rank() == 0 or not alone:
            t.save_checkpoint(saved[-1])
    dist.barrier()
    resumed = []
    for path in saved:
        for alone in (False, True):
            module = Finetuned()
            t = fit(module, alone, callbacks=[StepByStep()], max_epochs=3, ckpt_path=path)
            resumed.append((weights_of(module), len(t.optimizers[0].param_groups)))
    for weights, groups in resumed[1:]:
        assert_same(weights, resumed[0][0])
        assert groups == resumed[0][1] == 4


class At(Callback):
    """Calls `change(module, trainer)` before the given batch."""

    def __init__(self, **changes):
        self.changes = changes

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        change = self.changes.get(f"b{trainer.global_step}")
        if (
            change is not None
            and trainer.global_step == batch_idx + trainer.current_epoch * trainer.num_training_batches
        ):
            change(module, trainer)


def everything(net):
    """An optimizer that was given frozen parameters too, decay and no-decay apart."""
    groups = [[p for p in net.parameters() if (p.ndim > 1) == big] for big in (True, False)]
    return AdamW([{"params": g, "weight_decay": d} for g, d in zip(groups, (0.1, 0.0), strict=True)], lr=1e-2)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("made", [everything, sgd], ids=["AdamW", "SGD"])
@distributed(world=[1, 2, 3])
def test_requires_grad_set_and_unset_between_steps(world, made):
    """Frozen parameters of a layer that trains keep their value: neither decay nor momentum moves them."""

    def make_module():
        module = Task(make_mlp(), made)
        module.net.blocks[0].linear.weight.requires_grad_(False)
        module.net.blocks[1].requires_grad_(False)
        return module

    def callbacks():
        return [
            At(
                b2=lambda m, t: m.net.blocks[1].requires_grad_(True),
                b4=lambda m, t: (
                    m.net.blocks[0].linear.weight.requires_grad_(True),
                    m.net.head.bias.requires_grad_(False),
                    m.net.blocks[1].linear.bias.requires_grad_(False),
                ),
                b7=lambda m, t: m.net.head.bias.requires_grad_(True),
            )
        ]

    same(make_module, callbacks, max_epochs=1)


@distributed(world=[1, 2])
def test_two_parameters_of_a_layer_change_places(world):
    """What is frozen again is in a trainable chunk when the layer is cut anew."""

    def make_module():
        module = Task(make_mlp(), everything)
        module.net.blocks[0].linear.bias.requires_grad_(False)
        return module

    def swap(module, _):
        linear = module.net.blocks[0].linear
        linear.weight.requires_grad_(linear.bias.requires_grad)
        linear.bias.requires_grad_(not linear.weight.requires_grad)

    same(make_module, lambda: [At(b2=swap, b4=swap, b5=swap)], max_epochs=1)


@distributed(world=2)
def test_a_group_added_by_hand_with_its_own_options():
    def make_module():
        return Task(make_mlp(), lambda net: AdamW(net.head.parameters(), lr=1e-2))

    def add(module, t):
        t.optimizers[0].add_param_group(
            {"params": [*module.net.blocks[0].parameters()], "lr": 3e-3, "weight_decay": 0.2}
        )

    t = same(make_module, lambda: [At(b3=add)], max_epochs=1)
    assert [g["lr"] for g in t.optimizers[0].param_groups] == [1e-2, 3e-3]


@distributed(world=2)
def test_edits_of_groups_by_hand_are_used_at_the_next_step():
    def edit(module, t):
        for group in t.optimizers[0].param_groups:
            group.update(lr=2e-3, weight_decay=0.3, betas=(0.8, 0.9))

    same(lambda: Task(make_mlp()), lambda: [At(b2=edit)], max_epochs=1)


@distributed(world=2)
def test_unfreezing_between_two_fits():
    def run(alone):
        net = make_mlp()
        net.blocks[0].requires_grad_(False)
        module = Task(net, everything)
        fit(module, alone, max_epochs=1)
        net.blocks[0].requires_grad_(True)
        fit(module, alone, max_epochs=1)
        return module

    assert_same(weights_of(run(False)), dict(run(True).state_dict()))


@distributed(world=2)
def test_mixed_precision_casts_what_is_unfrozen():
    module = Finetuned()
    t = fit(
        module,
        False,
        precision="bf16-mixed",
        max_epochs=2,
        callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1)],
    )
    chunks = [c for layer in t.strategy.engine.layers for c in layer.chunks]
    assert {c.dtype for c in chunks} == {torch.float32}
    for chunk in chunks:
        (matrices,) = {p.ndim > 1 for p in chunk.params}
        assert chunk.compute_dtype is (torch.bfloat16 if matrices else torch.float32)


@distributed(world=[2, 3])
def test_without_lightning(world):
    """The engine alone: the new chunk is there after the next forward, for the user's optimizer."""
    model, plain = MLP(7, 15, 16), MLP(7, 15, 16)
    for net in (model, plain):
        net.blocks[0].requires_grad_(False)
    engine = shard_module(model, {Block})
    optimizer = AdamW(trainable_chunks(model), lr=1e-2)
    oracle = AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    batch = [torch.stack(t) for t in zip(*(DATA[i] for i in range(8)), strict=True)]
    for step in range(4):
        if step == 2:
            for net in (model, plain):
                net.blocks[0].requires_grad_(True)
            oracle.add_param_group({"params": list(plain.blocks[0].parameters())})
        for net in (model, plain):
            default_loss(net, batch).backward()
        if step == 2:
            known = {p for g in optimizer.param_groups for p in g["params"]}
            optimizer.add_param_group({"params": [p for p in trainable_chunks(model) if p not in known]})
        for o in (optimizer, oracle):
            o.step()
            o.zero_grad()
        engine.weights_changed(engine.layers)
    with gather_parameters(model):
        assert_same({n: p.detach().clone() for n, p in model.named_parameters()}, dict(plain.named_parameters()))
