"""The ops of a program, as data.

    Gather(units, slots, source)         all-gather each unit into its weight slot, from all ranks or inside the node
    Forward(visit, slots, keep)          run a visit on the weights in `slots`; keep its graph, or recompute it later
    Backward(visit, slots, grad_slots)   its backward; the gradient of each trained unit goes to its gradient slot
    Reduce(units, grad_slots)            reduce-scatter each gradient slot and add the result to the gradient shard
    Norm(units)                          the norm of the whole gradient, over all ranks
    Update(units, part)                  the optimizer's step on the units' shards, or a part of it

and what a program has for replicas, nodes, stages, owners of leaves or offloads: further_ops.py.

A slot is a preallocated flat buffer; weight slots, gradient slots and carry slots are numbered apart. A `Backward` adds
when its gradient slot already holds that unit's unreduced gradient, else it overwrites. A slot that is read before the
program gathers into it is carried over from the step before.

Each op says on which stream it runs, and what it `uses`: the buffers that it reads, and those that it writes. Who waits
for whom follows from that alone (scoreboard.py). To add an op:

    here, further_ops.py                    its class, in `Op`; `filled`, if it puts weights into slots
    trace.py                                `Trace.weights_of`, if it reads weights from slots
    text.py, well_formed.py, rules/         its words; its fields, if they have new names; its rule
    engine/interpreter.py                   its work; None where slots are the shards
    planner/costs.py, timeline/text.py      its cost; its kind

What is missing fails `tests/schedules/test_every_op.py`, by name; the oracle of mutants, tests/schedules/reference.py,
wants to know it, too.
"""

from collections.abc import Hashable
from typing import Any, Literal, NamedTuple, get_args

from yafsdp_fn.schedules.buffers import Uses, carry, in_set, of_units
from yafsdp_fn.schedules.further_ops import AllReduce, Exchange, Fetch, Offload, Receive, Send, Stash
from yafsdp_fn.schedules.split import Kind


class Gather(NamedTuple):
    """All-gathers `units[i]` into weight slot `slots[i]`: from all ranks' shards, or the secondary ones of a node."""

    units: tuple[int, ...]
    slots: tuple[int, ...]
    source: Literal["shard", "node"] = "shard"

    @property
    def stream(self) -> str:
        return "gather"

    def uses(self, at: Hashable = 0) -> Uses:
        """`at` names the slot set that the op runs in."""
        shards = in_set("secondary", at, self.units) if self.source == "node" else of_units("shard", self.units)
        return shards, in_set("slot", at, self.slots)


class Forward(NamedTuple):
    """A visit's forward on the weights in `slots`, one for each unit of the visit. keep: its graph, or recompute it.

    carry_slot: where it saves the scan's carry for its recomputation; None where the carry stays where it is
    early: the gradient slots of its backward, which comes next, where it may write gradients that it knows already
    takes, gives: carry slots with what comes from other segments of a pipeline, which it empties, and with what goes
        there: see `Split.takes`
    """

    visit: int
    slots: tuple[int, ...]
    keep: bool
    microbatch: int = 0
    carry_slot: int | None = None
    early: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()

    @property
    def stream(self) -> str:
        return "compute"

    def uses(self, at: Hashable = 0) -> Uses:
        carries = carry(at, self.carry_slot) + in_set("carry slot", at, self.gives)
        reads = in_set("slot", at, self.slots) + in_set("carry slot", at, self.takes)
        return reads, carries + in_set("grad slot", at, self.early)


class Backward(NamedTuple):
    """A visit's backward on the weights in `slots`; one gradient slot for each unit that the visit trains.

    carry_slot: where it finds the carry that its forward saved in one
    takes, gives: as those of a forward, with gradients
    half: "inputs", the gradients of its arguments, without gradient slots; and later "weights", without weight slots
    """

    visit: int
    slots: tuple[int, ...]
    grad_slots: tuple[int, ...]
    microbatch: int = 0
    carry_slot: int | None = None
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    half: Literal["both", "inputs", "weights"] = "both"

    @property
    def stream(self) -> str:
        return "compute"

    def uses(self, at: Hashable = 0) -> Uses:
        reads = in_set("slot", at, self.slots) + carry(at, self.carry_slot) + in_set("carry slot", at, self.takes)
        return reads, in_set("carry slot", at, self.gives) + in_set("grad slot", at, self.grad_slots)


class Reduce(NamedTuple):
    """Reduce-scatters: the gradient of `units[i]` from gradient slot `grad_slots[i]`, which is free afterwards."""

    units: tuple[int, ...]
    grad_slots: tuple[int, ...]

    @property
    def stream(self) -> str:
        return "reduce"

    def uses(self, at: Hashable = 0) -> Uses:
        return in_set("grad slot", at, self.grad_slots), [*of_units("grad shard", self.units), ("receive",)]


class Norm(NamedTuple):
    """The norm of the gradient of `units`, all that are trainable: what clipping and the skip of a step wait for."""

    units: tuple[int, ...]

    @property
    def stream(self) -> str:
        return "compute"

    def uses(self, at: Hashable = 0) -> Uses:
        return of_units("grad shard", self.units), [("norm",)]


class Update(NamedTuple):
    """The optimizer's step on the shards of `units`, and the refresh of their working copies. A program without updates
    is followed by one of all units.

    part: of the step, 0 where there is one. Where the optimizer needs whole matrices there are more (`Trace.parts`):
        even ones are on shards, odd ones on the leaves that this rank owns, and only the last writes the shards
    """

    units: tuple[int, ...]
    part: int = 0

    @property
    def stream(self) -> str:
        return "compute"

    def uses(self, at: Hashable = 0) -> Uses:
        # a fused kernel writes the scaled gradient back
        return [("norm",)], [(kind, unit) for unit in self.units for kind in ("shard", "optimizer", "grad shard")]


ComputeOp = Forward | Backward
Op = (
    Gather
    | Stash
    | Forward
    | Backward
    | Reduce
    | AllReduce
    | Norm
    | Update
    | Exchange
    | Offload
    | Fetch
    | Send
    | Receive
)
OPS: dict[str, type[Any]] = {op.__name__.lower(): op for op in get_args(Op)}
STREAMS = ("gather", "compute", "reduce", "replicate", "offload", "send", "receive")
"""In the order in which they are shown."""


def kind_of(op: ComputeOp) -> Kind:
    """The kind of compute that it is, as traces have it."""
    if isinstance(op, Forward):
        return "forward"
    return "backward" if op.half == "both" else op.half


def filled(op: Op) -> tuple[tuple[int, int], ...]:
    """`(unit, weight slot)` of the weights that `op` puts into slots."""
    return tuple(zip(op.units, op.slots, strict=True)) if isinstance(op, Gather) else ()
