"""What parameters a GPT-NeoX model has, and by which names and numbers files know them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from neox_lit.checkpoints.lazy import LazyTensor
from neox_lit.config import NeoXConfig
from neox_lit.errors import NeoXError

EMBEDDING, READOUT = "embedding.word_embeddings.weight", "readout.final_linear.weight"


def layer_prefixes(n_layers: int) -> dict[int, str]:
    """Number of a layer in GPT-NeoX's files to the prefix of its parameters here. Numbers 1 and n + 2 are functions."""
    blocks = {i + 2: f"blocks.{i}." for i in range(n_layers)}
    return {0: "embedding.", **blocks, n_layers + 3: "final_norm.", n_layers + 4: "readout."}


def shapes_of(n_vocab: int, n_hidden: int, n_layers: int, d_ff: int) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of `NeoXModel`, a readout of its own included, in the order of files."""
    h = n_hidden
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "input_layernorm.bias": (h,),
        "post_attention_layernorm.weight": (h,),
        "post_attention_layernorm.bias": (h,),
        "attention.query_key_value.weight": (3 * h, h),
        "attention.query_key_value.bias": (3 * h,),
        "attention.dense.weight": (h, h),
        "attention.dense.bias": (h,),
        "mlp.dense_h_to_4h.weight": (d_ff, h),
        "mlp.dense_h_to_4h.bias": (d_ff,),
        "mlp.dense_4h_to_h.weight": (h, d_ff),
        "mlp.dense_4h_to_h.bias": (h,),
    }
    return {
        EMBEDDING: (n_vocab, h),
        **{f"blocks.{i}.{name}": shape for i in range(n_layers) for name, shape in block.items()},
        "final_norm.norm.weight": (h,),
        "final_norm.norm.bias": (h,),
        READOUT: (n_vocab, h),
    }


def shapes_of_config(config: NeoXConfig) -> dict[str, tuple[int, ...]]:
    """Those that a model of this config has; a tied readout is the embedding."""
    shapes = shapes_of(config.n_vocab, config.n_hidden, config.n_layers, config.d_ff or 4 * config.n_hidden)
    if config.tied_readout:
        del shapes[READOUT]
    return shapes


def checked(
    found: Mapping[str, LazyTensor], config: NeoXConfig | None, place: Callable[[str], str]
) -> dict[str, LazyTensor]:
    """The parameters of a model in the order of files, after a look at their names and shapes; none is read.

    Args:
        found: By `NeoXModel`'s names.
        config: What they must be of. None: they must fit together.
        place: Where a name should be, for messages.

    Raises:
        NeoXError: Missing or unexpected parameters, wrong shapes, no floating point; names file and key.
    """
    tensors = dict(found)
    if config is not None and config.tied_readout:
        _take_tied(tensors)
    if EMBEDDING not in tensors:
        raise NeoXError(f"{place(EMBEDDING)}: {EMBEDDING!r} is missing")
    shapes = shapes_of_config(config) if config is not None else _shapes_among(tensors, place)
    for name in shapes:
        if name not in tensors:
            hint = "; if the model is tied, give config= with tied_readout=True" if name == READOUT else ""
            raise NeoXError(f"{place(name)}: {name!r} is missing{hint}")
    for name, tensor in tensors.items():
        if name not in shapes:
            raise NeoXError(
                f"{tensor.where} does not belong to a GPT-NeoX model with {_told(config, shapes)}{_remedy(name)}"
            )
        if tuple(tensor.shape) != shapes[name]:
            raise NeoXError(
                f"{tensor.where} has shape {list(tensor.shape)}, expected {list(shapes[name])} in a model with "
                f"{_told(config, shapes)}; are all tensor-parallel shards there, and is it this model's file?"
            )
        if not tensor.dtype.is_floating_point:
            raise NeoXError(
                f"{tensor.where} is {tensor.dtype}, a parameter must be floating point. Of an int8 model take the "
                "checkpoint that it was made from"
            )
    return {name: tensors[name] for name in shapes}


def _take_tied(tensors: dict[str, LazyTensor]) -> None:
    """Keep one of embedding and readout, under the embedding's name."""
    readout = tensors.pop(READOUT, None)
    if readout is None:
        return
    embedding = tensors.setdefault(EMBEDDING, readout)
    if embedding is readout:
        return
    if embedding.shape != readout.shape or not _equal(embedding, readout):
        raise NeoXError(
            f"the config says that the readout is the embedding (tied_readout), but {embedding.where} and "
            f"{readout.where} differ; give config= with tied_readout=False to keep both"
        )


def _equal(a: LazyTensor, b: LazyTensor, step: int = 1 << 22) -> bool:
    size = a.shape.numel()
    return all(a.read(i, min(size, i + step)).equal(b.read(i, min(size, i + step))) for i in range(0, size, step))


def _shapes_among(tensors: Mapping[str, LazyTensor], place: Callable[[str], str]) -> dict[str, tuple[int, ...]]:
    """What shapes must be if the embedding's and the first feed-forward's are right."""
    blocks = {int(m[1]) for name in tensors if (m := re.match(r"blocks\.(\d+)\.", name))}
    first = "blocks.0.mlp.dense_h_to_4h.weight"
    if first not in tensors:
        raise NeoXError(f"{place(first)}: {first!r} is missing")
    embedding, ffn = tensors[EMBEDDING], tensors[first]
    for tensor in (embedding, ffn):
        if len(tensor.shape) != 2:
            raise NeoXError(f"{tensor.where} has shape {list(tensor.shape)}, expected a matrix")
    return shapes_of(embedding.shape[0], embedding.shape[1], max(blocks) + 1, ffn.shape[0])


def _remedy(name: str) -> str:
    if ".lora." in name:
        return "; that is an adapter: merge_lora(model) and remove_lora(model), and save the result"
    return ""


def _told(config: NeoXConfig | None, shapes: Mapping[str, tuple[int, ...]]) -> str:
    if config is None:
        return f"an embedding of {list(shapes[EMBEDDING])}"
    d_ff = config.d_ff or 4 * config.n_hidden
    return f"n_vocab={config.n_vocab}, n_hidden={config.n_hidden}, n_layers={config.n_layers}, d_ff={d_ff}"
