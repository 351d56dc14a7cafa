"""What the figures of a section have in them, for who reads the JSON and not the code."""

from __future__ import annotations

from typing import NamedTuple


class Includes(NamedTuple):
    """A sentence each; the fields' names are the JSON's keys.

    timed: from where to where; optimizer: whether its step is in it; compiled: what goes through torch.compile;
    peer: whom ours is compared with; left_out: what a training run has and this has not
    """

    timed: str
    optimizer: str
    compiled: str
    precision: str
    peer: str
    left_out: str

    def __str__(self) -> str:
        return "\n".join(f"    {name.replace('_', ' ') + ':':<11}{text}" for name, text in self._asdict().items())


STEP = (
    "whole steps of one sequence: forward, backward, the gradient's norm, the update; loss and norm stay on the device"
)
PRECISION = "blocks and what is gathered bf16; master weights, moments, gradients and reductions fp32"
ADAMW = "in it, on all sides: torch's fused AdamW, no weight is left out of its decay"

CALIBRATION = Includes(
    timed="single operations: a product of 8192 x 8192, attention, copies; links are copies through its own memory",
    optimizer="none",
    compiled="nothing",
    precision="bf16",
    peer="none; the matrix rate is what MFU of the other sections is over",
    left_out="everything else of a training step",
)
ONE_RANK = Includes(
    timed=STEP,
    optimizer=f"{ADAMW}; ours also refreshes the bf16 copy, the peer copies its gradients to fp32 and back",
    compiled="the blocks, by torch.compile, once for both sides; embedding, head and loss are eager on both",
    precision=PRECISION,
    peer="the same Llama as a plain nn.Module, on the same weights, moments and gradient memory; no library",
    left_out="communication (one rank), data loading, clipping, recomputation, CUDA graphs",
)
EMULATED = Includes(
    timed=f"{STEP}. Of rank 0 of the row's ranks; the whole model is a line through two depths",
    optimizer=ADAMW,
    compiled="nothing, for nobody",
    precision=PRECISION,
    peer="torch's FSDP2 with explicit prefetch of one and of two units, and with a process group of its own for "
    "reductions where this torch has that; YaFSDP where it is installed. 'best' is FSDP2's fastest setting",
    left_out="NCCL: collectives only take their time on streams ('moving bytes': and copy as many bytes), so long that "
    "communication over compute is the published A100 cluster's; stragglers, data loading, clipping",
)
MEMORY = Includes(
    timed="nothing: the allocator's peak within one step, over the planner's prediction",
    optimizer="its step and its moments are in both",
    compiled="nothing: the planner reads the graph that eager blocks save",
    precision=PRECISION,
    peer="none",
    left_out="what the allocator rounds up, CUDA's context, libraries' workspaces",
)
ORDER = Includes(
    timed="one step of rank 0 of 8 on an emulated network, by torch's profiler and by ya.record: the order of ops is "
    "compared; times have a profiler in them",
    optimizer="in it",
    compiled="nothing",
    precision=PRECISION,
    peer="none",
    left_out="NCCL",
)
LEVERS = Includes(
    timed=f"{STEP}. On over off, interleaved: below 1 is what the lever buys",
    optimizer=f"{ADAMW}, except where it is the lever",
    compiled="as a variant's name says: 'eager' nothing, 'compiled' and 'step' the blocks",
    precision=f"{PRECISION}; 'bf16 gradients': slots and reductions bf16",
    peer="ours without the lever",
    left_out="communication: eight ranks are rank 0 of 8 on a network that takes no time, so that what hides it shows "
    "nothing",
)
