"""Sums that do not depend on the order of their terms, for norms and inner products over whole trees.

    8 neighbours of a shard            added as a tree, in float64: they are always on one rank
    each such block b                  part = b to the nearest multiple of unit[k]; bins[k] += part; b -= part
                                       for k from the bin that the largest block reaches, and three below
    ranks                              add up their bins
    the sum                            the highest bin that any block has reached, and three below

A bin's unit is 2^16 times the next lower one's, and a block is less than half of the unit above the bin that it
reaches. Its part in a bin therefore depends on the block alone: a higher bin gets nothing of it. The parts in a bin are
multiples of its unit, at most 2^15 of them each, so float64 adds up 2^38 blocks without rounding: in any order, on any
number of ranks. At most 2^-48 of the largest block is dropped of each. The only other error is the rounding of three
additions in float64.

Binned sums are due to Demmel, Ahrens and Nguyen, Efficient Reproducible Floating Point Summation and BLAS.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

WIDTH = 16
"""Bits of a bin."""

KEPT = 4
"""Bins used for a sum."""

LOWEST, HIGHEST = -1072, 960
"""Exponents of the lowest bin's unit, and of values too large for the highest bin, which count as not finite."""

BINS = (HIGHEST - LOWEST) // WIDTH

BLOCK = 8
"""Elements added up in a fixed order; shards are multiples of it."""

CHUNK = {"cpu": 1 << 14, "cuda": 1 << 20}
"""Blocks at a time: few enough for a core's cache; on a GPU, enough to fill it."""


def binned(pairs: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """Returns [2 * BINS], float64: the inner products of pairs of local shards, in bins, and which bins were reached.
    Its sum over ranks is that of whole trees."""
    found = torch.zeros(2 * BINS, dtype=torch.float64, device=device)
    size = BLOCK * CHUNK[device.type]
    for a, b in pairs:
        for x, y in zip(_parts(a, size), _parts(b, size), strict=True):
            found += _in_bins(_blocks(x, y))
    return found


def total(found: Tensor) -> Tensor:
    """Returns the sum, 0-dim, from the sum over ranks of `binned`; nan if anything was not finite."""
    bins, reached = found.view(2, BINS)
    highest = torch.where(reached > 0, torch.arange(BINS, device=found.device), KEPT - 1).amax()
    out = torch.zeros_like(bins[0])
    for part in bins[highest - torch.arange(KEPT, device=found.device)]:
        out = out + part
    return out.where(found.isfinite().all(), torch.nan)


def _parts(leaf: Tensor, size: int) -> list[Tensor]:
    values = leaf.detach().reshape(-1)
    rest = -values.numel() % BLOCK
    return [part for part in torch.split(pad(values, (0, rest)) if rest else values, size) if part.numel()]


def _blocks(x: Tensor, y: Tensor) -> Tensor:
    """Sums the products of 8 neighbours, by elementwise operations, which round alike wherever an element lies; in
    float64, since float32 products could overflow or underflow."""
    odd, even = (x[at::2].double() * y[at::2].double() for at in range(2))
    values = odd + even
    for _ in range(2):
        values = values[0::2] + values[1::2]
    return values


def _in_bins(blocks: Tensor) -> Tensor:
    """Returns [2 * BINS]; overwrites `blocks`. The host does not wait for the device."""
    device = blocks.device
    largest = blocks.abs().amax()
    exponent = torch.frexp(largest)[1].long()  # of the next power of two
    highest = ((exponent - LOWEST) // WIDTH).clamp(KEPT - 1, BINS - 1)
    kept = highest - torch.arange(KEPT, device=device)
    # 1.5 * 2^52 units, made of its bits: a number added to it is rounded to a multiple of the unit
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
