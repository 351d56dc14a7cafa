"""Fading gradient noise, as in Optax (Neelakantan et al., 2015, arXiv 1511.06807):

    update = g + sqrt(eta / (count + 1) ** gamma) * standard normal

The noise of an element is a function of the key, the count, the name of its leaf, and its index there. So it is the
same at every number of ranks, no rank draws for another, and the host reads nothing back.
"""

import dataclasses
import hashlib
import math
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import GradientTransformation, State, new_count
from yafsdp_fn.optim.step.cutting import GLOBAL
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Tree, dotted

GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, as an int64


@dataclasses.dataclass(frozen=True)
class Noise:
    """Rule: add normal noise of variance `eta / (count + 1) ** gamma`."""

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise ValueError(f"add_noise: eta is a variance, expected at least 0, got {self.eta}")


class AddNoiseState(NamedTuple):
    """The state of `add_noise`. count: int32 [], completed steps; rng_key: int64 [], the given key: `count` makes steps
    differ"""

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count
    rng_key: Tensor


def add_noise(eta: float, gamma: float, key: int) -> GradientTransformation:
    """Adds normal noise of variance `eta / (count + 1) ** gamma` to every element of the updates.

    key: seeds the noise. Its bits are not those of Optax, which draws by JAX's generator.

    Raises TypeError when run unit by unit: a row of a stack does not know its layer.

    >>> noisy = update(ya.optim.add_noise(eta=0.01, gamma=0.55, key=0))
    >>> (noisy - g).abs().max() < 1
    tensor(True)
    """

    def init(params: Tree) -> State:
        count = new_count(params)
        return AddNoiseState(count, torch.full_like(count, key, dtype=torch.int64))

    def update(updates: Tree, state: AddNoiseState, params: Tree | None = None) -> tuple[Tree, State]:
        count = state.count + 1
        deviation = (eta / count.double() ** gamma).sqrt()
        step_key = _mixed(state.rng_key + count.long() * GOLDEN)

        def normal(accessor: optree.PyTreeAccessor, node: Any) -> Any:
            return _of_handle(step_key, node) if isinstance(node, Sharded) else _of_leaf(step_key, accessor, node)

        noise = optree.tree_map_with_accessor(normal, updates, is_leaf=is_sharded)
        noisy = optree.tree_map(lambda u, z: u + (deviation * z).to(u.dtype), updates, noise)
        return noisy, AddNoiseState(count, state.rng_key)

    return GradientTransformation(init, update, elementwise=True, rule=Noise(eta, gamma))


def _of_leaf(key: Tensor, accessor: optree.PyTreeAccessor, leaf: Tensor) -> Tensor:
    noise = _normal(key, dotted(accessor), torch.arange(leaf.numel(), device=leaf.device))
    return noise.view(leaf.shape).to(leaf.dtype)


def _of_handle(key: Tensor, handle: Sharded) -> Sharded:
    """Returns this rank's part of the noise: zero in gaps and padding."""
    if handle.owner.why_not_whole() == GLOBAL:  # before any unit is written, of stacks or not
        raise TypeError(
            f"optim: add_noise needs to know where in {handle.entry.name or 'params'} its elements lie, but units take "
            "their optimizer steps one by one; keep the optimizer outside the program"
        )
    noises = []
    for _, group, leaf in handle.group_leaves():
        n = leaf.shape[-1]
        ranks = handle.owner.comms
        start = ranks.within(group.over).rank * n
        noise = torch.zeros_like(leaf)
        layers = torch.tensor(group.here, dtype=torch.int64, device=leaf.device)[:, None] if leaf.ndim > 1 else 0
        for piece in group.layout.pieces(start, start + n):
            name, size = group.layout.names[piece.leaf], group.whole.sizes[piece.leaf]
            if group.axes:
                every = torch.arange(size, device=leaf.device).view(group.whole.shapes[piece.leaf])
                place = group.part(piece.leaf, every, ranks).flatten().narrow(0, piece.origin, piece.stop - piece.start)
            else:
                place = torch.arange(piece.origin, piece.origin + piece.stop - piece.start, device=leaf.device)
            noise[..., piece.start : piece.stop] = _normal(key, name, layers * size + place)
        noises.append(noise)
    return Sharded(tuple(noises), handle.context)


def _normal(key: Tensor, leaf: str, place: Tensor) -> Tensor:
    """Draws standard normal float64 values for indices `place` (int64) in the named leaf, by box-muller from a hash."""
    digest = hashlib.blake2b(leaf.encode(), digest_size=8).digest()
    bits = _mixed(_mixed(key + int.from_bytes(digest, "little", signed=True)) + place * GOLDEN)
    high, low = (bits >> 32) & 0xFFFFFFFF, bits & 0xFFFFFFFF
    radius = (-2 * torch.log((high.double() + 0.5) / 2**32)).sqrt()
    return radius * torch.cos(2 * math.pi / 2**32 * low.double())


def _mixed(x: Tensor) -> Tensor:
    """Applies the finalizer of splitmix64 to int64 that wraps around: every bit of `x` affects every bit."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x
