"""The rules of gradients, from their slots to the shards, and of the optimizer's step that reads them.

backward -> gradient slot                      gradient: nothing that is unreduced is overwritten
forward  -> gradient slot                      early: its own backward comes next
gradient slot -> reduce -> gradient shard      reduce, ordered; once: each contribution
gradient shard -> all-reduce                   replicas, shared: once, when it is complete
gradient shards -> norm                        norm: of all that is trained, when all are complete
gradient shard -> update -> shard              update: each unit, after the norm
"""

from yafsdp_fn.program.ops import AllReduce, Backward, ComputeOp, Exchange, Forward, Norm, Update
from yafsdp_fn.proof.execution import Execution

# ---- Checks the rules `gradient` and `early`: nothing overwrites a gradient that is not reduced.


def is_free(run: Execution, unit: int | None, slot: int) -> None:
    """Checks that a gradient slot holds nothing unreduced, or the gradient of `unit` itself, which may be added to."""
    held = run.grads.get(slot)
    if held is None or held.unit == unit:
        return
    why = f"grad slot {slot} still holds the unreduced gradient of {run.unit(held.unit)}"
    run.refuse(why, ("grad slot", 0, slot), held.op)


def own_backward_is_next(run: Execution, op: Forward) -> None:
    """Checks that nothing comes between what a forward has begun and its backward, which confirms it in these slots."""
    if not op.keep:
        run.refuse("it recomputes, and its backward would not know what was begun")
    later = range(run.at + 1, len(run.ops))
    after = next((at for at in later if isinstance(run.ops[at], ComputeOp)), None)
    then = None if after is None else run.ops[after]
    buffer = ("grad slot", 0, op.early[0])
    if not isinstance(then, Backward) or (then.visit, then.microbatch) != (op.visit, op.microbatch):
        why = "its own backward is not the next compute, and another could write to the slots in between"
        run.refuse(why, buffer, after)
    if then.grad_slots != op.early:
        run.refuse(f"its backward writes to grad slots {then.grad_slots}, not {op.early}", buffer, after)
    for slot in op.early:
        is_free(run, None, slot)


# ---- Checks the rules `reduce`, `ordered` and `once`: each contribution reaches its shard, once.


def holds_gradient(run: Execution, unit: int, slot: int) -> None:
    """Checks that a reduction takes the gradient of `unit` from a slot that holds it."""
    held = run.grads.get(slot)
    buffer = ("grad slot", 0, slot)
    if held is None:
        before = run.last_reduced(unit)
        again = "" if before is None else "; it was reduced already"
        run.refuse(f"grad slot {slot} holds no gradient of {run.unit(unit)}{again}", buffer, before)
    if held.unit != unit:
        why = f"grad slot {slot} holds the gradient of {run.unit(held.unit)}, not of {run.unit(unit)}"
        run.refuse(why, buffer, held.op)


def microbatches_apart(run: Execution, unit: int, slot: int) -> None:
    """Checks that microbatches are added to the shard one by one, each whole, in their order: so a sum has the same
    bits at every number of ranks."""
    if not run.trace.ordered:
        return
    held = run.grads[slot]
    buffer = ("grad slot", 0, slot)
    # one microbatch
    found = {microbatch for _, microbatch, _ in held.contributions}
    if len(found) > 1:
        why = f"gradients of {run.unit(unit)} from microbatches {sorted(found)} are added before they are reduced"
        run.refuse(f"{why}; take a schedule that does not defer reductions", buffer, held.op)
    (microbatch,) = found
    # all of its gradient
    needed = {part for part in run.needed[unit] if part[1] == microbatch}
    missing = needed.difference(held.contributions)
    if missing:
        visit, _, _ = min(missing)
        why = f"what {run.visit(visit)} adds to the gradient of {run.unit(unit)} is reduced apart from it"
        run.refuse(why, buffer, run.last_reduced(unit))
    # after those before it
    before = [earlier for _, earlier, other in run.reduced if other == unit]
    if microbatch < max(before, default=0):
        why = f"a later microbatch's gradient of {run.unit(unit)} was reduced before"
        run.refuse(why, ("grad shard", unit), run.last_reduced(unit))


def all_reduced(run: Execution) -> None:
    """Checks that no gradient is left in a slot: then each contribution, which was written once, was reduced once."""
    for slot, grad in run.grads.items():
        why = f"grad slot {slot} still holds the gradient of {run.unit(grad.unit)}"
        run.refuse(why, ("grad slot", 0, slot), grad.op)


# ---- A gradient shard is complete: it has all contributions, and the sums over replicas and over stages.


def has_all_contributions(run: Execution, unit: int) -> None:
    """Checks that everything that computes add to a gradient has come to its shard."""
    for contribution in run.needed.get(unit, ()):
        if contribution not in run.reduced:
            visit, microbatch, _ = contribution
            part = f"the gradient of {run.unit(unit)} from {run.visit(visit)} in microbatch {microbatch}"
            run.refuse(f"{part} is not reduced yet", ("grad shard", unit), run.last_reduced(unit))


def is_summed_over_replicas(run: Execution, unit: int) -> None:
    """Checks that a shard has the gradients of all replicas, each of which has rows of its own."""
    if run.trace.replicas > 1 and unit in run.needed and unit not in run.summed:
        run.refuse(f"the gradient of {run.unit(unit)} is not summed over replicas yet", ("grad shard", unit))


def is_summed_over_stages(run: Execution, unit: int) -> None:
    """Checks that a shard has the gradients of all stages whose visits use the unit."""
    if unit in run.shared and unit not in run.joined:
        why = f"the gradient of {run.unit(unit)} is not summed over the stages that share it"
        run.refuse(why, ("grad shard", unit))


