"""GPT-NeoX as a LightningModule. It knows nothing of ZeRO: any strategy trains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torchmetrics import MeanMetric

from neox_lit.cache import KVCache
from neox_lit.config import NeoXConfig
from neox_lit.data import Batch, TextDataModule
from neox_lit.errors import NeoXError
from neox_lit.generate import GREEDY, Continuation, Sampling, generate
from neox_lit.loss import TokenLoss, token_loss
from neox_lit.masks import document_mask
from neox_lit.metrics import Perplexity
from neox_lit.model import NeoXModel
from neox_lit.optim import decay_groups, warmup_cosine
from neox_lit.tokenizer import TextTokenizer

_TOKENIZER_KEY = "neox_lit_tokenizer"


class NeoXLightning(LightningModule):
    """Trains a `NeoXModel` on next-token prediction.

    The model is built in `configure_model`, where a strategy decides device and sharding. Checkpoints hold plain data
    only, with the tokenizer in them, so `NeoXLightning.load_from_checkpoint(path)` is all it takes to generate.

    Args:
        config: The model's shape. Give this or `preset`.
        preset: A published size, e.g. 'pythia-70m' or 'gpt-neox-20b'.
        overrides: Fields of the preset to replace, e.g. {n_layers: 2}.
        lr: Peak learning rate.
        betas: AdamW's decay rates of the moments.
        eps: AdamW's term in the denominator.
        weight_decay: AdamW's decay of matrices; vectors do not decay.
        warmup_steps: Optimizer steps in which the learning rate rises to `lr`.
        decay_steps: Optimizer step at which the cosine ends. 0: the end of training.
        min_lr_ratio: Learning rate at the end of the cosine, as a part of `lr`.

    Logged: `train_loss` (nats per target, mean over ranks, each step), `val_loss`, `val_perplexity`, `test_loss`,
    `test_perplexity` (over all held-out targets of all ranks).
    """

    def __init__(
        self,
        config: NeoXConfig | None = None,
        preset: str | None = None,
        overrides: dict[str, Any] | None = None,
        lr: float = 6e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        warmup_steps: int = 0,
        decay_steps: int = 0,
        min_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__()
        self.config = _resolve(config, preset, overrides)
        for name, value, ok, what in (
            ("lr", lr, lr > 0, "positive"),
            ("betas", betas, len(betas) == 2 and all(0 <= b < 1 for b in betas), "two numbers in [0, 1)"),
            ("eps", eps, eps > 0, "positive"),
            ("weight_decay", weight_decay, weight_decay >= 0, "at least 0"),
            ("warmup_steps", warmup_steps, warmup_steps >= 0, "at least 0"),
            ("decay_steps", decay_steps, decay_steps >= 0, "at least 0"),
            ("min_lr_ratio", min_lr_ratio, 0 <= min_lr_ratio <= 1, "in [0, 1]"),
        ):
            if not ok:
                raise NeoXError(f"model.{name} must be {what}, got {value!r}")
        self.lr = lr
        self.betas = (float(betas[0]), float(betas[1]))
        self.eps = eps
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.min_lr_ratio = min_lr_ratio
        # A dict of plain data, and the resolved config rather than the preset: a checkpoint means the same for ever.
        self.save_hyperparameters(
            {
                "config": self.config.to_dict(),
                "lr": lr,
                "betas": list(self.betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "warmup_steps": warmup_steps,
                "decay_steps": decay_steps,
                "min_lr_ratio": min_lr_ratio,
            }
        )
        self.model: NeoXModel | None = None
        self.tokenizer: TextTokenizer | None = None
        self.val_loss, self.val_perplexity = MeanMetric(), Perplexity()
        self.test_loss, self.test_perplexity = MeanMetric(), Perplexity()

    def configure_model(self) -> None:
        """Build the model, once."""
        if self.model is None:
            self.model = NeoXModel(self.config)

    def setup(self, stage: str) -> None:
        """Check that model and data fit before anything is trained, and take the data's tokenizer."""
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, TextDataModule):
            if data.tokenizer.n_tokens > self.config.n_vocab:
                raise NeoXError(
                    f"the tokenizer has {data.tokenizer.n_tokens} tokens, more than the model's "
                    f"config.n_vocab={self.config.n_vocab}; set it to {data.tokenizer.n_vocab}",
                    on_all_ranks=True,
                )
            if data.seq_len > self.config.max_seq_len:
                raise NeoXError(
                    f"data.seq_len={data.seq_len} is above the model's config.max_seq_len={self.config.max_seq_len}; "
                    "lower the one or raise the other",
                    on_all_ranks=True,
                )
            self._take_tokenizer(data.tokenizer)

    def forward(self, ids: Tensor, cache: KVCache | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits `[batch, n_new, n_vocab]` of ids `[batch, n_new]`; see `NeoXModel.forward`."""
        if self.model is None:
            raise NeoXError("the model is not built yet; call configure_model() first, or let a Trainer do it")
        return self.model(ids, cache, mask)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._loss(batch).mean
        # The mean over ranks of their means: the number whose gradient the ranks average.
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self._loss(batch)
        self._log_metric("val_loss", self.val_loss, loss)
        self._log_metric("val_perplexity", self.val_perplexity, loss)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self._loss(batch)
        self._log_metric("test_loss", self.test_loss, loss)
        self._log_metric("test_perplexity", self.test_perplexity, loss)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of each window, nats per target: float32 `[batch]`."""
        logits = self._logits(batch)
        return torch.stack([token_loss(*row).mean for row in zip(logits, batch["labels"], strict=True)])

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW in two groups (`decay_groups`), learning rate by `warmup_cosine` at each optimizer step."""
        optimizer = torch.optim.AdamW(
            decay_groups(self.parameters(), self.weight_decay),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            fused=self._can_fuse(),
        )
        factor = partial(
            warmup_cosine,
            warmup=self.warmup_steps,
            total=self.decay_steps or self.trainer.estimated_stepping_batches,
            floor=self.min_lr_ratio,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 64,
        sampling: Sampling = GREEDY,
        on_token: Callable[[int, int], bool | None] | None = None,
    ) -> list[list[int]]:
        """New tokens for each prompt of token ids; see `neox_lit.generate.generate`.

        Ends at `<|endoftext|>` and never gives an id past the tokenizer's, if the tokenizer is known. While the model
        is sharded, all ranks must call this together with the same arguments.
        """
        return generate(
            self,
            prompts,
            max_new_tokens,
            sampling,
            n_tokens=self.tokenizer.n_tokens if self.tokenizer else None,
            stop_id=self.tokenizer.end_of_text if self.tokenizer else None,
            on_token=on_token,
            device=self.device,
        )

    def complete(
        self,
        prompt: str,
        max_new_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        *,
        stop: Sequence[str] = (),
        write: Callable[[str], object] | None = None,
    ) -> str:
        """The text that follows `prompt`. An empty prompt begins a new document.

        Args:
            max_new_tokens: Most tokens to add. None: what fits into `max_seq_len`.
            stop: The text ends before the first of these.
            write: Called with each piece of the text as it comes.

        Raises:
            NeoXError: No tokenizer is known: the model was neither trained on a `TextDataModule` nor loaded from a
                checkpoint of such a training.
        """
        return self.complete_all([prompt], max_new_tokens, sampling, stop=stop, write=write)[0]

    def complete_all(
        self,
        prompts: Sequence[str],
        max_new_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        *,
        stop: Sequence[str] = (),
        write: Callable[[str], object] | None = None,
    ) -> list[str]:
        """`complete` for several prompts in one batch. `write` gets the first one's text only."""
        if self.tokenizer is None:
            raise NeoXError("no tokenizer is known; set module.tokenizer = TextTokenizer.from_file(path)")
        ids = [self.tokenizer.encode(prompt) or [self.tokenizer.end_of_text] for prompt in prompts]
        if max_new_tokens is None:
            max_new_tokens = max(1, self.config.max_seq_len - max(map(len, ids), default=0))
        decode = self.tokenizer.decode
        texts = [Continuation(decode, stop, write if row == 0 else None) for row in range(len(prompts))]
        self.generate(ids, max_new_tokens, sampling, on_token=lambda row, token: texts[row].add(token))
        return [text.end() for text in texts]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the tokenizer into the checkpoint, as the text of a tokenizer.json."""
        if self.tokenizer is not None:
            checkpoint[_TOKENIZER_KEY] = self.tokenizer.to_json()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if _TOKENIZER_KEY in checkpoint:
            self._take_tokenizer(TextTokenizer.from_json(checkpoint[_TOKENIZER_KEY]))

    def _take_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Set the tokenizer; another one than before would make the weights meaningless."""
        if self.tokenizer is not None and self.tokenizer.hash != tokenizer.hash:
            raise NeoXError(
                f"the checkpoint was trained with another tokenizer ({self.tokenizer.n_tokens} and "
                f"{tokenizer.n_tokens} tokens); set data.tokenizer to the one it was trained with"
            )
        self.tokenizer = tokenizer

    def _loss(self, batch: Batch) -> TokenLoss:
        return token_loss(self._logits(batch), batch["labels"])

    def _logits(self, batch: Batch) -> Tensor:
        documents = batch.get("documents")
        return self(batch["input_ids"], mask=None if documents is None else document_mask(documents))

    def _log_metric(self, name: str, metric: MeanMetric, loss: TokenLoss) -> None:
        metric.update(loss.mean, loss.n_targets)
        self.log(name, metric, prog_bar=True)

    def _can_fuse(self) -> bool:
        """Whether AdamW may be fused: a device that has it, and no clipping under autocast, which Lightning refuses."""
        clipped_autocast = bool(self.trainer.gradient_clip_val) and "mixed" in str(self.trainer.precision)
        return self.device.type in ("cpu", "cuda") and not clipped_autocast


def _resolve(config: NeoXConfig | None, preset: str | None, overrides: dict[str, Any] | None) -> NeoXConfig:
    """The config that a user's three ways of saying it mean."""
    if config is None and preset is None:
        raise NeoXError("neither model.config nor model.preset is given; set one")
    if preset is not None:
        if config is not None:
            raise NeoXError(f"model.preset={preset!r} and model.config are both given; set one of them to null")
        return NeoXConfig.preset(preset, **(overrides or {}))
    if overrides:
        raise NeoXError(f"model.overrides={overrides!r} replaces fields of a preset; change model.config itself")
    if isinstance(config, dict):  # from a checkpoint's hyperparameters
        return NeoXConfig.from_dict(config)
    assert config is not None
    return config
