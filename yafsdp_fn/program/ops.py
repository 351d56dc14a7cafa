"""The ops of a program, and the buffers that they read and write, as data."""

import functools
import re
from collections.abc import Hashable, Iterable
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

from yafsdp_fn.program.split import Kind, Message

# ---- What ops read and write, by name: hazards are found from that alone (communication/streams.py).

Buffer = tuple[Hashable, ...]
"""`("slot", set, i)`, `("grad slot", set, i)`, `("carry slot", set, i)`, `("secondary", set, unit)`, `("host", set,
visit)`: of a slot set. `("shard", unit)`, `("grad shard", unit)`, `("optimizer", unit)`, `("receive",)`,
`("replicate",)`, `("norm",)`: of a state. The working copy of a shard is refreshed by the update that writes the shard:
one buffer."""


Uses = tuple[list[Buffer], list[Buffer]]
"""The buffers that an op reads, and those that it writes."""


# ---- Fields that number slots say so in their annotation: which ones an op reads and fills is declared there, once.


class SlotUse(NamedTuple):
    """The use of the slots that a field of an op numbers."""

    kind: Literal["slot", "grad slot", "carry slot"]
    way: Literal["reads", "writes"]


Numbers = TypeVar("Numbers")
ReadsWeights = Annotated[tuple[int, ...], SlotUse("slot", "reads")]
FillsWeights = Annotated[tuple[int, ...], SlotUse("slot", "writes")]
ReadsGradients = Annotated[tuple[int, ...], SlotUse("grad slot", "reads")]
WritesGradients = Annotated[tuple[int, ...], SlotUse("grad slot", "writes")]
ReadsCarry = Annotated[Numbers, SlotUse("carry slot", "reads")]
FillsCarry = Annotated[Numbers, SlotUse("carry slot", "writes")]


def slot_fields(op: Any) -> tuple[tuple[str, SlotUse], ...]:
    """Returns the fields of `op` that number slots, in their order."""
    kind: Any = type(op)
    return _slot_fields(kind)


