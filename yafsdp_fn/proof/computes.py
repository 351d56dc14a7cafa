"""The rules of computes: their order, the graphs they resume, the weights in their slots, and the carries they save and
take.

    trace -> computes                              order: all of them, as they are there
    gather -> weight slot -> compute               weights: of the unit, of this step
    the step before -> weight slot -> compute      carry: it ends as it began, with the next step's weights
    weight slot -> stash -> gather in the node     secondary
    forward -> graph -> backward                   graph: in the same slots
    forward -> carry slot, host -> backward        offload
    compute -> carry slots, messages -> compute    flow
"""

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
    kind_of,
)
from yafsdp_fn.program.split import Message
from yafsdp_fn.program.text import describe_message
from yafsdp_fn.proof.execution import Execution, Weights

# ---- Checks the rules `order` and `graph`: computes are the trace's, and a backward finds what its forward kept.


def in_order(run: Execution, op: ComputeOp) -> None:
    """Checks that a compute is the trace's next one."""
    if run.done == len(run.trace.order):
        run.refuse("the trace has no more computes")
    now = run.trace.order[run.done]
    if (kind_of(op), op.visit, op.microbatch) != now[:3]:
        which = f"{now.kind} of {run.visit(now.visit)}"
        if run.trace.microbatches > 1:
            which += f" of microbatch {now.microbatch}"
        run.refuse(f"the trace has {which} here")


def all_there(run: Execution) -> None:
    """Checks that no compute of the trace is left."""
    for left in run.trace.order[run.done :]:
        run.refuse(f"{left.kind} of {run.visit(left.visit)} is missing")


def same_slots(run: Execution, op: Backward) -> None:
    """Checks that a backward runs in the slots of its forward: a kept graph has saved views of them."""
    visit = op.visit, op.microbatch
    if visit not in run.graphs:
        run.refuse(f"no forward of {run.visit(op.visit)} before it")
    forward, slots = run.graphs[visit]
    if slots and slots != op.slots:
        moved = next(slot for slot, now in zip(slots, op.slots, strict=True) if slot != now)
        run.refuse(f"the graph was kept in slots {slots}, not {op.slots}", ("slot", 0, moved), forward)


# ---- Checks the rules `weights` and `carry`: contents of slots, and the step whose weights they are.


def of_this_step(run: Execution, unit: int, slot: int) -> None:
    """Checks that a compute finds the weights of `unit` in a slot, before their update."""
    held = run.slots[slot]
    if held[:2] != (unit, 0):
        why = f"slot {slot} holds {_held(run, held)}, it must hold {run.unit(unit)}"
        run.refuse(why, ("slot", 0, slot), held.op)


def written(run: Execution, unit: int, slot: int) -> None:
    """Checks that anything has written the slot, where a later gather must find the next step's weights there."""
    if _there_again(run, unit, slot):
        return
    # an update that follows the program makes all it holds old
    follows = run.trace.units[unit].trainable and not run.has_updates
    if run.slots[slot].op < 0 or follows:
        why = f"slot {slot} holds no weights of this step; it must hold {run.unit(unit)}"
        run.refuse(why, ("slot", 0, slot), at=_first_use(run, slot))


def carried_over(run: Execution, unit: int, slot: int) -> None:
    """Checks that a slot which is read before it is filled ends as the next step must find it."""
    if _there_again(run, unit, slot):
        return
    held = run.slots[slot]
    which = run.unit(held.unit)
    if held.version == 0:
        which += " of this step"
    why = (
        f"slot {slot} is read before anything is gathered into it, so at the end it must hold the next step's "
        f"{run.unit(unit)}; it will hold {which}. Gather {run.unit(unit)} first, or once more after its update"
    )
    run.refuse(why, ("slot", 0, slot), held.op, _first_use(run, slot))


def _there_again(run: Execution, unit: int, slot: int) -> bool:
    """Tells whether a slot ends as it began, one version later; without updates in the program, one of all trainable
    units follows it."""
    held = run.slots[slot]
    return held.unit == unit and held.version == run.trace.units[unit].trainable


def _first_use(run: Execution, slot: int) -> int:
    """Returns the first op that reads a slot."""
    return next(at for at, op in enumerate(run.ops) if slot in dict(run.trace.weights_of(op)).values())


# ---- Checks the rule `secondary`: secondary shards of a node, and their weights.


def stashed(run: Execution, unit: int, op: Gather) -> None:
    """Checks that a gather inside the node finds what it gathers: stashed in this step, and not updated since."""
    if op.source != "node":
        return
    if unit not in run.secondary:
        run.refuse(f"nothing was stashed of {run.unit(unit)} in this step")
    if unit in run.updated:
        why = f"the secondary shard of {run.unit(unit)} is of the weights before its update"
        run.refuse(why, ("secondary", 0, unit), run.secondary[unit])


