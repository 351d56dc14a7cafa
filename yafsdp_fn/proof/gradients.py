"""The rules of gradients, from their slots to the shards, and of the optimizer's step that reads them."""

from yafsdp_fn.program.ops import AllReduce, Backward, Buffer, Exchange, Forward, Norm, Reduce, Update
from yafsdp_fn.proof.walk import Gradient, Walk

# ---- Checks the rules `gradient`, `early`, `reduce`, `ordered`, `once`, `replicas` and `shared`.


def is_free(walk: Walk, unit: int | None, slot: int) -> None:
    """Checks that a gradient slot holds nothing unreduced, or the gradient of `unit` itself, which may be added to."""
    held = walk.grads.get(slot)
    if held is not None and held.unit != unit:
        why = f"grad slot {slot} still holds the unreduced gradient of {walk.unit(held.unit)}"
        walk.refuse(why, ("grad slot", 0, slot), held.op)


def own_backward_is_next(walk: Walk, op: Forward) -> None:
    if not op.keep:
        walk.refuse("it recomputes, and its backward would not know what was begun")
    later = enumerate(walk.ops[walk.at + 1 :], walk.at + 1)
    after, then = next(((at, it) for at, it in later if isinstance(it, Forward | Backward)), (None, None))
    buffer = ("grad slot", 0, op.early[0])
    if not isinstance(then, Backward) or (then.visit, then.microbatch) != (op.visit, op.microbatch):
        why = "its own backward is not the next compute, and another could write to the slots in between"
        walk.refuse(why, buffer, after)
    if then.grad_slots != op.early:
        walk.refuse(f"its backward writes to grad slots {then.grad_slots}, not {op.early}", buffer, after)
    for slot in op.early:
        is_free(walk, None, slot)


# ---- reductions


def holds_gradient(walk: Walk, op: Reduce) -> None:
    for unit, slot in zip(op.units, op.grad_slots, strict=True):
        held, buffer = walk.grads.get(slot), ("grad slot", 0, slot)
        if held is None:
            before = walk.last_reduced(unit)
            again = "; it was reduced already" if before is not None else ""
            walk.refuse(f"grad slot {slot} holds no gradient of {walk.unit(unit)}{again}", buffer, before)
        if held.unit != unit:
            why = f"grad slot {slot} holds the gradient of {walk.unit(held.unit)}, not of {walk.unit(unit)}"
            walk.refuse(why, buffer, held.op)


def microbatches_apart(walk: Walk, op: Reduce) -> None:
    """Checks that microbatches are added to the shard one by one: to the same bits at every number of ranks."""
    for unit, slot in zip(op.units, op.grad_slots, strict=True) if walk.trace.ordered else ():
        _one_microbatch(walk, unit, slot)


def _one_microbatch(walk: Walk, unit: int, slot: int) -> None:
    held: Gradient = walk.grads[slot]
    buffer: Buffer = ("grad slot", 0, slot)
    found = {microbatch for _, microbatch, _ in held.parts}
    if len(found) > 1:
        why = f"gradients of {walk.unit(unit)} from microbatches {sorted(found)} are added before they are reduced"
        walk.refuse(f"{why}; take a schedule that does not defer reductions", buffer, held.op)
    if missing := {part for part in walk.needed[unit] if part[1] in found} - set(held.parts):
        why = f"what {walk.visit(min(missing)[0])} adds to the gradient of {walk.unit(unit)} is reduced apart from it"
        walk.refuse(why, buffer, walk.last_reduced(unit))
    if min(found) < max((m for _, m, other in walk.reduced if other == unit), default=0):
        why = f"a later microbatch's gradient of {walk.unit(unit)} was reduced before"
        walk.refuse(why, ("grad shard", unit), walk.last_reduced(unit))


def all_reduced(walk: Walk) -> None:
    for slot, grad in walk.grads.items():
        why = f"grad slot {slot} still holds the gradient of {walk.unit(grad.unit)}"
        walk.refuse(why, ("grad slot", 0, slot), grad.op)


# ---- sums over replicas and stages


def complete(walk: Walk, unit: int, *, over_replicas: bool = True, over_stages: bool = True) -> None:
    """Checks that a gradient shard has all contributions, from all replicas and all stages that share the unit."""
    buffer = ("grad shard", unit)
    for visit, microbatch, _ in (part for part in walk.needed.get(unit, ()) if part not in walk.reduced):
        part = f"the gradient of {walk.unit(unit)} from {walk.visit(visit)} in microbatch {microbatch}"
        walk.refuse(f"{part} is not reduced yet", buffer, walk.last_reduced(unit))
    if over_replicas and walk.trace.replicas > 1 and unit in walk.needed and unit not in walk.summed:
        walk.refuse(f"the gradient of {walk.unit(unit)} is not summed over replicas yet", buffer)
    if over_stages and unit in walk.shared and unit not in walk.joined:
        walk.refuse(f"the gradient of {walk.unit(unit)} is not summed over the stages that share it", buffer)


