"""Formats and places of moments are searched as each by itself, with the errors of the user's own values."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

import yafsdp_fn as ya
from models import llama
from tests.api.test_relative_errors import by_definition, is_near
from tests.harness.abstract import batch_of
from tests.harness.meshes import made
from tests.harness.pool import on_ranks
from tests.harness.small import one_rank
from tests.models.theirs import draw
from tests.planner.test_search import MIXED, SLOW, TX
from yafsdp_fn.planner import FormatsFound, search
from yafsdp_fn.schedules import Trace, zero3

CONFIG = dataclasses.replace(llama.CONFIGS["debug"], layers=2)
INT8 = ya.formats.Scaled(block=16)
ROOTS = ya.formats.Roots(block=16)
WIRES = [ya.Wire(gather=INT8), ya.Wire(INT8, INT8)]
PARAMS = llama.params(CONFIG)
LOSS = llama.loss(CONFIG)


def traced(params: Any, tx: Any, ranks: int = 16) -> Trace:
    return ya.planner.trace(LOSS, params, batch_of(4, 64), ranks=ranks, precision=MIXED, tx=tx)


def searched(**asked: Any) -> FormatsFound:
    return ya.planner.search_formats(traced, PARAMS, TX, SLOW, state(), **asked)


@functools.cache
def state() -> Any:
    return ya.init(PARAMS, TX, mesh=one_rank(), precision=MIXED)


def test_without_being_asked_nothing_is_tried() -> None:
    found = searched()
    assert list(found.choices) == ["whole"]
    assert found.errors == {}
    assert str(found.choices["whole"]) == str(search(traced(PARAMS, TX), SLOW))


def test_each_choice_is_what_a_search_of_its_own_trace_finds() -> None:
    found = searched(wires=WIRES[:1], moments=[ROOTS, "host"])
    trees = {"whole": PARAMS, "gather=int8/16": ya.params.with_wire(PARAMS, WIRES[0])}
    txs = {"": TX, "in roots/16": ya.optim.in_format(TX, ROOTS), "on the host": ya.optim.on_host(TX)}
    alone = {
        f"{wire}, moments {place}" if place else wire: search(traced(params, tx), SLOW)
        for wire, params in trees.items()
        for place, tx in txs.items()
    }
    assert {name: str(each) for name, each in found.choices.items()} == {name: str(x) for name, x in alone.items()}
    # fastest first: the network is slow, and the moments are most of the state
    seconds = [each.best.step_s for each in found.choices.values()]
    assert seconds == sorted(seconds)
    fastest, best = next(iter(found.choices.items()))
    assert fastest.startswith("gather=int8/16")
    assert {unit.gathered_as.name for unit in best.trace.units if unit.gathered_as} == {"int8/16"}
    # in words: what is saved of the step that is whole, in its units
    whole = alone["whole"].best
    lines = str(found).splitlines()
    saved = f"saves {1e3 * (whole.step_s - best.best.step_s):.1f} ms"
    assert lines[0].startswith(f"{fastest}: {best.best.point}: ")
    assert saved in lines[0]
    assert f"{(whole.peak_bytes - best.best.peak_bytes) / 2**30:.2f} GiB" in lines[0]
    assert len(lines) == 8


def test_under_a_limit_that_only_smaller_moments_fit() -> None:
    def least(tx: Any) -> int:
        program = zero3(remat="all")(traced(PARAMS, tx))
        return ya.planner.predict_memory(program).peak_bytes

    light = ya.optim.in_format(TX, ROOTS)
    limit = (least(TX) + least(light)) // 2
    assert least(light) < limit
    found = searched(moments=[ROOTS], memory=limit)
    assert list(found.choices) == ["whole, moments in roots/16"]
    assert "saves" not in str(found)
    assert found.choices["whole, moments in roots/16"].best.peak_bytes <= limit
    assert searched(moments=[ROOTS], memory=2**10).choices == {}


def test_what_is_no_place_is_refused() -> None:
    with pytest.raises(TypeError, match=r"in_format: expected a ya\.formats\.Format or None, got 'hots'"):
        searched(moments=["hots"])


@on_ranks(2)
def test_its_errors_are_those_of_plain_values(mesh: Any) -> None:
    """Matrices of layers for the wire, all that moments have."""
    state = ya.init(PARAMS, TX, mesh=made("shard"), precision=MIXED)
    tokens = draw(2, 16, seed=mesh.get_rank(), most=CONFIG.vocab)
    state, _ = ya.train_step(LOSS, TX)(state, {"tokens": tokens, "targets": tokens})
    on_two = functools.partial(traced, ranks=2)
    found = ya.planner.search_formats(on_two, PARAMS, TX, SLOW, state, wires=WIRES[1:], moments=[ROOTS])
    matrices = by_definition(INT8, ya.unshard(state.params), in_matrices, CONFIG.layers)
    is_near(found.errors["int8/16"], matrices, 1e-6)  # sums in float32
    moments = found.errors["roots/16"]
    assert set(moments) > set(matrices)
    assert 0 < max(moments.values()) < 0.1
    assert set(found.choices) == {name + place for name in ("whole", str(WIRES[1])) for place in ("", MOMENTS)}
    assert f"int8/16 is off by at most {max(matrices.values()):.2%} of a unit" in str(found)


MOMENTS = ", moments in roots/16"


def in_matrices(path: str) -> bool:
    return path.startswith("layers") and "norm" not in path
