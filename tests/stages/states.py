"""States on meshes with stages, states of the same numbers without, and comparisons of the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch

import yafsdp_fn as ya
from tests.harness.meshes import mesh_of
from tests.harness.problems import base_params, frozen_params, pinned_params
from tests.steps.staged.models import F64
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.program.split import Assignment

MODELS = {
    "pinned": lambda: pinned_params(5),
    "frozen": lambda: frozen_params(5),
    "lora": lambda: ya.lora(base_params(5), 2, alpha=3.0),
}
MESHES = ((2, {"stage": 2}), (4, {"stage": 2}), (4, {"stage": 4}), (4, {"stage": 2, "replicate": 2}))


def scattered(units: int, stages: int) -> Assignment:
    """Units here and there, two segments on each stage; one that no visit uses."""
    order = tuple(range(stages))
    return Assignment((*((unit * unit % (2 * stages),) for unit in range(units - 1)), ()), order + order)


def units_of(params: Any) -> int:
    return len(ya.init(params, mesh=mesh_of()).memory.units)


def on_stages(params: Any, tx: Any = None, stages: Any = None, **axes: int) -> ya.ShardedState:
    mesh = mesh_of(**axes)
    count = communicators(mesh).stages
    given = scattered(units_of(params), count) if stages is None and count > 1 else stages
    return ya.init(params, tx, mesh=mesh, precision=F64, seed=3, stages=given)


def plain(params: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf.double(), ya.materialize(params, seed=3))


def grads_of(state: ya.ShardedState, seed: int) -> Any:
    """The same logical gradients on every mesh."""
    return ya.normal_like(seed, state.params)


def pair(params: Any, tx: Any, axes: dict[str, int], **options: Any) -> tuple[ya.ShardedState, ya.ShardedState]:
    """A state on stages, and one of the same ranks without."""
    return on_stages(params, tx, **axes, **options), on_stages(params, tx, shard=-1)


def bits(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(ya.unshard(tree)) if isinstance(leaf, torch.Tensor)]


def same(got: Any, expected: Any, tolerance: float = 0.0, what: str = "") -> None:
    for mine, other in zip(bits(got), bits(expected), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def negated_lion() -> Any:
    """A pair of functions that declares nothing: it is given whole trees."""
    lion = ya.optim.lion(1e-2)
    return lion.init, lion.update


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: ya.optim.adamw(1e-2),
    "clipped": lambda: ya.optim.chain(ya.optim.clip_by_global_norm(0.5), ya.optim.adamw(1e-2)),
    "muon": lambda: ya.optim.muon(1e-2),
    "soap": lambda: ya.optim.contrib.soap(1e-2),
    "momentum": lambda: ya.optim.sgd(1e-2, momentum=0.9),
    "schedule-free": lambda: ya.optim.contrib.schedule_free_adamw(1e-2),
    "whole trees": negated_lion,
}


def trained(mesh: Any, axes: dict[str, int], tx: Any) -> ya.ShardedState:
    state = on_stages(MODELS["pinned"](), tx, **axes)
    for step in range(2):
        state = state.apply_gradients(grads_of(state, step), tx)
    return state
