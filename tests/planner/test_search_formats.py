"""Formats and places of moments are searched as each by itself, with the errors of the user's own values."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from models import llama
from tests.api.test_relative_errors import by_definition, is_near, matrices
from tests.harness.meshes import made
from tests.harness.pool import Pool
from tests.planner.test_search import MIXED, SLOW, TX
from yafsdp_fn.planner import DoesNotFit, FormatsFound, search
from yafsdp_fn.schedules import Trace

CONFIG = dataclasses.replace(llama.CONFIGS["debug"], layers=2)
INT8, ROOTS = ya.formats.Scaled(block=16), ya.formats.Roots(block=16)
WIRES = [ya.Wire(gather=INT8), ya.Wire(INT8, INT8)]
PARAMS, LOSS = llama.params(CONFIG), llama.loss(CONFIG)


def traced(params: Any, tx: Any) -> Trace:
    tokens = torch.empty(4, 64, dtype=torch.long, device="meta")
    shape: dict[str, Any] = {"ranks": 16, "precision": MIXED, "tx": tx}
    return ya.planner.trace(LOSS, params, {"tokens": tokens, "targets": tokens}, **shape)


@functools.cache
def whole() -> Any:
    return search(traced(PARAMS, TX), SLOW)


def searched(**asked: Any) -> FormatsFound:
    return ya.planner.search_formats(traced, PARAMS, TX, SLOW, state=None, **asked)


def test_without_being_asked_nothing_is_tried() -> None:
    found = searched()
    assert [choice.name for choice in found.choices] == ["whole"] and found.best.errors == {}
    assert str(found.best.found) == str(whole()) and found.best.params is PARAMS and found.best.tx is TX


def test_each_choice_is_what_a_search_of_its_own_trace_finds() -> None:
    found = searched(wires=WIRES[:1], moments=[ROOTS, "host"])
    light = ya.params.with_wire(PARAMS, WIRES[0])
    txs = (TX, ya.optim.in_format(TX, ROOTS), ya.optim.on_host(TX))
    alone = [search(traced(params, tx), SLOW) for params in (PARAMS, light) for tx in txs]
    assert [str(choice.found) for choice in found.choices] == list(map(str, alone))
    assert [choice.name for choice in found.choices] == [
        "whole",
        "moments=roots/16",
        "moments=host",
        "gather=int8/16",
        "gather=int8/16, moments=roots/16",
        "gather=int8/16, moments=host",
    ]
    # the network is slow, and the moments are most of the state
    fastest = min(alone, key=lambda each: each.best.step_s)
    assert str(found.best.found) == str(fastest) and found.best.wire == WIRES[0]
    units = {unit.gathered_as.name for unit in found.best.found.trace.units if unit.gathered_as}  # type: ignore[union-attr]
    assert units == {"int8/16"}
    # in the table: what is saved of the first, in its units
    rows = str(found).splitlines()
    first, best = (each.best for each in (alone[0], alone[3]))
    assert f"{1e3 * (first.step_s - best.step_s):.1f} ms" in rows[4] and "off" in rows[0]
    assert rows[-1] == f"fastest: {found.best.name}, {fastest.best.point}"


def test_under_a_limit_that_only_smaller_moments_fit() -> None:
    def least(tx: Any) -> int:
        program = ya.schedules.zero3(remat="all")(traced(PARAMS, tx))
        return ya.planner.predict_memory(program).peak_bytes

    light = ya.optim.in_format(TX, ROOTS)
    limit = (least(TX) + least(light)) // 2
    assert least(light) < limit
    found = searched(moments=[ROOTS], memory=limit)
    assert found.choices[0].found is None and found.best.name == "moments=roots/16"
    assert found.best.found is not None and found.best.found.best.peak_bytes <= limit
    assert "does not fit" in str(found).splitlines()[1]
    with pytest.raises(DoesNotFit):
        searched(moments=[ROOTS], memory=2**10)


def test_what_is_no_place_is_refused() -> None:
    with pytest.raises(TypeError, match=r"in_format: expected a ya\.formats\.Format or None, got 'hots'"):
        searched(moments=["hots"])


def measured(mesh: Any) -> None:
    """Its errors are those of the plain values: matrices of layers for the wire, all that moments have."""
    state = ya.init(PARAMS, TX, mesh=made("shard"), precision=MIXED)
    tokens = torch.randint(0, CONFIG.vocab, (2, 16), generator=torch.Generator().manual_seed(mesh.get_rank()))
    batch = {"tokens": tokens, "targets": tokens}
    _, grads = ya.value_and_grad(LOSS)(state.params, batch)
    state, _ = ya.train_step(LOSS, TX)(state, batch)
    found = ya.planner.search_formats(
        traced, PARAMS, TX, SLOW, state=state, grads=grads, wires=WIRES[1:], moments=[ROOTS]
    )
    of_whole, of_roots, of_wire, of_both = (choice.errors for choice in found.choices)
    assert of_whole == {} and of_both == of_wire | of_roots
    assert set(of_both) == {"weights", "gradients", "moments"}
    layers = CONFIG.layers
    for of, tree in ("weights", state.params), ("gradients", grads):
        is_near(of_wire[of], by_definition(INT8, ya.unshard(tree), matrices, layers))
    assert set(of_roots["moments"]) > set(of_wire["weights"]) and max(of_roots["moments"].values()) < 0.1
    unit = max(of_wire["weights"], key=lambda unit: of_wire["weights"][unit])
    assert f"{of_wire['weights'][unit]:.2%} ({unit})" in str(found).splitlines()[3]


@pytest.mark.parametrize("world", [1, 2])
def test_its_errors_are_those_of_plain_values(pools: dict[int, Pool], world: int) -> None:
    pools[world].run(measured)
