"""Whatever `verify` accepts, the engine executes exactly: random programs in place of the builder's.

    program = builder(trace)
    changed = program after six random changes that `verify` accepts
    four steps of each, with an evaluation in between: the same metrics and parameters

PROGRAM_CASES sets how many cases there are at two ranks; at four there are a fifth as many. A case is drawn from its
world size and number, alike on every rank: `-k "2-17]"` runs number 17 of two ranks again.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.histories import BUILDERS
from tests.harness.marks import nightly
from tests.harness.meshes import made
from tests.harness.oracle import batch_of, compare
from tests.harness.pool import on_ranks
from tests.harness.problems import PROBLEMS
from tests.proof.mutants import mutant
from tests.steps.test_delays import Delays, delayed, without_waits
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.runtime.execute import Session
from yafsdp_fn.schedules import Gather, Op, Program, Reduce, Refused, Schedule, verify

CASES = int(os.environ.get("PROGRAM_CASES", "15"))
CHANGES, TRIES = 6, 600
TOLERANCE = 1e-9
"""Relative to a tensor, in float64: programs may add in another order."""

ON: dict[int, dict[str, tuple[str, ...]]] = {
    2: {"shard": ("zero1", "zero2", "zero3", "resident", "defer"), "copies": ("ddp", "zero3"), "nodes": ("hpz",)},
    4: {"replicate": ("hsdp", "zero1", "defer"), "nodes": ("hpz", "zero2"), "replicate-nodes": ("hpz", "hsdp")},
}
"""World -> mesh -> builders."""

REMAT = {"none": ya.schedules.remat.none, "all": ya.schedules.remat.all, "every": ya.schedules.remat.every(2)}
LATE: Delays = dict.fromkeys(("gather", "reduce", "replicate", "compute", "update"), (0.3, 3e-3))


class Case(NamedTuple):
    """clips: updates wait for the norm; late: work of the changed program is delayed at random"""

    mesh: str
    problem: str
    builder: str
    remat: str
    microbatches: int
    update: bool
    clips: bool
    late: bool

    @staticmethod
    def drawn(world: int, rng: random.Random) -> Case:
        mesh = rng.choice(list(ON[world]))
        builder, problem, remat = (rng.choice(list(of)) for of in (ON[world][mesh], PROBLEMS, REMAT))
        return Case(mesh, problem, builder, remat, rng.choice((1, 2)), *(rng.random() < p for p in (0.6, 0.5, 0.3)))

    def built(self) -> Schedule:
        return BUILDERS[self.builder](update=self.update, remat=REMAT[self.remat])

    def lived(self, schedule: Schedule | Program) -> tuple[dict[str, Any], Program]:
        """What is seen in four steps under `schedule`, and the program that ran."""
        mesh = made(self.mesh)
        problem = PROBLEMS[self.problem]
        clipped = ya.optim.chain(ya.optim.clip_by_global_norm(0.1), ya.optim.adamw(1e-2))
        tx = clipped if self.clips else ya.optim.sgd(0.1, momentum=0.9)
        state = ya.init(problem.params(3), tx, mesh=mesh, precision=ya.Precision(torch.float64))
        step = ya.train_step(
            problem.loss, tx, schedule=schedule, microbatches=self.microbatches, skip_nonfinite=self.clips
        )
        evaluate = ya.eval_step(problem.loss)
        seen = {}
        for number in range(4):
            batch = batch_of(mesh.get_rank(), seed=number, rows=4)
            state, seen[f"step {number}"] = step(state, batch)
            if number == 1:
                seen["evaluation"] = evaluate(state, batch)
        program = step.program(state)
        return {**seen, "parameters": ya.unshard(state)}, program


def changed(program: Program, rng: random.Random) -> Program:
    """`program` after CHANGES random changes that `verify` accepts."""
    found, accepted = program, 0
    for _ in range(TRIES):
        candidate = mutant(found, rng)
        if candidate.ops == found.ops:
            continue
        with contextlib.suppress(Refused):
            found = verify(candidate)
            accepted = accepted + 1
            if accepted >= CHANGES and found.ops != program.ops:
                return found
    raise AssertionError(f"{accepted} of {TRIES} changes were accepted, expected {CHANGES}:\n{program.diff(found)}")


def check(case: Case, rng: random.Random, during: contextlib.AbstractContextManager[Any]) -> None:
    """One rank's part: a changed program, run inside `during`, does what the builder's does."""
    expected, program = case.lived(case.built())
    other = changed(program, rng)
    try:
        with during:
            found, ran = case.lived(other)
        assert ran.ops == other.ops
        compare(found, expected, TOLERANCE, "the changed program")
    except Exception as error:
        raise AssertionError(f"{case}: {error}\n{program.diff(other)}") from error


ALL = [(2, n) for n in range(CASES)] + [(4, n) for n in range(-(-CASES // 5))]
DAILY = {2: 5, 4: 1}  # of each world; all run nightly


@on_ranks()
@pytest.mark.parametrize(
    ("world", "number"),
    [(w, n) if n < DAILY[w] else nightly(w, n) for w, n in ALL],
)
def test_accepted_programs_are_exact(mesh: Any, number: int) -> None:
    rng = random.Random(f"{mesh.size()}-{number}")
    case = Case.drawn(mesh.size(), rng)
    check(case, rng, delayed(LATE, seed=mesh.get_rank()) if case.late else contextlib.nullcontext())


# ---- broken engines


@contextlib.contextmanager
def skipping(kind: type[Any]) -> Iterator[None]:
    """An engine that leaves out the ops of one kind in the third step."""
    issue = Session.issue

    def skip(self: Session, op: Op, *why: Any, **number: Any) -> None:
        if type(op) is not kind or self.number != 2:
            issue(self, op, *why, **number)

    with mock.patch.object(Session, "issue", skip):
        yield


@contextlib.contextmanager
def late_gathers() -> Iterator[None]:
    """Nobody waits, and gathers are late."""
    with without_waits(), delayed({"gather": (1.0, 0.05)}, seed=0):
        yield


BROKEN: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "gathers": lambda: skipping(Gather),
    "reductions": lambda: skipping(Reduce),
    "carried": lambda: mock.patch.object(
        Session, "start", lambda session: session.follow()
    ),  # what slots should hold in the beginning
    "waits": late_gathers,
}


@on_ranks(2)
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_engine_is_seen(mesh: Any, what: str) -> None:
    """The test above can fail."""
    case = Case("shard", "base", "zero3", "every", 2, update=True, clips=False, late=False)
    with pytest.raises(AssertionError, match=f"the changed program: beyond {TOLERANCE:g}"):
        check(case, random.Random(what), BROKEN[what]())
    communicators(mesh).drain()