@functools.cache
def _slot_fields(kind: Any) -> tuple[tuple[str, SlotUse], ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple((field, use) for field, hint in hints.items() for use in getattr(hint, "__metadata__", ()))


def uses_of(op: Any, at: Hashable, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = ()) -> Uses:
    """Returns the uses of `op`: the slots of set `at` that its fields number, beside other buffers."""
    found: dict[str, list[Buffer]] = {"reads": [*reads], "writes": []}
    for field, (kind, way) in slot_fields(op):
        numbers = getattr(op, field)
        if numbers is not None:
            each = numbers if isinstance(numbers, tuple) else (numbers,)
            found[way] += [(kind, at, number) for number in each]
    return found["reads"], [*found["writes"], *writes]


def of_units(kind: str, units: tuple[int, ...]) -> list[Buffer]:
    return [(kind, unit) for unit in units]


# ---- The ops of a program, as data.
#
#     Gather(units, slots, source)         all-gather each unit into its weight slot, from all ranks or inside the node
#     Forward(visit, slots, keep)          run a visit on the weights in `slots`; keep its graph, or recompute it later
#     Backward(visit, slots, grad_slots)   its backward; the gradient of each trained unit goes to its gradient slot
#     Reduce(units, grad_slots)            reduce-scatter each gradient slot and add the result to the gradient shard
#     Norm(units)                          the norm of the whole gradient, over all ranks
#     Update(units, part)                  the optimizer's step on the units' shards, or a part of it
#
# and what a program has for replicas, nodes, stages, owners of leaves or offloads: below.
#
# A slot is a preallocated flat buffer; weight slots, gradient slots and carry slots are numbered apart. A `Backward`
# adds when its gradient slot already holds that unit's unreduced gradient, else it overwrites. A slot that is read
# before the program gathers into it is carried over from the step before.
#
# Each op says on which stream it runs, and what it `uses`: the buffers that it reads, and those that it writes. Who
# waits for whom follows from that alone (communication/streams.py). To add an op:
#
#     here                      its class, in `Op`, with annotations of `slot_fields`. Its form, words, JSON and kind in
#                               a timeline follow, and the slots that a program carries over
#     proof/execution.py        its moment, for rules, and its execution on symbols
#     runtime/works.py          its work; None where slots are the shards
#     planner/costs.py          its cost
#     schedules/__init__.py     its name, for users
#
# What is missing fails `tests/program/test_ops.py`, by name; the oracle of mutants,
# tests/proof/reference.py, wants to know it, too.


class Gather(NamedTuple):
    """All-gathers `units[i]` into weight slot `slots[i]`: from all ranks' shards, or the secondary ones of a node.

    >>> program.ops[0], program.words()[0]
    (Gather(units=(0,), slots=(2,), source='shard'), 'gather embed -> slot 2')
    """

    units: tuple[int, ...]
    slots: FillsWeights
    source: Literal["shard", "node"] = "shard"

    @property
    def stream(self) -> str:
        return "gather"

    def uses(self, at: Hashable = 0) -> Uses:
        """Returns the buffers that it reads, and those that it writes. at: names the slot set that the op runs in"""
        in_node = self.source == "node"
        return uses_of(self, at, [("secondary", at, unit) if in_node else ("shard", unit) for unit in self.units])


class Forward(NamedTuple):
    """A visit's forward on the weights in `slots`, one for each unit of the visit. keep: its graph, or recompute it.

    carry_slot: where it saves the scan's carry for its recomputation; None where the carry stays where it is
    early: the gradient slots of its backward, which comes next, where it may write gradients that it knows already
    takes, gives: carry slots with what comes from other segments of a pipeline, which it empties, and with what goes
        there: see `Split.takes`

    >>> next(op for op in program.ops if isinstance(op, ya.schedules.Forward))
    Forward(visit=0, slots=(2,), keep=True, microbatch=0, carry_slot=None, early=(), takes=(), gives=())
    """

    visit: int
    slots: ReadsWeights
    keep: bool
    microbatch: int = 0
    carry_slot: FillsCarry[int | None] = None
    early: WritesGradients = ()
    takes: ReadsCarry[tuple[int, ...]] = ()
    gives: FillsCarry[tuple[int, ...]] = ()

    @property
    def stream(self) -> str:
        return "compute"

    def uses(self, at: Hashable = 0) -> Uses:
        return uses_of(self, at)


class Backward(NamedTuple):
    """A visit's backward on the weights in `slots`; one gradient slot for each unit that the visit trains.

    carry_slot: where it finds the carry that its forward saved in one
    takes, gives: as those of a forward, with gradients
    half: "inputs", the gradients of its arguments, without gradient slots; and later "weights", without weight slots

    >>> next(op for op in program.ops if isinstance(op, ya.schedules.Backward))
    Backward(visit=5, slots=(3,), grad_slots=(3,), microbatch=0, carry_slot=None, takes=(), gives=(), half='both')
    """

    visit: int
    slots: ReadsWeights
    grad_slots: WritesGradients
    microbatch: int = 0
    carry_slot: ReadsCarry[int | None] = None
    takes: ReadsCarry[tuple[int, ...]] = ()
    gives: FillsCarry[tuple[int, ...]] = ()
    half: Literal["both", "inputs", "weights"] = "both"

    @property
    def stream(self) -> str:
        return "compute"

    def uses(self, at: Hashable = 0) -> Uses:
        return uses_of(self, at)


class Reduce(NamedTuple):
    """Reduce-scatters: the gradient of `units[i]` from gradient slot `grad_slots[i]`, which is free afterwards.

    >>> program.ops[-1], program.words()[-1]
    (Reduce(units=(0,), grad_slots=(2,)), 'reduce embed <- grad slot 2')
    """

    units: tuple[int, ...]
    grad_slots: ReadsGradients

    @property
    def stream(self) -> str:
        return "reduce"

    def uses(self, at: Hashable = 0) -> Uses:
        return uses_of(self, at, writes=[*of_units("grad shard", self.units), ("receive",)])


class Norm(NamedTuple):
    """The norm of the gradient of `units`, all that are trainable: what clipping and the skip of a step wait for.

    >>> ya.schedules.Norm((0, 1, 2, 3))
    Norm(units=(0, 1, 2, 3))
    """

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

    >>> of = ya.planner.trace(loss_fn, params, batch, tx=tx)   # tx says when a program may update
    >>> ya.schedules.zero3(update=True)(of).ops[-1]
    Update(units=(1,), part=0)
    """

    units: tuple[int, ...]
    part: int = 0

    @property
    def stream(self) -> str:
        return "compute"

    def uses(self, at: Hashable = 0) -> Uses:
        # a fused kernel writes the scaled gradient back
        return [("norm",)], [(kind, unit) for unit in self.units for kind in ("shard", "optimizer", "grad shard")]


# ---- Ops that a program has where it wants more than to shard: on replicas, nodes or stages, with owners or
# offloads.
#
# Stash(units, slots)                  keep this rank's part of each slot, for gathers inside the node
# AllReduce(units, over)               sum gradient shards over replicas, or over the stages that share a unit
# Exchange(units, part)                between two parts of an update: leaves travel to owners, or back to shards
# Offload(visit, carry_slot)           move what the visit has saved from its carry slot to the host
# Fetch(visit, carry_slot)             move it back, into a carry slot that its backward reads
# Send(flow, carry_slot)               send what a carry slot holds to another stage of the pipeline
# Receive(flow, carry_slot)            receive it there


class Stash(NamedTuple):
    """Copies this rank's part, 1 / local ranks, of weight slot `slots[i]` to the secondary shard of `units[i]`.

    >>> ya.schedules.Stash((1,), (0,))
    Stash(units=(1,), slots=(0,))
    """

    units: tuple[int, ...]
    slots: ReadsWeights

    @property
    def stream(self) -> str:
        return "gather"

    def uses(self, at: Hashable = 0) -> Uses:
        return uses_of(self, at, writes=[("secondary", at, unit) for unit in self.units])


class AllReduce(NamedTuple):
    """Sums the gradient shards of `units` over replicas, or over the pipeline stages that hold them, in place: once,
    when they are complete.

    >>> copies = ya.planner.trace(loss_fn, params, batch, mesh=[("replicate", 2), ("shard", 1)])
    >>> ya.schedules.ddp()(copies).ops[-1]
    AllReduce(units=(0,), over='replicas')
    """

    units: tuple[int, ...]
    over: Literal["replicas", "stages"] = "replicas"

    @property
    def stream(self) -> str:
        return "replicate"

    def uses(self, at: Hashable = 0) -> Uses:
        return [], [*of_units("grad shard", self.units), ("replicate",)]


class Exchange(NamedTuple):
    """Exchanges leaves of `units` between parts `part` and `part + 1` of their update: they travel to the ranks that
    own them, after even parts, or back to shards, after odd ones. What travels belongs to the optimizer.

    >>> ya.schedules.Exchange((1,), part=0)
    Exchange(units=(1,), part=0)
    """

    units: tuple[int, ...]
    part: int

    @property
    def stream(self) -> str:
        return "reduce"

    def uses(self, at: Hashable = 0) -> Uses:
        return [], of_units("optimizer", self.units)


class Offload(NamedTuple):
    """Copies the carry of `visit` from `carry_slot`, which is free afterwards, to the visit's buffer on the host.

    >>> ya.schedules.Offload(visit=1, carry_slot=0)
    Offload(visit=1, carry_slot=0)
    """

    visit: int
    carry_slot: ReadsCarry[int]

    @property
    def stream(self) -> str:
        return "offload"

    def uses(self, at: Hashable = 0) -> Uses:
        return uses_of(self, at, writes=[("host", at, self.visit)])


class Fetch(NamedTuple):
    """Copies the carry of `visit` from its buffer on the host to `carry_slot`.

    >>> ya.schedules.Fetch(visit=1, carry_slot=0)
    Fetch(visit=1, carry_slot=0)
    """

    visit: int
    carry_slot: FillsCarry[int]

    @property
    def stream(self) -> str:
        return "offload"

    def uses(self, at: Hashable = 0) -> Uses:
        return uses_of(self, at, reads=[("host", at, self.visit)])


class Send(NamedTuple):
    """Sends what `carry_slot` holds of `flow` in a microbatch to the stage that takes it; the slot is free afterwards.

    back: it is the gradient, which goes to the stage that the flow came from

    >>> program = ya.schedules.gpipe()(two_stages)
    >>> next(op for op in program.stages[0] if isinstance(op, ya.schedules.Send))
    Send(flow=0, carry_slot=0, microbatch=0, back=False)
    """

    flow: int
    carry_slot: ReadsCarry[int]
    microbatch: int = 0
    back: bool = False

    @property
    def message(self) -> Message:
        """The message that travels."""
        return Message(self.flow, self.microbatch, self.back)

    @property
    def stream(self) -> str:
        return "send"

    def uses(self, at: Hashable = 0) -> Uses:
        return uses_of(self, at)


class Receive(NamedTuple):
    """Receives what a `Send` of the same numbers sends, into `carry_slot`.

    >>> program = ya.schedules.gpipe()(two_stages)
    >>> next(op for op in program.stages[1] if isinstance(op, ya.schedules.Receive))
    Receive(flow=0, carry_slot=0, microbatch=0, back=False)
    """

    flow: int
    carry_slot: FillsCarry[int]
    microbatch: int = 0
    back: bool = False

    @property
    def message(self) -> Message:
        """The message that travels."""
        return Message(self.flow, self.microbatch, self.back)

    @property
    def stream(self) -> str:
        return "receive"

    def uses(self, at: Hashable = 0) -> Uses:
        return uses_of(self, at)


# ---- All ops, and what they have in common.

ComputeOp = Forward | Backward
MessageOp = Send | Receive
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
"""Any op of a program."""
OPS: tuple[type[Any], ...] = get_args(Op)
STREAMS = ("gather", "compute", "reduce", "replicate", "offload", "send", "receive")
"""The streams in the order in which they are shown."""


def kind_of(op: ComputeOp) -> Kind:
    """Returns the kind of compute that it is, as traces have it."""
    if isinstance(op, Forward):
        return "forward"
    return "backward" if op.half == "both" else op.half


def filled(op: Op) -> tuple[tuple[int, int], ...]:
    """Returns `(unit, weight slot)` of the weights that `op` puts into slots."""
    found: list[tuple[int, int]] = []
    for slots in weight_slots(op, "writes"):
        found += zip(op.units, slots, strict=True)  # type: ignore[union-attr]
    return tuple(found)


def weight_slots(op: Any, way: Literal["reads", "writes"]) -> list[tuple[int, ...]]:
    """Returns the weight slots that `op` reads, or those that it fills, field by field: one for each of its units."""
    kind: Any = type(op)
    return [getattr(op, field) for field in _weight_fields(kind, way)]


@functools.cache
def _weight_fields(kind: Any, way: str) -> tuple[str, ...]:
    return tuple(field for field, use in _slot_fields(kind) if use == ("slot", way))


def name_of(op: Any) -> str:
    """Returns the name of an op in words: `all-reduce`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(op).__name__).lower()
