"""The rules of computes: their order, the graphs they resume, the weights in their slots, and the carries they save and
take."""

from collections.abc import Callable, Sequence

from yafsdp_fn.program.ops import Backward, Buffer, ComputeOp, Fetch, Forward, Gather, Receive, Send, Stash, kind_of
from yafsdp_fn.program.split import Parcel
from yafsdp_fn.program.text import describe_parcel
from yafsdp_fn.proof.walk import Walk, Weights

# ---- Checks the rules `order` and `graph`: computes are the trace's, and a backward finds what its forward kept.


def in_order(walk: Walk, op: ComputeOp) -> None:
    if walk.done == len(walk.trace.order):
        walk.refuse("the trace has no more computes")
    now = walk.trace.order[walk.done]
    if (kind_of(op), op.visit, op.microbatch) != now[:3]:
        of = f" of microbatch {now.microbatch}" if walk.trace.microbatches > 1 else ""
        walk.refuse(f"the trace has {now.kind} of {walk.visit(now.visit)}{of} here")


def all_there(walk: Walk) -> None:
    for left in walk.trace.order[walk.done :]:
        walk.refuse(f"{left.kind} of {walk.visit(left.visit)} is missing")


def same_slots(walk: Walk, op: Backward) -> None:
    if (op.visit, op.microbatch) not in walk.graphs:
        walk.refuse(f"no forward of {walk.visit(op.visit)} before it")
    forward, slots = walk.graphs[op.visit, op.microbatch]
    if slots and slots != op.slots:
        moved = next(slot for slot, now in zip(slots, op.slots, strict=True) if slot != now)
        walk.refuse(f"the graph was kept in slots {slots}, not {op.slots}", ("slot", 0, moved), forward)


# ---- Checks the rules `weights`, `carry` and `secondary`: contents of slots and secondary shards, and of which step.


def of_this_step(walk: Walk, op: ComputeOp) -> None:
    for unit, slot in zip(walk.trace.visits[op.visit].units, op.slots, strict=True):
        held = walk.slots[slot]
        if held[:2] != (unit, 0):
            why = f"slot {slot} holds {_held(walk, held)}, it must hold {walk.unit(unit)}"
            walk.refuse(why, ("slot", 0, slot), held.op)


def written(walk: Walk, slot: int, carried: int) -> None:
    """Checks that anything has written the slot, where a later gather must find the next step's weights there."""
    held, trainable = walk.slots[slot], walk.trace.units[carried].trainable
    after = trainable and not walk.has_updates
    if (held.op < 0 or after) and not _there_again(walk, slot, carried):
        why = f"slot {slot} holds no weights of this step; it must hold {walk.unit(carried)}"
        walk.refuse(why, ("slot", 0, slot), at=_first_use(walk, slot))


def carried_over(walk: Walk, slot: int, carried: int) -> None:
    if not _there_again(walk, slot, carried):
        held = walk.slots[slot]
        why = (
            f"slot {slot} is read before anything is gathered into it, so at the end it must hold the next step's "
            f"{walk.unit(carried)}; it will hold {walk.unit(held.unit)}{' of this step' * (not held.version)}. "
            f"Gather {walk.unit(carried)} first, or once more after its update"
        )
        walk.refuse(why, ("slot", 0, slot), held.op, _first_use(walk, slot))


def _there_again(walk: Walk, slot: int, carried: int) -> bool:
    """Tells whether a slot ends as it began, one version later; without updates in the program, one of all trainable
    units follows it."""
    held = walk.slots[slot]
    return held.unit == carried and held.version == walk.trace.units[carried].trainable


def _first_use(walk: Walk, slot: int) -> int:
    return next(at for at, op in enumerate(walk.ops) if any(slot == used for _, used in walk.trace.weights_of(op)))


def stashed(walk: Walk, op: Gather) -> None:
    for unit in op.units if op.source == "node" else ():
        if unit not in walk.secondary:
            walk.refuse(f"nothing was stashed of {walk.unit(unit)} in this step")
        (stash, held), buffer = walk.secondary[unit], ("secondary", 0, unit)
        if unit in walk.updated:
            why = f"the secondary shard of {walk.unit(unit)} is of the weights before its update"
            walk.refuse(why, buffer, stash)
        if held[:2] != (unit, 0):
            why = f"what was stashed of {walk.unit(unit)} is from a slot that held {_held(walk, held)}"
            walk.refuse(why, buffer, stash)


def has_room(walk: Walk, op: Stash) -> None:
    """Checks the slot's size alone: a stash of another unit's weights does no harm, unless it is gathered."""
    for unit, slot in zip(op.units, op.slots, strict=True):
        room, size = walk.slot_bytes[slot], walk.trace.units[unit].gather_bytes
        if room < size:
            why = f"slot {slot} has {room} bytes, {walk.unit(unit)} is of {size}"
            walk.refuse(why, ("slot", 0, slot), walk.slots[slot].op)


def _held(walk: Walk, held: Weights) -> str:
    return walk.unit(held.unit) + " of the next step" * held.version


# ---- Checks the rules `offload` and `flow`: contents of carry slots and of host buffers.
#
#     Forward into slot s  ->  slot s  -> Offload -> host -> Fetch -> slot t  -> Backward from slot t        offload
#                              slot s  ------------------------------------->    Backward from slot s
#
#     given by a compute -> slot s -> Send ... of another stage ... Receive -> slot t -> taken by a compute   flow
#     given by a compute -> slot s -> taken by a compute, where both segments are on one stage
#
# A slot is written only when it is free, since what is lost cannot be made again.

Check = Callable[[Walk, int, int | Parcel], None]


def only(kind: type[int] | type[Parcel], check: Check) -> Check:
    """Returns `check` for what visits have saved alone, or for parcels alone."""

    def checked(walk: Walk, slot: int, what: int | Parcel) -> None:
        if isinstance(what, kind):
            check(walk, slot, what)

    return checked


def is_free(walk: Walk, slot: int, what: int | Parcel) -> None:
    if (held := walk.carries.get(slot)) is not None:
        walk.refuse(f"carry slot {slot} still holds {_named(walk, held.what)}", ("carry slot", 0, slot), held.op)


def is_there(walk: Walk, slot: int, what: int | Parcel) -> None:
    held = walk.carries.get(slot)
    if held is None or held.what != what:
        there = "nothing" if held is None else _named(walk, held.what)
        why = f"carry slot {slot} holds {there}, it must hold {_named(walk, what)}"
        walk.refuse(why, ("carry slot", 0, slot), None if held is None else held.op)


def _named(walk: Walk, what: int | Parcel) -> str:
    return describe_parcel(what, walk.trace) if isinstance(what, Parcel) else f"what {walk.visit(what)} has saved"


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


def a_slot_each(walk: Walk, op: ComputeOp, way: str, parcels: Sequence[Parcel]) -> None:
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
