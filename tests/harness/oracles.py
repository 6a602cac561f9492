"""Live oracles: the same training in one process, under DDP and under FSDP2, as plain loops and through Lightning.

The plain loops share their arguments:

    make_model()            the model, seeded: the same on every rank
    batches(rank, index)    that rank's batch number `index`, counting micro-batches over all steps
    make_optimizer(model)   its optimizer
    loss(model, batch)      a scalar; calls the model once

They return a `Run`. Its losses are means over the ranks, one per micro-batch; everything else is whole tensors, the
same on every rank. All but `train_single` run inside a job of the pool.
"""

import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.harness.models import default_loss

Batches = Callable[[int, int], Any]
Loss = Callable[[nn.Module, Any], Tensor]


class Run(NamedTuple):
    """What a training run left behind."""

    losses: list[float]
    weights: dict[str, Tensor]  # the state dict
    grads: dict[
        str, Tensor
    ]  # of the last step, as the optimizer saw them: mean over ranks, clipped; unused ones left out
    optimizer_state: dict[str, dict[str, Tensor]]  # by parameter name
    trainer: Trainer | None = None

    def strip(self, prefix: str) -> "Run":
        """The same with that prefix removed from all names: `fit(...).strip("net.")` compares with a plain loop."""
        parts = [{k.removeprefix(prefix): v for k, v in d.items()} for d in (self.weights, self.grads)]
        return self._replace(
            weights=parts[0],
            grads=parts[1],
            optimizer_state={k.removeprefix(prefix): v for k, v in self.optimizer_state.items()},
        )


def train_single(
    make_model: Callable[[], nn.Module],
    batches: Batches,
    make_optimizer: Callable[[nn.Module], Optimizer],
    steps: int,
    *,
    world: int = 1,
    accumulation: int = 1,
    clip: float | None = None,
    loss: Loss = default_loss,
) -> Run:
    """One process that takes the batches of all `world` ranks in turn: what data parallelism means."""
    model = make_model()
    optimizer = make_optimizer(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(step * accumulation, (step + 1) * accumulation):
            parts = [loss(model, batches(rank, micro)) / world for rank in range(world)]
            (sum(parts) / accumulation).backward()  # type: ignore[union-attr]
            losses.append(sum(part.item() for part in parts))
        _clip(model, clip)
        optimizer.step()
    return _result(losses, model, optimizer)


def train_loop(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    steps: int,
    *,
    accumulation: int,
    loss: Loss,
    syncing: Callable[[bool], AbstractContextManager] = lambda last: nullcontext(),
    before_step: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """The loop of every data-parallel form. Returns this rank's losses, one per micro-batch.

    `syncing` surrounds each micro-batch; it is told whether it is the last one before a step.
    """
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(step * accumulation, (step + 1) * accumulation):
            with syncing(micro == (step + 1) * accumulation - 1):
                value = loss(model, batches(dist.get_rank(), micro))
                (value / accumulation).backward()
            losses.append(value.item())
        before_step()
        optimizer.step()
        after_step()
    return losses


def train_ddp(
    make_model: Callable[[], nn.Module],
    batches: Batches,
    make_optimizer: Callable[[nn.Module], Optimizer],
    steps: int,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    loss: Loss = default_loss,
    **ddp_options: Any,
) -> Run:
    model = make_model()
    optimizer = make_optimizer(model)
    wrapped = DistributedDataParallel(model, **ddp_options)
    losses = train_loop(
        wrapped,
        optimizer,
        batches,
        steps,
        accumulation=accumulation,
        loss=loss,
        syncing=lambda last: nullcontext() if last else wrapped.no_sync(),
        before_step=lambda: _clip(model, clip),
    )
    return _result(mean_over_ranks(losses), model, optimizer)


def train_fsdp2(
    make_model: Callable[[], nn.Module],
    batches: Batches,
    make_optimizer: Callable[[nn.Module], Optimizer],
    steps: int,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    loss: Loss = default_loss,
    blocks: Callable[[nn.Module], Iterable[nn.Module]] | None = None,
) -> Run:
    """`fully_shard` on each block and the root. Scalars, which it refuses, stay whole and are averaged here."""
    model = make_model()
    scalars = [p for p in model.parameters() if p.ndim == 0]
    shard(model, (blocks or repeated_blocks)(model), set(scalars))
    optimizer = make_optimizer(model)

    def syncing(last: bool) -> AbstractContextManager:
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def before_step() -> None:
        for p in scalars:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        _clip(model, clip)

    losses = train_loop(
        model,
        optimizer,
        batches,
        steps,
        accumulation=accumulation,
        loss=loss,
        syncing=syncing,
        before_step=before_step,
    )
    return _result(mean_over_ranks(losses), model, optimizer)


def fit(
    strategy: Any,
    make_module: Callable[[], LightningModule],
    data: Any,
    *,
    steps: int = 10,
    callbacks: Iterable[Callback] = (),
    ckpt_path: str | None = None,
    **trainer_options: Any,
) -> Run:
    """`Trainer.fit` on the ranks of this job; `data` is a dataloader, several, or a datamodule.

    `strategy` is a Strategy, a name that Lightning knows, or "fsdp2" (ModelParallelStrategy, blocks sharded as in
    `train_fsdp2`). Weights and optimizer state are what the strategy would put in a checkpoint. No gradients.
    """
    module = make_module()
    if strategy == "fsdp2":
        strategy = _model_parallel_strategy(module)
    record = _Record()
    options = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "max_steps": steps,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tempfile.gettempdir(),
        **trainer_options,
    }
    trainer = Trainer(strategy=strategy, callbacks=[*callbacks, record], **options)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    names = _optimizer_names(make_module())
    saved: list[Any] = [record.weights, [_by_name(s, n) for s, n in zip(record.optimizers, names, strict=False)]]
    dist.broadcast_object_list(saved)  # a strategy may hand whole tensors to rank 0 only
    optimizer_state = {name: state for optimizer in saved[1] for name, state in optimizer.items()}
    return Run(mean_over_ranks(record.losses), saved[0], {}, optimizer_state, trainer)


class _Record(Callback):
    """Keeps the losses and, while the strategy still holds everything, what it would save."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: dict[str, Tensor] = {}
        self.optimizers: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if outputs is not None:
            self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer, module):
        self.weights = {k: full(v) for k, v in trainer.strategy.lightning_module_state_dict().items()}
        self.optimizers = [trainer.strategy.optimizer_state(o) for o in trainer.optimizers]


def _optimizer_names(module: LightningModule) -> list[list[str]]:
    """Per optimizer, its parameters' names in the order in which a state dict numbers them."""
    configured = module.configure_optimizers()
    if isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], list):
        configured = configured[0]
    name_of = {p: name for name, p in module.named_parameters()}
    names = []
    for item in configured if isinstance(configured, list | tuple) else [configured]:
        optimizer: Any = item["optimizer"] if isinstance(item, dict) else item
        names.append([name_of[p] for group in optimizer.param_groups for p in group["params"]])
    return names


