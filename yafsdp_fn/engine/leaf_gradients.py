"""Gradients of sharded leaves that a loss reads beside its visits (a regulariser, say), when the backward is over.

grads[unit] += gradient of the unit's leaf        # after the gradients of its visits
"""

from collections.abc import Sequence

from torch import Tensor

from yafsdp_fn.engine.memory import Memory
from yafsdp_fn.engine.shards import Shards

ORDERED = (
    "the loss reads sharded leaves beside its visits (a regulariser, say): on a deterministic mesh their gradient "
    "would be added up in another order at another number of ranks. Visit them (ya.apply, ya.scan)"
)

LATE = (
    "the loss reads sharded leaves beside its visits (a regulariser, say): their gradient is known only at the end of "
    "the backward, but this program updates units before. Visit them (ya.apply, ya.scan), or keep the optimizer out of "
    "the program (update=False)"
)


def add(memory: Memory, grads: Shards, found: Sequence[Tensor | None], to_sum: set[int]) -> None:
    """Adds what was found, per group, to `grads`. to_sum: the units whose gradient an op still sums over replicas: it
    takes this rank's part, others take the whole"""
    for group, extra in zip(memory.groups, found, strict=True):
        if extra is not None:
            whole = Shards([group], [memory.comms.sum_over_replicas(extra.contiguous())])
            for unit, row in Shards([group], [extra]).rows.items():
                grads.rows[unit].add_(row if unit in to_sum else whole.rows[unit])
