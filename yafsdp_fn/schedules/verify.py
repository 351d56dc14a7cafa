"""Proof that a program is right: it is executed symbolically, twice in a row, with the contents of every buffer.

The rules, by the names that a refusal gives:

    form      ops name units, visits and slots that exist, as many slots as units, no slot twice
    order     the computes are the trace's, all of them, in its order
    weights   a compute reads slots that hold its units' weights of this step
    graph     a kept graph's backward runs in the slots of its forward (saved weights are views of them)
    gradient  a backward writes to a gradient slot that is free or holds the same unit
    reduce    a reduction takes the gradient of its unit from the slot that holds it
    once      every contribution (visit, microbatch, unit) is reduced exactly once by the end
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from yafsdp_fn.schedules.program import Backward, Forward, Gather, Op, Program, Reduce, describe
from yafsdp_fn.schedules.trace import Compute, Trace

Contribution = tuple[int, int, int]
"""(visit, microbatch, unit)"""


class Refused(ValueError):
    """A program broke a rule. `rule`: its name; `op`: index of the op, -1 for the end of the program."""

    def __init__(self, rule: str, op: int, message: str) -> None:
        super().__init__(message)
        self.rule, self.op = rule, op


def verify(program: Program) -> Program:
    """Returns `program` if it is right; raises `Refused`, which names op, slot and rule, if not."""
    checker = _Checker(program)
    for version in range(2):  # twice: what a step leaves behind must not satisfy the next
        checker.step(version)
    return program


class _Checker:
    def __init__(self, program: Program) -> None:
        self.trace, self.ops = program
        self.weights: dict[int, tuple[int, int, int]] = {}  # slot -> unit, version, op that gathered it
        self.grads: dict[int, tuple[int, int, list[Contribution]]] = {}  # grad slot -> unit, last op, contributions

    def refuse(self, rule: str, index: int, why: str, other: int | None = None) -> NoReturn:
        here = f"op {index} ({describe(self.ops[index], self.trace)})" if index >= 0 else "end of program"
        against = "" if other is None else f"\n    against op {other} ({describe(self.ops[other], self.trace)})"
        raise Refused(rule, index, f"{here}: rule {rule!r}: {why}{against}")

    def unit(self, unit: int) -> str:
        return self.trace.units[unit].name

    def step(self, version: int) -> None:
        computes, self.graphs = iter(self.trace.order), dict[tuple[int, int], tuple[int, tuple[int, ...]]]()
        self.reduced: dict[Contribution, int] = {}
        for index, op in enumerate(self.ops):
            self.form(index, op)
            match op:
                case Gather(units, slots):
                    for unit, slot in zip(units, slots, strict=True):
                        self.weights[slot] = (unit, version, index)
                case Reduce():
                    self.reduce(index, op)
                case Forward() | Backward():
                    compute = self.next_compute(index, op, computes)
                    self.reads(index, op, version)
                    if isinstance(op, Forward):
                        self.graphs[compute.visit, compute.microbatch] = (index, op.slots if op.keep else ())
                    else:
                        self.backward(index, op, compute)
        if (left := next(computes, None)) is not None:
            self.refuse("order", -1, f"{left.kind} of {self.trace.visits[left.visit].name} is missing")
        self.all_reduced()

    def form(self, index: int, op: Op) -> None:
        units, visits = len(self.trace.units), len(self.trace.visits)
        pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]
        match op:
            case Gather(ids, slots) | Reduce(ids, slots):
                if any(not 0 <= unit < units for unit in ids):
                    raise Refused(
                        "form", index, f"op {index} ({op}): rule 'form': the trace has units 0 to {units - 1}"
                    )
                pairs = [(ids, slots)]
            case Forward(visit, slots, _) | Backward(visit, slots, _):
                if not 0 <= visit < visits:
                    raise Refused("form", index, f"op {index} ({op}): rule 'form': there are visits 0 to {visits - 1}")
                pairs = [(self.trace.visits[visit].units, slots)]
                if isinstance(op, Backward):
                    pairs.append((self.trace.visits[visit].trained, op.grad_slots))
            case _:
                raise Refused("form", index, f"op {index} ({op}): rule 'form': not an op of a program")
        for ids, slots in pairs:
            if len(ids) != len(slots):
                self.refuse("form", index, f"{len(ids)} units but {len(slots)} slots {slots}")
            if len(set(ids)) != len(ids):
                self.refuse("form", index, f"units {ids} name one unit twice")
            if len(set(slots)) != len(slots):
                self.refuse("form", index, f"slots {slots} name one slot twice")

    def next_compute(self, index: int, op: Forward | Backward, computes: Iterator[Compute]) -> Compute:
        now = next(computes, None)
        kind = type(op).__name__.lower()
        if now is None:
            self.refuse("order", index, "the trace has no more computes")
        if (kind, op.visit) != (now.kind, now.visit):
            self.refuse("order", index, f"the trace has {now.kind} of {self.trace.visits[now.visit].name} here")
        return now

    def reads(self, index: int, op: Forward | Backward, version: int) -> None:
        for unit, slot in zip(self.trace.visits[op.visit].units, op.slots, strict=True):
            held = self.weights.get(slot)
            if held is None:
                self.refuse("weights", index, f"slot {slot} was never gathered into; it must hold {self.unit(unit)}")
            if held[:2] != (unit, version):
                stale = "" if held[1] == version else " of the step before"
                self.refuse(
                    "weights",
                    index,
                    f"slot {slot} holds {self.unit(held[0])}{stale}, it must hold {self.unit(unit)}",
                    held[2],
                )

    def backward(self, index: int, op: Backward, now: Compute) -> None:
        forward, slots = self.graphs[now.visit, now.microbatch]
        if slots and slots != op.slots:
            self.refuse("graph", index, f"the graph was kept in slots {slots}, not {op.slots}", forward)
        for unit, slot in zip(self.trace.visits[op.visit].trained, op.grad_slots, strict=True):
            held = self.grads.setdefault(slot, (unit, index, []))
            if held[0] != unit:
                why = f"grad slot {slot} still holds the unreduced gradient of {self.unit(held[0])}"
                self.refuse("gradient", index, why, held[1])
            self.grads[slot] = (unit, index, [*held[2], (now.visit, now.microbatch, unit)])

    def reduce(self, index: int, op: Reduce) -> None:
        for unit, slot in zip(op.units, op.grad_slots, strict=True):
            held = self.grads.get(slot)
            if held is None:
                before = max((at for (_, _, u), at in self.reduced.items() if u == unit), default=None)
                again = "; it was reduced already" if before is not None else ""
                self.refuse("reduce", index, f"grad slot {slot} holds no gradient of {self.unit(unit)}{again}", before)
            if held[0] != unit:
                why = f"grad slot {slot} holds the gradient of {self.unit(held[0])}, not of {self.unit(unit)}"
                self.refuse("reduce", index, why, held[1])
            self.reduced.update(dict.fromkeys(held[2], index))
            del self.grads[slot]

    def all_reduced(self) -> None:
        for slot, (unit, index, _) in self.grads.items():
            self.refuse("once", -1, f"grad slot {slot} still holds the gradient of {self.unit(unit)}", index)
        for visit, microbatch, unit in needed(self.trace) - self.reduced.keys():
            where = f"{self.trace.visits[visit].name} in microbatch {microbatch}"
            self.refuse("once", -1, f"the gradient of {self.unit(unit)} from {where} is never reduced")


def needed(trace: Trace) -> set[Contribution]:
    """Every gradient contribution of the trace."""
    return {
        (compute.visit, compute.microbatch, unit)
        for compute in trace.order
        if compute.kind == "backward"
        for unit in trace.visits[compute.visit].trained
    }