def _by_name(state_dict: dict[str, Any], names: list[str]) -> dict[str, dict[str, Tensor]]:
    states = state_dict.get("state", {})
    return {names[key] if isinstance(key, int) else key: _full_state(state) for key, state in states.items()}


def _model_parallel_strategy(module: LightningModule) -> Any:
    """Lightning's strategy for FSDP2, which wants `configure_model` to shard; `module` gets one."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    def configure_model(self: LightningModule) -> None:
        if not any(isinstance(p, DTensor) for p in self.parameters()):
            mesh = self.device_mesh
            assert mesh is not None
            for net in self.children():  # and not the LightningModule: `training_step` does not pass its `forward`
                shard(net, repeated_blocks(net), set(), mesh["data_parallel"])

    module.__class__ = type(type(module).__name__, (type(module),), {"configure_model": configure_model})
    return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)


def shard(model: nn.Module, blocks: Iterable[nn.Module], ignored: set[nn.Parameter], mesh: Any = None) -> None:
    """Apply FSDP2 to the blocks and the root."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh, ignored_params=ignored & set(block.parameters()))
    fully_shard(model, mesh=mesh, ignored_params=ignored)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The children with parameters of every ModuleList and Sequential that is not inside another."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += repeated_blocks(child)
    return found


def full(value: Any) -> Tensor:
    """A copy of the whole tensor on the CPU. A collective call if it is sharded."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return torch.as_tensor(value).detach().cpu().clone()


def mean_over_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def _clip(model: nn.Module, clip: float | None) -> None:
    """Clip by global norm, in plain words so that it can be trusted with any mix of sharded and whole gradients."""
    if clip is None:
        return
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([full(g).norm() for g in grads]).norm().item()
    for g in grads:
        g.mul_(min(1.0, clip / (norm + 1e-6)))


def _full_state(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: full(value) for key, value in state.items()}


def _result(losses: list[float], model: nn.Module, optimizer: Optimizer) -> Run:
    named = dict(model.named_parameters())
    return Run(
        losses,
        {name: full(value) for name, value in model.state_dict().items()},
        {name: full(p.grad) for name, p in named.items() if p.grad is not None},
        {name: _full_state(optimizer.state[p]) for name, p in named.items() if p in optimizer.state},
    )
