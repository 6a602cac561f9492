"""GPT-NeoX as a LightningModule. It knows nothing of ZeRO: any strategy trains it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_zero3 import empty_parameters, load_weights
from lightning_zero3.weights import is_rehearsal
from neox_lit.adapters import load_adapter, save_adapter
from neox_lit.cache import KVCache
from neox_lit.checkpoints import open_checkpoint
from neox_lit.compiling import check_backend, compile_blocks
from neox_lit.config import NeoXConfig
from neox_lit.data import Batch, TextDataModule
from neox_lit.errors import NeoXError
from neox_lit.finetune import check_choice, set_trainable
from neox_lit.generate import GREEDY, Continuation, Sampling, generate
from neox_lit.int8 import require_bitsandbytes, to_int8
from neox_lit.lora import LoRAOptions, adapted, add_lora
from neox_lit.loss import TokenLoss, token_loss
from neox_lit.masks import document_mask
from neox_lit.metrics import Perplexity
from neox_lit.model import NeoXModel
from neox_lit.optim import Schedule, decay_groups, lr_factor
from neox_lit.sharing import any_rank
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
        pretrained: A checkpoint of GPT-NeoX, Hugging Face or this package to begin with, any format that
            `open_checkpoint` knows. It gives the shape, too, unless `config` or `preset` does. Under `Zero3Strategy`
            each rank reads only its part. A resumed run takes its weights from its own checkpoint.
        lr: Peak learning rate.
        betas: AdamW's decay rates of the moments.
        eps: AdamW's term in the denominator.
        weight_decay: AdamW's decay of matrices; vectors do not decay.
        schedule: How the learning rate falls after the warm-up: cosine, linear, or constant (not at all).
        warmup_steps: Optimizer steps in which the learning rate rises to `lr`.
        decay_steps: Optimizer step at which the fall ends. 0: the end of training.
        min_lr_ratio: Learning rate at the end of the fall, as a part of `lr`.
        trainable: What trains: all, biases (of query_key_value, attention.dense and dense_h_to_4h), lora, or a list of
            regular expressions of which one is found in each parameter's name, e.g. ['norm', 'readout'].
        lora: Rank, alpha, dropout and targets of the adapters that `trainable: lora` makes.
        int8: Keep the four linears of each block in 8 bits (LLM.int8(), needs bitsandbytes); they do not train.
        int8_threshold: Input columns with a value at least this large are not multiplied in 8 bits.
        loss_chunk: Tokens whose logits exist at once; the loss is the same. 0: those of the whole batch.
        compile: Compile the transformer layers with torch.compile. Generation stays uncompiled.
        compile_backend: What compiles: inductor (needs a C++ compiler), or another backend of torch.compile.

    Logged: `train_loss` (nats per target, mean over ranks, each step), `val_loss`, `val_perplexity`, `test_loss`,
    `test_perplexity` (over all held-out targets of all ranks).
    """

    def __init__(
        self,
        config: NeoXConfig | None = None,
        preset: str | None = None,
        overrides: dict[str, Any] | None = None,
        pretrained: str | None = None,
        lr: float = 6e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        schedule: Schedule = "cosine",
        warmup_steps: int = 0,
        decay_steps: int = 0,
        min_lr_ratio: float = 0.1,
        trainable: list[str] | str = "all",
        lora: LoRAOptions | None = None,
        int8: bool = False,
        int8_threshold: float = 6.0,
        loss_chunk: int = 1_024,
        compile: bool = False,
        compile_backend: str = "inductor",
    ) -> None:
        super().__init__()
        if pretrained is not None and config is None and preset is None:
            config = open_checkpoint(pretrained).require_config()
        self.config = _resolve(config, preset, overrides)
        self.pretrained = pretrained
        check_choice(trainable, lora is not None)
        for name, value, ok, what in (
            ("lr", lr, lr > 0, "positive"),
            ("betas", betas, len(betas) == 2 and all(0 <= b < 1 for b in betas), "two numbers in [0, 1)"),
            ("eps", eps, eps > 0, "positive"),
            ("weight_decay", weight_decay, weight_decay >= 0, "at least 0"),
            ("schedule", schedule, schedule in get_args(Schedule), f"one of {', '.join(get_args(Schedule))}"),
            ("warmup_steps", warmup_steps, warmup_steps >= 0, "at least 0"),
            ("decay_steps", decay_steps, decay_steps >= 0, "at least 0"),
            ("min_lr_ratio", min_lr_ratio, 0 <= min_lr_ratio <= 1, "in [0, 1]"),
            ("int8_threshold", int8_threshold, int8_threshold >= 0, "at least 0"),
            ("loss_chunk", loss_chunk, loss_chunk >= 0, "at least 0"),
        ):
            if not ok:
                raise NeoXError(f"model.{name} must be {what}, got {value!r}")
        self.lr = lr
        self.betas = (float(betas[0]), float(betas[1]))
        self.eps = eps
        self.weight_decay = weight_decay
        self.schedule: Schedule = schedule
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.min_lr_ratio = min_lr_ratio
        self.trainable = trainable if isinstance(trainable, str) else list(trainable)
        options = LoRAOptions(**lora) if isinstance(lora, dict) else lora  # a dict if from a checkpoint
        self.lora = options or LoRAOptions() if trainable == "lora" else None
        self.int8, self.int8_threshold = int8, int8_threshold
        self.loss_chunk = loss_chunk
        self.compile_backend = compile_backend if compile else None  # `compile` is a method of every module
        if self.compile_backend:
            check_backend(self.compile_backend)
        if int8:
            require_bitsandbytes()
        # A dict of plain data, and the resolved config rather than the preset: a checkpoint means the same for ever.
        # How the same numbers are computed (loss_chunk, compile) is no part of it.
        self.save_hyperparameters(
            {
                "config": self.config.to_dict(),
                "lr": lr,
                "betas": list(self.betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "schedule": schedule,
                "warmup_steps": warmup_steps,
                "decay_steps": decay_steps,
                "min_lr_ratio": min_lr_ratio,
                "trainable": self.trainable,
                "lora": self.lora.to_dict() if self.lora else None,
                "int8": int8,
                "int8_threshold": int8_threshold,
            }
        )
        self.model: NeoXModel | None = None
        self.tokenizer: TextTokenizer | None = None
        self.val_loss, self.val_perplexity = MeanMetric(), Perplexity()
        self.test_loss, self.test_perplexity = MeanMetric(), Perplexity()

    def configure_model(self) -> None:
        """Build the model, once: its weights, then int8, then adapters, and what is frozen."""
        if self.model is None:
            resumed = self._trainer is not None and self.trainer.ckpt_path is not None
            model = NeoXModel(self.config) if self.pretrained is None or resumed else self._from_files(self.pretrained)
            if self.int8:
                to_int8(model, self.int8_threshold)
            if self.lora is not None:
                add_lora(model, self.lora)
            set_trainable(model, self.trainable)
            if self.compile_backend:
                compile_blocks(model, self.compile_backend)
            self.model = model

    def _from_files(self, path: str) -> NeoXModel:
        """The model with a checkpoint's weights, in the dtype of the run."""
        if is_rehearsal():
            return NeoXModel(self.config)
        checkpoint = open_checkpoint(path, self.config)
        if checkpoint.tokenizer is not None:
            self._take_tokenizer(TextTokenizer.from_json(checkpoint.tokenizer))
        with empty_parameters():
            model = NeoXModel(self.config)
        load_weights(model, checkpoint.tensors)
        return model

    def setup(self, stage: str) -> None:
        """Check that model and data fit before anything is trained, and take the data's tokenizer."""
        if stage == "fit" and self.int8 and self.trainable == "all":
            raise NeoXError("with model.int8=true most weights cannot train; set model.trainable to lora or biases")
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
        return self._built()(ids, cache, mask)

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
        logits = self(batch["input_ids"], mask=_mask(batch))
        return torch.stack([token_loss(*row).mean for row in zip(logits, batch["labels"], strict=True)])

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW in two groups (`decay_groups`), learning rate by `lr_factor` at each optimizer step."""
        optimizer = torch.optim.AdamW(
            decay_groups(self.parameters(), self.weight_decay),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            fused=self._can_fuse(),
        )
        total = self.decay_steps or self.trainer.estimated_stepping_batches

        def factor(step: int) -> float:
            return lr_factor(step, self.schedule, warmup=self.warmup_steps, total=total, floor=self.min_lr_ratio)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 64,
        sampling: Sampling = GREEDY,
        on_token: Callable[[int, int], bool | None] | None = None,
        shared: bool = False,
    ) -> list[list[int]]:
        """New tokens for each prompt of token ids; see `neox_lit.generate.generate`.

        Ends at `<|endoftext|>` and never gives an id past the tokenizer's, if the tokenizer is known. While the model
        is sharded, all ranks must call this together: with the same arguments, or each with its own and `shared`.
        """
        # As a step of the Trainer computes, in mixed precision too; but eagerly: every length would be compiled anew.
        precise = self._trainer.precision_plugin.forward_context() if self._trainer is not None else nullcontext()
        with precise, torch.compiler.set_stance("force_eager"):
            return generate(
                self,
                prompts,
                max_new_tokens,
                sampling,
                n_tokens=self.tokenizer.n_tokens if self.tokenizer else None,
                stop_id=self.tokenizer.end_of_text if self.tokenizer else None,
                on_token=on_token,
                device=self.device,
                any_rank=partial(any_rank, device=self.device) if shared else bool,
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
        shared: bool = False,
    ) -> list[str]:
        """`complete` for several prompts in one batch. Prompt i draws with the seed + i, as it would alone.

        Args:
            max_new_tokens: Most tokens to add to each. None: what fits into `max_seq_len` after the longest prompt.
            write: Gets the first one's text only.
            shared: Each rank has its own prompts, or none.
        """
        ids = self.encode(prompts)
        if max_new_tokens is None:
            max_new_tokens = max(1, self.config.max_seq_len - max(map(len, ids), default=0))
        return self.complete_ids(ids, max_new_tokens, sampling, stop=stop, write=write, shared=shared)

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of each prompt; of an empty one the token that begins a document.

        Raises:
            NeoXError: No tokenizer is known.
        """
        if self.tokenizer is None:
            raise NeoXError("no tokenizer is known; set module.tokenizer = TextTokenizer.from_file(path)")
        return [list(self.tokenizer.encode(prompt)) or [self.tokenizer.end_of_text] for prompt in prompts]

    def complete_ids(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        stop: Sequence[str] = (),
        write: Callable[[str], object] | None = None,
        shared: bool = False,
    ) -> list[str]:
        """`complete_all` for prompts of token ids."""
        if self.tokenizer is None:
            raise NeoXError("no tokenizer is known; set module.tokenizer = TextTokenizer.from_file(path)")
        decode = self.tokenizer.decode
        texts = [Continuation(decode, stop, write if row == 0 else None) for row in range(len(prompts))]
        self.generate(prompts, max_new_tokens, sampling, lambda row, token: texts[row].add(token), shared)
        return [text.end() for text in texts]

    def example_batch(self, batch_size: int, seq_len: int | None = None) -> Batch:
        """What `training_step` gets, of zeros: for `zero3 plan`."""
        ids = torch.zeros(batch_size, seq_len or self.config.max_seq_len, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}

    def save_adapter(self, directory: str | os.PathLike) -> None:
        """Write the adapters alone, as files of `peft`; see `neox_lit.adapters.save_adapter`. Called on every rank."""
        save_adapter(self._built(), directory)

    def load_adapter(self, directory: str | os.PathLike) -> None:
        """Load adapters that `save_adapter` or `peft` wrote; from then on they are what trains.

        Before `fit` or, with adapters of the same shape there, during it. Called on every rank.
        """
        self.configure_model()
        self.lora, self.trainable = load_adapter(self._built(), directory), "lora"
        set_trainable(self._built(), "lora")
        self.hparams.update({"trainable": "lora", "lora": self.lora.to_dict()})

    def plan_variants(self) -> dict[str, dict[str, Any]]:
        """Changes of the configuration that make a run smaller, by name, for `zero3 plan`."""
        lora = {} if self.trainable == "lora" else {"model.trainable": "lora"}
        variants: dict[str, dict[str, Any]] = {}
        if self.trainable == "all":
            variants["LoRA"] = lora
        if not self.int8:
            keeps = self.trainable in ("biases", "lora")
            variants["int8" if self.trainable == "biases" else "int8 and LoRA"] = {
                **({} if keeps else lora),
                "model.int8": True,
            }
        return variants

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the tokenizer into the checkpoint, as the text of a tokenizer.json."""
        if any(lora.merged for _, _, lora in adapted(self)):
            raise NeoXError("a checkpoint of merged adapters would apply them twice; call unmerge_lora() first")
        if self.tokenizer is not None:
            checkpoint[_TOKENIZER_KEY] = self.tokenizer.to_json()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._check_structure(checkpoint)
        if _TOKENIZER_KEY in checkpoint:
            self._take_tokenizer(TextTokenizer.from_json(checkpoint[_TOKENIZER_KEY]))

    def _built(self) -> NeoXModel:
        if self.model is None:
            raise NeoXError("the model is not built yet; call configure_model() first, or let a Trainer do it")
        return self.model

    def _check_structure(self, checkpoint: dict[str, Any]) -> None:
        """Raise for a resumed checkpoint of other adapters or of another int8. A base model's gets fresh adapters.

        The latter only by `load_from_checkpoint(path, trainable="lora")`, where the options asked for are already among
        the checkpoint's.
        """
        theirs = checkpoint.get("hyper_parameters", {})
        trains = self._trainer is not None and self._trainer.state.fn == "fit"
        for name, default in (("lora", None), ("int8", False), *([("trainable", "all")] if trains else [])):
            asked = self.hparams[name]
            if self._trainer is not None and theirs.get(name, default) != asked:
                raise NeoXError(
                    f"the checkpoint has model.{name}={theirs.get(name, default)!r}, this run {asked!r}; set it to the "
                    f"checkpoint's, or start anew from NeoXLightning.load_from_checkpoint(path, {name}=...)"
                )
        state = checkpoint.get("state_dict", {})
        if self._trainer is None and not any(".lora." in name for name in state):
            state.update({name: value for name, value in self.state_dict().items() if ".lora." in name})

    def _take_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Set the tokenizer; another one than before would make the weights meaningless."""
        if self.tokenizer is not None and self.tokenizer.hash != tokenizer.hash:
            raise NeoXError(
                f"the checkpoint was trained with another tokenizer ({self.tokenizer.n_tokens} and "
                f"{tokenizer.n_tokens} tokens); set data.tokenizer to the one it was trained with",
                on_all_ranks=True,
            )
        self.tokenizer = tokenizer

    def _loss(self, batch: Batch) -> TokenLoss:
        return self._built()(batch["input_ids"], mask=_mask(batch), labels=batch["labels"], loss_chunk=self.loss_chunk)

    def _log_metric(self, name: str, metric: MeanMetric, loss: TokenLoss) -> None:
        metric.update(loss.mean, loss.n_targets)
        self.log(name, metric, prog_bar=True)

    def _can_fuse(self) -> bool:
        """Whether AdamW may be fused: a device that has it, and no clipping under autocast, which Lightning refuses."""
        clipped_autocast = bool(self.trainer.gradient_clip_val) and "mixed" in str(self.trainer.precision)
        return self.device.type in ("cpu", "cuda") and not clipped_autocast


def _mask(batch: Batch) -> Tensor | None:
    """What may attend to what, if documents are apart."""
    return document_mask(batch["documents"]) if "documents" in batch else None


def _resolve(config: NeoXConfig | None, preset: str | None, overrides: dict[str, Any] | None) -> NeoXConfig:
    """The config that a user's three ways of saying it mean."""
    if config is None and preset is None:
        raise NeoXError("none of model.config, model.preset and model.pretrained is given; set one")
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
