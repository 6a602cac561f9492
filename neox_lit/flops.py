"""How many floating-point operations a token of training takes, and how many a device could do."""

from __future__ import annotations

import re

from torch import nn

from neox_lit.config import NeoXConfig

# Dense matrix products of 16-bit numbers that are summed in 32 bits, in FLOP/s; without structured sparsity, which
# NVIDIA's newer data sheets include (their number is twice this). The first that is in the
# device's name as whole words.
PEAK_FLOPS = {
    "B200": 2.25e15,  # Blackwell architecture brief: 4.5 PFLOPS sparse per GPU of an HGX B200
    "H200": 989e12,  # H200 data sheet: 1,979 TFLOPS sparse
    "H100 PCIe": 756e12,  # H100 data sheet: 1,513 TFLOPS sparse
    "H100 NVL": 835e12,  # H100 NVL data sheet: 1,671 TFLOPS sparse per GPU
    "H100": 989e12,  # SXM; H100 data sheet: 1,979 TFLOPS sparse
    "A100": 312e12,  # A100 data sheet
    "A10": 125e12,  # A10 data sheet
    "L40S": 362e12,  # L40S data sheet
    "L4": 121e12,  # L4 data sheet: 242 TFLOPS sparse
    "V100-SXM2": 125e12,  # V100 data sheet
    "V100-PCIE": 112e12,  # V100 data sheet
    "T4": 65e12,  # T4 data sheet
}


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a device in 16-bit precision with float32 sums, or None if it is not in the table."""
    return next((flops for name, flops in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def flops_per_token(config: NeoXConfig, model: nn.Module, seq_len: int) -> float:
    """Floating-point operations of forward and backward per token, of matrix products; recomputation not counted.

    With everything trainable 6 N + 12 n_layers n_hidden seq_len, N the elements of all matrices but the embedding,
    which is looked up. A third of it is forward, a third the gradients of what the products read, a third those of the
    weights. Frozen weights have none of the latter; and layers before the first that trains no gradients at all.

    Args:
        config: Of the base model.
        model: The `NeoXModel`, for what trains and its adapters; sharded or not.
        seq_len: Tokens that attend to each other. Masked halves of the scores count, as is usual.

    Source: Kaplan et al. 2020, arXiv:2001.08361, table 1; Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B.
    """
    h = config.n_hidden
    block = 4 * h * h + 2 * h * (config.d_ff or 4 * h)
    stages = ["embedding.", *(f"blocks.{i}." for i in range(config.n_layers)), "final_norm.", "readout."]
    base = [0.0, *[float(block)] * config.n_layers, 0.0, float(h * config.n_vocab)]
    adapters, trainable, trains = [dict.fromkeys(stages, 0.0) for _ in range(3)]
    for name, parameter in model.named_parameters():
        stage = next(s for s in stages if name.startswith(s))
        if ".lora." in name:
            adapters[stage] += parameter.numel()
        if parameter.requires_grad:
            trains[stage] = 1.0
            if parameter.ndim == 2 and stage != "embedding.":
                trainable[stage] += parameter.numel()
    if config.tied_readout and trains["embedding."]:
        trainable["readout."] = base[-1]
    total, reached = 0.0, False
    for stage, weights in zip(stages, base, strict=True):
        attention = 4.0 * h * seq_len if stage.startswith("blocks") else 0.0
        reached = reached or bool(trains[stage])
        forward = 2 * (weights + adapters[stage]) + attention
        backward = forward + attention if reached else 0.0  # both products of attention have two operands to derive by
        total += forward + backward + 2 * trainable[stage]
    return total
