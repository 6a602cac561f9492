"""The layers of GPT-NeoX, each in the order it computes.

Parameters carry the names of GPT-NeoX's checkpoint files, so that the state dict of one of these layers has the keys of
one `layer_XX-model_YY-model_states.pt`; Hugging Face's names inside a block are the same:

| here                                    | GPT-NeoX file                | Hugging Face                        |
|-----------------------------------------|------------------------------|-------------------------------------|
| Embedding `word_embeddings.weight`      | layer_00                     | `gpt_neox.embed_in.weight`          |
| TransformerLayer `input_layernorm.*`    | layer_02 ...                 | `gpt_neox.layers.N.` + the same     |
|   `post_attention_layernorm.*`          |                              |                                     |
|   `attention.query_key_value.*`         |                              |                                     |
|   `attention.dense.*`                   |                              |                                     |
|   `mlp.dense_h_to_4h.*`, `mlp.dense_4h_to_h.*` |                       |                                     |
| FinalNorm `norm.*`                      | layer_{n_layers + 3}         | `gpt_neox.final_layer_norm.*`       |
| ReadoutLayer `final_linear.weight`      | layer_{n_layers + 4}         | `embed_out.weight` / `lm_head.weight` |

Every parameter gets its first value in `reset_parameters()` of the module that owns it, so a model built on the meta
device is complete after `to_empty` and a walk over the modules that calls it.

Source: Black et al. 2022, arXiv:2204.06745. Defaults are those of the 20B model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox_lit.cache import LayerCache
from neox_lit.errors import NeoXError
from neox_lit.loss import TokenLoss, chunked_loss, token_loss
from neox_lit.masks import causal_mask
from neox_lit.merging import Rule, merge, merged_shape, parameters_of, rule_of
from neox_lit.rope import RoPE


class NeoXModule(nn.Module):
    """A layer with files of its own in a GPT-NeoX checkpoint."""

    @torch.no_grad()
    def load_state(self, *shards: Mapping[str, Tensor]) -> None:
        """Fill this layer from its tensor-parallel shards, cast to its dtype and device.

        Args:
            shards: State dicts of ranks 0, 1, ..., as many as there are. Constants that old files hold are ignored,
                newer names of the MLP understood.

        Raises:
            NeoXError: Missing or unexpected keys, dtypes or shapes that do not fit; names the key. Nothing is changed
                then, unless copies in the shards differ too much (see `merging.merge`).
        """
        if not shards:
            raise NeoXError(f"{type(self).__name__}.load_state needs the state dict of at least one shard")
        own = dict(self.named_parameters())
        keys = [parameters_of(shard) for shard in shards]
        pieces: dict[str, list[Tensor]] = {}
        for name, parameter in own.items():
            for rank, known in enumerate(keys):
                if name not in known:
                    raise NeoXError(f"{name!r} is missing in shard {rank} of {type(self).__name__}")
            pieces[name] = [shard[known[name]] for shard, known in zip(shards, keys, strict=True)]
            shape = merged_shape(self._rule(name), [piece.shape for piece in pieces[name]], repr(name))
            if shape != parameter.shape:
                raise NeoXError(
                    f"{name!r} has shape {list(shape)} after merging {len(shards)} shard(s), {list(parameter.shape)} "
                    f"in this {type(self).__name__}; are all shards there, and is it this layer's file?"
                )
            if parameter.is_meta:
                raise NeoXError(f"{name!r} has no memory (device 'meta'); call to_empty(device=...) before load_state")
        for rank, known in enumerate(keys):
            for name in known:
                if name not in own:
                    raise NeoXError(f"{name!r} in shard {rank} does not belong to {type(self).__name__}")
        for name, parts in pieces.items():
            own[name].copy_(merge(self._rule(name), parts, repr(name)))

    def _rule(self, name: str) -> Rule:
        return rule_of(name, getattr(self, "parallel_residual", True))


class NormalLinear(nn.Linear):
    """A linear layer whose weights start normal with a given standard deviation, and whose bias starts at zero."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool = True, init_std: float) -> None:
        self.init_std = init_std  # first, for nn.Linear.__init__ calls reset_parameters
        super().__init__(n_in, n_out, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ReadoutLinear(NormalLinear):
    """The linear of the readout, which can go on to the loss.

    It must be here and not a loop around this module: what gathers a sharded weight for a module's forward would do so
    for each chunk.
    """

    def forward(self, x: Tensor, labels: Tensor | None = None, loss_chunk: int = 0) -> Tensor | TokenLoss:  # type: ignore[override]
        """Logits or, given labels, their loss; see `ReadoutLayer`."""
        if labels is None:
            return super().forward(x)
        return (
            chunked_loss(x, self.weight, labels, loss_chunk) if loss_chunk else token_loss(super().forward(x), labels)
        )


class NormalEmbedding(nn.Embedding):
    """A table of vectors that start normal with a given standard deviation."""

    def __init__(self, n_vocab: int, n_hidden: int, *, init_std: float) -> None:
        self.init_std = init_std
        super().__init__(n_vocab, n_hidden)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)


