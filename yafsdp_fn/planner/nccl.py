"""What NCCL allocates for its communicators, beside torch's allocator: an estimate, of what tensors cannot have.

ring (gathers, reduce-scatters, all-reduces)        1 peer
exchange of n ranks (`Precision.accumulate`)        n - 1 peers
messages to other stages of a pipeline, or from them    as many peers as there are such stages
a peer                                              CHANNELS x CHANNEL_BYTES
"""

from yafsdp_fn.comm.ranks import Ranks
from yafsdp_fn.schedules.further_ops import Receive, Send
from yafsdp_fn.schedules.ops import Gather
from yafsdp_fn.schedules.program import Program

CHANNELS = 32
"""The most that NCCL opens; on slower links it opens fewer."""

CHANNEL_BYTES = 14 << 20
"""Per channel and peer: one buffer of 10 MiB and two of 2 MiB, as an exchange of eight H100 allocated (32 channels a
peer, 3.3 GB in all; issue 1685 of NVIDIA/nccl)."""


def communicator_bytes(program: Program, ranks: Ranks, exchanges: bool) -> int:
    """Of all communicators that a step of `program` uses. exchanges: whether reductions are exchanges and local sums"""
    split = program.trace.split
    messages = {split.ends(op.flow, op.back) for op in program.ops if split and isinstance(op, Send | Receive)}
    peers = len({stage for ends in messages for stage in ends} - {program.trace.stage})
    if ranks.ranks > 1:
        sources = {op.source for op in program.ops if isinstance(op, Gather)}
        peers += len(sources - {"node"}) + ("node" in sources and ranks.local_ranks > 1)
        peers += 1  # reductions, or sums of norms and metrics
        if exchanges and ranks.nodes > 1 and ranks.local_ranks > 1:
            peers += ranks.local_ranks - 1 + ranks.nodes - 1
        elif exchanges:
            peers += ranks.ranks - 2  # the ring's own is one of them
    if ranks.replicas > 1:
        peers += 1 + (ranks.replicas - 1 if exchanges else 1)  # metrics; gradients
    return peers * CHANNELS * CHANNEL_BYTES
