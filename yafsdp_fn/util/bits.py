"""Sums the bit patterns of tensors, as integers: the same in any order."""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AT_ONCE = 1 << 20
"""Elements summed at a time; the sum widens them to eight bytes."""


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Sums the elements as integers of their size, modulo 2 ** 64: int64 []."""
    bits = tensor.contiguous().view(-1)
    if bits.is_complex():
        bits = torch.view_as_real(bits).view(-1)
    pattern = bits.view(PATTERNS[bits.element_size()])  # uint8 of bools, too
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in torch.split(pattern, AT_ONCE):
        found += part.sum(dtype=torch.int64)
    return found


SAMPLES = 256
ALL = sys.maxsize


def content(leaves: Sequence[Tensor], most: int) -> list[tuple[int, int]]:
    """Returns what tells whether `leaves` have been written to.

    most: elements of each whose bits are compared, at equal distances, since no version counts what is written by
        `.data`: 0, `SAMPLES` (a step has no memory for more), or `ALL`
    """
    found = []
    for leaf in leaves:
        bits = 0
        if most:
            bits = int(sum_of_bits(leaf.detach().flatten()[:: max(1, leaf.numel() // most)]))
        found.append((leaf._version, bits))
    return found
