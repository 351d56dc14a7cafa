"""Checks the rules `offload` and `flow`: contents of carry slots and of host buffers.

    Forward into slot s  ->  slot s  -> Offload -> host -> Fetch -> slot t  -> Backward from slot t        offload
                             slot s  ------------------------------------->    Backward from slot s

    given by a compute -> slot s -> Send ... of another stage ... Receive -> slot t -> taken by a compute   flow
    given by a compute -> slot s -> taken by a compute, where both segments are on one stage

A slot is written only when it is free, since what is lost cannot be made again.
"""

from collections.abc import Callable, Sequence

from yafsdp_fn.program.ops import Backward, Buffer, ComputeOp, Fetch, Forward, Receive, Send
from yafsdp_fn.program.split import StageMessage
from yafsdp_fn.program.text import describe_message
from yafsdp_fn.proof.walk import Walk

Check = Callable[[Walk, int, int | StageMessage], None]


def only(kind: type[int] | type[StageMessage], check: Check) -> Check:
    """Returns `check` for what visits have saved alone, or for parcels alone."""

    def checked(walk: Walk, slot: int, what: int | StageMessage) -> None:
        if isinstance(what, kind):
            check(walk, slot, what)

    return checked


def is_free(walk: Walk, slot: int, what: int | StageMessage) -> None:
    if (held := walk.carries.get(slot)) is not None:
        walk.refuse(f"carry slot {slot} still holds {_named(walk, held.what)}", ("carry slot", 0, slot), held.op)


def is_there(walk: Walk, slot: int, what: int | StageMessage) -> None:
    held = walk.carries.get(slot)
    if held is None or held.what != what:
        there = "nothing" if held is None else _named(walk, held.what)
        why = f"carry slot {slot} holds {there}, it must hold {_named(walk, what)}"
        walk.refuse(why, ("carry slot", 0, slot), None if held is None else held.op)


def _named(walk: Walk, what: int | StageMessage) -> str:
    return (
        describe_message(what, walk.trace) if isinstance(what, StageMessage) else f"what {walk.visit(what)} has saved"
    )


# ---- offload


def one_microbatch(walk: Walk, op: Forward) -> None:
    if walk.trace.split is not None:
        walk.refuse("carries are known by their visit, and a stage has several microbatches of it")


def saved(walk: Walk, op: Backward) -> None:
    forward = walk.saved.get((op.visit, op.microbatch))
    if op.carry_slot is not None and forward is None:
        walk.refuse(f"the forward of {walk.visit(op.visit)} has saved no carry")
    if op.carry_slot is None and forward is not None:
        why = f"{walk.visit(op.visit)} has saved its carry in a carry slot"
        walk.refuse(why, _where(walk, op.visit), forward)


def on_the_host(walk: Walk, op: Fetch) -> None:
    if op.visit not in walk.host:
        walk.refuse(f"nothing that {walk.visit(op.visit)} has saved is on the host", ("host", 0, op.visit))


def all_read(walk: Walk) -> None:
    for (visit, _), forward in walk.saved.items():
        walk.refuse(f"no backward reads what {walk.visit(visit)} has saved", _where(walk, visit), forward)


def _where(walk: Walk, visit: int) -> Buffer:
    """Returns the buffer that the carry of `visit` is in."""
    slots = (("carry slot", 0, slot) for slot, held in walk.carries.items() if held.what == visit)
    return next(slots, ("host", 0, visit))


# ---- flow


def a_slot_each(walk: Walk, op: ComputeOp, way: str, parcels: Sequence[StageMessage]) -> None:
    slots = getattr(op, way)
    if len(parcels) != len(slots):
        words = ", ".join(_named(walk, parcel) for parcel in parcels) or "nothing"
        walk.refuse(f"it {way} {words}: expected {len(parcels)} carry slots, got {slots}")


def ends_here(walk: Walk, op: Send | Receive) -> None:
    """Checks that a message is between this stage and another."""
    assert walk.trace.split is not None, "in form"
    ends = walk.trace.split.ends(op.flow, op.back)
    if ends[isinstance(op, Receive)] != walk.trace.stage or ends[0] == ends[1]:
        way = f"from stage {ends[0]} to stage {ends[1]}" if ends[0] != ends[1] else f"inside stage {ends[0]}"
        walk.refuse(f"that goes {way}; this is stage {walk.trace.stage}")


def all_taken(walk: Walk) -> None:
    for slot, held in walk.carries.items():
        walk.refuse(f"nothing takes {_named(walk, held.what)}", ("carry slot", 0, slot), held.op)
