"""A GAN: one network makes samples, another tells them from real ones, and each learns from the other.

The idea (Goodfellow et al. 2014, arXiv 1406.2661): the critic is the loss of the generator. Two networks, so two states
and two steps in turn; each step takes the parameters of the other in its batch, where they stay as they are. The
generator's gradient goes through the critic's layers, which are gathered as its own.

    torchrun --nproc-per-node 2 docs/recipes/gan.py
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tiny import say, weight
from torch import Tensor
from torch.nn.functional import softplus, tanh

import yafsdp_fn as ya

L, E, Z = 2, 32, 4
TX = ya.optim.adam(2e-3, b1=0.5)


def network(inputs: int, outputs: int) -> dict[str, Any]:
    return {
        "first": ya.Unit({"w": weight(E, inputs)}),
        "layers": ya.Stacked({"w": weight(L, E, E), "b": weight(L, E)}),
        "last": ya.Unit({"w": weight(outputs, E)}),
    }


GENERATOR, CRITIC = network(Z, 2), network(2, 1)


def run(params: Any, x: Tensor) -> Tensor:
    x = ya.apply(lambda w, x: ya.linear(x, w["w"]), params["first"], x)
    x, _ = ya.scan(lambda x, w: (x + tanh(ya.linear(x, w["w"], w["b"])), None), x, params["layers"])
    return ya.apply(lambda w, x: ya.linear(x, w["w"]), params["last"], x)


def critic_loss(params: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        made = run(batch["generator"], batch["noise"])
    return softplus(-run(params, batch["real"])).mean() + softplus(run(params, made)).mean()


def generator_loss(params: Any, batch: Any) -> Tensor:
    return softplus(-run(batch["critic"], run(params, batch["noise"]))).mean()


def batch(seed: int, rows: int = 64) -> dict[str, Tensor]:
    """real: points on a circle; noise: what the generator makes its points of."""
    draw = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(rows, generator=draw)
    return {"real": torch.stack([angle.cos(), angle.sin()], 1), "noise": torch.randn(rows, Z, generator=draw)}


def round_of(g: Any, c: Any, steps: tuple[Any, Any], own: Any) -> tuple[Any, Any]:
    """Both states after a step of the critic and one of the generator."""
    c, _ = steps[0](c, own | {"generator": g.params})
    g, _ = steps[1](g, own | {"critic": c.params})
    return g, c


def main(rounds: int = 300) -> list[float]:
    mesh = ya.mesh()
    g, c = (ya.init(params, TX, mesh=mesh, seed=seed) for seed, params in enumerate((GENERATOR, CRITIC)))
    steps = ya.train_step(critic_loss, TX), ya.train_step(generator_loss, TX)
    off = ya.eval_step(lambda params, batch: (run(params, batch["noise"]).norm(dim=1) - 1).abs().mean())
    found = [off(g, ya.shard_batch(batch(0), mesh))["loss"].item()]
    for number in range(rounds):
        g, c = round_of(g, c, steps, ya.shard_batch(batch(number), mesh))
    found.append(off(g, ya.shard_batch(batch(0), mesh))["loss"].item())
    say(f"mean distance of samples from the circle {found[0]:.2f} -> {found[1]:.2f}")
    return found


if __name__ == "__main__":
    main()
