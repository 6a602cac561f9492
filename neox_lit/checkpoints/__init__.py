"""Checkpoints of GPT-NeoX, Hugging Face and our own training: read by ranges, written layer by layer.

- `opening`: which format it is, and its tensors under `NeoXModel`'s names. `shapes`: what there must be.
- `lazy`: tensors in files, merged from tensor-parallel shards as they are read (`neox_lit.merging` has the rules).
- `pickles`, `safetensors`: the two kinds of files, without running code and without mapping them.
- `writing`: `save_neox`, `save_hf`, `convert`. `loading`: a `NeoXModel` with the weights of a checkpoint.
"""

from neox_lit.checkpoints.loading import load_model
from neox_lit.checkpoints.opening import Checkpoint, open_checkpoint
from neox_lit.checkpoints.writing import convert, save_hf, save_neox

__all__ = ["Checkpoint", "convert", "load_model", "open_checkpoint", "save_hf", "save_neox"]
