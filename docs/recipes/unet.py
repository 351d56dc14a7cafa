"""A U-Net that takes noise off images: down to coarse pixels and up again, with a bridge at every level.

The idea (Ronneberger et al. 2015, arXiv 1505.04597): each block on the way up also sees what the block opposite has
made on the way down. In a scan that is nothing special: what blocks return beside the carry is stacked, `skips`, and
the way up scans over its own layers and `skips` together, in reverse. A level is a stack, since its width is its own.

    torchrun --nproc-per-node 2 docs/recipes/unet.py
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from tiny import train
from torch import Tensor

import yafsdp_fn as ya

N, WIDTHS, AXES = 2, (8, 16), {}  # blocks of a level each way, channels of each level


def kernel(*shape: int) -> ya.Param:  # [..., out, in, 3, 3]
    return ya.Param((*shape, 3, 3), init=ya.params.initializers.normal((9 * shape[-1]) ** -0.5))


PARAMS = {
    "first": ya.Unit({"w": kernel(WIDTHS[0], 2)}),
    "last": ya.Unit({"w": kernel(1, WIDTHS[0])}),
    "coarser": [ya.Unit({"w": kernel(out, into)}) for into, out in pairwise(WIDTHS)],
    "finer": [ya.Unit({"w": kernel(into, out)}) for into, out in pairwise(WIDTHS)],
    "down": [ya.Stacked({"w": kernel(N, width, width)}) for width in WIDTHS],
    "up": [ya.Stacked({"w": kernel(N, width, 2 * width)}) for width in WIDTHS],
}


def conv(w: Any, x: Tensor, stride: int = 1) -> Tensor:
    return F.conv2d(x, w["w"], stride=stride, padding=1)


def down(x: Tensor, w: Any) -> tuple[Tensor, Tensor]:
    x = x + conv(w, F.silu(x))
    return x, x  # the carry, and what the block opposite is to see


def up(x: Tensor, layer: Any) -> tuple[Tensor, None]:
    w, skip = layer
    return x + conv(w, F.silu(torch.cat([x, skip], 1))), None


def unet(params: Any, x: Tensor) -> Tensor:
    """[B, 2, S, S] -> [B, 1, S, S]"""
    x, skips = ya.apply(conv, params["first"], x), []
    for level, stack in enumerate(params["down"]):
        if level:
            x = ya.apply(conv, params["coarser"][level - 1], x, 2)
        x, seen = ya.scan(down, x, stack)
        skips.append(seen)
    for level, stack in reversed([*enumerate(params["up"])]):
        x, _ = ya.scan(up, x, (stack, skips[level]), reverse=True)
        if level:
            x = ya.apply(conv, params["finer"][level - 1], F.interpolate(x, scale_factor=2.0))
    return ya.apply(conv, params["last"], x)


def loss_fn(params: Any, batch: Any) -> ya.Mean:
    noisy = batch["image"].lerp(batch["noise"], level := batch["level"])
    off = unet(params, torch.cat([noisy, level.expand_as(noisy)], 1)) - batch["image"]  # it knows how noisy they are
    return ya.Mean(off.square().sum(), off.numel())


def batch(seed: int, rows: int = 8, size: int = 8) -> dict[str, Tensor]:
    """Stripes, upright or level, with noise of many levels."""
    draw = torch.Generator().manual_seed(seed)
    wave = torch.sin(torch.rand(rows, 1, 1, 1, generator=draw) * 6 + torch.arange(size))
    upright = torch.rand(rows, 1, 1, 1, generator=draw) < 0.5
    image = torch.where(upright, wave, wave.mT).expand(rows, 1, size, size)
    noise, level = torch.randn(image.shape, generator=draw), torch.rand(rows, 1, 1, 1, generator=draw)
    return {"image": image, "noise": noise, "level": level}


def main(steps: int = 60) -> list[float]:
    return train(loss_fn, PARAMS, batch, steps)[1]


if __name__ == "__main__":
    main()
