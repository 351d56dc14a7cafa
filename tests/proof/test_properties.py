"""Random losses through every builder: `verify` accepts, and what comes out is exact, in any order that waits permit.

Each loss goes through all six builders, and half as many are changed. The nightly run has five times as many.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.program.traces import MESHES, on
from tests.proof.mutants import mutant
from tests.proof.overlapped import account, goes_wrong, right, waits_of
from tests.proof.reference import MODES, SHARDED
from tests.schedules.strategies import POLICIES, UPDATES, Choice, choices, traces
from yafsdp_fn.schedules import AllReduce, Gather, Norm, Program, Reduce, Refused, Stash, Trace, Update, build, verify

EXAMPLES = 200
"""Random losses of a nightly run."""


def examples(number: int) -> settings:
    return settings(
        max_examples=max(1, number),
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def built(choice: Choice, trace: Trace) -> Program | None:
    """The program, verified; None where the builder must refuse the trace, which it does, naming the reason."""
    refusal = choice.refusal(trace)
    if refusal is None:
        return verify(choice.schedule(trace))
    with pytest.raises(ValueError, match=re.compile(refusal, re.DOTALL)):
        choice.schedule(trace)
    return None


def every_builder(trace: Trace, all_builders: list[Choice]) -> None:
    for number, choice in enumerate(all_builders):
        program = built(choice, on(trace, choice.mesh, choice.updates, choice.parts))
        event(f"{choice.name} {'refuses' if program is None else 'builds'}")
        if program is None:
            continue
        assert right(program), choice
        terms = account(program, SHARDED if number % 2 else random.Random(len(program.ops)).choice(MODES))
        assert not goes_wrong(terms, waits_of(terms.events), random.Random(number)), choice
        counts(program, choice)


def any_assignment(trace: Trace, data: st.DataObject) -> None:
    trace = on(trace, data.draw(st.sampled_from(sorted(MESHES))), data.draw(st.sampled_from(UPDATES)))
    ids = [unit.id for unit in trace.units]
    slots, grad_slots = (data.draw(st.fixed_dictionaries({u: st.integers(0, 4) for u in ids})) for _ in range(2))
    program = build(
        trace,
        slots,
        grad_slots,
        prefetch=data.draw(st.integers(0, 3)),
        remat=POLICIES[data.draw(st.sampled_from(sorted(POLICIES)))],
        defer=data.draw(st.booleans()),
        secondary=data.draw(st.sets(st.sampled_from(ids))),
        update=data.draw(st.booleans()) and trace.update_when != "never",
    )
    apart = all(
        len({at[u] for u in units}) == len(units)
        for visit in trace.visits
        for at, units in ((slots, visit.units), (grad_slots, visit.trained if trace.trains else ()))
    )
    event("apart" if apart else "not apart")
    if not apart:
        assert not accepted(program)
        return
    verify(program)
    assert right(program)


def random_changes(trace: Trace, all_builders: list[Choice], rng: random.Random) -> None:
    """Up to four changes, of which each is kept if `verify` accepts it: what is accepted is exact in any order."""
    for choice in rng.sample(all_builders, 2):
        there = on(trace, choice.mesh, choice.updates, choice.parts)
        program = None if choice.refusal(there) else choice.schedule(there)
        if program is None or len(program.ops) > 60:
            continue
        changed = 0
        for _ in range(20):
            attempt = mutant(program, rng)
            if changed < 4 and attempt.ops != program.ops and accepted(attempt):
                program = attempt
                changed = changed + 1
        event(f"{changed} changes")
        assert right(program), f"accepted, though wrong:\n{program}"
        terms = account(program, rng.choice(MODES))
        assert not goes_wrong(terms, waits_of(terms.events), rng), program


def accepted(program: Program) -> bool:
    try:
        verify(program)
    except Refused:
        return False
    return True


def counts(program: Program, choice: Choice) -> None:
    """What holds of every trace."""
    trace = program.trace
    options = choice.options
    visited = {u for visit in trace.visits for u in visit.units}
    trained = {u for visit in trace.visits for u in visit.trained} if trace.trains else set()
    trainable = {u.id for u in trace.units if u.trainable}
    updates = options["update"] and trace.trains
    deferred = options.get("defer") or choice.name in ("zero1", "ddp")
    assert program.count(Gather, "shard") + program.count(Gather, "node") == program.count(Gather)
    assert program.count(AllReduce) == (len(trained) if trace.replicas > 1 else 0)
    assert program.count(Update) == (sum(map(trace.parts, trainable)) if updates else 0)
    assert program.count(Norm) == (len(trainable) if updates and trace.update_when == "after norm" else 0)
    assert program.count(Reduce) == len(trained) if deferred else program.count(Reduce) >= len(trained)
    if choice.name in ("zero1", "zero2", "ddp"):
        # once a step each; a frozen unit is gathered once and for all, before the first step
        assert program.count(Gather) == len(visited & trainable)
        assert set(program.carried().values()) >= visited - trainable
    if choice.name == "hpz":
        assert program.count(Stash) <= options["layers"]
        assert set(program.secondary_bytes()) == {u for op in program.ops if isinstance(op, Stash) for u in op.units}
    else:
        assert program.count(Stash) == program.count(Gather, "node") == 0
    assert program.carried() == {} or updates or visited - trainable
    sent = program.wire_bytes()
    if trace.ranks == 1:
        assert sent["gather"] == sent["reduce"] == 0
    if deferred:
        wire = sum(trace.units[u].reduce_bytes for u in trained)
        assert sent["reduce"] * trace.ranks == wire * (trace.ranks - 1)
    assert sent["all-reduce"] <= 2 * sum(trace.units[u].reduce_bytes for u in trained) // trace.ranks


BUILDERS = given(traces(), choices()), every_builder
ASSIGNMENTS = given(traces(), st.data()), any_assignment
CHANGES = given(traces(), choices(), st.randoms(use_true_random=False)), random_changes


def tried(number: int, drawn: Any, function: Callable[..., None]) -> None:
    """Calls a function with random arguments so many times."""
    examples(number)(drawn(function))()  # drawn anew: hypothesis sets the number of one object once


def test_every_builder_on_random_losses() -> None:
    tried(EXAMPLES // 5, *BUILDERS)


def test_build_takes_any_assignment_that_keeps_the_units_of_a_visit_apart() -> None:
    tried(EXAMPLES // 5, *ASSIGNMENTS)


def test_random_changes_of_random_programs() -> None:
    tried(EXAMPLES // 10, *CHANGES)


@pytest.mark.nightly
def test_more_random_losses_and_changes() -> None:
    tried(EXAMPLES, *BUILDERS)
    tried(EXAMPLES, *ASSIGNMENTS)
    tried(EXAMPLES // 2, *CHANGES)
