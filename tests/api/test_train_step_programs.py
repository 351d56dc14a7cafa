"""The programs of a train_step: looked at before, kept, given back, and what does not fit them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import yafsdp_fn as ya
from tests.api.test_train_step import TX, states
from tests.harness.small import (
    batch,
    loss,
    one_rank,
    param,
)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"update_when": "never"}, "update_when: it has .never., here it is .after norm."),
        ({"mesh": (("shard", 4),)}, "mesh: it has"),
        ({"microbatches": 2}, "microbatches: it has 2, here it is 1"),
    ],
)
def test_a_schedule_that_returns_a_program_of_another_trace_is_refused(changed: Any, field: str) -> None:
    """It would be judged by rules of a step that does not run."""
    state, _ = states()
    step = ya.train_step(loss, TX, schedule=lambda trace: ya.schedules.zero3()(trace._replace(**changed)))
    for run in (step.lower, step):
        with pytest.raises(ValueError, match=f"the schedule returned a program of another trace: {field}"):
            run(state, batch())
    ya.train_step(loss, TX)(state, batch())


def test_a_program_for_training_does_not_evaluate() -> None:
    state, _ = states()
    program = ya.train_step(loss, TX).lower(state, batch())
    with pytest.raises(ValueError, match="it is of a training step, which this is not"):
        ya.eval_step(loss, schedule=program)(state, batch())


def test_the_same_number_of_other_units_is_refused() -> None:
    """Frozen units have no gradient by which the visits could be told apart."""
    tree = {"a": ya.frozen({"w": param(5)}), "b": ya.frozen({"w": param(5)}), "c": {"w": param(5)}}
    state = ya.init(tree, TX, mesh=one_rank())

    def either(params: Any, b: Any) -> Tensor:
        x = ya.apply(lambda w: w["w"] * 1, params[b["which"]])
        return ya.apply(lambda w, x: (w["w"] * x).sum(), params["c"], x)

    step = ya.train_step(either, TX)
    state, _ = step(state, {"which": "a"})
    with pytest.raises(ya.errors.OrderChanged, match=r"forward of b .* expects forward a here"):
        step(state, {"which": "b"})
