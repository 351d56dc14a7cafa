"""Fading gradient noise, as in Optax (Neelakantan et al., 2015, arXiv 1511.06807):

    update = g + sqrt(eta / (count + 1) ** gamma) * standard normal

The noise of a leaf follows from the key, the count and the leaf's name, and is the same at every number of ranks. The
host reads the count in every step, to seed it.
"""

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn import normal_like
from yafsdp_fn.optim import Around, GradientTransformation, identity, new_count


class AddNoiseState(NamedTuple):
    """The state of `add_noise`. count: int32 [], completed steps; rng_key: int64 [], the given key: `count` makes steps
    differ"""

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count
    rng_key: Tensor


def add_noise(eta: float, gamma: float, key: int) -> GradientTransformation:
    """Adds normal noise of variance `eta / (count + 1) ** gamma` to every element of the updates.

    key: seeds the noise. Its bits are not those of Optax, which draws by JAX's generator.

    Raises TypeError when run unit by unit: a row of a stack does not know its layer.

    >>> noisy = update(ya.optim.contrib.add_noise(eta=0.01, gamma=0.55, key=0))
    >>> (noisy - g).abs().max() < 1
    tensor(True)
    """
    if eta < 0:
        raise ValueError(f"add_noise: eta is a variance, expected at least 0, got {eta}")

    def init(params: Any) -> AddNoiseState:
        count = new_count(params)
        return AddNoiseState(count, torch.full_like(count, key, dtype=torch.int64))

    def update(updates: Any, state: AddNoiseState, params: Any = None) -> tuple[Any, AddNoiseState]:
        count = state.count + 1
        deviation = (eta / count.double() ** gamma).sqrt()
        noise = normal_like((int(state.rng_key) << 32) + int(count), updates)
        noisy = optree.tree_map(lambda u, z: u + (deviation * z).to(u.dtype), updates, noise)
        return noisy, AddNoiseState(count, state.rng_key)

    why = "add_noise depends on where an element lies: it needs all units at once"
    return GradientTransformation(init, update, elementwise=True, rule=Around(identity(), why))
