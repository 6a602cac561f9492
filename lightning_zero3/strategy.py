"""`Zero3Strategy`: the engine as Lightning's hooks call it. Glue only, in the order in which the Trainer calls it.

The logic is written once, in `Zero3StrategyMixin`, and bound to both homes of Lightning: `lightning.pytorch` here, and
`pytorch_lightning` (other classes, another registry) in `lightning_zero3.pytorch_lightning`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins import precision as _lightning
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_zero3.callbacks.refused import refuse_callbacks, refuse_loggers
from lightning_zero3.checkpointing import (
    ActivationCheckpointingPolicy,
    check_checkpointing,
    checkpoint_activations,
)
from lightning_zero3.checkpoints import durable, sharded_checkpoint
from lightning_zero3.checkpoints.background import BackgroundWriter
from lightning_zero3.checkpoints.boxes import FlatRange
from lightning_zero3.checkpoints.loading import let_lightning_load_directories
from lightning_zero3.chunk import PrecisionPolicy
from lightning_zero3.clip import clip_grad_norm_
from lightning_zero3.comm import Communicator
from lightning_zero3.engine import Engine, check_prefetch
from lightning_zero3.errors import Zero3Error
from lightning_zero3.evenly import EvenSteps, evaluation_batches, training_batches
from lightning_zero3.optim import ShardedOptimizers
from lightning_zero3.precision import PRECISIONS, MixedPrecisionMixin, TruePrecisionMixin, Zero3PrecisionMixin
from lightning_zero3.registry import register_strategies
from lightning_zero3.report import Report
from lightning_zero3.requeue import requeue_between_steps
from lightning_zero3.shard import (
    engine_of,
    full_state_dict,
    load_full_state_dict,
    shard_module,
    sharded_state_dict,
    unshard_module,
)
from lightning_zero3.weights import until_sharded
from lightning_zero3.wrap import AutoWrapPolicy, check_policy

__all__ = ["LauncherMixin", "Zero3Strategy", "Zero3StrategyMixin"]

_LAST_WORDS = timedelta(seconds=15)  # how long a failing rank waits for the others before it gives up saving


class Precision(TruePrecisionMixin, _lightning.Precision):  # type: ignore[misc]
    """`TruePrecisionMixin` for `lightning.pytorch`."""


class MixedPrecision(MixedPrecisionMixin, _lightning.MixedPrecision):  # type: ignore[misc]
    """`MixedPrecisionMixin` for `lightning.pytorch`. Its name is where checkpoints keep the scaler: Lightning's own."""


if TYPE_CHECKING:
    from typing import Any as _Base  # it has ParallelStrategy's attributes, of one home or the other
else:
    _Base = object


class LauncherMixin:
    """Part of a launcher whose processes end: this process's module gets the trained weights, all of them.

    Lightning loads what finds a parameter of its name, and a model that `configure_model` makes is not there yet.
    """

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        if worker_output.weights_path is not None:
            with trainer.strategy.precision_plugin.tensor_init_context():
                trainer.lightning_module.configure_model()
        super()._recover_results_in_main_process(worker_output, trainer)  # type: ignore[misc]


