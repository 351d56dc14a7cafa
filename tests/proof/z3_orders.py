"""The question whether some order that the waits permit goes wrong, for z3: as SMT-LIB, and its answer.

Event i begins at s_i and ends at e_i, integers that z3 chooses. Given is that a stream runs in order, and that an event
begins when those that it waits for have ended. What an event finds in a buffer follows from the order:

    it finds what the last event has left that began to write before this one ends
    what two write at a time, or one writes while another reads, is nothing that is known

and asked is for an order in which anything of `SmtTerms.wrong` happens. Of a pipeline each stage has streams and
buffers of its own, and waits as its own scoreboard says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import z3

from tests.proof.reference import MODES, Mode, Stops
from tests.proof.smt import NOTHING, SmtProgram, SmtTerms, Wrong
from tests.proof.stages_smt import SmtPipeline
from yafsdp_fn.program.ops import Buffer
from yafsdp_fn.schedules import Program, Scoreboard


class Bad(NamedTuple):
    """Where a program goes wrong: in an order of events, `None` where no engine would run it at all."""

    why: str
    mode: Mode
    order: tuple[str, ...] | None = None


def waits_of(terms: SmtTerms) -> list[list[int]]:
    boards = defaultdict[int, Scoreboard[int]](Scoreboard)
    return [boards[e.stage].use(at, e.stream, e.reads, e.writes) for at, e in enumerate(terms.events)]


def question(terms: SmtTerms, waits: list[list[int]]) -> str:
    """In SMT-LIB: satisfiable if there is a bad order."""
    return "\n".join([*_order(terms, waits), *_asked(terms)])


def _order(terms: SmtTerms, waits: list[list[int]]) -> Iterator[str]:
    """When events may run."""
    last: dict[tuple[int, str], int] = {}
    of_stage: dict[int, list[int]] = {}
    for at, event in enumerate(terms.events):
        yield f"(declare-const s{at} Int) (declare-const e{at} Int) (assert (< s{at} e{at})) (assert (<= 0 s{at}))"
        stream = event.stage, event.stream
        before = [*waits[at], *([last[stream]] if stream in last else [])]
        if at in terms.ends:
            before = of_stage[event.stage]
        yield from (f"(assert (<= e{other} s{at}))" for other in before)
        last[stream] = at
        of_stage.setdefault(event.stage, []).append(at)
    yield from (f"(assert {term})" for term in terms.met)


def _asked(terms: SmtTerms) -> Iterator[str]:
    """What events find and leave, in an order, and that something of it is wrong."""
    half = len(terms.bits)
    spoilt = terms.spoilt
    none = terms.gradient()
    yield f"(define-sort W () (_ BitVec 16)) (define-sort G () (_ BitVec {terms.width}))"
    both = f"(ite (= (bvand a b) {none}) {none} {spoilt})"
    yield f"(define-fun add ((a G) (b G)) G (bvor a b {both}))"
    if terms.trace.replicas > 1:
        raw = terms.gradient(*range(half))
        once = f"(= (bvand a (bvnot {raw})) {none})"
        yield f"(define-fun summed ((a G)) G (ite {once} (bvshl a (_ bv{half} {terms.width})) {spoilt}))"
    else:
        yield "(define-fun summed ((a G)) G a)"
    # ---- what is left
    streams = [(event.stage, event.stream) for event in terms.events]
    writers: dict[tuple[int, Buffer], list[tuple[int, int]]] = {}  # of a stage's buffer: (event, what it leaves)
    for number, (event_at, buffer, _) in enumerate(terms.left):
        yield f"(declare-const w{number} {terms.sort(buffer)})"
        writers.setdefault((streams[event_at][0], buffer), []).append((event_at, number))
    # ---- what is found
    for k, (at, buffer) in enumerate(terms.found):
        # what its own stream runs later cannot be there yet
        there = writers.get((streams[at][0], buffer), [])
        later = {event for event, _ in there if event >= at and streams[event] == streams[at]}
        others = [(event, number) for event, number in there if event not in later]
        yield f"(declare-const r{k} {terms.sort(buffer)}) (declare-const f{k} Int) (declare-const t{k} Int)"
        choice = []  # t, f: when the last one began and ended
        for event, number in others:
            yield f"(assert (or (<= s{event} t{k}) (<= e{at} s{event})))"
            choice.append(
                f"(and (= t{k} s{event}) (= f{k} e{event}) (< s{event} e{at}) (= r{k} (ite u{k} "
                f"{spoilt if terms.sort(buffer) == 'G' else NOTHING} w{number})))"
            )
        choice.append(f"(and (= t{k} (- 2)) (= f{k} (- 1)) (= r{k} {terms.beginning(buffer)}))")
        torn = [f"(and (< s{event} t{k}) (< t{k} e{event}))" for event, _ in others]
        yield f"(define-fun u{k} () Bool (or (< s{at} f{k}) {' '.join(torn)}))"
        yield f"(assert (or {' '.join(choice)}))"
    yield from (f"(assert (= w{number} {term}))" for number, (_, _, term) in enumerate(terms.left))
    # ---- what is asked
    for number, wrong in enumerate(terms.wrong):
        yield f"(declare-const x{number} Bool) (assert (= x{number} {wrong.term}))"
    yield f"(assert (or false {' '.join(f'x{number}' for number in range(len(terms.wrong)))}))"


def _solver(lines: str) -> z3.Solver:
    solver = z3.SimpleSolver()
    solver.set("arith.solver", 3)  # differences alone: ten times faster here than simplex
    solver.from_string(lines)
    return solver


def bad_order(terms: SmtTerms, waits: list[list[int]]) -> tuple[Wrong, tuple[str, ...]] | None:
    """What goes wrong in some order, with the events as they begin in it; None where z3 proves that there is none."""
    solver = _solver(question(terms, waits))
    answer = solver.check()
    if answer == z3.unsat:
        return None
    assert answer == z3.sat, solver.reason_unknown()
    model = solver.model()
    value = {constant.name(): model[constant] for constant in model.decls()}
    wrong = next(w for number, w in enumerate(terms.wrong) if z3.is_true(value.get(f"x{number}")))
    order = sorted(range(len(terms.events)), key=lambda at: value[f"s{at}"].as_long())
    return wrong, tuple(f"{place(terms, at)}: {terms.events[at].op}" for at in order)


def place(terms: SmtTerms, at: int) -> str:
    event = terms.events[at]
    return f"stage {event.stage}, " * isinstance(terms, SmtPipeline) + f"step {event.step}"


def ends(joint: SmtPipeline, waits: list[list[int]]) -> bool:
    """Whether there is any order at all, where stages wait for each other as much as they ever do."""
    lines = [*_order(joint, waits), *(f"(assert {term})" for term in joint.blocking)]
    return bool(_solver("\n".join(lines)).check() == z3.sat)


def opinion(program: Program) -> Bad | None:
    """Whether anything goes wrong in any mode and order; None if `program` is right."""
    for mode in MODES:
        try:
            terms = SmtPipeline(program, mode) if len(program.stages) > 1 else SmtProgram(program, mode)
        except (Stops, LookupError, ValueError) as stops:
            return Bad(str(stops), mode)
        waits = waits_of(terms)
        if isinstance(terms, SmtPipeline) and not ends(terms, waits):
            return Bad("stages wait for each other", mode)
        if (found := bad_order(terms, waits)) is not None:
            at = f"{place(terms, found[0].event)}: " * isinstance(terms, SmtPipeline)
            return Bad(f"{at}{terms.events[found[0].event].op}: {found[0].what}", mode, found[1])
    return None
