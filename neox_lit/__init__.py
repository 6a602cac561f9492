"""GPT-NeoX on PyTorch Lightning: model, data, training, generation."""

from neox_lit.cache import KVCache
from neox_lit.callbacks import SampleText
from neox_lit.checkpoints import Checkpoint, open_checkpoint, save_hf, save_neox
from neox_lit.config import PRESETS, NeoXConfig
from neox_lit.data import TextDataModule
from neox_lit.errors import NeoXError
from neox_lit.generate import Sampling, generate
from neox_lit.generator import LayerGenerator
from neox_lit.layers import (
    AttentionLayer,
    Embedding,
    FFNLayer,
    FinalNorm,
    NeoXModule,
    ReadoutLayer,
    TransformerLayer,
)
from neox_lit.masks import document_mask
from neox_lit.model import NeoXModel
from neox_lit.module import NeoXLightning
from neox_lit.rope import RoPE
from neox_lit.tokenizer import TextTokenizer

__all__ = [
    "PRESETS",
    "AttentionLayer",
    "Checkpoint",
    "Embedding",
    "FFNLayer",
    "FinalNorm",
    "KVCache",
    "LayerGenerator",
    "NeoXConfig",
    "NeoXError",
    "NeoXLightning",
    "NeoXModel",
    "NeoXModule",
    "ReadoutLayer",
    "RoPE",
    "SampleText",
    "Sampling",
    "TextDataModule",
    "TextTokenizer",
    "TransformerLayer",
    "document_mask",
    "generate",
    "open_checkpoint",
    "save_hf",
    "save_neox",
]
