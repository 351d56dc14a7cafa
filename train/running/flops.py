"""FLOPs of a step's mathematics, and of devices. Needs torch and nothing else, as the benches on a GPU do."""

from __future__ import annotations

import torch

from models.parts.config import Shape

PEAK = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}
"""Dense bf16 tensor-core FLOP/s of one device, by a part of its name; the first that matches counts."""


def peak(device: torch.device) -> float | None:
    """FLOP/s of `device`, or None where no figure is known (any CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK.items() if part in name), None)


def per_token(model: Shape, seq_len: int) -> int:
    """FLOPs of one token, forward and backward.

        6 P + 12 L H D S

    P: parameters that a token meets (of experts, those it goes through; an embedding's rows are looked up), L H D:
    layers, query heads and head dim, S: sequence length. Attention is counted without the causal half, as PaLM and most
    published tables do, and recomputation is not counted: remat lowers the utilisation (MFU) that comes of it. Counting
    causally would give 12% less at S = 8192.
    """
    return 6 * model.multiplied + 12 * model.layers * model.attended * seq_len