def from_its_slot(run: Execution, unit: int, slot: int) -> None:
    """Checks that a unit is stashed from a slot that holds it. One of other units may be too small, or none at all:
    theirs may be the shards, in which nothing is gathered."""
    held = run.slots[slot]
    if held.unit != unit:
        why = f"slot {slot} holds {_held(run, held)}, and {run.unit(unit)} is stashed from it"
        run.refuse(why, ("slot", 0, slot), held.op)


def _held(run: Execution, held: Weights) -> str:
    name = run.unit(held.unit)
    return f"{name} of the next step" if held.version else name


# ---- Checks the rules `offload` and `flow`: contents of carry slots and of host buffers.
#
#     Forward into slot s  ->  slot s  -> Offload -> host -> Fetch -> slot t  -> Backward from slot t        offload
#                              slot s  ------------------------------------->    Backward from slot s
#
#     given by a compute -> slot s -> Send ... of another stage ... Receive -> slot t -> taken by a compute   flow
#     given by a compute -> slot s -> taken by a compute, where both segments are on one stage
#
# A slot is written only when it is free, since what is lost cannot be made again.

What = int | Message
"""The content of a carry slot: what a visit has saved, by its number, or a message."""

Check = Callable[[Execution, int, What], None]


def only(kind: type[int] | type[Message], check: Check) -> Check:
    """Returns `check` for what visits have saved alone, or for messages alone."""

    def checked(run: Execution, slot: int, what: What) -> None:
        if isinstance(what, kind):
            check(run, slot, what)

    return checked


def is_free(run: Execution, slot: int, what: What) -> None:
    """Checks that a carry slot is empty before `what` comes into it."""
    if slot in run.activations:
        held = run.activations[slot]
        run.refuse(f"carry slot {slot} still holds {_named(run, held.what)}", ("carry slot", 0, slot), held.op)


def is_there(run: Execution, slot: int, what: What) -> None:
    """Checks that a carry slot has `what` in it."""
    must = f"it must hold {_named(run, what)}"
    buffer = ("carry slot", 0, slot)
    if slot not in run.activations:
        run.refuse(f"carry slot {slot} holds nothing, {must}", buffer)
    held = run.activations[slot]
    if held.what != what:
        run.refuse(f"carry slot {slot} holds {_named(run, held.what)}, {must}", buffer, held.op)


def _named(run: Execution, what: What) -> str:
    """Returns the content of a carry slot in words."""
    if isinstance(what, Message):
        return describe_message(what, run.trace)
    return f"what {run.visit(what)} has saved"


# ---- offload


def one_microbatch(run: Execution, op: Forward) -> None:
    """Checks that a carry is saved where its visit tells it apart: in a step that is not cut."""
    if run.trace.split is not None:
        run.refuse("carries are known by their visit, and a stage has several microbatches of it")


def saved(run: Execution, op: Backward) -> None:
    """Checks that a backward takes the carry that its forward has saved, if and only if it has."""
    forward = run.saved.get((op.visit, op.microbatch))
    if op.carry_slot is not None and forward is None:
        run.refuse(f"the forward of {run.visit(op.visit)} has saved no carry")
    if op.carry_slot is None and forward is not None:
        why = f"{run.visit(op.visit)} has saved its carry in a carry slot"
        run.refuse(why, _where(run, op.visit), forward)


def on_the_host(run: Execution, op: Fetch) -> None:
    """Checks that a fetch finds what it copies back."""
    if op.visit not in run.host:
        run.refuse(f"nothing that {run.visit(op.visit)} has saved is on the host", ("host", 0, op.visit))


def all_read(run: Execution) -> None:
    """Checks that each carry which was saved has come to its backward."""
    for (visit, _), forward in run.saved.items():
        run.refuse(f"no backward reads what {run.visit(visit)} has saved", _where(run, visit), forward)


def _where(run: Execution, visit: int) -> Buffer:
    """Returns the buffer that the carry of `visit` is in."""
    for slot, held in run.activations.items():
        if held.what == visit:
            return "carry slot", 0, slot
    return "host", 0, visit


# ---- flow


def a_slot_each(run: Execution, op: ComputeOp, way: str, messages: Sequence[Message]) -> None:
    """Checks that a compute names a carry slot for each message that it takes, or gives."""
    slots = getattr(op, way)
    if len(messages) != len(slots):
        words = ", ".join(_named(run, message) for message in messages) or "nothing"
        run.refuse(f"it {way} {words}: expected {len(messages)} carry slots, got {slots}")


def ends_here(run: Execution, op: MessageOp) -> None:
    """Checks that a message is between this stage and another."""
    source, target = run.trace.cut.ends(op.flow, op.back)
    own = target if isinstance(op, Receive) else source
    if own != run.trace.stage or source == target:
        way = f"inside stage {source}" if source == target else f"from stage {source} to stage {target}"
        run.refuse(f"that goes {way}; this is stage {run.trace.stage}")


def all_taken(run: Execution) -> None:
    """Checks that all messages have come to their compute, and all carries to their backward."""
    for slot, held in run.activations.items():
        run.refuse(f"nothing takes {_named(run, held.what)}", ("carry slot", 0, slot), held.op)
