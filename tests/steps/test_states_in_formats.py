"""Optimizers whose state is in a format, against the plain loop whose moments pass through the same after each step."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.meshes import made
from tests.harness.oracle import batch_of, by_autograd, compare, joined
from tests.harness.pool import Pool
from tests.harness.problems import Batch, E
from tests.steps.test_wire_formats import (
    EXACT,
    STEPS,
    TOLERANCE,
    WHERE,
    Halves,
    Plain,
    loss,
    schedules_for,
    split_loss,
    tree,
)
from yafsdp_fn.communication.formats import Format, Scaled, Wire, passed

ROOTS = Scaled(torch.int8, 8, root=4)
FORMATS: dict[str, tuple[Format, Wire]] = {
    "roots": (ROOTS, Wire()),
    "wide blocks": (Scaled(torch.int8, 48, root=2), Wire()),
    "travels": (Scaled(torch.float8_e4m3fn, 16, root=4), Wire(gather=Scaled(torch.int8, 24))),
    "own": (Halves(), Wire()),
}
B1, B2, RATE, EPS, DECAY = 0.9, 0.95, 1e-2, 1e-8, 0.1


def adamw(format: Format) -> ya.optim.GradientTransformation:
    inside = ya.optim.in_format(ya.optim.adamw(RATE, B1, B2, EPS, DECAY), format)
    return ya.optim.chain(ya.optim.clip_by_global_norm(1.0), inside)


class Loop:
    """Clipped AdamW on whole leaves, by hand. Moments pass through `format`, a layer of a stacked leaf at a time."""

    def __init__(self, leaves: dict[str, Tensor], format: Format, by_layer: set[str]) -> None:
        self.leaves, self.format, self.by_layer, self.count = leaves, format, by_layer, 0
        self.mu, self.nu = ({name: torch.zeros_like(leaf) for name, leaf in leaves.items()} for _ in range(2))

    def passed(self, name: str, moment: Tensor) -> Tensor:
        if name not in self.by_layer:
            return passed(self.format, moment)
        return torch.stack([passed(self.format, row) for row in moment])

    def step(self, grads: dict[str, Tensor]) -> None:
        self.count += 1
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        for name, grad in grads.items():
            grad = grad / max(norm, 1.0)
            mu, nu = B1 * self.mu[name] + (1 - B1) * grad, B2 * self.nu[name] + (1 - B2) * grad.square()
            update = mu / (1 - B1**self.count) / ((nu / (1 - B2**self.count)).sqrt() + EPS)
            self.leaves[name] = self.leaves[name] - RATE * (update + DECAY * self.leaves[name])
            self.mu[name], self.nu[name] = self.passed(name, mu), self.passed(name, nu)


def looped(plain: Plain, params: Any, format: Format) -> Loop:
    by_layer = {name for name, stacked in zip(plain.names, plain.stacked, strict=True) if stacked}
    return Loop(dict(plain.trained(params)), format, by_layer if plain.frozen else by_layer | {"layers.gain"})


def exact(mesh: Any, name: str, kind: str, formats: str, parts: int, how: str) -> None:
    """One rank's part. how: the gradients of weights are written into slots, or autograd's"""
    with by_autograd() if how == "autograd" else contextlib.nullcontext():
        three_steps(made(name), f"{name}, {kind}, {formats}, {parts} microbatches", kind, formats, parts)


def three_steps(mesh: Any, what: str, kind: str, formats: str, parts: int) -> None:
    format, wire = FORMATS[formats]
    abstract, tx = tree(wire, kind), adamw(format)
    plain = Plain(abstract)
    if kind != "marked":
        plain.stacked = [name.startswith("layers") for name in plain.names]
    schedules = dict(schedules_for(mesh)) | {"updates inside": ya.schedules.zero3(update=True)}
    for schedule in [name for name in (*STEPS, "updates inside") if name in schedules]:
        state = ya.init(abstract, tx, mesh=mesh, precision=EXACT)
        step = ya.train_step(loss, tx, schedule=schedules[schedule], microbatches=parts)
        params = ya.unshard(state)
        whole = optree.tree_leaves(params)
        loop = looped(plain, params, format)
        for number in range(3):
            now = [batch_of(rank, seed=number) for rank in range(mesh.size())]
            latest = [loop.leaves.get(name, leaf) for name, leaf in zip(plain.names, whole, strict=True)]
            _, grads = plain.value_and_grad(latest, now, parts, schedule == "zero1")
            loop.step(plain.trained(grads))
            state, _ = step(state, now[mesh.get_rank()])
            got = plain.trained(ya.unshard(state))
            compare(got, loop.leaves, 100 * TOLERANCE, f"{what}, {schedule}: step {number}")
        for handle in ya_handles(state.opt_state):
            assert all(leaf.dtype == torch.uint8 for leaf in handle.leaves)


def ya_handles(tree: Any) -> list[Any]:
    found = optree.tree_leaves(tree, is_leaf=lambda node: isinstance(node, ya.Sharded))
    return [node for node in found if isinstance(node, ya.Sharded)]


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["slots", "autograd"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("kind", ["plain", "marked", "tied"])
@pytest.mark.parametrize("where", WHERE)
def test_three_steps_are_those_of_the_plain_loop(
    pools: dict[int, Pool], where: str, kind: str, formats: str, parts: int, how: str
) -> None:
    world, mesh = where.split()
    pools[int(world)].run(exact, mesh, kind, formats, parts, how)
