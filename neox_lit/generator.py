"""The layers of a GPT-NeoX model one after the other, for those who put them together themselves."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import track

from neox_lit.errors import NeoXError
from neox_lit.layers import Embedding, FinalNorm, NeoXModule, ReadoutLayer, TransformerLayer


class LayerGenerator:
    """Makes the layers of a model in the order of its checkpoint: embedding, transformer layers, norm, readout.

    One layer after the other, so that each can be moved, sharded or converted before the next takes memory. The layers
    have the numerics of the 20B model; for others, and for other formats than GPT-NeoX's, see
    `NeoXModel.from_checkpoint`.

    Args:
        n_vocab, n_hidden, n_layers, n_heads: Shape of the model, by default that of GPT-NeoX-20B.
        filter_layers: Positions to keep, of 0 (embedding) to n_layers + 2 (readout). By default all.
        is_clone_layers: Whether transformer layers are copies of one whose values were drawn; drawing is slow.
        dtype: Of the parameters.
        device: Where `load` leaves each layer. They are made and filled on the CPU.
        is_llm_int8: Whether `load` converts the linears of transformer layers to int8.
        llm_int8_threshold: Inputs of this size and above stay out of int8.
        is_flash_attention: See `AttentionLayer`.
        checkpoint: Directory with `layer_XX-model_YY-model_states.pt`, any number of tensor-parallel shards. `load`
            needs it.

    Raises:
        NeoXError: `filter_layers` has positions that the model does not have; no such directory.
    """

    def __init__(
        self,
        *,
        n_vocab: int = 50_432,
        n_hidden: int = 6_144,
        n_layers: int = 44,
        n_heads: int = 64,
        filter_layers: set[int] | None = None,
        is_clone_layers: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        is_llm_int8: bool = False,
        llm_int8_threshold: float = 6.0,
        is_flash_attention: bool = False,
        checkpoint: str | Path | None = None,
    ) -> None:
        self.n_vocab, self.n_hidden, self.n_layers, self.n_heads = n_vocab, n_hidden, n_layers, n_heads
        wrong = sorted(i for i in filter_layers or () if not 0 <= i < self.total_layers)
        if wrong:
            raise NeoXError(f"filter_layers has {wrong}; positions are 0 to {self.total_layers - 1}")
        self.filter_layers = set(range(self.total_layers)) if filter_layers is None else set(filter_layers)
        self.is_clone_layers = is_clone_layers
        self.dtype, self.device = dtype, torch.device(device)
        self.is_llm_int8, self.llm_int8_threshold = is_llm_int8, llm_int8_threshold
        self.is_flash_attention = is_flash_attention
        self.checkpoint = Path(checkpoint) if checkpoint is not None else None
        if self.checkpoint is not None and not self.checkpoint.is_dir():
            raise NeoXError(f"checkpoint {str(checkpoint)!r}: no such directory (here: {Path.cwd()})")

    @property
    def total_layers(self) -> int:
        """Transformer layers, and three more."""
        return self.n_layers + 3

    def get_layers(self) -> Iterator[tuple[NeoXModule, tuple[str, ...]]]:
        """Each layer with its initial values, and the names of its files, one for each tensor-parallel shard.

        The number of shards is that of the checkpoint; without one, one.
        """
        # Counted over all files: where one shard of one layer is missing, its name is among those that `load` opens.
        shards = 1 + max(self._ranks(), default=0)
        drawn: TransformerLayer | None = None
        for position in sorted(self.filter_layers):
            is_block = 0 < position <= self.n_layers
            # Numbers of the files count the functions that GPT-NeoX has between its layers.
            number = position if position == 0 else position + (1 if is_block else 2)
            names = tuple(f"layer_{number:02d}-model_{rank:02d}-model_states.pt" for rank in range(shards))
            if is_block and self.is_clone_layers:
                drawn = drawn or self._make(position)  # type: ignore[assignment]
                yield copy.deepcopy(drawn), names  # type: ignore[misc]
            else:
                yield self._make(position), names

    def load(self) -> Iterator[NeoXModule]:
        """Each layer with the weights of the checkpoint, prepared (`post_load_prepare`). Shows its progress.

        Raises:
            NeoXError: No checkpoint was given; files are missing, damaged, hold code, or are of another model.
        """
        from neox_lit.checkpoints.pickles import read_state

        if self.checkpoint is None:
            raise NeoXError("load() needs a checkpoint; give its directory: LayerGenerator(checkpoint=...)")
        for layer, names in track(self.get_layers(), description="Loading layers", total=len(self.filter_layers)):
            files = [self.checkpoint / name for name in names]
            try:
                layer.load_state(*map(read_state, files))
            except NeoXError as error:
                if any(str(file) in str(error) for file in files):
                    raise
                raise NeoXError(f"{', '.join(map(str, files))}: {error}") from error
            yield self.post_load_prepare(
                layer, is_llm_int8=self.is_llm_int8, device=self.device, llm_int8_threshold=self.llm_int8_threshold
            )

    def post_load_prepare(
        self, layer: NeoXModule, *, is_llm_int8: bool, device: torch.device | str, llm_int8_threshold: float
    ) -> NeoXModule:
        """Convert the four linears of a transformer layer to int8 if asked to; move the layer to its device."""
        if is_llm_int8 and isinstance(layer, TransformerLayer):
            from neox_lit.int8 import to_int8

            to_int8(layer, llm_int8_threshold)
        return layer.to(device)

    def _make(self, position: int) -> NeoXModule:
        layer: NeoXModule
        if position == 0:
            layer = Embedding(self.n_vocab, self.n_hidden)
        elif position <= self.n_layers:
            layer = TransformerLayer(self.n_hidden, self.n_heads, is_flash_attention=self.is_flash_attention)
        elif position == self.n_layers + 1:
            layer = FinalNorm(self.n_hidden)
        else:
            layer = ReadoutLayer(self.n_hidden, self.n_vocab)
        return layer.to(self.dtype)

    def _ranks(self) -> list[int]:
        files = self.checkpoint.iterdir() if self.checkpoint is not None else ()
        matches = (re.fullmatch(r"layer_\d+-model_(\d+)-model_states\.pt", file.name) for file in files)
        return [int(match[1]) for match in matches if match]
