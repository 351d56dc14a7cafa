"""What is not supported yet on axes inside blocks, and what cannot be, is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.axes.model import Options, batch_of, loss_of, params
from tests.harness.pool import on_ranks

WEIGHT = ya.Param((4, 6), split={"tensor": -1})


def meshes(_: Any) -> None:
    with pytest.raises(ValueError, match="rows go to 2 ranks, and 5 micro-shards do not divide by 2; take 1, 5"):
        ya.mesh(device="cpu", deterministic=5, expert=2)
    with pytest.raises(TypeError, match=r"mesh\(shards=2\): did you mean shard\?"):
        ya.mesh(device="cpu", shards=2)
    with pytest.raises(TypeError, match="'node' is the name of an axis outside of blocks"):
        ya.mesh(device="cpu", node=2)
    with pytest.raises(ValueError, match=r"mesh\(tensor=0\): expected the number of ranks on this axis"):
        ya.mesh(device="cpu", tensor=0)
    with pytest.raises(ValueError, match=r"mesh\(shard=-1, tensor=3\): the job has 2 ranks, not a multiple of 3"):
        ya.mesh(device="cpu", tensor=3)
    mine = ya.mesh(device="cpu", pipes=1, tensor=2)
    assert mine.mesh_dim_names == ("shard", "pipes", "tensor") and tuple(mine.shape) == (1, 1, 2)


def states(_: Any) -> None:
    mesh = ya.mesh(device="cpu", tensor=2)

    def refused(kind: type[Exception], text: str, *args: Any) -> None:
        with pytest.raises(kind, match=text):
            ya.init(*args, mesh=mesh)

    odd = {"a": {"w": ya.Param((3, 6), split={"tensor": -2})}}
    refused(ValueError, r"a.w: dimension -2 is split over tensor, and 3 elements do not divide by its 2 ranks", odd)
    foreign = {"a": {"w": ya.Param((4, 6), split={"tensro": -2})}}
    refused(ValueError, r"a.w is split over 'tensro', which is no axis of this mesh; it has tensor", foreign)
    with pytest.raises(ValueError, match=r"split=\{'tensor': 0\} of shape \(4, 6\): expected .* counted from the end"):
        ya.Param((4, 6), split={"tensor": 0})
    with pytest.raises(ValueError, match=r"split=\{'tensor': \(-1, 4\)\} of shape \(4, 6\): .* blocks\), equal ones"):
        ya.Param((4, 6), split={"tensor": (-1, 4)})
    three = {"a": {"w": ya.Param((4, 6), split={"tensor": (-1, 2)})}}
    refused(ValueError, r"a.w: dimension -1 is split over tensor, and 3 elements do not divide by its 2 ranks", three)
    with pytest.raises(ValueError, match=r"like=...\): a.w should be of shape \(4, 6\), got torch.float32 \(4, 5\)"):
        ya.shard({"a": {"w": torch.ones(4, 5)}}, like={"a": {"w": WEIGHT}}, mesh=mesh)
    with pytest.raises(ValueError, match=r"`like` has no a.b: they would be lost"):
        ya.shard({"a": {"w": torch.ones(4, 6), "b": torch.ones(2)}}, like={"a": {"w": WEIGHT}}, mesh=mesh)
    with pytest.raises(ValueError, match="is 5 long in dimension 1, not a multiple of 4, for 2 ranks of tensor"):
        ya.shard_batch(torch.ones(2, 5), mesh, split={"tensor": 1}, zigzag=True)


def calls(_: Any) -> None:
    mesh, of = ya.mesh(device="cpu", tensor=2), Options()
    state = ya.init(params(of), ya.optim.sgd(0.1), mesh=mesh)
    with pytest.raises(RuntimeError, match=r"embed: a loss or function of its own on a mesh .*functional_loss"):
        loss_of(of)(state.params, batch_of(0))
    with pytest.raises(
        NotImplementedError, match=r"graphs=True on a mesh with axes .* captured on all of its ranks or"
    ):
        ya.train_step(loss_of(of), ya.optim.sgd(0.1), graphs=True)(state, batch_of(0))
    loss = ya.functional_loss(loss_of(of))(state.params, batch_of(0))  # as the error says
    assert loss.isfinite()


@on_ranks(2)
@pytest.mark.parametrize("function", [meshes, states, calls])
def test_refused_by_name(mesh: Any, function: Any) -> None:
    function(mesh)
