"""Costs, for predictions: of each visit and of the optimizer, as they were measured on fake tensors.

    Visit.cost         FLOPs, bytes through memory, what is held until the backward
    Trace.optimizer    bytes of the optimizer's state, and of its update

The engine and the proof do without: a program that was recorded from a running step has zeros here. Of `Cost` a cut
into stages takes the arguments, which travel.
"""

from typing import NamedTuple

from yafsdp_fn.program.split import Argument, Positive, in_carry_slot

# ---- One visit.


class Value(NamedTuple):
    """Memory that goes into visits or comes out of them. number: equal where it is the same memory, in a microbatch;
    grad_bytes: of its gradient, 0 where there is none. What exists before the step, such as the batch, has no number.
    """

    number: int
    nbytes: int
    grad_bytes: int


class Moved(NamedTuple):
    """The bytes that a pass moves through memory beside attention, and by how many kernels.

    products: operands and results of matrix products; eager, eager_kernels: inputs and outputs of every other kernel,
    as eager torch launches them; fused, fused_kernels: the same where kernels that feed each other are one, as
    `torch.compile` or a library of kernels makes them: what they hand on to each other is not written; pieces,
    piece_kernels: what norms move beyond `eager` where they are written out, operation by operation
    """

    products: int = 0
    product_kernels: int = 0
    eager: int = 0
    eager_kernels: int = 0
    fused: int = 0
    fused_kernels: int = 0
    pieces: int = 0
    piece_kernels: int = 0

    def more(self, nbytes: int) -> "Moved":
        """Returns these with so many bytes more, by kernels that do not fuse."""
        return self._replace(eager=self.eager + nbytes, fused=self.fused + nbytes)

    def others(self, kernels: str) -> tuple[int, int]:
        """Bytes and number of the kernels that are no products. kernels: one of `KERNELS`"""
        if kernels == "fused":
            return self.fused, self.fused_kernels
        written_out = kernels == "pieces"
        return self.eager + written_out * self.pieces, self.eager_kernels + written_out * self.piece_kernels


KERNELS = {
    "fused": "kernels fused as torch.compile does (kernels='eager' for the others)",
    "eager": "eager torch's kernels",
    "pieces": "eager torch's kernels, norms written out",
}
"""Kinds of kernels for what is no product and no attention, `Trace.kernels`, in words. "pieces": as torch ran
`rms_norm` before 2.8, and as models that write their norms out do."""


class Cost(NamedTuple):
    """The cost of one visit. Zero, or empty, where nothing has measured it.

    flops, bwd_flops: of matrix products in forward and backward, without recomputation; attention_flops,
    bwd_attention_flops: of attention, a causal one half (see `tracing/attention.py`); kept_bytes: of a kept graph,
    inputs and what it saves inside, without weights and outputs; carry_bytes: inputs, which a recomputation needs.

    For predicted memory: takes, gives: inputs and outputs; inner_bytes: saved by a kept graph beside these; peak_bytes:
    the most that a forward with a graph has allocated at once, with `gives`; bwd_peak_bytes: the most that a backward
    has, with what its graph saved inside, gradients of weights and of `takes`, without `gives`; between_bytes: held
    between the halves of a backward; beside_bytes, beside_peak_bytes: saved by the operations of the loss between this
    visit and the next (or the end), and the most that they allocate; carries: numbers of the values in `takes` that an
    offload copies; unsaved: numbers of values in `takes` and `gives` that nobody saves; scratch_bytes: of the memory
    for products on their way to a gradient slot of another dtype, one for all visits.

    arguments: the inputs that other visits have made: they travel if the step is cut into stages
    moved, bwd_moved: through memory, by forward and by backward; last_flops: those of `flops` that come after all that
        a graph saves inside: no backward needs them again
    """

    flops: int = 0
    bwd_flops: int = 0
    kept_bytes: int = 0
    carry_bytes: int = 0
    attention_flops: int = 0
    bwd_attention_flops: int = 0
    takes: tuple[Value, ...] = ()
    gives: tuple[Value, ...] = ()
    inner_bytes: int = 0
    peak_bytes: int = 0
    bwd_peak_bytes: int = 0
    beside_bytes: int = 0
    beside_peak_bytes: int = 0
    between_bytes: int = 0
    carries: tuple[int, ...] = ()
    scratch_bytes: int = 0
    unsaved: tuple[int, ...] = ()
    arguments: tuple[Argument, ...] = ()
    moved: Moved = Moved()
    bwd_moved: Moved = Moved()
    last_flops: int = 0

    def __repr__(self) -> str:
        return f"Cost(flops={self.flops}, bwd_flops={self.bwd_flops}, kept_bytes={self.kept_bytes}, ...)"

    @property
    def carry_slot_bytes(self) -> int:
        """Bytes that `carries` take in a carry slot, and on the host."""
        return sum(in_carry_slot(value.nbytes) for value in self.takes if value.number in self.carries)


# ---- The optimizer.


class OptimizerMemory(NamedTuple):
    """The memory of an optimizer on one rank.

    fixed: bytes of its state whatever the number of ranks; shards: `(elements of a flat vector, bytes of state per
    element of its shard, parts that units are split into over axes inside blocks)`; step: `(bytes, elements)`: what an
    update of so many elements has allocated at once
    block: 1, or the elements of a block, where the state is in a format: bytes in `shards` are of so many elements, and
        units are updated one after the other
    on_host: `(unit, bytes of its state that are on the host, as in shards)`: the device has those of two units at a
        time, and units are updated one after the other
    """

    fixed: int = 0
    shards: tuple[tuple[int, int, Positive], ...] = ()
    step: tuple[int, Positive] = (0, 1)
    block: Positive = 1
    on_host: tuple[tuple[int, int], ...] = ()
