"""Which visits recompute: layers of stacks, never an embedding or a head."""

from __future__ import annotations

import pytest

import yafsdp_fn as ya
from tests.schedules.traces import model, together
from yafsdp_fn.schedules import Forward, remat, zero2, zero3

TRACE = model(5, 2)  # visits: embed 0, layers 1 to 5, head 6


@pytest.mark.parametrize(
    ("policy", "visits"),
    [
        (remat.none, set()),
        (remat.all, {1, 2, 3, 4, 5}),
        (remat.first(0), set()),
        (remat.first(2), {1, 2}),
        (remat.first(99), {1, 2, 3, 4, 5}),
        (remat.every(1), {1, 2, 3, 4, 5}),
        (remat.every(2), {1, 3, 5}),
        (remat.every(9), {1}),
    ],
)
def test_policies(policy: remat.Remat, visits: set[int]) -> None:
    assert policy(TRACE) == visits
    for factory in (zero3, zero2):
        forwards = [op for op in factory(remat=policy)(TRACE).ops if isinstance(op, Forward)]
        assert len(forwards) == 14  # in every microbatch alike
        assert {op.visit for op in forwards if not op.keep} == visits


def test_layers_of_all_stacks_count_in_forward_order() -> None:
    assert remat.first(3)(model(2, stacks=2)) == {1, 2, 3}
    assert remat.all(together(2)) == {0, 1}


def test_the_default_keeps_every_graph() -> None:
    assert all(op.keep for op in zero3()(TRACE).ops if isinstance(op, Forward))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"remat.first\(-1\)"):
        remat.first(-1)
    with pytest.raises(ValueError, match=r"remat.every\(0\)"):
        remat.every(0)


def test_public_names() -> None:
    assert ya.remat is remat
