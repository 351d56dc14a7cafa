"""Races of sharded training: an op lacked a wait. Here no op names one, so that none can be left out."""

from __future__ import annotations

from tests.museum.edits import find
from tests.museum.exhibit import Order
from tests.museum.sharded import DEEPSPEED, MEGATRON, OFFLOADED, PLAIN, TORCH, TWO, VERIFIER
from tests.program.traces import model
from tests.schedules.cases import program
from yafsdp_fn.schedules import AllReduce, Backward, Forward, Gather, Offload, Reduce, Update

HYBRID = program(model(3), "hsdp, update after norm")
UPDATED = program(model(3), "zero3, update after norm")

RACES = [
    Order(
        f"{DEEPSPEED}/pull/3727",
        "ZeRO-2 with overlapped reductions: a gradient buffer was written again before the reduction of what was "
        "in it "
        "had ended. (So does DeepSpeed#5545.)",
        "a backward into the gradient slot of a layer before",
        PLAIN,
        (0, find(PLAIN, Backward, "a[0]")),
        (0, find(PLAIN, Reduce, "a[2]")),
    ),
    Order(
        f"{DEEPSPEED}/issues/8061",
        "Gradients were copied into the buffer on several streams; the reduction waited for one of them.",
        "a reduction, and the backward that writes what it takes",
        PLAIN,
        (0, find(PLAIN, Reduce, "a[1]")),
        (0, find(PLAIN, Backward, "a[1]")),
    ),
    Order(
        f"{DEEPSPEED}/pull/7965",
        "Results of reductions were used on the stream of reductions, and their memory given to others meanwhile: NaN.",
        "the second microbatch's gradient of the head, begun in the slot of the first one's",
        TWO,
        (0, find(TWO, Forward, "head", 1)),
        (0, find(TWO, Reduce, "head")),
    ),
    Order(
        f"{MEGATRON}/pull/6187",
        "The gradient shard belonged to another stream than the one that reduced into it, so that its memory "
        "could be used "
        "before the reduce-scatter had ended. Silently wrong.",
        "slots and shards are made once and belong to no stream; a sum over replicas, and the reduction whose result "
        "it reads",
        HYBRID,
        (0, find(HYBRID, AllReduce, "head")),
        (0, find(HYBRID, Reduce, "head")),
    ),
    Order(
        f"{TORCH}/pull/180665",
        "HSDP with gradients on the host: the reduce-scatter's result was given away before the stream of "
        "all-reduces had "
        "copied it.",
        "an all-reduce over replicas, and the reduce-scatter whose result it reads",
        HYBRID,
        (0, find(HYBRID, AllReduce, "a[2]")),
        (0, find(HYBRID, Reduce, "a[2]")),
    ),
    Order(
        VERIFIER + "#RB4a",
        "An asynchronous all-reduce of a gradient, which nobody waits for before the next one uses it.",
        "an all-reduce over replicas, and the reduce-scatter whose result it sums",
        HYBRID,
        (0, find(HYBRID, AllReduce, "a[0]")),
        (0, find(HYBRID, Reduce, "a[0]")),
    ),
    Order(
        "https://github.com/karpathy/nanochat/pull/843",
        "Inputs of asynchronous gathers were freed before they had ended: parameters of ranks came apart.",
        "a gather, and the update that writes the shard that it sends",
        UPDATED,
        (0, find(UPDATED, Gather, "embed")),
        (0, find(UPDATED, Update, "embed")),
    ),
    Order(
        "https://github.com/meta-pytorch/torchtune/issues/1867",
        "Activations offloaded on a stream of their own were deleted before the copy had read them: NaN gradients.",
        "a forward saves its carry where another one is being copied to the host",
        OFFLOADED,
        (0, find(OFFLOADED, Forward, "a[2]")),
        (0, find(OFFLOADED, Offload)),
    ),
    Order(
        "https://github.com/huggingface/trl/pull/7195",
        "A copy to the host was ordered after the stream that was current when the offload was made, not after "
        "the one "
        "that wrote the activation.",
        "an offload, and the forward that saves the carry",
        OFFLOADED,
        (0, find(OFFLOADED, Offload)),
        (0, find(OFFLOADED, Forward, "a[0]")),
    ),
]
