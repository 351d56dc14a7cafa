"""The rules of gradients, from their slots to the shards, and of the optimizer's step that reads them."""

from yafsdp_fn.program.ops import AllReduce, Backward, Buffer, ComputeOp, Exchange, Forward, Norm, Reduce, Update
from yafsdp_fn.proof.execution import Execution, Gradient

# ---- Checks the rules `gradient`, `early`, `reduce`, `ordered`, `once`, `replicas` and `shared`.


def is_free(run: Execution, unit: int | None, slot: int) -> None:
    """Checks that a gradient slot holds nothing unreduced, or the gradient of `unit` itself, which may be added to."""
    held = run.grads.get(slot)
    if held is not None and held.unit != unit:
        why = f"grad slot {slot} still holds the unreduced gradient of {run.unit(held.unit)}"
        run.refuse(why, ("grad slot", 0, slot), held.op)


def own_backward_is_next(run: Execution, op: Forward) -> None:
    if not op.keep:
        run.refuse("it recomputes, and its backward would not know what was begun")
    # the compute that comes next
    later = enumerate(run.ops[run.at + 1 :], run.at + 1)
    after, then = next(((at, it) for at, it in later if isinstance(it, ComputeOp)), (None, None))
    buffer = ("grad slot", 0, op.early[0])
    if not isinstance(then, Backward) or (then.visit, then.microbatch) != (op.visit, op.microbatch):
        why = "its own backward is not the next compute, and another could write to the slots in between"
        run.refuse(why, buffer, after)
    if then.grad_slots != op.early:
        run.refuse(f"its backward writes to grad slots {then.grad_slots}, not {op.early}", buffer, after)
    for slot in op.early:
        is_free(run, None, slot)


# ---- reductions


def holds_gradient(run: Execution, op: Reduce) -> None:
    for unit, slot in zip(op.units, op.grad_slots, strict=True):
        held = run.grads.get(slot)
        buffer = ("grad slot", 0, slot)
        if held is None:
            before = run.last_reduced(unit)
            again = "; it was reduced already" if before is not None else ""
            run.refuse(f"grad slot {slot} holds no gradient of {run.unit(unit)}{again}", buffer, before)
        if held.unit != unit:
            why = f"grad slot {slot} holds the gradient of {run.unit(held.unit)}, not of {run.unit(unit)}"
            run.refuse(why, buffer, held.op)


def microbatches_apart(run: Execution, op: Reduce) -> None:
    """Checks that microbatches are added to the shard one by one: to the same bits at every number of ranks."""
    for unit, slot in zip(op.units, op.grad_slots, strict=True) if run.trace.ordered else ():
        _one_microbatch(run, unit, slot)


def _one_microbatch(run: Execution, unit: int, slot: int) -> None:
    held: Gradient = run.grads[slot]
    buffer: Buffer = ("grad slot", 0, slot)
    # one, whole, and none before an earlier one
    found = {microbatch for _, microbatch, _ in held.contributions}
    if len(found) > 1:
        why = f"gradients of {run.unit(unit)} from microbatches {sorted(found)} are added before they are reduced"
        run.refuse(f"{why}; take a schedule that does not defer reductions", buffer, held.op)
    missing = {part for part in run.needed[unit] if part[1] in found} - set(held.contributions)
    if missing:
        why = f"what {run.visit(min(missing)[0])} adds to the gradient of {run.unit(unit)} is reduced apart from it"
        run.refuse(why, buffer, run.last_reduced(unit))
    if min(found) < max((m for _, m, other in run.reduced if other == unit), default=0):
        why = f"a later microbatch's gradient of {run.unit(unit)} was reduced before"
        run.refuse(why, ("grad shard", unit), run.last_reduced(unit))


def all_reduced(run: Execution) -> None:
    for slot, grad in run.grads.items():
        why = f"grad slot {slot} still holds the gradient of {run.unit(grad.unit)}"
        run.refuse(why, ("grad slot", 0, slot), grad.op)


# ---- sums over replicas and stages


def complete(run: Execution, unit: int, *, over_replicas: bool = True, over_stages: bool = True) -> None:
    """Checks that a gradient shard has all contributions, from all replicas and all stages that share the unit."""
    buffer = ("grad shard", unit)
    for visit, microbatch, _ in (part for part in run.needed.get(unit, ()) if part not in run.reduced):
        part = f"the gradient of {run.unit(unit)} from {run.visit(visit)} in microbatch {microbatch}"
        run.refuse(f"{part} is not reduced yet", buffer, run.last_reduced(unit))
    if over_replicas and run.trace.replicas > 1 and unit in run.needed and unit not in run.summed:
        run.refuse(f"the gradient of {run.unit(unit)} is not summed over replicas yet", buffer)
    if over_stages and unit in run.shared and unit not in run.joined:
        run.refuse(f"the gradient of {run.unit(unit)} is not summed over the stages that share it", buffer)