class Zero3StrategyMixin(_Base):
    """ZeRO stage 3: parameters, gradients and optimizer state sharded over all ranks.

    Mathematically DDP; in memory 1/N of the model per rank, plus the slots that layers take turns in.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as Lightning's strategies
            have them; usually set by the Trainer.
        auto_wrap_policy: which modules are fetched and released together: "auto", a set of module classes, a function
            `module -> bool`, or None for the whole model at once. See `lightning_zero3.wrap.plan_layers`.
        prefetch: how many layers ahead to fetch while one computes. Each costs one slot.
        state_dict_type: "full": checkpoints are those of DDP, one file, written by the first rank. "sharded": they are
            directories of `torch.distributed.checkpoint`, in which every rank writes its part.
        save_async: write sharded checkpoints while training goes on. At most one is in flight; what went wrong is
            raised at the next step, and the end waits for the last.
        reduce_dtype: of gradients while they are reduced, as torch.dtype or by name ("float32"); default the dtype they
            are kept in. Under "bf16-true" "float32" sums exactly at twice the bytes; under "*-mixed" "bfloat16" halves
            them.
        activation_checkpointing_policy: whose activations to compute again in backward instead of keeping them: a set
            of module classes, a function `module -> bool`, or None.
        accumulation: of gradients over micro-batches. "sharded": each is reduced into the shards at once; the least
            memory. "full": each rank keeps whole gradients and reduces once, before the step; the least traffic.
        broadcast_buffers: overwrite buffers with the first rank's before each forward pass in training, as DDP does.
        process_group_backend: default "gloo" on the CPU and "nccl" on CUDA.
        timeout: how long a collective may take before it is an error.
        start_method: "popen" (scripts), "fork" (notebooks; registered as "zero3_notebook"), "spawn" or "forkserver"
            (functions that are called with a Trainer).

    Raises:
        Zero3Error: an option that is not supported, when the Trainer is built; a model or optimizer that cannot be
            sharded, when a run is set up. Each names the thing and the remedy.

    Example::

        Trainer(strategy=Zero3Strategy(), accelerator="cpu", devices=2).fit(model, data)
    """

    _pl = "lightning.pytorch"
    _fabric = "lightning.fabric"
    _precision_class: type = Precision
    _mixed_precision_class: type = MixedPrecision
    _precision_plugin: Any
    model: Any

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        auto_wrap_policy: AutoWrapPolicy = "auto",
        prefetch: int = 1,
        activation_checkpointing_policy: ActivationCheckpointingPolicy = None,
        accumulation: str = "sharded",
        state_dict_type: str = "full",
        save_async: bool = False,
        reduce_dtype: torch.dtype | str | None = None,
        broadcast_buffers: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: str = "popen",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if state_dict_type not in ("full", "sharded"):
            raise Zero3Error(f"state_dict_type={state_dict_type!r}: choose 'full' or 'sharded'")
        if save_async and state_dict_type != "sharded":
            raise Zero3Error("save_async=True needs state_dict_type='sharded'")
        if start_method not in ("popen", "spawn", "fork", "forkserver"):
            raise Zero3Error(f"start_method={start_method!r}: choose 'popen', 'spawn', 'fork' or 'forkserver'")
        if accumulation not in ("sharded", "full"):
            raise Zero3Error(f"accumulation={accumulation!r}: choose 'sharded' or 'full'")
        check_policy(auto_wrap_policy)
        check_checkpointing(activation_checkpointing_policy)
        check_prefetch(prefetch)
        self.auto_wrap_policy = auto_wrap_policy
        self.prefetch = prefetch
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.accumulation = accumulation
        self.state_dict_type = state_dict_type
        self.save_async = save_async
        self.reduce_dtype = _float_dtype("reduce_dtype", reduce_dtype)
        self.broadcast_buffers = broadcast_buffers
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._engine: Engine | None = None
        self._sharded_optimizers: ShardedOptimizers | None = None
        self._to_load: tuple[Mapping[str, Any], bool] | None = None  # a state dict that waits for the shards
        self._background: BackgroundWriter | None = None
        self._even_steps: EvenSteps
        self._failed = False

    # -- processes and devices ----------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Lightning asks strategies it does not know: samplers are distributed and `sync_dist` means all ranks."""
        return True

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    def _configure_launcher(self) -> None:
        launchers = import_module(f"{self._pl}.strategies.launchers")
        if self._start_method == "popen":
            self._launcher = launchers._SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        else:
            self._launcher = self._launcher_class(self, start_method=self._start_method)

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for home in (f"{self._pl}.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
            import_module(home).rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        distributed = import_module(f"{self._fabric}.utilities.distributed")
        import_module(f"{self._fabric}.utilities.seed").reset_seed()
        self.set_world_ranks()
        self._process_group_backend = (
            self._process_group_backend or distributed._get_default_process_group_backend_for_device(self.root_device)
        )
        device_id = self.root_device if self.root_device.type != "cpu" else None
        distributed._init_dist_connection(
            self.cluster_environment, self._process_group_backend, timeout=self._timeout, device_id=device_id
        )
        expected = self.num_nodes * self.num_processes
        world_size = torch.distributed.get_world_size()
        if world_size != expected:
            raise Zero3Error(
                f"Trainer(devices={self.num_processes}, num_nodes={self.num_nodes}) makes {expected} processes, but "
                f"the process group has {world_size}. Set devices and num_nodes to what torchrun or SLURM started."
            )

    # -- precision ----------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        if self._precision_plugin is None:
            self._precision_plugin = self._precision_class("32-true")
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        # The Trainer hands custom strategies the plain plugins; what they ask for is ours to do.
        if plugin is not None and not isinstance(plugin, Zero3PrecisionMixin):
            known = type(plugin).__name__ in ("Precision", "HalfPrecision", "DoublePrecision", "MixedPrecision")
            precision = str(plugin.precision)
            if not known:
                raise Zero3Error(
                    f"precision plugin {type(plugin).__name__} is not supported by Zero3Strategy; use "
                    f"Trainer(precision=...) with one of {', '.join(PRECISIONS)}"
                )
            if precision.endswith("-mixed"):
                plugin = self._mixed_precision_class(precision, plugin.device, plugin.scaler)
            else:
                plugin = self._precision_class(precision)
        self._precision_plugin = plugin

    @property
    def _policy(self) -> PrecisionPolicy:
        return replace(self.precision_plugin.policy, reduce_dtype=self.reduce_dtype)

    # -- set-up -------------------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Models are built on the CPU, or on no device at all; they never exist whole on an accelerator."""
        device = torch.device("meta" if empty_init else "cpu")
        with device, self.precision_plugin.tensor_init_context(), until_sharded():
            yield

    def setup(self, trainer: Any) -> None:
        refuse_callbacks(trainer.callbacks)
        if self.world_size > 1:
            refuse_loggers(trainer.loggers)
        self.accelerator.setup(trainer)
        trainer._signal_connector._sigterm_notifier_fn = self._note_sigterm
        requeue_between_steps(trainer, self, self._pl)
        module = self.lightning_module
        if engine_of(module) is None:
            self.precision_plugin.convert_module(module)
            self.shard(Communicator(device=self.root_device, timeout=self._timeout))
        else:  # a second fit, or validate after fit: sharded it stays
            self._engine = engine_of(module)
            self._check_sharded_as_asked()
            self.engine.broadcast_buffers()
        self.precision_plugin.engine = self._engine
        if self._to_load is not None:
            (state, strict), self._to_load = self._to_load, None
            load_full_state_dict(module, state, strict)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def shard(self, comm: Communicator) -> Engine:
        """Shard the module over the ranks of `comm`, as the options say."""
        module = self.lightning_module
        if self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        if self.activation_checkpointing_policy is not None:
            checkpoint_activations(module, self.activation_checkpointing_policy)
        self._engine = shard_module(
            module,
            self.auto_wrap_policy,
            comm=comm,
            device=comm.device,
            precision=self._policy,
            prefetch=self.prefetch,
            broadcast_buffers=self.broadcast_buffers,
        )
        self.precision_plugin.engine = self._engine
        return self._engine

    def _check_sharded_as_asked(self) -> None:
        """Raise if this Trainer wants of the module what an earlier one, which sharded it, did not."""
        engine, precision, module = self.engine, self.precision_plugin, self.lightning_module
        name, remedy = type(module).__name__, "Use the same, or load its checkpoint into a new module."
        stored = {c.dtype for layer in engine.layers for c in layer.chunks if c.dtype.is_floating_point}
        any_dtype = precision.mixed or precision.dtype is torch.float32  # "32-true" leaves every dtype as it is
        # Some parameters keep their dtype whatever a module is cast to: scales of quantised weights.
        same_precision = engine.policy == self._policy and (any_dtype or not stored or precision.dtype in stored)
        if not same_precision or engine.device != self.root_device:
            raise Zero3Error(
                f"{name} was sharded by an earlier Trainer in another precision or on another device "
                f"({', '.join(map(str, stored))} on {engine.device}). {remedy}"
            )
        local = [m for m in module.modules() if isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm)]
        if self._layer_sync and local:
            raise Zero3Error(
                f"sync_batchnorm replaces modules, but {name} was sharded by an earlier Trainer without it. {remedy}"
            )

    def model_to_device(self) -> None:
        """Nothing to do: chunks are made on the device, layer by layer."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)  # type: ignore[misc]
        self.adopt(self.optimizers)

    def adopt(self, optimizers: list[Optimizer]) -> None:
        """Let optimizers of the module's parameters work on shards."""
        self._sharded_optimizers = ShardedOptimizers(optimizers, self.engine)
        self.precision_plugin.optimizers = self._sharded_optimizers

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a step as one use of the root layer, in which all other layers are used."""
        root, output = self.engine.root, None
        assert root is not None
        root.enter()
        try:
            output = step(*args, **kwargs)
        finally:
            root.leave(output)
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.sharded_optimizers.stand_ins.settle()
        if self._background is not None:
            self._background.check(self.engine.comm)
        with self.precision_plugin.train_step_context():
            return self._step(self.lightning_module.training_step, args, kwargs)

    def block_backward_sync(self) -> Any:
        """Surrounds micro-batches that are not the last before a step."""
        return self.engine.no_sync() if self.accumulation == "full" else nullcontext()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._even_steps.step(), self.precision_plugin.val_step_context():
            return self._step(self.lightning_module.validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._even_steps.step(), self.precision_plugin.test_step_context():
            return self._step(self.lightning_module.test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._even_steps.step(), self.precision_plugin.predict_step_context():
            return self._step(self.lightning_module.predict_step, args, kwargs)

    # -- batches: ranks may have different numbers of them, see `evenly` ----------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        batches = training_batches if self.lightning_module.trainer.training else evaluation_batches
        return batches(dataloader, self.engine.comm)

    def on_validation_start(self) -> None:
        self._even_steps = EvenSteps(self.engine, self.lightning_module.trainer._evaluation_loop)

    on_test_start = on_validation_start

    def on_predict_start(self) -> None:
        self._even_steps = EvenSteps(self.engine, self.lightning_module.trainer.predict_loop)

    # -- collectives of the user and of Lightning ---------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        if torch.distributed.is_initialized():
            ids = [self.root_device.index] if torch.distributed.get_backend() == "nccl" else None
            torch.distributed.barrier(device_ids=ids)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not torch.distributed.is_initialized():
            return obj
        objects = [obj]
        torch.distributed.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        sync = import_module(f"{self._fabric}.utilities.distributed")._sync_ddp_if_available
        return sync(tensor, group, reduce_op=reduce_op)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The plain module's state dict, on the first rank; empty on the others."""
        if self._engine is None:  # after a fit in other processes, which have handed back full weights
            return dict(self.lightning_module.state_dict())
        if self.lightning_module.trainer.state.status == "interrupted":  # of an exception, perhaps of this rank alone
            self.engine.comm.together("saving a checkpoint after an exception", timeout=_LAST_WORDS)
        if self.state_dict_type == "sharded":
            return sharded_state_dict(self.lightning_module)
        return full_state_dict(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self.state_dict_type == "sharded":
            return self.sharded_optimizers.sharded_state_dict(optimizer)
        return self.sharded_optimizers.state_dict(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.state_dict_type == "full":
            if type(self.checkpoint_io).__name__ == "TorchCheckpointIO" and storage_options is None:
                comm = None if self._engine is None else self._engine.comm
                sharded_checkpoint.on_first(comm, lambda: durable.save(checkpoint, filepath), filepath)
            else:
                super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        if storage_options is not None:
            raise Zero3Error("storage_options have no meaning for state_dict_type='sharded'")
        path = str(self.broadcast(filepath))
        entries: dict[str, Any] = {}
        for what in [k for k, v in checkpoint.items() if k == "state_dict" or _has_parts(v)]:  # of callbacks, too
            entries.update({f"{what}.{name}": value for name, value in checkpoint.pop(what).items()})
        groups = []
        for i, optimizer in enumerate(checkpoint.pop("optimizer_states", ())):
            groups.append(optimizer["param_groups"])
            for name, state in optimizer["state"].items():
                entries.update({f"optimizer_{i}.state.{name}.{key}": value for key, value in state.items()})
        extra = {**checkpoint, sharded_checkpoint.PARAM_GROUPS: groups}
        if not self.save_async or self._engine is None:
            sharded_checkpoint.write(path, entries, durable.saved(extra), self._engine.comm if self._engine else None)
            return
        if self._background is None:
            self._background = BackgroundWriter()
        self._background.write(path, entries, extra)

    def wait_for_checkpoint(self) -> None:
        """Return when the checkpoint that `save_async` writes in the background, if any, is complete.

        Raises:
            Zero3Error: it could not be written.
        """
        if self._background is not None:
            self._background.wait()

    def remove_checkpoint(self, filepath: Any) -> None:
        self.wait_for_checkpoint()  # the one that makes the old one superfluous must be complete
        super().remove_checkpoint(filepath)  # type: ignore[misc]

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self.wait_for_checkpoint()
        if sharded_checkpoint.is_sharded_checkpoint(checkpoint_path):
            comm = Communicator(device=self.root_device, timeout=self._timeout)
            return sharded_checkpoint.load(checkpoint_path, comm, weights_only)
        try:
            return super().load_checkpoint(checkpoint_path, weights_only)  # type: ignore[misc]
        except FileNotFoundError:
            raise
        except (RuntimeError, EOFError, OSError) as error:  # torch does not say of which file
            raise Zero3Error(f"cannot read the checkpoint {checkpoint_path}: {error}") from error

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state, module = checkpoint["state_dict"], self.lightning_module
        if engine_of(module) is not None:
            load_full_state_dict(module, state, strict=strict)
        elif any(p.is_meta for p in module.parameters()) and not isinstance(state, sharded_checkpoint.StoredState):
            module.load_state_dict(state, strict=strict, assign=True)  # it takes the checkpoint's tensors as its own
        else:
            self._to_load = state, strict  # each rank will read its part

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise Zero3Error(
                f"the checkpoint has {len(states)} optimizers, configure_optimizers returned {len(self.optimizers)}"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            self.sharded_optimizers.load_state_dict(optimizer, state)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _note_sigterm(self, signum: int, _: Any) -> None:
        """In place of Lightning's handler, which broadcasts from inside of whatever this rank was doing.

        Ranks are signalled at different places, and perhaps twice: they would wait for each other for ever. The
        training loop looks at the flag, on all ranks together, at every batch.
        """
        connector = self.lightning_module.trainer._signal_connector
        if not connector.received_sigterm and self.launcher is not None:
            self.launcher.kill(signum)
        connector.received_sigterm = True

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    def teardown(self) -> None:
        """Where processes live on, the module stays sharded and usable. Processes that end hand back full weights."""
        if self._background is not None:
            background, self._background = self._background, None
            background.close()
        if self._sharded_optimizers is not None:
            self._sharded_optimizers.stand_ins.remove()
        if self._start_method != "popen" and self._engine is not None and not self._failed:
            unshard_module(self.lightning_module)
            self._engine = None
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @property
    def engine(self) -> Engine:
        """The engine of the module that is set up."""
        if self._engine is None:
            raise Zero3Error("the model is not sharded yet; the engine exists from the strategy's setup on")
        return self._engine

    @property
    def sharded_optimizers(self) -> ShardedOptimizers:
        """The optimizers of the fit that is set up."""
        if self._sharded_optimizers is None:
            raise Zero3Error("there are no sharded optimizers yet; they exist from the set-up of a fit on")
        return self._sharded_optimizers

    # -- for people ---------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` for the parameters of one optimizer, in manual optimization.

        Call it on every rank, between `self.manual_backward(loss)` and `optimizer.step()`. It acts on the gradients as
        they are without the loss scale of "16-mixed".

        Args:
            optimizer: one of `self.optimizers()`.
            max_norm, norm_type: the largest norm to leave, and its p; `inf` for the largest absolute value.
            error_if_nonfinite: raise if the norm is infinite or NaN; on all ranks or none.

        Returns:
            The norm before, a float64 scalar, the same on every rank.
        """
        scaler = getattr(self.precision_plugin, "scaler", None)
        factor = scaler.factor(getattr(optimizer, "optimizer", optimizer)) if scaler is not None else 1.0
        segments = self.precision_plugin.main_params(optimizer)
        comm = self.engine.comm
        return clip_grad_norm_(segments, comm, factor * float(max_norm), norm_type, error_if_nonfinite) / factor

    def grad_norms(self, norm_type: float | str = 2.0, optimizer: Any = None) -> dict[str, Tensor]:
        """Norms of the gradients, for logging: what Lightning's `grad_norm(module, norm_type)` gives under DDP.

        Call it on every rank, in `on_before_optimizer_step` for example.

        Args:
            norm_type: p of the p-norm; "inf" for the largest absolute value.
            optimizer: whose parameters; default all.

        Returns:
            "grad_2.0_norm/name" for each trainable parameter (0 if unused), and "grad_2.0_norm_total".
        """
        p = float(norm_type)
        norms = self.sharded_optimizers.grad_norms(p)
        if optimizer is not None:
            groups = self.sharded_optimizers.params(getattr(optimizer, "optimizer", optimizer))
            ids = {id(param) for group in groups for param in group}
            pairs = ((n, q) for c in self.engine.trainable for n, q in zip(c.names, c.params, strict=True))
            norms = {name: norms[name] for name, param in pairs if id(param) in ids}
        named = {f"grad_{p}_norm/{name}": norm for name, norm in norms.items()}
        return {**named, f"grad_{p}_norm_total": torch.stack(list(norms.values())).norm(p)}

    def segments(self, optimizer: Any) -> list[nn.Parameter]:
        """This rank's shards that an optimizer updates: flat, with their gradients; `optimizer.state` is kept by them.

        For those who want to look inside, between a backward and the step. A rank may have none.
        """
        return self.sharded_optimizers.segments(getattr(optimizer, "optimizer", optimizer))  # of a LightningOptimizer

    def report(self) -> Report:
        """Bytes per rank of model states and slots, beside what DDP would take. After set-up; exact after a step."""
        return Report.of(self.engine, self.optimizers)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        register_strategies(cls, strategy_registry)


def _has_parts(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(v, FlatRange) for v in value.values())


def _float_dtype(name: str, value: torch.dtype | str | None) -> torch.dtype | None:
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if value is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise Zero3Error(f"{name}={value!r}: give a floating-point dtype, torch.float32 or 'float32' for example")
    return dtype


class Launcher(LauncherMixin, _MultiProcessingLauncher):
    """`LauncherMixin` for `lightning`."""


class Zero3Strategy(Zero3StrategyMixin, ParallelStrategy):
    __doc__ = Zero3StrategyMixin.__doc__
    _launcher_class = Launcher


register_strategies(Zero3Strategy, StrategyRegistry)
let_lightning_load_directories("lightning.pytorch", "lightning.fabric")
