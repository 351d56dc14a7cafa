"""What grad and value_and_grad refuse, each by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import yafsdp_fn as ya
from tests.api.test_transform import A, C, f
from tests.harness.small import (
    batch,
    loss,
    one_rank,
    states,
)

TX = ya.optim.sgd(0.1)


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda p: ya.value_and_grad(f, argnums=(0, 0))(A, C), ValueError, "names one argument twice"),
        (
            lambda p: ya.value_and_grad(loss, microbatches=3)(p, batch()),
            ValueError,
            r"tokens of argument 1|targets of argum",
        ),
        (
            lambda p: ya.grad(lambda a, b: loss(a, batch()).total, (0, 1))(p, p),
            ValueError,
            "'embed' is differentiated twice",
        ),
        (
            lambda p: ya.grad(lambda a, b: loss(a, batch()).total, (0, 1))(p, states(seed=1)[0]),
            ValueError,
            "'embed' is of another state than 'embed'",
        ),
    ],
)
def test_errors(run: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(states()[0])


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_second_order_is_right_or_refused(kind: str) -> None:
    state = ya.init({"w": ya.Param((3,), init=ya.params.initializers.ones)}, TX, mesh=one_rank())
    params = state.params if kind == "sharded" else ya.unshard(state)

    def cube(p: Any) -> Tensor:
        return ya.apply(lambda w: (w**3).sum(), p["w"])

    try:
        got = ya.grad(lambda p: ya.vdot(ya.grad(cube)(p), p))(params)
    except RuntimeError as error:
        assert "torch.func" in str(error)
    else:
        assert ya.unshard(got)["w"].tolist() == [9, 9, 9]


def test_an_empty_subtree_is_no_second_use_of_its_neighbour() -> None:
    state = ya.init({"a": (), "w": ya.Param((3,)), "z": {}}, TX, mesh=one_rank())
    grads = ya.grad(lambda p: ya.apply(lambda w: w.sum(), p["w"]))(state.params)
    assert ya.unshard(grads)["w"].tolist() == [1, 1, 1]
