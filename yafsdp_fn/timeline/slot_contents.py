"""What weight slots and gradient slots hold during a timeline.

weight slot      from the beginning of a gather into it until its last use; from the step's beginning where it was
                 carried over, to its end where it is gathered for the next step
gradient slot    from the beginning of the first backward that writes to it until its reduction has ended
"""

from operator import attrgetter
from typing import NamedTuple

from yafsdp_fn.schedules.ops import Backward, Reduce, filled
from yafsdp_fn.timeline.spans import Spans


class Held(NamedTuple):
    """A slot holds a unit. ready: when the gather has ended, or the first backward; before, the slot is being filled"""

    slot: int
    unit: int
    start: float
    ready: float
    end: float


BY_SLOT = attrgetter("slot", "start")


def weight_slots(timeline: Spans) -> list[Held]:
    """Empty where nothing is gathered."""
    now: dict[int, Held] = {}
    used: set[int] = set()
    done: list[Held] = []
    for span in timeline.spans:
        op = span.op
        for unit, slot in timeline.trace.weights_of(op):
            held = now.get(slot) or Held(slot, unit, 0.0, 0.0, span.end)
            now[slot] = held._replace(end=max(span.end, held.end) if slot in used else span.end)
            used.add(slot)
        for unit, slot in filled(op):
            done += [now[slot]] if slot in now else []
            now[slot] = Held(slot, unit, span.start, span.end, timeline.seconds)
            used.discard(slot)
    gathered = any(filled(span.op) for span in timeline.spans)
    return sorted([*done, *now.values()], key=BY_SLOT) if gathered else []


def grad_slots(timeline: Spans) -> list[Held]:
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
    return sorted([*done, *now.values()], key=BY_SLOT) if done else []
