"""The rules of computes: their order, the graphs they resume, the weights in their slots, and the carries they save and
take."""

from collections.abc import Callable, Sequence

from yafsdp_fn.program.ops import (
    Backward,
    Buffer,
    ComputeOp,
    Fetch,
    Forward,
    Gather,
    MessageOp,
    Receive,
    Stash,
    kind_of,
)
from yafsdp_fn.program.split import Message
from yafsdp_fn.program.text import describe_message
from yafsdp_fn.proof.execution import Execution, Weights

# ---- Checks the rules `order` and `graph`: computes are the trace's, and a backward finds what its forward kept.


def in_order(run: Execution, op: ComputeOp) -> None:
    if run.done == len(run.trace.order):
        run.refuse("the trace has no more computes")
    now = run.trace.order[run.done]
    if (kind_of(op), op.visit, op.microbatch) != now[:3]:
        of = f" of microbatch {now.microbatch}" if run.trace.microbatches > 1 else ""
        run.refuse(f"the trace has {now.kind} of {run.visit(now.visit)}{of} here")


def all_there(run: Execution) -> None:
    for left in run.trace.order[run.done :]:
        run.refuse(f"{left.kind} of {run.visit(left.visit)} is missing")


def same_slots(run: Execution, op: Backward) -> None:
    if (op.visit, op.microbatch) not in run.graphs:
        run.refuse(f"no forward of {run.visit(op.visit)} before it")
    forward, slots = run.graphs[op.visit, op.microbatch]
    if slots and slots != op.slots:
        moved = next(slot for slot, now in zip(slots, op.slots, strict=True) if slot != now)
        run.refuse(f"the graph was kept in slots {slots}, not {op.slots}", ("slot", 0, moved), forward)


# ---- Checks the rules `weights`, `carry` and `secondary`: contents of slots and secondary shards, and of which step.


def of_this_step(run: Execution, op: ComputeOp) -> None:
    for unit, slot in zip(run.trace.visits[op.visit].units, op.slots, strict=True):
        held = run.slots[slot]
        if held[:2] != (unit, 0):
            why = f"slot {slot} holds {_held(run, held)}, it must hold {run.unit(unit)}"
            run.refuse(why, ("slot", 0, slot), held.op)


def written(run: Execution, slot: int, carried: int) -> None:
    """Checks that anything has written the slot, where a later gather must find the next step's weights there."""
    held = run.slots[slot]
    # an update that follows the program makes all it holds old
    after = run.trace.units[carried].trainable and not run.has_updates
    if (held.op < 0 or after) and not _there_again(run, slot, carried):
        why = f"slot {slot} holds no weights of this step; it must hold {run.unit(carried)}"
        run.refuse(why, ("slot", 0, slot), at=_first_use(run, slot))


def carried_over(run: Execution, slot: int, carried: int) -> None:
    if not _there_again(run, slot, carried):
        held = run.slots[slot]
        why = (
            f"slot {slot} is read before anything is gathered into it, so at the end it must hold the next step's "
            f"{run.unit(carried)}; it will hold {run.unit(held.unit)}{' of this step' * (not held.version)}. "
            f"Gather {run.unit(carried)} first, or once more after its update"
        )
        run.refuse(why, ("slot", 0, slot), held.op, _first_use(run, slot))


def _there_again(run: Execution, slot: int, carried: int) -> bool:
    """Tells whether a slot ends as it began, one version later; without updates in the program, one of all trainable
    units follows it."""
    held = run.slots[slot]
    return held.unit == carried and held.version == run.trace.units[carried].trainable


def _first_use(run: Execution, slot: int) -> int:
    return next(at for at, op in enumerate(run.ops) if any(slot == used for _, used in run.trace.weights_of(op)))


def stashed(run: Execution, op: Gather) -> None:
    for unit in op.units if op.source == "node" else ():
        if unit not in run.secondary:
            run.refuse(f"nothing was stashed of {run.unit(unit)} in this step")
        stash, held = run.secondary[unit]
        buffer = ("secondary", 0, unit)
        if unit in run.updated:
            why = f"the secondary shard of {run.unit(unit)} is of the weights before its update"
            run.refuse(why, buffer, stash)
        if held[:2] != (unit, 0):
            why = f"what was stashed of {run.unit(unit)} is from a slot that held {_held(run, held)}"
            run.refuse(why, buffer, stash)


