"""The programs of a train_step: looked at before, kept, given back, and what does not fit them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.api.test_train_step import TX, states
from tests.harness.small import (
    L,
    Model,
    assert_equal,
    batch,
    block,
    embed,
    leaves,
    loss,
    model,
    one_rank,
    param,
)
from yafsdp_fn.schedules import Gather, Reduce


def test_lower_looks_without_running() -> None:
    state, _ = states()
    step = ya.train_step(loss, TX, microbatches=2)
    before = [leaf.clone() for leaf in leaves(state)]
    lowered = step.lower(state, batch())
    with pytest.raises(RuntimeError, match=r"no step of this function has run .*; step.lower\(state, batch\) returns"):
        step.program(state)
    assert_equal(before, state)
    assert lowered.count(Gather) == 2 * L - 2 + 2 + max(0, 2 * L - 4) and lowered.count(Reduce) == 2 * (L + 2)
    state, _ = step(state, batch())
    program = step.program(state)
    assert program.ops == lowered.ops and program.fingerprint() == lowered.fingerprint()
    assert step.lower(state, batch()) is program


def test_a_trace_names_the_visits() -> None:
    state, _ = states()
    trace = ya.train_step(loss, TX).trace(state, batch())
    assert [visit.name for visit in trace.visits] == ["embed", *(f"layers[{i}]" for i in range(L)), "head"]
    assert [unit.name for unit in trace.units] == ["embed", *(f"layers[{i}]" for i in range(L)), "head"]
    assert trace.mesh == (("shard", 1),) and trace.microbatches == 1


def test_a_program_can_be_kept_and_given_back() -> None:
    state, _ = states()
    twin, _ = states()
    step = ya.train_step(loss, TX, schedule=ya.schedules.zero3(remat=ya.schedules.remat.first(1)))
    program = ya.Program.from_json(step.lower(state, batch()).to_json())
    again = ya.train_step(loss, TX, schedule=program)
    for number in range(2):
        state, got = step(state, batch(number))
        twin, want = again(twin, batch(number))
        assert_equal(got, want)
    assert again.program(twin) == program and again.lower(twin, batch()) == program


def test_a_program_of_something_else_is_refused() -> None:
    state, _ = states()
    program = ya.train_step(loss, TX).lower(state, batch())
    with pytest.raises(ValueError, match=r"the program does not fit: microbatches: it has 1, here it is 2; lower it"):
        ya.train_step(loss, TX, schedule=program, microbatches=2)(state, batch())
    other = ya.init(model(4), TX, mesh=one_rank())
    with pytest.raises(ValueError, match=r"the program does not fit: it is of other units: .*layers\[3\]"):
        ya.train_step(loss, TX, schedule=program)(other, batch())
    broken = program.with_ops(program.ops[1:])
    with pytest.raises(ya.errors.Refused, match="rule 'weights'"):
        ya.train_step(loss, TX, schedule=broken)(state, batch())
    ya.train_step(loss, TX)(state, batch())  # the state is as good as before


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


def test_one_step_function_for_states_of_several_layouts_and_precisions() -> None:
    step = ya.train_step(loss, TX)
    kinds: list[Any] = [
        (model(), ya.Precision()),
        (model(), ya.Precision(reduce=torch.bfloat16)),
        (model(), ya.Precision(param=torch.float64, reduce=torch.float32)),
        (model(5), ya.Precision()),
    ]
    made = [ya.init(tree, TX, mesh=one_rank(), precision=precision) for tree, precision in kinds]
    alone = [ya.init(tree, TX, mesh=one_rank(), precision=precision) for tree, precision in kinds]
    for number in range(3):
        made = [step(state, batch(number))[0] for state in made]  # in turn
    for state, twin in zip(made, alone, strict=True):
        own = ya.train_step(loss, TX)
        for number in range(3):
            twin, _ = own(twin, batch(number))
        assert_equal(state, twin)


def test_another_order_of_visits_is_refused_and_the_state_kept() -> None:
    state, _ = states()

    def moody(params: Model, b: Any) -> ya.Mean:
        if b["reverse"]:
            return loss(params._replace(embed=params.head, head=params.embed), b)
        return loss(params, b)

    step = ya.train_step(moody, TX)
    state, _ = step(state, batch() | {"reverse": False})
    before = [leaf.clone() for leaf in leaves(state)]
    with pytest.raises(ya.errors.OrderChanged, match=r"forward of head .*the program expects forward embed here"):
        step(state, batch() | {"reverse": True})
    assert_equal(before, state)
    step(state, batch() | {"reverse": False})


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


def test_a_loss_that_stops_early_is_refused() -> None:
    state, _ = states()

    def lazy(params: Model, b: Any) -> Tensor:
        x = ya.apply(embed, params.embed, b["tokens"])
        return x.sum() if b["stop"] else ya.scan(block, x, params.layers)[0].sum()

    step = ya.train_step(lazy, TX)
    state, _ = step(state, batch() | {"stop": False})
    with pytest.raises(ya.errors.OrderChanged, match=r"forward layers\[0\]|layers"):
        step(state, batch() | {"stop": True})
    step(state, batch() | {"stop": False})


@pytest.mark.parametrize("options", [{"microbatches": 0}, {"microbatches": 1.5}, {"schedule": 3}])
def test_bad_options_are_refused_at_once(options: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        ya.train_step(loss, TX, **options)
    with pytest.raises((ValueError, TypeError)):
        ya.eval_step(loss, **options)
