"""The question whether some order that the waits permit goes wrong, for z3: as SMT-LIB, and its answer.

Event i begins at s_i and ends at e_i, integers that z3 chooses. Given is that a stream runs in order, and that an event
begins when those that it waits for have ended. What an event finds in a buffer follows from the order:

    it finds what the last event has left that began to write before this one ends
    what two write at a time, or one writes while another reads, is nothing that is known

and asked is for an order in which anything of `Meaning.wrong` happens. Of the stages of a pipeline each has streams and
buffers of its own, and waits as its own scoreboard says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import z3

from tests.schedules.meaning import Meaning
from tests.schedules.reference import MODES, Mode, Stops
from tests.schedules.stages.meaning import Joint
from tests.schedules.written import NOTHING, Written, Wrong
from yafsdp_fn.program.ops import Buffer
from yafsdp_fn.schedules import Program, Scoreboard


class Bad(NamedTuple):
    """Where a program goes wrong: in an order of events, `None` where no engine would run it at all."""

    why: str
    mode: Mode
    order: tuple[str, ...] | None = None


def waits_of(meaning: Written) -> list[list[int]]:
    boards = defaultdict[int, Scoreboard[int]](Scoreboard)
    return [boards[e.stage].use(at, e.stream, e.reads, e.writes) for at, e in enumerate(meaning.events)]


def question(meaning: Written, waits: list[list[int]]) -> str:
    """In SMT-LIB: satisfiable if there is a bad order."""
    return "\n".join([*_order(meaning, waits), *_asked(meaning)])


def _order(meaning: Written, waits: list[list[int]]) -> Iterator[str]:
    """When events may run."""
    last: dict[tuple[int, str], int] = {}
    of_stage: dict[int, list[int]] = {}
    for at, event in enumerate(meaning.events):
        yield f"(declare-const s{at} Int) (declare-const e{at} Int) (assert (< s{at} e{at})) (assert (<= 0 s{at}))"
        stream = event.stage, event.stream
        before = [*waits[at], *([last[stream]] if stream in last else [])]
        if at in meaning.ends:
            before = of_stage[event.stage]
        yield from (f"(assert (<= e{other} s{at}))" for other in before)
        last[stream] = at
        of_stage.setdefault(event.stage, []).append(at)
    yield from (f"(assert {term})" for term in meaning.met)


def _asked(meaning: Written) -> Iterator[str]:
    """What events find and leave, in an order, and that something of it is wrong."""
    half = len(meaning.bits)
    spoilt, none = meaning.spoilt, meaning.gradient()
    yield f"(define-sort W () (_ BitVec 16)) (define-sort G () (_ BitVec {meaning.width}))"
    both = f"(ite (= (bvand a b) {none}) {none} {spoilt})"
    yield f"(define-fun add ((a G) (b G)) G (bvor a b {both}))"
    if meaning.trace.replicas > 1:
        raw = meaning.gradient(*range(half))
        once = f"(= (bvand a (bvnot {raw})) {none})"
        yield f"(define-fun summed ((a G)) G (ite {once} (bvshl a (_ bv{half} {meaning.width})) {spoilt}))"
    else:
        yield "(define-fun summed ((a G)) G a)"
    # ---- what is left
    streams = [(event.stage, event.stream) for event in meaning.events]
    writers: dict[tuple[int, Buffer], list[tuple[int, int]]] = {}  # of a stage's buffer: (event, what it leaves)
    for number, (event_at, buffer, _) in enumerate(meaning.left):
        yield f"(declare-const w{number} {meaning.sort(buffer)})"
        writers.setdefault((streams[event_at][0], buffer), []).append((event_at, number))
    # ---- what is found
    for k, (at, buffer) in enumerate(meaning.found):
        # what its own stream runs later cannot be there yet
        there = writers.get((streams[at][0], buffer), [])
        later = {event for event, _ in there if event >= at and streams[event] == streams[at]}
        others = [(event, number) for event, number in there if event not in later]
        yield f"(declare-const r{k} {meaning.sort(buffer)}) (declare-const f{k} Int) (declare-const t{k} Int)"
        choice = []  # t, f: when the last one began and ended
        for event, number in others:
            yield f"(assert (or (<= s{event} t{k}) (<= e{at} s{event})))"
            choice.append(
                f"(and (= t{k} s{event}) (= f{k} e{event}) (< s{event} e{at}) (= r{k} (ite u{k} "
                f"{spoilt if meaning.sort(buffer) == 'G' else NOTHING} w{number})))"
            )
        choice.append(f"(and (= t{k} (- 2)) (= f{k} (- 1)) (= r{k} {meaning.beginning(buffer)}))")
        torn = [f"(and (< s{event} t{k}) (< t{k} e{event}))" for event, _ in others]
        yield f"(define-fun u{k} () Bool (or (< s{at} f{k}) {' '.join(torn)}))"
        yield f"(assert (or {' '.join(choice)}))"
    yield from (f"(assert (= w{number} {term}))" for number, (_, _, term) in enumerate(meaning.left))
    # ---- what is asked
    for number, wrong in enumerate(meaning.wrong):
        yield f"(declare-const x{number} Bool) (assert (= x{number} {wrong.term}))"
    yield f"(assert (or false {' '.join(f'x{number}' for number in range(len(meaning.wrong)))}))"


def _solver(lines: str) -> z3.Solver:
    solver = z3.SimpleSolver()
    solver.set("arith.solver", 3)  # differences alone: ten times faster here than simplex
    solver.from_string(lines)
    return solver


def bad_order(meaning: Written, waits: list[list[int]]) -> tuple[Wrong, tuple[str, ...]] | None:
    """What goes wrong in some order, with the events as they begin in it; None where z3 proves that there is none."""
    solver = _solver(question(meaning, waits))
    answer = solver.check()
    if answer == z3.unsat:
        return None
    assert answer == z3.sat, solver.reason_unknown()
    model = solver.model()
    value = {constant.name(): model[constant] for constant in model.decls()}
    wrong = next(w for number, w in enumerate(meaning.wrong) if z3.is_true(value.get(f"x{number}")))
    order = sorted(range(len(meaning.events)), key=lambda at: value[f"s{at}"].as_long())
    return wrong, tuple(f"{place(meaning, at)}: {meaning.events[at].op}" for at in order)


def place(meaning: Written, at: int) -> str:
    event = meaning.events[at]
    return f"stage {event.stage}, " * isinstance(meaning, Joint) + f"step {event.step}"


def ends(joint: Joint, waits: list[list[int]]) -> bool:
    """Whether there is any order at all, where stages wait for each other as much as they ever do."""
    lines = [*_order(joint, waits), *(f"(assert {term})" for term in joint.blocking)]
    return bool(_solver("\n".join(lines)).check() == z3.sat)


def opinion(program: Program) -> Bad | None:
    """Whether anything goes wrong in any mode and order; None if `program` is right."""
    for mode in MODES:
        try:
            meaning = Joint(program, mode) if len(program.stages) > 1 else Meaning(program, mode)
        except (Stops, LookupError, ValueError) as stops:
            return Bad(str(stops), mode)
        waits = waits_of(meaning)
        if isinstance(meaning, Joint) and not ends(meaning, waits):
            return Bad("stages wait for each other", mode)
        if (found := bad_order(meaning, waits)) is not None:
            at = f"{place(meaning, found[0].event)}: " * isinstance(meaning, Joint)
            return Bad(f"{at}{meaning.events[found[0].event].op}: {found[0].what}", mode, found[1])
    return None