def once_over_replicas(walk: Walk, op: AllReduce) -> None:
    for unit in op.units if op.over == "replicas" else ():
        buffer = ("grad shard", unit)
        if unit not in walk.needed:
            walk.refuse(f"nothing trains {walk.unit(unit)}", buffer)
        if walk.sums(unit):
            if unit in walk.summed:
                why = f"the gradient of {walk.unit(unit)} was summed over replicas already"
                walk.refuse(why, buffer, walk.summed[unit])
            complete(walk, unit, over_replicas=False, over_stages=False)


def never_over_replicas(walk: Walk) -> None:
    for unit in sorted(walk.needed.keys() - walk.summed.keys()) if walk.trace.replicas > 1 else ():
        walk.refuse(f"the gradient of {walk.unit(unit)} is never summed over replicas", ("grad shard", unit))


def once_over_stages(walk: Walk, op: AllReduce) -> None:
    for unit in op.units if op.over == "stages" else ():
        buffer = ("grad shard", unit)
        if unit not in walk.shared:
            walk.refuse(f"no other stage has {walk.unit(unit)}", buffer)
        if unit not in walk.needed:  # the shard holds what the step before has left
            walk.refuse(f"nothing on this stage trains {walk.unit(unit)}", buffer)
        if unit in walk.joined:
            why = f"the gradient of {walk.unit(unit)} was summed over stages already"
            walk.refuse(why, buffer, walk.joined[unit])
        complete(walk, unit, over_stages=False)


def never_over_stages(walk: Walk) -> None:
    for unit in walk.shared:
        if unit not in walk.joined:
            why = f"the gradient of {walk.unit(unit)} is never summed over the stages that share it"
            walk.refuse(why, ("grad shard", unit))


# ---- Checks the rules `norm` and `update`: an optimizer's step, unit by unit, in parts.


def whole_norm(walk: Walk, op: Norm) -> None:
    if walk.trace.update_when == "never":
        walk.refuse("this step has no optimizer, so that nothing would read the norm")
    if walk.norm is not None:
        walk.refuse("the norm was taken already", ("norm",), walk.norm)
    if walk.at < walk.last_compute:
        # a loss may read sharded leaves beside its visits: that gradient arrives with the end of the backward
        walk.refuse("the norm comes before the last compute", ("norm",), walk.last_compute)
    if wrong := set(walk.trace.trained) ^ set(op.units):
        unit = min(wrong)
        why = "is trainable, and missing" if walk.trace.units[unit].trainable else "is frozen"
        walk.refuse(f"it must be of all trainable units: {walk.unit(unit)} {why}")
    for unit in op.units:
        complete(walk, unit)


def norm_is_read(walk: Walk) -> None:
    if walk.norm is not None and not walk.has_updates:
        walk.refuse("nothing reads the norm: the program has no updates", ("norm",), at=walk.norm)


# ---- updates


def after_the_norm(walk: Walk, op: Update) -> None:
    for unit in op.units:
        _after_the_norm(walk, unit, op.part)


def _after_the_norm(walk: Walk, unit: int, part: int) -> None:
    if walk.trace.update_when == "never":
        walk.refuse("this step has no optimizer: only a train_step has")
    if not walk.trace.units[unit].trainable:
        walk.refuse(f"{walk.unit(unit)} is frozen")
    if unit in walk.updated:
        walk.refuse(f"{walk.unit(unit)} was updated already", ("shard", unit), walk.updated[unit])
    _is_next(walk, unit, 2 * part)
    if walk.norm is None:
        why = (
            f"{walk.unit(unit)} is updated before the norm of the whole gradient is known, by which a step clips, or "
            "is skipped where it is not finite: take the norm first"
        )
        walk.refuse(why, ("norm",))


def between_parts(walk: Walk, op: Exchange) -> None:
    for unit in op.units:
        parts = walk.trace.parts(unit)
        if unit in walk.updated or op.part + 1 >= parts:
            of = f"its update has {parts} part{'s' * (parts > 1)}"
            why = f"nothing of {walk.unit(unit)} travels after part {op.part}: {of}"
            walk.refuse(why, ("optimizer", unit), walk.updated.get(unit))
        _is_next(walk, unit, 2 * op.part + 1)


def _is_next(walk: Walk, unit: int, number: int) -> None:
    """Checks the order of an update's parts and of the exchanges between them, counted together."""
    expected = walk.turns.get(unit, 0)
    if number != expected:
        name = f"{'the exchange after ' * (expected % 2)}part {expected // 2}"
        why = f"next in the update of {walk.unit(unit)} is {name}"
        walk.refuse(why, ("optimizer", unit), walk.begun.get(unit))


def all_updated(walk: Walk) -> None:
    for unit, record in enumerate(walk.trace.units):
        if unit in walk.begun and unit not in walk.updated:
            why = f"the update of {record.name} does not end: it has {walk.trace.parts(unit)} parts"
            walk.refuse(why, ("shard", unit), walk.begun[unit])
        if walk.has_updates and record.trainable and unit not in walk.updated:
            walk.refuse(f"{record.name} is never updated, other units are", ("shard", unit))
