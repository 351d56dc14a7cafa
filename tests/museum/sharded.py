"""Bugs of sharded training that a program can have: `verify` refuses each by name."""

from __future__ import annotations

from tests.museum.edits import changed, drop, find, move, with_, without
from tests.museum.exhibit import Refusal
from tests.program.traces import model, on
from tests.schedules.cases import LARGER, program
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Fetch,
    Forward,
    Gather,
    Offload,
    Program,
    Reduce,
    Stash,
    Update,
    hsdp,
    remat,
    zero3,
)

MEGATRON = "https://github.com/NVIDIA/Megatron-LM"
DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed"
TORCH = "https://github.com/pytorch/pytorch"
VERIFIER = (
    "https://github.com/NJUDeepEngine/llm-infra-verifier/blob/34a5e7dae7888200b92738477f14d22dda32e0af/benchmarks/"
    "real_bug_benchmark.py"
)

PLAIN = zero3()(model(3))
UPDATED = program(model(3), "zero3, update after norm")
DEFERRED = zero3(defer=True)(model(1, 2))
TWO = zero3()(model(1, 2))
HYBRID = hsdp()(on(model(1, 2), "replicas"))
COPIES = program(model(2), "ddp, update after norm")
NODES = program(model(3), "hpz")
TWICE = program(LARGER["scanned twice"], "zero3, update after norm")
OFFLOADED = zero3(remat=remat.offload(ahead=1))(model(3))


def write_after_read() -> Program:
    late = find(PLAIN, Backward, "a[0]")
    return changed(PLAIN, move(find(PLAIN, Reduce, "a[2]"), late))


def index_reset() -> Program:
    """Each reduction one layer later, as two buffers permit; but each layer gets the first buffer."""
    other = find(PLAIN, Backward, "a[1]")
    first = find(PLAIN, Reduce, "a[2]")
    reset = with_(other, grad_slots=(0,)), with_(find(PLAIN, Reduce, "a[1]"), grad_slots=(0,))
    return changed(PLAIN, *reset, move(first, other))


def one_buffer() -> Program:
    """Two reductions from one buffer, both after both backwards."""
    slot = (0,)
    second = find(PLAIN, Reduce, "a[1]")
    at = with_(find(PLAIN, Backward, "a[1]"), grad_slots=slot), with_(second, grad_slots=slot)
    return changed(PLAIN, *at, move(find(PLAIN, Reduce, "a[2]"), second - 1))


def finished_each_time() -> Program:
    """The sum over replicas already after the first of two microbatches."""
    return changed(HYBRID, move(find(HYBRID, AllReduce, "head"), find(HYBRID, Reduce, "head") + 1))


def begun_anew() -> Program:
    """The forward of the second microbatch begins the gradient, as that of the first one did."""
    first = DEFERRED.ops[find(DEFERRED, Forward, "head", 0)]
    begun = DEFERRED.ops[find(DEFERRED, Backward, "head", 1)].grad_slots
    assert isinstance(first, Forward)
    return changed(DEFERRED, with_(find(DEFERRED, Forward, "head", 1), early=begun))


def first_alone() -> Program:
    return changed(TWO, drop(find(TWO, Reduce, "a[0]", nth=1)))


def not_gathered_again() -> Program:
    gathers = [at for at, op in enumerate(UPDATED.ops) if op == Gather((1,), (0,))]
    return changed(UPDATED, drop(gathers[-1]))


def still_flagged() -> Program:
    return changed(PLAIN, drop(find(PLAIN, Gather, "a[0]", nth=1)))


def updated_at_once() -> Program:
    return changed(UPDATED, move(find(UPDATED, Update, "a[1]"), find(UPDATED, Reduce, "a[1]")))


def updated_after_one_visit() -> Program:
    return changed(TWICE, move(find(TWICE, Update, "a[0]"), find(TWICE, Backward, "a[0]") + 1))


def gathered_before_it_is_there() -> Program:
    inside = next(at for at, op in enumerate(NODES.ops) if isinstance(op, Gather) and op.source == "node")
    unit = NODES.trace.units[NODES.ops[inside].units[0]].name
    return changed(NODES, move(find(NODES, Stash, unit), inside))


def loaded_before_it_is_there() -> Program:
    store, load = (next(at for at, op in enumerate(OFFLOADED.ops) if isinstance(op, kind)) for kind in (Offload, Fetch))
    return changed(OFFLOADED, move(load, store))


