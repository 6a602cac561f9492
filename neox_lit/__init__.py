"""GPT-NeoX on PyTorch Lightning: model, data, training, generation."""

from neox_lit.adapters import load_adapter, save_adapter
from neox_lit.cache import KVCache
from neox_lit.callbacks import SampleText, SaveAdapter, Throughput
from neox_lit.checkpoints import Checkpoint, open_checkpoint, save_hf, save_neox
from neox_lit.config import PRESETS, NeoXConfig
from neox_lit.data import TextDataModule
from neox_lit.errors import NeoXError
from neox_lit.generate import Sampling, generate
from neox_lit.generator import LayerGenerator
from neox_lit.int8 import Int8Linear, to_int8
from neox_lit.layers import (
    AttentionLayer,
    Embedding,
    FFNLayer,
    FinalNorm,
    NeoXModule,
    ReadoutLayer,
    TransformerLayer,
)
from neox_lit.lora import LoRA, LoRAOptions, add_lora, merge_lora, remove_lora, unmerge_lora
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
    "Int8Linear",
    "KVCache",
    "LayerGenerator",
    "LoRA",
    "LoRAOptions",
    "NeoXConfig",
    "NeoXError",
    "NeoXLightning",
    "NeoXModel",
    "NeoXModule",
    "ReadoutLayer",
    "RoPE",
    "SampleText",
    "Sampling",
    "SaveAdapter",
    "TextDataModule",
    "TextTokenizer",
    "Throughput",
    "TransformerLayer",
    "add_lora",
    "document_mask",
    "generate",
    "load_adapter",
    "merge_lora",
    "open_checkpoint",
    "remove_lora",
    "save_adapter",
    "save_hf",
    "save_neox",
    "to_int8",
    "unmerge_lora",
]
