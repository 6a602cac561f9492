"""Callbacks for language models."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from neox_lit.errors import NeoXError
from neox_lit.flops import flops_per_token, peak_flops
from neox_lit.generate import Sampling
from neox_lit.loss import IGNORE
from neox_lit.module import NeoXLightning


class SampleText(Callback):
    """Prints a sample of the model's text during training and at its end, and logs it to TensorBoard if that is there.

    All ranks generate together, for the model may be sharded over them; rank 0 prints.

    Args:
        prompt: Text to continue. Empty: begin a new document.
        max_new_tokens: Most tokens of a sample. None: what fits into the model's `max_seq_len`.
        every_n_epochs: A sample after every n-th epoch. 0: none then.
        every_n_validations: A sample after every n-th validation during training. 0: none then.
        temperature, top_k, top_p, seed: See `neox_lit.generate.Sampling`.
    """

    def __init__(
        self,
        prompt: str = "",
        max_new_tokens: int | None = 64,
        every_n_epochs: int = 0,
        every_n_validations: int = 0,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 0.95,
        seed: int = 0,
    ) -> None:
        if max_new_tokens is not None and max_new_tokens < 1:
            raise NeoXError(f"SampleText.max_new_tokens must be at least 1, got {max_new_tokens}")
        for name, value in (("every_n_epochs", every_n_epochs), ("every_n_validations", every_n_validations)):
            if value < 0:
                raise NeoXError(f"SampleText.{name} must be at least 0, got {value}")
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.every_n_epochs = every_n_epochs
        self.every_n_validations = every_n_validations
        self._validations = 0
        self.sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        self._sampled_at = -1  # global step of the last sample

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, NeoXLightning):
            raise NeoXError(f"SampleText samples from a NeoXLightning, not from a {type(pl_module).__name__}")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fail now rather than after training."""
        assert isinstance(pl_module, NeoXLightning)
        if pl_module.tokenizer is None:
            raise NeoXError("SampleText needs a tokenizer; train on a TextDataModule or set module.tokenizer")
        n_prompt, limit = len(pl_module.tokenizer.encode(self.prompt)), pl_module.config.max_seq_len
        if max(n_prompt, 1) + (self.max_new_tokens or 1) > limit:
            raise NeoXError(
                f"SampleText.prompt has {n_prompt} tokens, with max_new_tokens={self.max_new_tokens} that is more than "
                f"the model's max_seq_len={limit}"
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_validations and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validations += 1
            if self._validations % self.every_n_validations == 0:
                self._sample(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._sample(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sample(trainer, pl_module)

    def _sample(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, NeoXLightning)
        if self._sampled_at == trainer.global_step:
            return  # the same model would say the same
        self._sampled_at = trainer.global_step
        text = pl_module.complete(self.prompt, self.max_new_tokens, self.sampling)
        if trainer.is_global_zero:
            print(f"\nSample after {trainer.global_step} steps:\n{self.prompt}{text}\n", flush=True)
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_text("sample", f"{self.prompt}{text}", trainer.global_step)


class Throughput(Callback):
    """Logs how fast a run is and how much memory it takes, over the steps since it last did.

    `tokens_per_s`: targets of all ranks per second. `tflops_per_s`: 10^12 operations per second and device that the
    model needs for them, see `flops_per_token` (recomputed activations are not counted). `mfu`: that as a part of what
    the device could do, if this is known. `memory_gib`: the most that a rank has taken so far, in 2^30 bytes; allocated
    tensors on a GPU, the resident process on a CPU. All are the same on every rank.

    Time is what training takes, waiting for data included, the first step (which records, allocates, compiles),
    validation and checkpoints not. (Checkpoints without optimizer state cannot be told from waiting, and count.)

    Args:
        peak_flops: FLOP/s of a device in the run's precision. By default known for some GPUs in 16-bit precisions (see
            `neox_lit.flops.PEAK_FLOPS`); without it there is no `mfu`.
        every_n_steps: Optimizer steps between two logs. By default the Trainer's `log_every_n_steps`.
    """

    def __init__(self, peak_flops: float | None = None, every_n_steps: int | None = None) -> None:
        if peak_flops is not None and not peak_flops > 0:
            raise NeoXError(f"Throughput.peak_flops must be positive, got {peak_flops}")
        if every_n_steps is not None and every_n_steps < 1:
            raise NeoXError(f"Throughput.every_n_steps must be at least 1, got {every_n_steps}")
        self.peak_flops, self.every_n_steps = peak_flops, every_n_steps
        self._tokens, self._seconds, self._started = 0, 0.0, 0.0
        self._stopped: float | None = None  # when the last batch ended, if nothing but loading followed it

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(pl_module, NeoXLightning):
            raise NeoXError(f"Throughput counts the operations of a NeoXLightning, not of a {type(pl_module).__name__}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restart()
        self._batches = 0
        self._logged_at = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._stopped is not None:  # the time since the last batch went to loading this one
            self._seconds += time.perf_counter() - self._stopped
        self._started = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stopped = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._stopped = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stopped = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, NeoXLightning)
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)  # the clock here says nothing about work that is queued there
        self._stopped = time.perf_counter()
        self._batches += 1
        if self._batches == 1:
            return
        self._seconds += self._stopped - self._started
        self._tokens += int((batch["labels"] != IGNORE).sum())
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0 and trainer.global_step != self._logged_at:
            self._logged_at = trainer.global_step
            self._log(trainer, pl_module, batch["labels"].shape[1])
            self._restart()

    def _log(self, trainer: Trainer, module: NeoXLightning, seq_len: int) -> None:
        assert module.model is not None
        mine = torch.tensor([self._tokens, self._seconds, _peak_memory(module.device)], device=module.device)
        gathered = module.all_gather(mine)
        assert isinstance(gathered, torch.Tensor)
        tokens, seconds, memory = gathered.reshape(-1, 3).unbind(1)
        rate = (tokens.sum() / seconds.max()).item()
        flops = rate / trainer.world_size * flops_per_token(module.config, module.model, seq_len)
        values = {"tokens_per_s": rate, "tflops_per_s": flops / 1e12, "memory_gib": memory.max().item()}
        peak = self.peak_flops
        if peak is None and module.device.type == "cuda" and "16" in str(trainer.precision):
            peak = peak_flops(torch.cuda.get_device_name(module.device))
        if peak:
            values["mfu"] = flops / peak
        module.log_dict(values, prog_bar=True)

    def _restart(self) -> None:
        self._tokens, self._seconds, self._stopped = 0, 0.0, None


def _peak_memory(device: torch.device) -> float:
    """GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "linux":  # where ru_maxrss also counts what the parent had when it started this process
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    unit = 1 if sys.platform == "darwin" else 2**10  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class SaveAdapter(Callback):
    """Writes the adapters alone when training ends, as files of `peft`; all ranks gather them, rank 0 writes.

    Args:
        directory: Where adapter_config.json and adapter_model.safetensors go.
    """

    def __init__(self, directory: str | os.PathLike) -> None:
        self.directory = directory

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Fail now rather than after training."""
        if stage == "fit" and not (isinstance(pl_module, NeoXLightning) and pl_module.lora is not None):
            raise NeoXError(
                "SaveAdapter needs a NeoXLightning with model.trainable=lora: there are no adapters to save"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, NeoXLightning)
        pl_module.save_adapter(self.directory)
        trainer.strategy.barrier("SaveAdapter")
