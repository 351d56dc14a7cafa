"""What is not supported yet on axes inside blocks, and what cannot be, is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.axes.model import Options, batch_of, loss_of, params
from tests.harness.meshes import mesh_of
from tests.harness.pool import on_ranks

MESHES: list[tuple[type[Exception], str, dict[str, int]]] = [
    (
        ValueError,
        "rows go to 2 ranks, and 5 micro-shards do not divide by 2; take 1, 5",
        {"deterministic": 5, "expert": 2},
    ),
    (TypeError, r"mesh\(shards=2\): did you mean shard\?", {"shards": 2}),
    (TypeError, "'node' is the name of an axis outside of blocks", {"node": 2}),
    (ValueError, r"mesh\(tensor=0\): expected the number of ranks on this axis", {"tensor": 0}),
    (ValueError, r"mesh\(shard=-1, tensor=3\): the job has 2 ranks, not a multiple of 3", {"tensor": 3}),
]


@on_ranks(2)
def test_meshes(_: Any) -> None:
    for kind, text, axes in MESHES:
        with pytest.raises(kind, match=text):
            ya.mesh(device="cpu", **axes)
    mine = ya.mesh(device="cpu", pipes=1, tensor=2)
    assert mine.mesh_dim_names == ("shard", "pipes", "tensor")
    assert tuple(mine.shape) == (1, 1, 2)


def split(*shape: int, **split: Any) -> Any:
    return {"a": {"w": ya.Param(shape, split=split)}}


def given(like: Any, **leaves: torch.Tensor) -> Callable[[Any], Any]:
    return lambda mesh: ya.shard({"a": leaves}, like=like, mesh=mesh)


WEIGHT = split(4, 6, tensor=-1)
STATES: dict[str, Callable[[Any], Any]] = {
    r"a.w: dimension -2 is split over tensor, and 3 elements do not divide by its 2 ranks": (
        lambda mesh: ya.init(split(3, 6, tensor=-2), mesh=mesh)
    ),
    r"a.w is split over 'tensro', which is no axis of this mesh; it has tensor": (
        lambda mesh: ya.init(split(4, 6, tensro=-2), mesh=mesh)
    ),
    r"split=\{'tensor': 0\} of shape \(4, 6\): expected .* counted from the end": lambda _: split(4, 6, tensor=0),
    r"split=\{'tensor': \(-1, 4\)\} of shape \(4, 6\): .* blocks\), equal ones": (
        lambda _: split(4, 6, tensor=(-1, 4))
    ),
    r"a.w: dimension -1 is split over tensor, and 3 elements do not divide by its 2 ranks": (
        lambda mesh: ya.init(split(4, 6, tensor=(-1, 2)), mesh=mesh)
    ),
    r"like=...\): a.w should be of shape \(4, 6\), got torch.float32 \(4, 5\)": given(WEIGHT, w=torch.ones(4, 5)),
    r"`like` has no a.b: they would be lost": given(WEIGHT, w=torch.ones(4, 6), b=torch.ones(2)),
    "is 5 long in dimension 1, not a multiple of 4, for 2 ranks of tensor": (
        lambda mesh: ya.shard_batch(torch.ones(2, 5), mesh, split={"tensor": 1}, zigzag=True)
    ),
}


@on_ranks(2)
def test_states(_: Any) -> None:
    mesh = mesh_of(tensor=2)
    for text, make in STATES.items():
        with pytest.raises(ValueError, match=text):
            make(mesh)


@on_ranks(2)
def test_calls(_: Any) -> None:
    of = Options()
    state = ya.init(params(of), ya.optim.sgd(0.1), mesh=mesh_of(tensor=2))
    with pytest.raises(RuntimeError, match=r"embed: a loss or function of its own on a mesh .*functional_loss"):
        loss_of(of)(state.params, batch_of(0))
    loss = ya.functional_loss(loss_of(of))(state.params, batch_of(0))  # as the error says
    assert loss.isfinite()
