"""Bugs that no program can have, since nothing in a program says such a thing: what a block does is the user's."""

from __future__ import annotations

import torch

import yafsdp_fn as ya
from tests.harness.small import batch, block, model, one_rank, with_block
from tests.museum.exhibit import Outside
from tests.museum.sharded import DEFERRED, MEGATRON, VERIFIER
from tests.proof.overlapped import right
from yafsdp_fn.program import ops
from yafsdp_fn.schedules import Backward, Forward, Program, Reduce, verify
from yafsdp_fn.util.mesh_axes import AxisCollective

TX = ya.optim.sgd(0.1)


def half(x: torch.Tensor, weights: object) -> tuple[torch.Tensor, None]:
    """A layer whose output is right, and whose gradient is not: as a race in a kernel would have it."""
    right = block(x, weights)[0]
    return right.detach() + (right - right.detach()) / 2, None


def blocks_are_not_seen() -> None:
    """Two steps of which one has wrong gradients are one program."""
    state = ya.init(model(), TX, mesh=one_rank())
    data = batch()
    programs = [ya.verify(ya.train_step(with_block(it), TX).lower(state, data)) for it in (block, half)]
    assert programs[0].fingerprint() == programs[1].fingerprint()


KINDS = {"slot", "grad slot", "carry slot", "secondary", "host", "shard", "grad shard", "optimizer"}
KINDS |= {"receive", "replicate", "norm"}


def sums_are_the_blocks() -> None:
    """A program without a sum that its block should have passes, and is not the one with it."""
    activations_are_not_named()
    trace = DEFERRED.trace._replace(mesh=(("shard", 1), ("tensor", DEFERRED.trace.ranks)))
    summed = trace.visits[1]._replace(collectives=(AxisCollective("tensor", "psum", 64),))
    programs = [
        verify(DEFERRED.with_trace(trace._replace(visits=(trace.visits[0], visit, *trace.visits[2:]))))
        for visit in (trace.visits[1], summed)
    ]
    assert programs[0].fingerprint() != programs[1].fingerprint()


def activations_are_not_named() -> None:
    """No op that sums anything over ranks uses an activation: but for gradients, weights and norms there is "
    "nothing."""
    sums: list[ops.Op] = [ops.Reduce((0,), (0,)), ops.AllReduce((0,)), ops.AllReduce((0,), "stages"), ops.Norm((0,))]
    every: list[ops.Op] = [
        *sums,
        ops.Gather((0,), (0,)),
        ops.Stash((0,), (0,)),
        ops.Update((0,)),
        ops.Exchange((0,), 0),
    ]
    every += [ops.Forward(0, (0,), True), ops.Backward(0, (0,), (0,)), ops.Offload(0, 0), ops.Fetch(0, 0)]
    every += [ops.Send(0, 0), ops.Receive(0, 0)]
    assert {type(op) for op in every} == set(ops.OPS)
    kinds = {op: {buffer[0] for used in op.uses() for buffer in used} for op in every}
    assert set().union(*kinds.values()) <= KINDS
    assert not any("carry slot" in kinds[op] for op in sums)


def memory_is_not_judged() -> None:
    """Each microbatch's gradients in slots of their own, reduced when all are there: right, and twice as large."""
    made: list[ops.Op] = []
    for op in DEFERRED.ops:
        if isinstance(op, Forward | Backward):
            field = "early" if isinstance(op, Forward) else "grad_slots"
            op = op._replace(**{field: tuple(slot + 10 * op.microbatch for slot in getattr(op, field))})
        if isinstance(op, Reduce):
            made.append(op._replace(grad_slots=tuple(slot + 10 for slot in op.grad_slots)))
        made.append(op)
    larger = verify(Program(DEFERRED.trace, tuple(made)))
    assert right(larger)
    assert sum(larger.grad_slot_bytes().values()) == 2 * sum(DEFERRED.grad_slot_bytes().values())


OUTSIDE = [
    Outside(
        f"{MEGATRON}/issues/7400",
        "With an expert dispatcher of its own, now and then gradients are far too large, or NaN. The thread is "
        "open, and "
        "names no cause.",
        "a layer whose output is right and whose gradient is not",
        "not caught: what a block computes is in no program. Two runs on a [deterministic "
        "mesh](deterministic.md), whose "
        "bits would differ, show that there is something",
        blocks_are_not_seen,
    ),
    Outside(
        VERIFIER + "#RB1a",
        "Tensor parallelism: a layer's output is a part of a sum, and nothing sums it over ranks.",
        "a block without its `psum`: no op sums activations, blocks do",
        "accepted: it is another program, whose trace and fingerprint do not have the sum, and exact for what it says. "
        "What a block should sum is the user's; the same functions on plain tensors, the oracle, give other numbers",
        sums_are_the_blocks,
    ),
    Outside(
        "https://github.com/marin-community/marin/issues/6532",
        "A zero-bubble schedule kept the weight gradients of every microbatch apart and added them at the end: "
        "out of "
        "memory, the more microbatches the sooner.",
        "`zero3(defer=True)`, two microbatches; the second one's gradients in slots of their own",
        "accepted: it is right. `verify` does not judge memory; `Program.grad_slot_bytes` and "
        "`ya.planner.predict_memory` say that "
        "gradient slots are twice as large",
        memory_is_not_judged,
    ),
]
