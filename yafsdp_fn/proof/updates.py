"""Checks the rules `norm` and `update`: an optimizer's step, unit by unit, in parts."""

from yafsdp_fn.program.ops import Exchange, Norm, Update
from yafsdp_fn.proof.gradients import complete
from yafsdp_fn.proof.walk import Walk


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
        if unit in walk.begun:  # the update has scaled the gradient in place
            why = f"the update of {walk.unit(unit)} has overwritten its gradient"
            walk.refuse(why, ("grad shard", unit), walk.begun[unit])
        complete(walk, unit)


def norm_is_read(walk: Walk) -> None:
    if walk.norm is not None and not walk.has_updates:
        walk.refuse("nothing reads the norm: the program has no updates", ("norm",), at=walk.norm)


# ---- updates


def after_complete_gradients(walk: Walk, op: Update) -> None:
    for unit in op.units:
        _after_complete_gradient(walk, unit, op.part)


def _after_complete_gradient(walk: Walk, unit: int, part: int) -> None:
    if walk.trace.update_when == "never":
        walk.refuse("this step has no optimizer: only a train_step has")
    if not walk.trace.units[unit].trainable:
        walk.refuse(f"{walk.unit(unit)} is frozen")
    if unit in walk.updated:
        walk.refuse(f"{walk.unit(unit)} was updated already", ("shard", unit), walk.updated[unit])
    _is_next(walk, unit, 2 * part)
    if part:
        return
    if walk.at < (last := walk.last_use.get(unit, -1)):
        # at world size 1 slots are the shards, and the later compute would read new weights
        why = f"a later compute uses {walk.unit(unit)}, and where one rank holds all of it slots are the shards"
        walk.refuse(why, ("shard", unit), last)
    if unit not in walk.needed and walk.at < walk.last_compute:
        # what it gets comes from the loss itself, at the end of the backward; nothing else is known before
        why = f"no visit trains {walk.unit(unit)}: its gradient is known only after the last compute"
        walk.refuse(why, ("grad shard", unit), walk.last_compute)
    complete(walk, unit)
    if walk.at < walk.last_forward:
        # of a pipeline's stage, where nothing connects two of its segments
        why = "a later forward has losses, too: by the weights of all of them is the gradient divided"
        walk.refuse(why, ("grad shard", unit), walk.last_forward)
    if walk.norm is None and walk.trace.update_when == "after norm":
        why = (
            f"{walk.unit(unit)} is updated before the norm of the whole gradient is known, but this step clips "
            "by it, or skips steps that are not finite. Either take the norm first, or have neither: no "
            "clip_by_global_norm, and train_step(skip_nonfinite=False)"
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
