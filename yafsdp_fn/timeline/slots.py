"""What weight slots and gradient slots hold during a timeline.

weight slot      from the beginning of a gather into it until its last use; from the step's beginning where it was
                 carried over, to its end where it is gathered for the next step
gradient slot    from the beginning of the first backward that writes to it until its reduction has ended
"""

from __future__ import annotations

from typing import NamedTuple

from yafsdp_fn.schedules.ops import Backward, Forward, Gather, Reduce, Stash
from yafsdp_fn.timeline.timeline import Timeline


class Held(NamedTuple):
    """A slot holds a unit. ready: when the gather has ended, or the first backward; before, the slot is being filled"""

    slot: int
    unit: int
    start: float
    ready: float
    end: float


def weight_slots(timeline: Timeline) -> list[Held]:
    """Empty where nothing is gathered."""
    now: dict[int, Held] = {}
    used: set[int] = set()
    done: list[Held] = []
    for span in timeline.spans:
        op = span.op
        if isinstance(op, Gather):
            for unit, slot in zip(op.units, op.slots, strict=True):
                done += [now[slot]] if slot in now else []
                now[slot] = Held(slot, unit, span.start, span.end, timeline.seconds)
                used.discard(slot)
        elif isinstance(op, Forward | Backward | Stash):
            units = op.units if isinstance(op, Stash) else timeline.trace.visits[op.visit].units
            for unit, slot in zip(units, op.slots, strict=True):
                held = now.get(slot) or Held(slot, unit, 0.0, 0.0, span.end)
                end = max(span.end, held.end) if slot in used else span.end
                used.add(slot)
                now[slot] = held._replace(end=end)
    gathered = any(isinstance(span.op, Gather) for span in timeline.spans)
    return _in_order([*done, *now.values()]) if gathered else []


def grad_slots(timeline: Timeline) -> list[Held]:
    """Empty where nothing is reduced."""
    now: dict[int, Held] = {}
    done: list[Held] = []
    for span in timeline.spans:
        op = span.op
        if isinstance(op, Backward):
            trained = timeline.trace.visits[op.visit].trained
            for unit, slot in zip(trained, op.grad_slots, strict=True):
                now.setdefault(slot, Held(slot, unit, span.start, span.end, timeline.seconds))
        elif isinstance(op, Reduce):
            for slot in op.grad_slots:
                done += [now.pop(slot)._replace(end=span.end)] if slot in now else []
    return _in_order([*done, *now.values()]) if done else []


def _in_order(held: list[Held]) -> list[Held]:
    return sorted(held, key=lambda each: (each.slot, each.start))