class Embedding(NeoXModule):
    """Token ids to vectors."""

    def __init__(
        self, n_vocab: int = 50_432, n_hidden: int = 6_144, *, dropout: float = 0.0, init_std: float = 0.02
    ) -> None:
        super().__init__()
        self.word_embeddings = NormalEmbedding(n_vocab, n_hidden, init_std=init_std)
        self.dropout = dropout

    def forward(self, ids: Tensor) -> Tensor:
        """int `[batch, seq]` to `[batch, seq, n_hidden]`."""
        return F.dropout(self.word_embeddings(ids), self.dropout, self.training)


class AttentionLayer(nn.Module):
    """Causal multi-head self-attention with rotary positions.

    Args:
        n_hidden: Width of input and output.
        n_heads: Number of heads; each is `n_hidden / n_heads` wide.
        rope_percentage: Part of each head that rotary embedding turns.
        mask_fill: Score of a forbidden pair before the softmax; used by the plain formula only.
        is_flash_attention: True: `scaled_dot_product_attention`, which takes a flash kernel where the device has one
            for this head size and dtype, and is right where it has none. False: the formula written out, scores in
            float32.
        rope_base, max_seq_len: See `RoPE`.
        dropout: Probability of dropping an attention weight in training.
        init_std, output_init_std: Standard deviations of the initial weights of the qkv and of the output linear.
    """

    def __init__(
        self,
        n_hidden: int = 6_144,
        n_heads: int = 64,
        rope_percentage: float = 0.25,
        mask_fill: float = -10_000.0,
        *,
        is_flash_attention: bool = False,
        rope_base: float = 10_000.0,
        max_seq_len: int = 2_048,
        dropout: float = 0.0,
        init_std: float = 0.02,
        output_init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if n_hidden % n_heads:
            raise NeoXError(f"n_heads={n_heads} does not divide n_hidden={n_hidden}")
        self.n_heads = n_heads
        self.d_k = n_hidden // n_heads
        self.mask_fill = mask_fill
        self.is_flash_attention = is_flash_attention
        self.dropout = dropout
        self.rope = RoPE(int(self.d_k * rope_percentage), rope_base, max_seq_len=max_seq_len)
        self.query_key_value = NormalLinear(n_hidden, 3 * n_hidden, init_std=init_std)
        self.dense = NormalLinear(n_hidden, n_hidden, init_std=output_init_std)

    def forward(self, x: Tensor, cache: LayerCache | None = None, mask: Tensor | None = None) -> Tensor:
        """Attend from each token to those before it.

        Args:
            x: `[batch, n_new, n_hidden]`.
            cache: Keys and values of the tokens before `x`; those of `x` are added to it.
            mask: bool `[batch, n_new, n_total]`, True where a query may attend to a key, cached keys first. Causal
                by default; replaces that default, so it must be causal itself (`masks.document_mask` is).

        Returns:
            `[batch, n_new, n_hidden]`.
        """
        batch, n_new, _ = x.shape
        # The fused projection holds q, k and v of one head side by side: rows are [head, (q | k | v), d_k].
        qkv = self.query_key_value(x).view(batch, n_new, self.n_heads, 3, self.d_k)
        q, k, v = qkv.unbind(3)
        offset = cache.length if cache is not None else 0
        q, k, v = (t.transpose(1, 2) for t in (self.rope(q, offset), self.rope(k, offset), v))
        if cache is not None:
            k, v = cache.append(k, v)
        attend = self._fused_attention if self.is_flash_attention else self._plain_attention
        out = attend(q, k, v, mask)
        return self.dense(out.transpose(1, 2).reshape(batch, n_new, -1))

    def _fused_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(q k' / sqrt(d_k)) v in one kernel. q `[batch, heads, n_new, d_k]`, k and v `[.., n_total, d_k]`."""
        n_new, n_total = q.shape[-2], k.shape[-2]
        is_causal = False
        if mask is not None:
            mask = mask[:, None]
        elif n_new == n_total:
            is_causal = True
        elif n_new > 1:  # is_causal would align the triangle with the first key, not with the last
            mask = causal_mask(n_new, n_total, q.device)
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)

    def _plain_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The same, written out."""
        allowed = causal_mask(q.shape[-2], k.shape[-2], q.device) if mask is None else mask[:, None]
        with torch.autocast(q.device.type, enabled=False):  # large fp16 scores overflow; autocast would make them fp16
            scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(self.d_k)
            weights = scores.masked_fill(~allowed, self.mask_fill).softmax(dim=-1)
            return F.dropout(weights, self.dropout, self.training).to(v.dtype) @ v


class FFNLayer(nn.Module):
    """Two linears with a GELU between. `d_ff` defaults to 4 x `n_hidden`."""

    def __init__(
        self,
        n_hidden: int = 6_144,
        d_ff: int = 0,
        *,
        gelu: Literal["tanh", "exact"] = "tanh",
        init_std: float = 0.02,
        output_init_std: float = 0.02,
    ) -> None:
        super().__init__()
        d_ff = d_ff or 4 * n_hidden
        self.approximate = "tanh" if gelu == "tanh" else "none"
        self.dense_h_to_4h = NormalLinear(n_hidden, d_ff, init_std=init_std)
        self.dense_4h_to_h = NormalLinear(d_ff, n_hidden, init_std=output_init_std)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., n_hidden]` to the same."""
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x), approximate=self.approximate))


