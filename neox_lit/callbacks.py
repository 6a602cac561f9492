"""Callbacks for language models."""

from __future__ import annotations

import os

from lightning.pytorch import Callback, LightningModule, Trainer

from neox_lit.errors import NeoXError
from neox_lit.generate import Sampling
from neox_lit.module import NeoXLightning


class SampleText(Callback):
    """Prints a sample of the model's text during training and at its end.

    All ranks generate together, for the model may be sharded over them; rank 0 prints.

    Args:
        prompt: Text to continue. Empty: begin a new document.
        max_new_tokens: Most tokens of a sample. None: what fits into the model's `max_seq_len`.
        every_n_epochs: A sample after every n-th epoch. 0: only at the end of training.
        temperature, top_k, top_p, seed: See `neox_lit.generate.Sampling`.
    """

    def __init__(
        self,
        prompt: str = "",
        max_new_tokens: int | None = 64,
        every_n_epochs: int = 0,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 0.95,
        seed: int = 0,
    ) -> None:
        if max_new_tokens is not None and max_new_tokens < 1:
            raise NeoXError(f"SampleText.max_new_tokens must be at least 1, got {max_new_tokens}")
        if every_n_epochs < 0:
            raise NeoXError(f"SampleText.every_n_epochs must be at least 0, got {every_n_epochs}")
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.every_n_epochs = every_n_epochs
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

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._sample(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._sampled_at != trainer.global_step:
            self._sample(trainer, pl_module)

    def _sample(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, NeoXLightning)
        self._sampled_at = trainer.global_step
        text = pl_module.complete(self.prompt, self.max_new_tokens, self.sampling)
        if trainer.is_global_zero:
            print(f"\nSample after {trainer.global_step} steps:\n{self.prompt}{text}\n", flush=True)


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
