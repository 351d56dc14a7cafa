"""Sums that no order of their terms can change, for numbers over whole trees: norms and inner products.

    8 neighbours of a shard            added as a tree, in float32 (or float64): they never lie on two ranks
    each such block b                  part = b to the nearest multiple of unit[k]; bins[k] += part; b -= part
                                       for k from the bin that the largest block reaches, and three below
    ranks                              add up their bins
    the sum                            the highest bin that any block has reached, and three below

A bin's unit is 2^16 times the next lower one's, and a block is less than half of the unit above the bin that it
reaches. What it gives to a bin therefore depends on the block alone: a higher bin gets nothing of it. The parts in a
bin are multiples of its unit, at most 2^15 of them each, so that float64 adds up 2^38 blocks of them without rounding:
in any order, on any number of ranks. At most 2^-48 of the largest block is dropped of each. What is off is the rounding
of squares and of three additions: less than 3e-7 of a sum of squares in float32.

The idea of binned sums is of Demmel, Ahrens and Nguyen, Efficient Reproducible Floating Point Summation and BLAS.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

WIDTH = 16
"""Bits of a bin."""

KEPT = 4
"""Bins that a sum is made of."""

LOWEST, HIGHEST = -1072, 960
"""Exponents: of the lowest bin's unit; of what is too large for the highest bin, and counts as not finite."""

BINS = (HIGHEST - LOWEST) // WIDTH

BLOCK = 8
"""Elements that are added up in one order: shards are multiples of it."""

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 21}
"""Blocks at a time: what stays in a core's cache; on a GPU, enough to fill it."""


def binned(pairs: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """[2 * BINS], float64: the inner products of pairs of local shards, in bins, and which bins were reached. Added up
    over ranks, it is that of whole trees."""
    found = torch.zeros(2 * BINS, dtype=torch.float64, device=device)
    size = BLOCK * CHUNK[device.type]
    for a, b in pairs:
        parts = zip(*(torch.split(leaf.detach().reshape(-1), size) for leaf in (a, b)), strict=True)
        for x, y in parts if a.numel() else ():
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            found += _in_bins(_blocks(wide * (wide if a is b else y.to(wide.dtype))))
    return found


def total(found: Tensor) -> Tensor:
    """The sum, 0-dim, from what `binned` gave on all ranks; nan where anything was not finite."""
    bins, reached = found.view(2, BINS)
    highest = torch.where(reached > 0, torch.arange(BINS, device=found.device), KEPT - 1).amax()
    out = torch.zeros_like(bins[0])
    for part in bins[highest - torch.arange(KEPT, device=found.device)]:
        out = out + part
    return out.where(found.isfinite().all(), torch.nan)


def _blocks(values: Tensor) -> Tensor:
    """Sums of 8 neighbours, in float64, by elementwise additions, which round alike wherever an element lies."""
    rest = -values.numel() % BLOCK
    values = pad(values, (0, rest)) if rest else values
    for _ in range(3):
        values = values[0::2] + values[1::2]
    return values.double()


def _in_bins(blocks: Tensor) -> Tensor:
    """[2 * BINS]; `blocks` are used up. The host does not wait for the device."""
    device = blocks.device
    largest = blocks.abs().amax()
    exponent = torch.frexp(largest)[1].long()  # of the next power of two
    highest = ((exponent - LOWEST) // WIDTH).clamp(KEPT - 1, BINS - 1)
    kept = highest - torch.arange(KEPT, device=device)
    # 1.5 * 2^52 units, made of its bits: what is added to it is rounded to a multiple of the unit
    rounding = ((WIDTH * kept + (LOWEST + 52 + 1023)) << 52 | 1 << 51).view(torch.float64)
    parts = []
    for number in rounding:
        part = (blocks + number).sub_(number)
        parts.append(part.sum())
        blocks.sub_(part)
    out = torch.zeros(2 * BINS, dtype=torch.float64, device=device)
    places = torch.cat([kept, BINS + highest.view(1)])  # a 0-dim index would be read by the host
    out[places] = torch.stack([*parts, (largest > 0).double()])
    return out.where(largest < 2.0**HIGHEST, torch.nan)
