"""Sums the bit patterns of tensors, as integers: the same in any order."""

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
