"""Keys and values of past tokens: one object per generation, passed in by the caller, never global."""

from __future__ import annotations

from torch import Tensor

from neox_lit.errors import NeoXError


class LayerCache:
    """One attention layer's keys and values.

    Memory for `max_len` tokens is taken at the first `append`, which knows batch, heads, device and dtype (autocast
    and sharded models decide those late); nothing is allocated after it.
    """

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.length = 0  # tokens held
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens' keys and values.

        Args:
            keys, values: `[batch, n_heads, n_new, d_k]`.

        Returns:
            Views of all keys and all values so far, each `[batch, n_heads, length, d_k]`.

        Raises:
            NeoXError: More than `max_len` tokens, or another batch than before.
        """
        batch, n_heads, n_new, d_k = keys.shape
        end = self.length + n_new
        if end > self.max_len:
            raise NeoXError(f"the key/value cache holds max_len={self.max_len} tokens, and {end} are to be kept")
        if self._keys is None or self._values is None:
            self._keys = keys.new_empty(batch, n_heads, self.max_len, d_k)
            self._values = values.new_empty(batch, n_heads, self.max_len, d_k)
        if len(self._keys) != batch:
            raise NeoXError(f"the key/value cache belongs to a batch of {len(self._keys)}, got a batch of {batch}")
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KVCache:
    """The caches of all layers of a model, for one generation.

    Args:
        n_layers: Transformer layers of the model.
        max_len: Most tokens per sequence, prompt included.
    """

    def __init__(self, n_layers: int, max_len: int) -> None:
        self.layers = [LayerCache(max_len) for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """Tokens that the model has seen."""
        return self.layers[0].length
