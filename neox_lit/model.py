"""GPT-NeoX, whole. It knows nothing of parallelism: that is applied from outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from neox_lit.cache import KVCache
from neox_lit.config import NeoXConfig
from neox_lit.errors import NeoXError
from neox_lit.layers import Embedding, FinalNorm, ReadoutLayer, TransformerLayer
from neox_lit.loss import TokenLoss


class NeoXModel(nn.Module):
    """Embedding, `n_layers` transformer layers, final norm, readout."""

    def __init__(self, config: NeoXConfig) -> None:
        super().__init__()
        self.config = config
        std, output_std = config.weight_std, config.output_weight_std
        self.embedding = Embedding(config.n_vocab, config.n_hidden, dropout=config.dropout, init_std=std)
        self.blocks = nn.ModuleList(
            TransformerLayer(
                config.n_hidden,
                config.n_heads,
                is_flash_attention=True,
                d_ff=config.d_ff,
                rope_percentage=config.rotary_pct,
                rope_base=config.rotary_base,
                max_seq_len=config.max_seq_len,
                layer_norm_eps=config.layer_norm_eps,
                gelu=config.gelu,
                parallel_residual=config.parallel_residual,
                dropout=config.dropout,
                init_std=std,
                output_init_std=output_std,
            )
            for _ in range(config.n_layers)
        )
        self.final_norm = FinalNorm(config.n_hidden, layer_norm_eps=config.layer_norm_eps)
        self.readout = ReadoutLayer(config.n_hidden, config.n_vocab, init_std=std)
        self._tie()

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, config: NeoXConfig | None = None, *, dtype: torch.dtype | None = None
    ) -> NeoXModel:
        """A model with the weights of a checkpoint: GPT-NeoX's, Hugging Face's, or one of `neox-lit fit`.

        In `configure_model` under `Zero3Strategy` the weights are read later, by each rank its own part. Elsewhere
        they are there when this returns, on the CPU.

        Args:
            path: See `checkpoints.open_checkpoint`.
            config: The model. By default what a config file beside the weights says.
            dtype: Of the parameters. By default that of the files.

        Raises:
            NeoXError: The files do not hold such a model, or not the config, or several dtypes.
        """
        from neox_lit.checkpoints import load_model

        return load_model(path, config, dtype)

    def forward(
        self,
        ids: Tensor,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_chunk: int = 0,
    ) -> Tensor | TokenLoss:
        """Scores of the next token at every position, or their loss.

        Args:
            ids: int `[batch, n_new]`, each in [0, n_vocab).
            cache: What the model remembers of the tokens before `ids`; `ids` are added to it.
            mask: bool `[batch, n_new, n_total]`, True where a token may attend to another; causal by default. See
                `masks.document_mask`.
            labels: int `[batch, n_new]`, the next token of each, or -100 where that is no target.
            loss_chunk: With labels, the most tokens whose logits exist at once. 0: all.

        Returns:
            logits `[batch, n_new, n_vocab]`; with labels their `TokenLoss`.

        Raises:
            NeoXError: More tokens than `max_seq_len`.
        """
        n_total = ids.shape[1] + (cache.length if cache is not None else 0)
        if n_total > self.config.max_seq_len:
            raise NeoXError(f"{n_total} tokens are more than the model's max_seq_len={self.config.max_seq_len}")
        x = self.embedding(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, cache.layers[i] if cache is not None else None, mask)
        return self.readout(self.final_norm(x), labels, loss_chunk)

    def _tie(self) -> None:
        # The readout's weight is kept: it is drawn last, so a walk of `reset_parameters` ends with the same values.
        if self.config.tied_readout and self.embedding.word_embeddings.weight is not self.readout.final_linear.weight:
            self.embedding.word_embeddings.weight = self.readout.final_linear.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NeoXModel:
        """Tie again after `.to`, `.to_empty` and the like, which may replace a shared parameter by two."""
        super()._apply(fn, recurse)
        self._tie()
        return self
