"""What people who tried the library for the first time typed, and what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import yafsdp_fn as ya
from tests.harness.pool import Pool

PARAMS = {"layers": ya.Stacked({"w": ya.Param((2, 4, 4))})}
TX = ya.optim.adamw(1e-3)


def loss_fn(params: Any, batch: Any) -> ya.Mean:
    x, _ = ya.scan(lambda x, w: (x + ya.linear(x, w["w"]), None), torch.as_tensor(batch["x"]), params["layers"])
    return ya.Mean(x.square().sum(), x.numel())


def with_arrays(mesh: Any) -> tuple[list[list[float]], float, float, str]:
    rows = np.arange(32, dtype=np.float32).reshape(8, 4)
    mine = ya.shard_batch({"x": rows}, mesh)
    same = ya.shard_batch({"x": torch.from_numpy(rows)}, mesh)
    losses = [ya.train_step(loss_fn, TX)(ya.init(PARAMS, TX, mesh=mesh), each)[1]["loss"] for each in (mine, same)]
    with pytest.raises(TypeError) as refused:
        ya.train_step(loss_fn, TX, microbatches=2)(ya.init(PARAMS, TX, mesh=mesh), {"x": rows})
    return mine["x"].tolist(), float(losses[0]), float(losses[1]), str(refused.value)


@pytest.mark.parametrize("world", [1, 2])
def test_arrays_of_numpy_are_sharded_as_tensors_are(pools: dict[int, Pool], world: int) -> None:
    found = pools[world].run(with_arrays)
    rows = np.arange(32.0).reshape(8, 4).tolist()
    assert [row for mine, *_ in found for row in mine] == rows
    for _, one, same, refused in found:
        assert one == same
        assert "x of argument 1 is a NumPy array of shape (8, 4), of which every one would get all rows" in refused


def a_module_of_its_own(mesh: Any) -> str:
    net = torch.nn.Linear(4, 1)
    with pytest.raises(ValueError) as refused:
        ya.train_step(lambda params, batch: net(batch).square().mean(), TX)(
            ya.init(PARAMS, TX, mesh=mesh), torch.ones(2, 4)
        )
    return str(refused.value)


@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_that_no_parameter_goes_into_is_refused(pools: dict[int, Pool], world: int) -> None:
    assert all(
        "the loss does not depend on the differentiated arguments" in text
        for text in pools[world].run(a_module_of_its_own)
    )


def other_things(mesh: Any) -> list[str]:
    state = ya.init(PARAMS, TX, mesh=mesh)
    calls = (
        lambda: ya.shard(torch.nn.Linear(2, 2), TX, mesh=mesh),
        lambda: ya.init(PARAMS, TX, mesh=init_device_mesh("cpu", (mesh.size(),))),
        lambda: ya.checkpoint.save("folder", state.params),
        lambda: ya.Param(64, 32),
        lambda: ya.optim.adamw("1e-3"),
    )
    found = []
    for call in calls:
        with pytest.raises(TypeError) as refused:
            call()
        found.append(str(refused.value))
    return found


def test_what_is_given_for_something_else_is_named(pools: dict[int, Pool]) -> None:
    for said in pools[2].run(other_things):
        for text, part in zip(
            said,
            (
                "params: expected a Param, a tensor or a Lazy leaf, got Linear; an nn.Module becomes parameters by ya.",
                "mesh: its axes have no names; make it by ya.mesh()",
                "checkpoint.save: expected a folder and a state, got a dict for the state",
                "Param(64, ...): expected a shape, such as Param((64, 8))",
                "learning_rate='1e-3': expected a number, or a function of the count",
            ),
            strict=True,
        ):
            assert part in text, text