# ---- Checks the rules `replicas` and `shared`: a sum over ranks is taken once, of what is complete before it.


def once_over_replicas(run: Execution, unit: int, op: AllReduce) -> None:
    """Checks that a sum over replicas, if it counts, is the only one, and of the complete gradient."""
    if op.over != "replicas":
        return
    buffer = ("grad shard", unit)
    if unit not in run.needed:
        run.refuse(f"nothing trains {run.unit(unit)}", buffer)
    if not run.sums(unit):  # the first gradient of the step overwrites it
        return
    if unit in run.summed:
        why = f"the gradient of {run.unit(unit)} was summed over replicas already"
        run.refuse(why, buffer, run.summed[unit])
    has_all_contributions(run, unit)


def never_over_replicas(run: Execution) -> None:
    """Checks that no gradient was left to its replica: their weights would differ from then on."""
    if run.trace.replicas == 1:
        return
    for unit in sorted(run.needed.keys() - run.summed.keys()):
        run.refuse(f"the gradient of {run.unit(unit)} is never summed over replicas", ("grad shard", unit))


def once_over_stages(run: Execution, unit: int, op: AllReduce) -> None:
    """Checks that a sum over stages is the only one, and of a gradient that is complete on this stage."""
    if op.over != "stages":
        return
    buffer = ("grad shard", unit)
    if unit not in run.shared:
        run.refuse(f"no other stage has {run.unit(unit)}", buffer)
    if unit not in run.needed:  # the shard holds what the step before has left
        run.refuse(f"nothing on this stage trains {run.unit(unit)}", buffer)
    if unit in run.joined:
        why = f"the gradient of {run.unit(unit)} was summed over stages already"
        run.refuse(why, buffer, run.joined[unit])
    has_all_contributions(run, unit)
    is_summed_over_replicas(run, unit)


def never_over_stages(run: Execution) -> None:
    """Checks that no gradient of a shared unit was left to its stage."""
    for unit in run.shared:
        if unit not in run.joined:
            why = f"the gradient of {run.unit(unit)} is never summed over the stages that share it"
            run.refuse(why, ("grad shard", unit))


# ---- Checks the rule `norm`: it is of the whole gradient, when that is complete.


def whole_norm(run: Execution, op: Norm) -> None:
    """Checks that the norm is the one of the step: of all trainable units, after the backward."""
    if run.trace.update_when == "never":
        run.refuse("this step has no optimizer, so that nothing would read the norm")
    if run.norm is not None:
        run.refuse("the norm was taken already", ("norm",), run.norm)
    if run.at < run.last_compute:
        # a loss may read sharded leaves beside its visits: that gradient arrives with the end of the backward
        run.refuse("the norm comes before the last compute", ("norm",), run.last_compute)
    wrong = set(run.trace.trained).symmetric_difference(op.units)
    if wrong:
        unit = min(wrong)
        why = "is trainable, and missing" if run.trace.units[unit].trainable else "is frozen"
        run.refuse(f"it must be of all trainable units: {run.unit(unit)} {why}")
    for unit in op.units:
        has_all_contributions(run, unit)
        is_summed_over_replicas(run, unit)
        is_summed_over_stages(run, unit)


def norm_is_read(run: Execution) -> None:
    """Checks that a program takes the norm for its updates alone; what follows a program has its own."""
    if run.norm is not None and not run.has_updates:
        run.refuse("nothing reads the norm: the program has no updates", ("norm",), at=run.norm)


# ---- Checks the rule `update`: the optimizer's step, unit by unit, in parts.


def after_the_norm(run: Execution, unit: int, op: Update) -> None:
    """Checks that a unit takes this part of its step now: it is trained, not updated yet, and the norm is known."""
    if run.trace.update_when == "never":
        run.refuse("this step has no optimizer: only a train_step has")
    if not run.trace.units[unit].trainable:
        run.refuse(f"{run.unit(unit)} is frozen")
    if unit in run.updated:
        run.refuse(f"{run.unit(unit)} was updated already", ("shard", unit), run.updated[unit])
    _is_next(run, unit, 2 * op.part)
    if run.norm is None:
        why = (
            f"{run.unit(unit)} is updated before the norm of the whole gradient is known, by which a step clips, or "
            "is skipped where it is not finite: take the norm first"
        )
        run.refuse(why, ("norm",))


def between_parts(run: Execution, unit: int, op: Exchange) -> None:
    """Checks that the update of a unit has a part after this exchange, which waits for it."""
    parts = run.trace.parts(unit)
    if unit in run.updated or op.part + 1 >= parts:
        count = "1 part" if parts == 1 else f"{parts} parts"
        why = f"nothing of {run.unit(unit)} travels after part {op.part}: its update has {count}"
        run.refuse(why, ("optimizer", unit), run.updated.get(unit))
    _is_next(run, unit, 2 * op.part + 1)


def _is_next(run: Execution, unit: int, number: int) -> None:
    """Checks the order of an update's parts and of the exchanges between them, counted together."""
    expected = run.turns.get(unit, 0)
    if number != expected:
        name = f"part {expected // 2}"
        if expected % 2:
            name = f"the exchange after {name}"
        why = f"next in the update of {run.unit(unit)} is {name}"
        run.refuse(why, ("optimizer", unit), run.begun.get(unit))


def all_updated(run: Execution) -> None:
    """Checks that updates have ended where they began, and that all trainable units have one if any has."""
    for unit in run.trace.units:
        if unit.id in run.updated:
            continue
        if unit.id in run.begun:
            why = f"the update of {unit.name} does not end: it has {run.trace.parts(unit.id)} parts"
            run.refuse(why, ("shard", unit.id), run.begun[unit.id])
        if run.has_updates and unit.trainable:
            run.refuse(f"{unit.name} is never updated, other units are", ("shard", unit.id))