def once_over_replicas(run: Execution, op: AllReduce) -> None:
    for unit in op.units if op.over == "replicas" else ():
        buffer = ("grad shard", unit)
        if unit not in run.needed:
            run.refuse(f"nothing trains {run.unit(unit)}", buffer)
        if run.sums(unit):
            if unit in run.summed:
                why = f"the gradient of {run.unit(unit)} was summed over replicas already"
                run.refuse(why, buffer, run.summed[unit])
            complete(run, unit, over_replicas=False, over_stages=False)


def never_over_replicas(run: Execution) -> None:
    for unit in sorted(run.needed.keys() - run.summed.keys()) if run.trace.replicas > 1 else ():
        run.refuse(f"the gradient of {run.unit(unit)} is never summed over replicas", ("grad shard", unit))


def once_over_stages(run: Execution, op: AllReduce) -> None:
    for unit in op.units if op.over == "stages" else ():
        buffer = ("grad shard", unit)
        if unit not in run.shared:
            run.refuse(f"no other stage has {run.unit(unit)}", buffer)
        if unit not in run.needed:  # the shard holds what the step before has left
            run.refuse(f"nothing on this stage trains {run.unit(unit)}", buffer)
        if unit in run.joined:
            why = f"the gradient of {run.unit(unit)} was summed over stages already"
            run.refuse(why, buffer, run.joined[unit])
        complete(run, unit, over_stages=False)


def never_over_stages(run: Execution) -> None:
    for unit in run.shared:
        if unit not in run.joined:
            why = f"the gradient of {run.unit(unit)} is never summed over the stages that share it"
            run.refuse(why, ("grad shard", unit))


# ---- Checks the rules `norm` and `update`: an optimizer's step, unit by unit, in parts.


def whole_norm(run: Execution, op: Norm) -> None:
    if run.trace.update_when == "never":
        run.refuse("this step has no optimizer, so that nothing would read the norm")
    if run.norm is not None:
        run.refuse("the norm was taken already", ("norm",), run.norm)
    if run.at < run.last_compute:
        # a loss may read sharded leaves beside its visits: that gradient arrives with the end of the backward
        run.refuse("the norm comes before the last compute", ("norm",), run.last_compute)
    wrong = set(run.trace.trained) ^ set(op.units)
    if wrong:
        unit = min(wrong)
        why = "is trainable, and missing" if run.trace.units[unit].trainable else "is frozen"
        run.refuse(f"it must be of all trainable units: {run.unit(unit)} {why}")
    for unit in op.units:
        complete(run, unit)


def norm_is_read(run: Execution) -> None:
    if run.norm is not None and not run.has_updates:
        run.refuse("nothing reads the norm: the program has no updates", ("norm",), at=run.norm)


# ---- updates


def after_the_norm(run: Execution, op: Update) -> None:
    for unit in op.units:
        _after_the_norm(run, unit, op.part)


def _after_the_norm(run: Execution, unit: int, part: int) -> None:
    if run.trace.update_when == "never":
        run.refuse("this step has no optimizer: only a train_step has")
    if not run.trace.units[unit].trainable:
        run.refuse(f"{run.unit(unit)} is frozen")
    if unit in run.updated:
        run.refuse(f"{run.unit(unit)} was updated already", ("shard", unit), run.updated[unit])
    _is_next(run, unit, 2 * part)
    if run.norm is None:
        why = (
            f"{run.unit(unit)} is updated before the norm of the whole gradient is known, by which a step clips, or "
            "is skipped where it is not finite: take the norm first"
        )
        run.refuse(why, ("norm",))


def between_parts(run: Execution, op: Exchange) -> None:
    for unit in op.units:
        parts = run.trace.parts(unit)
        if unit in run.updated or op.part + 1 >= parts:
            of = f"its update has {parts} part{'s' * (parts > 1)}"
            why = f"nothing of {run.unit(unit)} travels after part {op.part}: {of}"
            run.refuse(why, ("optimizer", unit), run.updated.get(unit))
        _is_next(run, unit, 2 * op.part + 1)


def _is_next(run: Execution, unit: int, number: int) -> None:
    """Checks the order of an update's parts and of the exchanges between them, counted together."""
    expected = run.turns.get(unit, 0)
    if number != expected:
        name = f"{'the exchange after ' * (expected % 2)}part {expected // 2}"
        why = f"next in the update of {run.unit(unit)} is {name}"
        run.refuse(why, ("optimizer", unit), run.begun.get(unit))


def all_updated(run: Execution) -> None:
    for unit, record in enumerate(run.trace.units):
        if unit in run.begun and unit not in run.updated:
            why = f"the update of {record.name} does not end: it has {run.trace.parts(unit)} parts"
            run.refuse(why, ("shard", unit), run.begun[unit])
        if run.has_updates and record.trainable and unit not in run.updated:
            run.refuse(f"{record.name} is never updated, other units are", ("shard", unit))
