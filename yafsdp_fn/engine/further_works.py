"""Work of ops that a plain `zero3` has none of: secondary shards, sums over replicas and stages, exchanges of leaves.

Each gives what a stream is to do, None where that is nothing.
"""

from functools import partial

from torch.distributed import ReduceOp

from yafsdp_fn.comm import flat
from yafsdp_fn.comm.streams import Work
from yafsdp_fn.engine.memory import Memory
from yafsdp_fn.engine.protocols import Updates
from yafsdp_fn.engine.shards import Shards
from yafsdp_fn.engine.slots import Slots
from yafsdp_fn.schedules.further_ops import AllReduce, Exchange, Stash


def stash(memory: Memory, slots: Slots, op: Stash) -> Work | None:
    if memory.weights_alias:
        return None
    jobs = [
        (slots.secondary(unit), flat.node_slice(memory.comms, slots.weight(slot, unit)[0]))
        for unit, slot in zip(op.units, op.slots, strict=True)
    ]

    def work() -> None:
        for kept, part in jobs:
            kept.copy_(part)

    return work


def all_reduce(memory: Memory, grads: Shards | None, op: AllReduce) -> Work | None:
    assert grads is not None
    if op.over == "stages":
        (unit,) = op.units
        group, row = memory.comms.sharing(memory.holders[unit]), grads.rows[unit]
        return partial(group.all_reduce, row, ReduceOp.SUM)
    if memory.comms.replicas == 1:
        return None
    staging, rows = memory.staging(), [grads.rows[unit] for unit in op.units]
    wire, wide = memory.wire_dtype, memory.sum_dtype

    def work() -> None:
        for shard in rows:
            flat.all_reduce_replicas(memory.comms, shard, staging, wire=wire, accumulate=wide)

    return work


def exchange(memory: Memory, updates: Updates | None, op: Exchange) -> Work | None:
    assert updates is not None, "only an optimizer exchanges"
    return None if memory.comms.ranks == 1 else updates.exchange(op.units)
