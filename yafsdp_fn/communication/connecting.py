"""Makes the communicators of a mesh, and connects their ranks, before a step needs them.

NCCL makes a communicator, and connects two ranks, at first use. That blocks both hosts and may synchronise the device:
in the middle of a step, a rank could so wait for one that waits for what it has not launched yet. What only some states
and programs use is connected when they are made (`Communicators.connect`, `connect_sums`), since the buffers for it
take memory.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from yafsdp_fn.communication.collectives import RankGroup
from yafsdp_fn.util.torch_private import make_communicator


def meet(comms: Any) -> None:
    """Makes every communicator of `comms`, and uses those that all steps use, in one order on all ranks."""
    if comms.alone:
        return
    meet_for_units(comms)
    use_once(comms, comms.of_metrics, comms.metrics_group, "all-reduce")
    if comms.replicas > 1:
        use_once(comms, "replicate", comms.replicate_group, "all-reduce")
    if comms.stages > 1:
        use_once(comms, "gather", comms.stages_group, "all-gather")  # a ring, as its broadcasts
    for group in comms.along.values():
        for kind in ("all-gather", "reduce-scatter", "all-reduce", "exchange"):
            use_once(comms, "", group, kind)
    # each pair of stages, both ways
    token = torch.zeros(1, device=comms.device)
    for sender in range(len(comms.message_groups)):
        for receiver in range(comms.stages):
            if sender == comms.stage != receiver:
                comms.now("send", comms.send(token, receiver), "first message")
            elif receiver == comms.stage != sender:
                comms.now("receive", comms.receive(token, sender), "first message")


def meet_for_units(comms: Any) -> None:
    """Makes the communicators that move units, of a mesh or of a part of its axes."""
    use_once(comms, "gather", comms.gather_group, "all-gather")
    use_once(comms, "reduce", comms.reduce_group, "reduce-scatter")
    for name in ("gather_local", "reduce_local", "reduce_nodes"):
        group = getattr(comms, f"{name}_group", comms.gather_group)
        if group is not comms.gather_group:
            make_communicator(group.process_group, comms.device)


def use_once(comms: Any, stream: str, group: RankGroup, kind: str) -> None:
    """Runs a collective of the kind that `group` is for, on its stream, or on that of computes (""): kinds have
    connections of their own."""
    ranks = group.process_group.size()
    if ranks == 1:
        return
    one = torch.zeros(1, device=comms.device)
    every = torch.zeros(ranks, device=comms.device)
    kinds = {
        "all-gather": partial(group.all_gathers, [every], [one]),
        "reduce-scatter": partial(group.reduce_scatters, [one], [every]),
        "all-reduce": partial(group.all_reduce, one, dist.ReduceOp.SUM),
        "exchange": partial(group.exchange, [*torch.zeros_like(every)], [*every]),
    }
    comms.now(stream, kinds[kind], f"first {kind}")
