"""Prepares ops, once for each slot set: collects what is known of them, and makes their work, which streams run.

A steady step of a plain `zero3` does not enter this file: what is prepared is kept. The work of a reduction depends on
what has been written before it, and is in execute.py.
"""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ReduceOp

from yafsdp_fn.communication import flat, formats, sums
from yafsdp_fn.communication.formats import Format
from yafsdp_fn.communication.streams import Work
from yafsdp_fn.program.ops import (
    AllReduce,
    Backward,
    Buffer,
    Exchange,
    Forward,
    Gather,
    Op,
    Receive,
    Send,
    Stash,
    filled,
)
from yafsdp_fn.program.trace import Visit

# ---- What a session knows of an op before it runs.


class PreparedOp(NamedTuple):
    """An op on a slot set: name, stream and uses; its work, if that depends on the slots alone; `(unit, slot)` of the
    weights that it puts into slots."""

    name: str
    stream: str
    reads: list[Buffer]
    writes: list[Buffer]
    work: Work | None
    fills: tuple[tuple[int, int], ...]


def prepare(session: Any, op: Op, visit: Visit | None = None) -> PreparedOp:
    """Collects, once, all that is known of `op` in these slots. visit: of a compute"""
    memory = session.memory
    # uses
    reads, writes = op.uses(session.slots.number)
    if isinstance(op, Forward | Backward) and visit is not None:
        # the session itself copies what travels between segments; slots may be the shards
        reads, writes = op._replace(takes=(), gives=()).uses(session.slots.number)
        pairs = zip(visit.units, op.slots, strict=False)  # a half of a backward may read none
        reads = _aliased(reads, "slot", "shard", pairs, memory.weights_alias)
        pairs = zip(visit.trained, op.early if isinstance(op, Forward) else op.grad_slots, strict=False)
        writes = _aliased(writes, "grad slot", "grad shard", pairs, memory.grads_alias)
    # words
    units = getattr(op, "units", ())
    if isinstance(op, Send | Receive):
        what = session.slots.activations.named(op)
    elif units:
        what = ", ".join([memory.units[unit].name for unit in units])
    else:
        what = f"visit {op[0]}"
    name = f"{type(op).__name__.lower()} of {what}"
    work = session.work(op) if op.stream == "gather" else None  # depends on these slots alone
    found = PreparedOp(name, op.stream, reads, writes, work, filled(op))
    session.slots.prepared[type(op), op] = found
    return found


def _aliased(
    uses: list[Buffer], slot: str, shard: str, pairs: Iterable[tuple[int, int]], alias: Collection[int]
) -> list[Buffer]:
    """Returns `uses` with shards in place of slots. pairs: `(unit, slot)`; alias: units whose slots are their shards"""
    aliased = {number: unit for unit, number in pairs if unit in alias}
    kept = [use for use in uses if use[0] != slot or use[2] not in aliased]
    shards: list[Buffer] = [(shard, unit) for unit in aliased.values()]
    return kept + shards


# ---- The work of each kind of op: a table, so that a new kind is one more row.


def gather(session: Any, op: Gather) -> Work | None:
    memory = session.memory
    slots = session.slots
    in_node = op.source == "node"
    units: list[int] = []
    wholes: list[Tensor] = []
    shards: list[Tensor] = []
    decoded: list[tuple[Format, Tensor, Tensor]] = []
    for unit, slot in zip(op.units, op.slots, strict=True):
        if unit in memory.weights_alias:
            continue
        whole = slots.weight(slot, unit).flat
        format = memory.gathered_in.get(unit)
        if format is not None and not memory.keeps(unit) and not in_node:  # secondary shards are decoded
            encoded = slots.encoded(slot, unit)
            decoded.append((format, encoded, whole))
            whole = encoded
        units.append(unit)
        wholes.append(whole)
        shards.append(slots.secondary(unit) if in_node else memory.working.rows[unit])
    gathering = partial(flat.gather_into, in_node=in_node)
    work: Work | None = session.by_ranks(units, gathering, wholes, shards)
    if work is None or not decoded:
        return work

    def gather_and_decode() -> None:
        work()
        for each in decoded:
            formats.decode(*each)

    return gather_and_decode


def stash(session: Any, op: Stash) -> Work | None:
    jobs: list[tuple[Tensor, Tensor]] = []
    for unit, slot in zip(op.units, op.slots, strict=True):
        if unit not in session.memory.weights_alias:
            whole = session.slots.weight(slot, unit).flat
            jobs.append((session.slots.secondary(unit), flat.node_slice(session.memory.ranks_of[unit], whole)))
    if not jobs:
        return None

    def work() -> None:
        for kept, part in jobs:
            kept.copy_(part)

    return work


def all_reduce(session: Any, op: AllReduce) -> Work | None:
    memory = session.memory
    grads = session.grads
    assert grads is not None
    comms = memory.comms
    if op.over == "stages":
        (unit,) = op.units
        return partial(comms.sharing(memory.holders[unit]).all_reduce, grads.rows[unit], ReduceOp.SUM)
    if comms.replicas == 1:
        return None
    staging = memory.buffer("replicate")
    rows = [(grads.rows[unit], memory.wire_dtype(unit), memory.sums[unit]) for unit in op.units]

    def work() -> None:
        for shard, wire, wide in rows:
            sums.all_reduce_replicas(comms, shard, staging, wire=wire, accumulate=wide)

    return work


def exchange(session: Any, op: Exchange) -> Work | None:
    assert session.updates is not None, "only an optimizer exchanges"
    return None if session.memory.comms.ranks == 1 else session.updates.exchange(op.units)


WORKS: dict[type[Any], Callable[[Any, Any], Work | None]] = {
    Gather: gather,
    Stash: stash,
    AllReduce: all_reduce,
    Exchange: exchange,
}
"""Kind of op -> its work, of a session and an op; None where there is nothing to do."""