def has_room(run: Execution, op: Stash) -> None:
    """Checks the slot's size alone: a stash of another unit's weights does no harm, unless it is gathered."""
    for unit, slot in zip(op.units, op.slots, strict=True):
        room = run.slot_bytes[slot]
        size = run.trace.units[unit].gather_bytes
        if room < size:
            why = f"slot {slot} has {room} bytes, {run.unit(unit)} is of {size}"
            run.refuse(why, ("slot", 0, slot), run.slots[slot].op)


def _held(run: Execution, held: Weights) -> str:
    return run.unit(held.unit) + " of the next step" * held.version


# ---- Checks the rules `offload` and `flow`: contents of carry slots and of host buffers.
#
#     Forward into slot s  ->  slot s  -> Offload -> host -> Fetch -> slot t  -> Backward from slot t        offload
#                              slot s  ------------------------------------->    Backward from slot s
#
#     given by a compute -> slot s -> Send ... of another stage ... Receive -> slot t -> taken by a compute   flow
#     given by a compute -> slot s -> taken by a compute, where both segments are on one stage
#
# A slot is written only when it is free, since what is lost cannot be made again.

Check = Callable[[Execution, int, int | Message], None]


def only(kind: type[int] | type[Message], check: Check) -> Check:
    """Returns `check` for what visits have saved alone, or for messages alone."""

    def checked(run: Execution, slot: int, what: int | Message) -> None:
        if isinstance(what, kind):
            check(run, slot, what)

    return checked


def is_free(run: Execution, slot: int, what: int | Message) -> None:
    if (held := run.activations.get(slot)) is not None:
        run.refuse(f"carry slot {slot} still holds {_named(run, held.what)}", ("carry slot", 0, slot), held.op)


def is_there(run: Execution, slot: int, what: int | Message) -> None:
    held = run.activations.get(slot)
    if held is None or held.what != what:
        there = "nothing" if held is None else _named(run, held.what)
        why = f"carry slot {slot} holds {there}, it must hold {_named(run, what)}"
        run.refuse(why, ("carry slot", 0, slot), None if held is None else held.op)


def _named(run: Execution, what: int | Message) -> str:
    return describe_message(what, run.trace) if isinstance(what, Message) else f"what {run.visit(what)} has saved"


# ---- offload


def one_microbatch(run: Execution, op: Forward) -> None:
    if run.trace.split is not None:
        run.refuse("carries are known by their visit, and a stage has several microbatches of it")


def saved(run: Execution, op: Backward) -> None:
    forward = run.saved.get((op.visit, op.microbatch))
    if op.carry_slot is not None and forward is None:
        run.refuse(f"the forward of {run.visit(op.visit)} has saved no carry")
    if op.carry_slot is None and forward is not None:
        why = f"{run.visit(op.visit)} has saved its carry in a carry slot"
        run.refuse(why, _where(run, op.visit), forward)


def on_the_host(run: Execution, op: Fetch) -> None:
    if op.visit not in run.host:
        run.refuse(f"nothing that {run.visit(op.visit)} has saved is on the host", ("host", 0, op.visit))


def all_read(run: Execution) -> None:
    for (visit, _), forward in run.saved.items():
        run.refuse(f"no backward reads what {run.visit(visit)} has saved", _where(run, visit), forward)


def _where(run: Execution, visit: int) -> Buffer:
    """Returns the buffer that the carry of `visit` is in."""
    slots = (("carry slot", 0, slot) for slot, held in run.activations.items() if held.what == visit)
    return next(slots, ("host", 0, visit))


# ---- flow


def a_slot_each(run: Execution, op: ComputeOp, way: str, messages: Sequence[Message]) -> None:
    slots = getattr(op, way)
    if len(messages) != len(slots):
        words = ", ".join(_named(run, message) for message in messages) or "nothing"
        run.refuse(f"it {way} {words}: expected {len(messages)} carry slots, got {slots}")


def ends_here(run: Execution, op: MessageOp) -> None:
    """Checks that a message is between this stage and another."""
    assert run.trace.split is not None, "in form"
    ends = run.trace.split.ends(op.flow, op.back)
    if ends[isinstance(op, Receive)] != run.trace.stage or ends[0] == ends[1]:
        way = f"from stage {ends[0]} to stage {ends[1]}" if ends[0] != ends[1] else f"inside stage {ends[0]}"
        run.refuse(f"that goes {way}; this is stage {run.trace.stage}")


def all_taken(run: Execution) -> None:
    for slot, held in run.activations.items():
        run.refuse(f"nothing takes {_named(run, held.what)}", ("carry slot", 0, slot), held.op)