REFUSED = [
    Refusal(
        f"{MEGATRON}/pull/5222",
        "Two gradient buffers taken in turns: a fused weight gradient was written over the input of a "
        "reduce-scatter that "
        "was still to be done. Slightly wrong gradients.",
        "`zero3`, gradient slots in turns; the reduction of a layer after the backward of the next one in its slot",
        PLAIN,
        write_after_read,
        "gradient",
    ),
    Refusal(
        f"{DEEPSPEED}/pull/7805",
        "The index of the ping-pong buffers was set back to 0 after every reduction, so that layers wrote to the "
        "buffer that "
        "was being reduced.",
        "two gradient slots, reductions one layer later, and each backward writes to slot 0",
        PLAIN,
        index_reset,
        "gradient",
    ),
    Refusal(
        VERIFIER + "#RB4b",
        "Two asynchronous all-reduces use one gradient buffer, neither has been waited for.",
        "backwards of two layers into one gradient slot, then their reductions",
        PLAIN,
        one_buffer,
        "gradient",
    ),
    Refusal(
        f"{MEGATRON}/pull/7186",
        "The reduction over replicas was done after every microbatch, since nothing marked the last one; only "
        "the last "
        "microbatch's gradient reached the optimizer.",
        "`hsdp`, two microbatches; the all-reduce after the first one",
        HYBRID,
        finished_each_time,
        "replicas",
    ),
    Refusal(
        "https://github.com/allenai/open-instruct/pull/1498",
        "ZeRO-2 took every backward for the last one and began its gradient accumulator anew; earlier "
        "microbatches were lost.",
        "`zero3(defer=True)`; the head of the second microbatch begins its gradient where that of the first still is",
        DEFERRED,
        begun_anew,
        "early",
    ),
    Refusal(
        "https://github.com/AMD-AGI/Primus/pull/1046",
        "A flag said once per step that a weight gradient was added: gradients of all microbatches but the first "
        "were lost.",
        "`zero3`, two microbatches; the second one's gradient of a layer is never reduced",
        TWO,
        first_alone,
        "once",
    ),
    Refusal(
        f"{MEGATRON}/issues/950",
        "With all-gathers overlapped with the forward, in another order than layers are used, a layer computed "
        "with the "
        "weights of the step before.",
        "`zero3(update=True)`; a slot that the next step reads is not gathered again after the update",
        UPDATED,
        not_gathered_again,
        "carry",
    ),
    Refusal(
        f"{TORCH}/pull/111354",
        "The flag `prefetched` was not reset when weights were let go; the next use did not gather them.",
        "`zero3`; the second gather of a layer is left out",
        PLAIN,
        still_flagged,
        "weights",
    ),
    Refusal(
        f"{TORCH}/pull/144535",
        "Under pipelining a hook of FSDP was missed that waits for the last reduce-scatters: gradients were read "
        "before they "
        "were reduced.",
        "`zero3(update=True)`; an update before the reduction of its gradient",
        UPDATED,
        updated_at_once,
        "update",
    ),
    Refusal(
        "https://github.com/facebookresearch/fairscale/issues/780",
        "A module used twice in a forward: its state was shed and its gradient taken after the first of its backwards.",
        "layers that are scanned twice; an update after the first of a layer's two backwards",
        TWICE,
        updated_after_one_visit,
        "update",
    ),
    Refusal(
        "https://github.com/verl-project/verl/issues/7493",
        "Shards of one rank on several GPUs: gradients were reduced in groups of one rank, never over replicas. "
        "Each rank "
        "trained a model of its own.",
        "`ddp` without its all-reduces",
        COPIES,
        lambda: changed(COPIES, without(AllReduce)),
        "norm",
    ),
    Refusal(
        f"{DEEPSPEED}/issues/5059",
        "ZeRO++ hpZ: gathers inside the node began while the secondary shards were still being copied. NaN, loss "
        "0 (arXiv:2407.01614).",
        "`hpz`; a gather inside the node before the stash that it reads",
        NODES,
        gathered_before_it_is_there,
        "secondary",
    ),
    Refusal(
        f"{MEGATRON}/issues/7398",
        "An activation was loaded from host memory while its copy to the host was under way.",
        "`remat.offload`; a fetch before the offload of its carry",
        OFFLOADED,
        loaded_before_it_is_there,
        "offload",
    ),
]
