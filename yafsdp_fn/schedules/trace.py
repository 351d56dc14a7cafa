"""What a loss function does with its units: the visits, in order. A schedule is built from this and nothing else.

    for m in range(microbatches):
        for visit in visits:           Compute("forward", visit, m)
        for visit in reversed(visits): Compute("backward", visit, m, closes)

Visits are chained, so backward runs in exactly the reverse of the forward's order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from yafsdp_fn.layout import padded_numel

Kind = Literal["forward", "backward"]
UpdateWhen = Literal["never", "after norm", "any time"]
"""When a program may update a unit: never, since the step has no optimizer; after the norm of the whole gradient is
known, to clip by it or to skip a step that is not finite; or any time after the unit's own gradient is complete."""


class Unit(NamedTuple):
    """One flat vector of parameters, sharded as one.

    stack: name of the stack it is a layer of, None if unstacked; layer: index in the stack, 0 if unstacked
    numel: elements, without padding; gather_bytes, reduce_bytes: one padded flat vector, as gathered and as reduced
    sum_bytes: the same vector in the dtype in which ranks sum themselves (`Precision.accumulate`), 0 if they do not
    """

    id: int
    name: str
    stack: str | None
    layer: int
    numel: int
    gather_bytes: int
    reduce_bytes: int
    trainable: bool
    sum_bytes: int = 0


class Value(NamedTuple):
    """Memory that goes into visits or comes out of them. number: equal where it is the same memory, in a microbatch;
    grad_bytes: of its gradient, 0 where there is none. What exists before the step, such as the batch, has no number.
    """

    number: int
    nbytes: int
    grad_bytes: int


def in_carry_slot(nbytes: int) -> int:
    """Bytes that a value takes in a carry slot: aligned as CUDA's allocator would, since kernels may look at that."""
    return -(-nbytes // 512) * 512


class Visit(NamedTuple):
    """One use of units in a microbatch.

    units: ids, in the order the block takes them; trained: those that receive a gradient from this visit
    flops, bwd_flops: of matrix products in forward and backward, without recomputation; attention_flops,
    bwd_attention_flops: of attention, a causal one half (see `runtime.attention`); kept_bytes: held when the
    graph is kept: inputs and what it saves inside, weights and outputs apart; carry_bytes: inputs, held when it is made
    again.

    For predicted memory: takes, gives: what goes in and comes out; inner_bytes: saved by a kept graph beyond these;
    peak_bytes: most bytes that a forward with a graph has allocated at once, `gives` included; bwd_peak_bytes: most
    that a backward has, with what its graph saved inside, gradients of weights and of `takes`, without `gives`;
    beside_bytes, beside_peak_bytes: saved by what the loss does between this visit and the next (or its end), and the
    most that this allocates; carries: numbers of the values in `takes` that an offload copies; scratch_bytes: of memory
    that products go through on their way to a gradient slot of another dtype, one for all visits. Zero, or empty, where
    nothing has measured them.
    """

    id: int
    name: str
    units: tuple[int, ...]
    trained: tuple[int, ...]
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
    carries: tuple[int, ...] = ()
    scratch_bytes: int = 0

    @property
    def carry_slot_bytes(self) -> int:
        """What `carries` take in a carry slot, and on the host."""
        return sum(in_carry_slot(value.nbytes) for value in self.takes if value.number in self.carries)


class Compute(NamedTuple):
    """Forward or backward of a visit. closes: units whose gradient is now complete in this microbatch."""

    kind: Kind
    visit: int
    microbatch: int
    closes: tuple[int, ...] = ()


class Optimizer(NamedTuple):
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


class Trace(NamedTuple):
    """The whole step. mesh: `(axis name, size)` pairs, outermost first; order: computes as executed.

    precision: `Precision.names`, and optimizer: where a trace was taken on fake tensors, for predicted memory
    """

    units: tuple[Unit, ...]
    visits: tuple[Visit, ...]
    order: tuple[Compute, ...]
    mesh: tuple[tuple[str, int], ...]
    microbatches: int
    updates: UpdateWhen = "never"
    precision: tuple[str, ...] = ()
    optimizer: Optimizer = Optimizer()

    @property
    def ranks(self) -> int:
        """Ranks that shards are cut by: all axes but `replicate`."""
        return math.prod(size for name, size in self.mesh if name != "replicate")

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard."""
        return dict(self.mesh).get("replicate", 1)

    @property
    def local_ranks(self) -> int:
        """Ranks of one node that share a replica; all of them where the mesh does not tell nodes apart."""
        return dict(self.mesh).get("local", self.ranks)

    def on(self, mesh: tuple[tuple[str, int], ...]) -> Trace:
        """The same step on another mesh, `(axis name, size)` pairs: only the padding of units changes.

        The batch stays that of one rank.
        """
        moved = self._replace(mesh=mesh)
        return moved._replace(units=tuple(_padded(unit, self.ranks, moved.ranks) for unit in self.units))

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return any(compute.kind == "backward" for compute in self.order)


def _padded(unit: Unit, before: int, after: int) -> Unit:
    """`unit` cut over `after` ranks instead of `before`."""
    old, new = padded_numel(unit.numel, before), padded_numel(unit.numel, after)
    sizes = (unit.gather_bytes, unit.reduce_bytes, unit.sum_bytes)
    gather, reduce, wide = (nbytes // old * new if old else 0 for nbytes in sizes)
    return unit._replace(gather_bytes=gather, reduce_bytes=reduce, sum_bytes=wide)


def chained_order(visits: Sequence[Visit], microbatches: int, backward: bool = True) -> tuple[Compute, ...]:
    """The order of computes: depth-first over microbatches, backward in exactly the reverse of forward."""
    closes: list[tuple[int, ...]] = []
    closed: set[int] = set()
    for visit in visits:  # the first visit of a unit in the forward is its last in the backward
        closes.append(tuple(dict.fromkeys(unit for unit in visit.trained if unit not in closed)))
        closed.update(visit.trained)
    order: list[Compute] = []
    for microbatch in range(microbatches):
        order += [Compute("forward", visit.id, microbatch) for visit in visits]
        if backward:
            order += [Compute("backward", v.id, microbatch, closes[v.id]) for v in reversed(visits)]
    return tuple(order)
