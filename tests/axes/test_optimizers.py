"""Optimizers on leaves that are split over axes inside blocks: whole leaves are put together at their owners, whole
trees on every rank, and updates, states and clipping are those of the plain loop."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.axes.model import H, batch_of, loss_of, mesh_of, params
from tests.axes.test_exact import FLOAT64, close
from tests.harness.marks import nightly
from tests.harness.pool import Pools, on_ranks
from tests.optim.test_leafwise import centralized, exchanged, rows, sizes
from yafsdp_fn import optim
from yafsdp_fn.checkpoint import load, save
from yafsdp_fn.params.tree import named_leaves
from yafsdp_fn.schedules import zero2

STEPS = 3
WITHOUT = ya.params.without_markers


def signs() -> Any:
    """A foreign pair that is elementwise, with a state."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        new = optree.tree_map(lambda u, s: 0.5 * s + u, updates, state)
        return optree.tree_map(lambda s, p: s.tanh() + 0.01 * p, new, params), new

    return lambda params: optree.tree_map(torch.zeros_like, params), update


def some(path: str, param: ya.Param) -> bool:
    return "down" in path or ".qk" in path or "embed" in path


HEADS = {"layers.qk": (-2, 2 * H), "layers.v": (-2, H), "layers.o": (-1, H)}
CLIP = optim.clip_by_global_norm(0.5)
TXS: dict[str, Any] = {
    "muon": optim.chain(CLIP, optim.muon(0.02, dtype=None, others=optim.adamw(0.01))),
    "muon by heads": optim.muon(0.02, dtype=None, blocks=lambda path, param: HEADS.get(path), others=optim.adamw(0.01)),
    "soap": optim.chain(CLIP, optim.contrib.soap(0.02, where=lambda path, param: len(param.shape) == 2)),
    "two rounds": optim.chain(centralized(), optim.assume_leafwise(rows(), params=True), optim.scale(-0.01)),
    "some leaves": optim.chain(optim.assume_leafwise(rows(), params=True, where=some), optim.sgd(0.01)),
    "foreign, whole trees": optim.chain(CLIP, sizes(), optim.scale(-0.1)),
    "foreign, elementwise": optim.chain(CLIP, optim.assume_elementwise(signs()), optim.scale(-0.01)),
}


@functools.cache
def plain(name: str) -> Any:
    state = ya.PlainState.create(params(), TXS[name])
    step = ya.train_step(loss_of(), TXS[name])
    for number in range(STEPS):
        state, _ = step(state, batch_of(number))
    return state


def leaves(tree: Any) -> dict[str, Tensor]:
    return {path: leaf.double() for path, leaf in named_leaves(WITHOUT(tree))}


def compared(state: Any, want: Any, name: str) -> None:
    got = leaves(ya.unshard(state.opt_state))
    wanted = leaves(want.opt_state)
    close({path: got[path] for path in wanted}, wanted, f"{name}: the optimizer's state", 1e-10)


SOME = ("muon", "soap", "two rounds", "foreign, whole trees")


@on_ranks()
@pytest.mark.parametrize(
    ("world", "axes", "names", "kept"),
    [
        (2, {"tensor": 2}, tuple(TXS), False),
        nightly(2, {"expert": 2}, ("muon", "two rounds"), False),
        nightly(4, {"shard": 2, "tensor": 2}, SOME, True),
        nightly(4, {"expert": 2, "tensor": 2}, SOME, True),
        nightly(4, {"shard": 2, "context": 2}, tuple(TXS), False),
        nightly(4, {"tensor": 4}, tuple(TXS), False),
        nightly(4, {"replicate": 2, "shard": 1, "tensor": 2}, tuple(TXS), False),
    ],
)
def test_updates_and_states_are_those_of_the_plain_loop(
    _: Any, axes: dict[str, int], names: tuple[str, ...], kept: bool, tmp_path: Path
) -> None:
    """kept: in checkpoints, too, which are loaded on other axes"""
    mesh = mesh_of(**axes)
    for name in names:
        tx = TXS[name]
        want = plain(name)
        for update in (False, True)[: 1 + (optim.why_not_unitwise(tx) is None)]:
            step = ya.train_step(loss_of(), tx, schedule=zero2(update=update))
            state = ya.init(params(), tx, mesh=mesh, precision=FLOAT64)
            for number in range(STEPS):
                state, _ = step(state, ya.shard_batch(batch_of(number), mesh, split={"context": 1}))
            close(state, want.params, f"{name}: parameters")
            compared(state, want, name)
        if kept:
            save(f"{tmp_path}/{name}", state)
            for other in ({}, {"expert": 2, "context": 2}):
                again = load(f"{tmp_path}/{name}", ya.init(params(), tx, mesh=mesh_of(**other), precision=FLOAT64))[0]
                compared(again, want, name)


def sent(_: Any, axes: dict[str, int]) -> tuple[int, int]:
    tx = TXS["muon"]
    mesh = mesh_of(**axes)
    state = ya.init(params(), tx, mesh=mesh, precision=FLOAT64)
    step = ya.train_step(loss_of(), tx, schedule=zero2())
    return exchanged(step, state, ya.shard_batch(batch_of(0), mesh))


@pytest.mark.nightly
@pytest.mark.parametrize("axes", [{"shard": 2, "tensor": 2}, {"expert": 2, "tensor": 2}])
def test_programs_know_what_travels(pools: Pools, axes: dict[str, int]) -> None:
    found = pools[4].run(sent, axes)
    (said,) = {said for _, said in found}
    units = 4 * 2 + 2  # of layers: split over nothing, tensor, both, and over expert and tensor; embedding and head
    assert said > 0
    assert abs(sum(nbytes for nbytes, _ in found) / 4 - said) <= 2 * units  # rounded down, twice
