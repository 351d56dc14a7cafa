"""What has been measured of a step on fake tensors, for predictions. Schedules and the engine do without."""

from typing import NamedTuple

from yafsdp_fn.comm.ranks import padded_numel


class Value(NamedTuple):
    """Memory that goes into visits or comes out of them. number: equal where it is the same memory, in a microbatch;
    grad_bytes: of its gradient, 0 where there is none. What exists before the step, such as the batch, has no number.
    """

    number: int
    nbytes: int
    grad_bytes: int


class Argument(NamedTuple):
    """A tensor that a visit is given and that other visits have made, at once or by what the loss does between visits.

    place: among the visit's tensors; number: equal for the same tensor, in a microbatch; made: by which visits
    shape, dtype: of the tensor, the dtype as torch names it
    """

    place: int
    number: int
    made: tuple[int, ...]
    nbytes: int
    grad_bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = "float32"


class Cost(NamedTuple):
    """What one visit costs. Zero, or empty, where nothing has measured it.

    flops, bwd_flops: of matrix products in forward and backward, without recomputation; attention_flops,
    bwd_attention_flops: of attention, a causal one half (see `tracing.attention`); kept_bytes: held when the graph is
    kept: inputs and what it saves inside, weights and outputs apart; carry_bytes: inputs, held when it is made again.

    For predicted memory: takes, gives: what goes in and comes out; inner_bytes: saved by a kept graph beyond these;
    peak_bytes: most bytes that a forward with a graph has allocated at once, `gives` included; bwd_peak_bytes: most
    that a backward has, with what its graph saved inside, gradients of weights and of `takes`, without `gives`;
    between_bytes: what a backward in halves holds between them; beside_bytes, beside_peak_bytes: saved by what the loss
    does between this visit and the next (or its end), and the most that this allocates; carries: numbers of the values
    in `takes` that an offload copies; scratch_bytes: of memory that products go through on their way to a gradient slot
    of another dtype, one for all visits.

    arguments: what other visits have made of what it is given: what travels where the step is cut into stages
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
    arguments: tuple[Argument, ...] = ()

    @property
    def carry_slot_bytes(self) -> int:
        """What `carries` take in a carry slot, and on the host."""
        return sum(in_carry_slot(value.nbytes) for value in self.takes if value.number in self.carries)


def in_carry_slot(nbytes: int) -> int:
    """Bytes that a value takes in a carry slot: aligned as CUDA's allocator would, since kernels may look at that."""
    return -(-nbytes // 512) * 512


class OptimizerMemory(NamedTuple):
    """The memory of an optimizer on one rank.

    fixed: bytes of its state whatever the number of ranks; shards: `(elements of a flat vector, bytes of state per
    element of its shard)`; step: `(bytes, elements)`: what an update of so many elements has allocated at once
    """

    fixed: int = 0
    shards: tuple[tuple[int, int], ...] = ()
    step: tuple[int, int] = (0, 1)

    def nbytes(self, ranks: int) -> int:
        """Of the state, where shards are cut over `ranks`."""
        return self.fixed + sum(padded_numel(numel, ranks) // ranks * each for numel, each in self.shards)
