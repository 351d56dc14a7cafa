"""The rules of computes: their order, the graphs they resume, and the weights in the slots that they read."""

from yafsdp_fn.program.ops import Backward, ComputeOp, Gather, Stash, kind_of
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
