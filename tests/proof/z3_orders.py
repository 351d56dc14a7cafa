"""The question whether some order that the waits permit goes wrong, for z3: as SMT-LIB, and its answer.

Event i begins at b_i and ends at e_i, integers that z3 chooses. Given is that a stream runs in order, and that an event
begins when those that it waits for have ended. What an event finds in a buffer follows from the order:

    it finds what the last event has left that began to write before this one ends
    what two write at a time, or one writes while another reads, is nothing that is known

and asked is for an order in which anything of `Account.wrong` happens. Of a pipeline each stage has streams and
buffers of its own, and waits as its own scoreboard says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import z3

from tests.proof.overlapped import Waits, account, constraints, drawn, waits_of
from tests.proof.reference import MODES, Account, Added, Constant, Found, If, Mode, Stops, Summed, Term, Wrong
from tests.proof.stages_reference import PipelineAccount
from yafsdp_fn.program.ops import Buffer
from yafsdp_fn.schedules import Program


class Bad(NamedTuple):
    """Where a program goes wrong: in an order of events, `None` where no engine would run it at all."""

    why: str
    mode: Mode
    order: tuple[str, ...] | None = None


def _order(terms: Account, waits: Waits) -> Iterator[str]:
    """When events may run."""
    for at in range(len(terms.events)):
        yield f"(declare-const b{at} Int) (declare-const e{at} Int) (assert (<= 0 b{at}))"
    for (what, one), (then, other) in constraints(terms, waits):
        yield f"(assert (< {what[0]}{one} {then[0]}{other}))"


def _written(term: Term) -> str:
    match term:
        case Constant(value, bits):
            return f"(_ bv{value} {bits})"
        case Found(number):
            return f"r{number}"
        case Added(one, other):
            return f"(add {_written(one)} {_written(other)})"
        case Summed(gradient):
            return f"(summed {_written(gradient)})"
        case If(held, among, right, wrong):
            fits = " ".join(f"(= {_written(held)} {_written(one)})" for one in among)
            return f"(ite (or false {fits}) {_written(right)} {_written(wrong)})"


def _asked(terms: Account) -> Iterator[str]:
    """What events find and leave, in an order, and that something of it is wrong."""
    half = len(terms.bits)
    spoilt = _written(terms.spoilt)
    none = _written(terms.gradient())
    yield f"(define-sort G () (_ BitVec {terms.width}))"
    both = f"(ite (= (bvand a b) {none}) {none} {spoilt})"
    yield f"(define-fun add ((a G) (b G)) G (bvor a b {both}))"
    if terms.trace.replicas > 1:
        raw = _written(terms.gradient(*range(half)))
        once = f"(= (bvand a (bvnot {raw})) {none})"
        yield f"(define-fun summed ((a G)) G (ite {once} (bvshl a (_ bv{half} {terms.width})) {spoilt}))"
    else:
        yield "(define-fun summed ((a G)) G a)"
    # ---- what is left
    streams = [(event.stage, event.stream) for event in terms.events]
    writers: dict[tuple[int, Buffer], list[tuple[int, int]]] = {}  # of a stage's buffer: (event, what it leaves)
    for number, (event_at, buffer, _) in enumerate(terms.left):
        yield f"(declare-const w{number} (_ BitVec {terms.unknown(buffer).bits}))"
        writers.setdefault((streams[event_at][0], buffer), []).append((event_at, number))
    # ---- what is found
    for k, (at, buffer) in enumerate(terms.found):
        # what its own stream runs later cannot be there yet
        there = writers.get((streams[at][0], buffer), [])
        later = {event for event, _ in there if event >= at and streams[event] == streams[at]}
        others = [(event, number) for event, number in there if event not in later]
        unknown = terms.unknown(buffer)
        beginning = terms.beginning(buffer)
        yield f"(declare-const r{k} (_ BitVec {unknown.bits})) (declare-const f{k} Int) (declare-const t{k} Int)"
        choice = []  # t, f: when the last one began and ended
        for event, number in others:
            yield f"(assert (or (<= b{event} t{k}) (<= e{at} b{event})))"
            choice.append(
                f"(and (= t{k} b{event}) (= f{k} e{event}) (< b{event} e{at}) (= r{k} (ite u{k} "
                f"{_written(unknown)} w{number})))"
            )
        choice.append(f"(and (= t{k} (- 2)) (= f{k} (- 1)) (= r{k} {_written(beginning)}))")
        torn = [f"(and (< b{event} t{k}) (< t{k} e{event}))" for event, _ in others]
        yield f"(define-fun u{k} () Bool (or (< b{at} f{k}) {' '.join(torn)}))"
        yield f"(assert (or {' '.join(choice)}))"
    yield from (f"(assert (= w{number} {_written(term)}))" for number, (_, _, term) in enumerate(terms.left))
    # ---- what is asked
    for number, wrong in enumerate(terms.wrong):
        differs = f"(distinct {_written(wrong.term)} {_written(wrong.value)})"
        yield f"(declare-const x{number} Bool) (assert (= x{number} {differs}))"
    yield f"(assert (or false {' '.join(f'x{number}' for number in range(len(terms.wrong)))}))"


def bad_order(terms: Account, waits: Waits) -> tuple[Wrong, tuple[str, ...]] | None:
    """What goes wrong in some order, with the events as they begin in it; None where z3 proves that there is none."""
    solver = z3.SimpleSolver()
    solver.set("arith.solver", 3)  # differences alone: ten times faster here than simplex
    solver.from_string("\n".join([*_order(terms, waits), *_asked(terms)]))
    answer = solver.check()
    if answer == z3.unsat:
        return None
    assert answer == z3.sat, solver.reason_unknown()
    model = solver.model()
    value = {constant.name(): model[constant] for constant in model.decls()}
    wrong = next(w for number, w in enumerate(terms.wrong) if z3.is_true(value.get(f"x{number}")))
    order = sorted(range(len(terms.events)), key=lambda at: value[f"b{at}"].as_long())
    return wrong, tuple(f"{place(terms, at)}: {terms.events[at].op}" for at in order)


def place(terms: Account, at: int) -> str:
    event = terms.events[at]
    return f"stage {event.stage}, " * isinstance(terms, PipelineAccount) + f"step {event.step}"


def opinion(program: Program) -> Bad | None:
    """Whether anything goes wrong in any mode and order; None if `program` is right."""
    for mode in MODES:
        try:
            terms = account(program, mode)
        except (Stops, LookupError, ValueError) as stops:
            return Bad(str(stops), mode)
        waits = waits_of(terms.events)
        if drawn(terms, constraints(terms, waits, blocking=True), random.Random(0)) is None:
            return Bad("stages wait for each other", mode)
        if (found := bad_order(terms, waits)) is not None:
            at = f"{place(terms, found[0].event)}: " * isinstance(terms, PipelineAccount)
            return Bad(f"{at}{terms.events[found[0].event].op}: {found[0].what}", mode, found[1])
    return None