class TransformerLayer(NeoXModule):
    """Attention and feed-forward, each behind its own LayerNorm, added to the residual stream.

    Parallel: `x + attention(ln1 x) + mlp(ln2 x)`. Sequential: `h = x + attention(ln1 x)`, then `h + mlp(ln2 h)`.
    """

    def __init__(
        self,
        n_hidden: int = 6_144,
        n_heads: int = 64,
        *,
        is_flash_attention: bool = False,
        d_ff: int = 0,
        rope_percentage: float = 0.25,
        rope_base: float = 10_000.0,
        max_seq_len: int = 2_048,
        layer_norm_eps: float = 1e-5,
        gelu: Literal["tanh", "exact"] = "tanh",
        parallel_residual: bool = True,
        dropout: float = 0.0,
        init_std: float = 0.02,
        output_init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.parallel_residual = parallel_residual
        self.dropout = dropout
        self.input_layernorm = nn.LayerNorm(n_hidden, eps=layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(n_hidden, eps=layer_norm_eps)
        self.attention = AttentionLayer(
            n_hidden,
            n_heads,
            rope_percentage,
            is_flash_attention=is_flash_attention,
            rope_base=rope_base,
            max_seq_len=max_seq_len,
            dropout=dropout,
            init_std=init_std,
            output_init_std=output_init_std,
        )
        self.mlp = FFNLayer(n_hidden, d_ff, gelu=gelu, init_std=init_std, output_init_std=output_init_std)

    def forward(self, x: Tensor, cache: LayerCache | None = None, mask: Tensor | None = None) -> Tensor:
        """`[batch, n_new, n_hidden]` to the same; `cache` and `mask` as in `AttentionLayer`."""
        attention = F.dropout(self.attention(self.input_layernorm(x), cache, mask), self.dropout, self.training)
        if self.parallel_residual:
            return x + attention + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)
        h = x + attention
        return h + F.dropout(self.mlp(self.post_attention_layernorm(h)), self.dropout, self.training)


class FinalNorm(NeoXModule):
    """LayerNorm before the readout."""

    def __init__(self, n_hidden: int = 6_144, *, layer_norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(n_hidden, eps=layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., n_hidden]` to the same."""
        return self.norm(x)


class ReadoutLayer(NeoXModule):
    """Vectors to a score for each id of the vocabulary; a linear without bias."""

    def __init__(self, n_hidden: int = 6_144, n_vocab: int = 50_432, *, init_std: float = 0.02) -> None:
        super().__init__()
        self.final_linear = ReadoutLinear(n_hidden, n_vocab, bias=False, init_std=init_std)

    def forward(self, x: Tensor, labels: Tensor | None = None, loss_chunk: int = 0) -> Tensor | TokenLoss:
        """`[..., n_hidden]` to logits `[..., n_vocab]`, or to their loss against labels `[...]`.

        Args:
            labels: See `loss.token_loss`.
            loss_chunk: With labels, the most tokens whose logits exist at once. 0: all.
        """
        return self.final_linear(x, labels, loss_chunk)
