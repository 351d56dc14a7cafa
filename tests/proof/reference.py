"""What the ops of a program do to buffers, as terms, from the docstrings of program/ops.py alone, without any rule.

`ProgramAccount(program, mode)` issues two steps, as a host does, and one update after each where the program has none.
Each event runs on a stream and waits as the scoreboard says, of the buffers that its op *declares*. What it *does* is
written down apart: which buffers it finds (`found`), what it puts where (`left`), and what must not be (`wrong`).
Nothing here says when an event runs: overlapped.py draws an order and looks what comes out, and z3 looks for any order
in which something goes wrong (z3_orders.py).

A program must be right in every mode of `MODES`, where one rank is the shard group and slots are the shards themselves.

    weights     `(unit, version)`, carries, what crosses between stages, how far an optimizer's step is: 16 bits
    gradient    a set: a bit for each contribution of a rank, one for each that is summed over replicas, one where
                anything is in it twice, one where a forward has begun it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from yafsdp_fn.program.ops import Buffer, kind_of
from yafsdp_fn.schedules import (
    AllReduce,
    Backward,
    Exchange,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Op,
    Program,
    Reduce,
    Stash,
    Trace,
    Update,
)

STEPS = 2
"""The second begins with what the first has left."""


class Stops(Exception):
    """An engine would stop here with an error."""


class Mode(NamedTuple):
    """Whether weight slots and gradient slots are the shards themselves."""

    weights_alias: bool
    grads_alias: bool


SHARDED = Mode(False, False)
ALIASED = Mode(True, True)
ALIASED_WEIGHTS = Mode(True, False)
MODES = (SHARDED, ALIASED, ALIASED_WEIGHTS)


# ---- Terms.


class Constant(NamedTuple):
    """bits: how many it is written with: 16, or `Account.width` for a gradient"""

    value: int
    bits: int = 16


class Found(NamedTuple):
    """What `Account.found[number]` is."""

    number: int


class Added(NamedTuple):
    """A gradient and another."""

    one: Term
    other: Term


class Summed(NamedTuple):
    """A gradient, summed over replicas."""

    gradient: Term


class If(NamedTuple):
    """`right` if `held` is one of `among`, else `wrong`."""

    held: Term
    among: tuple[Constant, ...]
    right: Term
    wrong: Term


Term = Constant | Found | Added | Summed | If
NOTHING = Constant(0xFFFF)


class Event(NamedTuple):
    """An op that is issued; None for the end of a backward, and of all. Buffers and streams are those of its stage."""

    op: Op | None
    step: int
    stream: str
    reads: list[Buffer]
    writes: list[Buffer]
    stage: int = 0


Moment = tuple[Literal["begins", "ends"], int]
"""Of an event, by its number."""


class Wrong(NamedTuple):
    """At `event`, where `term` is not `value`; what: in words."""

    event: int
    what: str
    term: Term
    value: Constant


class Account:
    """whole: what a stage writes to, together with others. Events are numbered as they are written, stage by stage."""

    def __init__(self, trace: Trace, whole: Account | None = None) -> None:
        self.trace = trace
        self.events: list[Event] = []
        self.found: list[tuple[int, Buffer]] = []  # (event, buffer)
        self.left: list[tuple[int, Buffer, Term]] = []  # (event, buffer, term)
        self.wrong: list[Wrong] = []
        self.ends: set[int] = set()  # events that are the end of all, on their stages
        self.met: list[tuple[Moment, Moment]] = []  # how stages wait for each other, wherever they run
        if whole is not None:
            self.events, self.found, self.left, self.wrong = whole.events, whole.found, whole.left, whole.wrong
            self.ends = whole.ends
            trace = whole.trace
        computes = trace.order if trace.trains else ()  # an evaluation forms no gradient
        parts = [(c.visit, c.microbatch, u) for c in computes for u in trace.visits[c.visit].trained]
        self.visited = {u for c in trace.order if c.kind == "backward" for u in trace.visits[c.visit].trained}
        names = [*dict.fromkeys(parts), *(("leaf", 0, unit) for unit in trace.trained)]
        self.bits = {name: at for at, name in enumerate((step, *name) for step in range(STEPS) for name in names)}
        self.width = 2 * len(self.bits) + 2  # once, once and summed; begun, spoilt

    def gradient(self, *bits: int) -> Constant:
        return Constant(sum(1 << bit for bit in set(bits)), self.width)

    @property
    def spoilt(self) -> Constant:
        return self.gradient(self.width - 1)

    def unknown(self, buffer: Buffer) -> Constant:
        """What is found where two have written at a time, or one while another has read."""
        return self.spoilt if buffer[0] in ("grad slot", "grad shard") else NOTHING

    def beginning(self, buffer: Buffer) -> Constant:
        if buffer[0] == "shard":
            return weights(int(buffer[1]), 0)
        if buffer[0] == "optimizer":
            return turn(0, 0)
        return self.unknown(buffer)

    def must(self, event: int, what: str, term: Term, value: Constant) -> None:
        self.wrong.append(Wrong(event, what, term, value))


def weights(unit: int, version: int) -> Constant:
    return Constant(unit * (STEPS + 1) + version)


def turn(step: int, at: int) -> Constant:
    """How far the optimizer's step of a unit is: steps that are over, parts and exchanges since."""
    return Constant(step * 256 + at)


# ---- A program of one stage.


class ProgramAccount(Account):
    def __init__(self, program: Program, mode: Mode, whole: Account | None = None) -> None:
        """whole: of all stages, where `program` is that of one"""
        super().__init__(program.trace, whole)
        self.program = program
        self.trace = program.trace
        self.mode = mode
        self.contents: dict[int, tuple[int, int]] = {}  # slot -> unit, version that the host has noted
        self.reserved = {"slot": program.slot_bytes(), "grad slot": program.grad_slot_bytes()}
        self.versions = Counter[int]()  # of units, as the host counts them
        self.there: set[Buffer] = set()  # carry slots, and buffers on the host, that something was put into
        self._steps()

    def _steps(self) -> None:
        if carried := self.program.carried():  # what the first step does not find in its slots
            self.step = 0
            self.issue(Gather(tuple(carried.values()), tuple(carried)))
        for self.step in range(STEPS):
            self._step()
        held = [unit for unit in self.trace.units if unit.numel]  # others are on other stages
        end = self._event(None, [("shard", unit.id) for unit in held], [])
        self.ends.add(end)
        for slot, (unit_id, version) in self.contents.items():  # other programs of the slot set rely on it
            name = self.trace.units[unit_id].name
            found = self.find(end, ("slot", 0, slot))
            self.must(end, f"slot {slot} does not hold what was gathered, {name}", found, weights(unit_id, version))
        for unit in held:
            shard = self.find(end, ("shard", unit.id))
            self.must(end, f"{unit.name} is not updated once a step", shard, weights(unit.id, STEPS * unit.trainable))

    def whole(self, unit: int) -> Constant:
        """The gradient of `unit` that its update must take, of this step."""
        bits = [bit for (step, kind, *_, u), bit in self.bits.items() if step == self.step and u == unit]
        if unit in self.visited and not self.leaves:
            bits.remove(self.bits[self.step, "leaf", 0, unit])
        return self.gradient(*(bit + len(self.bits) * (self.trace.replicas > 1) for bit in bits))

    def _event(self, op: Op | None, reads: list[Buffer], writes: list[Buffer]) -> int:
        stream = "compute" if op is None else op.stream
        self.events.append(Event(op, self.step, stream, reads, writes, self.trace.stage or 0))
        return len(self.events) - 1

    def find(self, event: int, buffer: Buffer) -> Found:
        if buffer[0] in ("carry slot", "host") and buffer not in self.there:
            raise Stops("memory that is made when something is put into it, and nothing was")
        if buffer[0] == "secondary" and buffer[2] not in self.program.secondary_bytes():
            raise Stops("there is no such secondary shard")
        self.found.append((event, buffer))
        return Found(len(self.found) - 1)

    def leave(self, event: int, buffer: Buffer, term: Term) -> None:
        self.there.add(buffer)
        self.left.append((event, buffer, term))

    # ---- a step

    def _step(self) -> None:
        trace = self.trace
        ops = self.program.ops
        self.computes = iter(trace.order)
        self.graphs: dict[tuple[int, int], tuple[int, ...] | None] = {}
        self.halves: set[tuple[int, int]] = set()  # of backwards, that have the other one to come
        self.saved: set[tuple[int, int]] = set()
        self.begun: dict[tuple[int, int], dict[int, Buffer]] = {}
        self.unreduced: dict[int, int] = {}  # gradient slot -> unit
        self.touched: set[int] = set()  # units whose gradient shard this step has written: others count as zero
        # a loss may read leaves beside its visits; on stages it must not
        self.leaves = trace.trains and trace.split is None
        last = max((at for at, op in enumerate(ops) if isinstance(op, Forward | Backward)), default=-1)
        over = False
        for at, op in enumerate(ops):
            if at > last and isinstance(op, Norm | Update) and not over:
                self._end_backward(ops[at:])
                over = True
            if isinstance(op, Norm | Update) and (trace.update_when == "never" or not self.program.has_updates):
                raise Stops("no optimizer")
            self.issue(op)
        if next(self.computes, None) is not None:
            raise Stops("the program has ended, the loss goes on")
        if not over:
            self._end_backward(())
        if not self.program.has_updates:  # the optimizer's step follows
            self.issue(Norm(trace.trained))
            for unit in trace.trained:
                for part in range(trace.parts(unit)):
                    self.issue(Update((unit,), part))
                    if part + 1 < trace.parts(unit):
                        self.issue(Exchange((unit,), part))

    def _end_backward(self, later: Iterable[Op]) -> None:
        """What leaves get beside visits arrives; engines sum it over replicas, unless the unit is summed later."""
        to_sum = {unit for op in later if isinstance(op, AllReduce) for unit in op.units}
        event = self._event(None, [], [("grad shard", unit) for unit in self.trace.trained])
        for unit in self.trace.trained:
            shard: Buffer = ("grad shard", unit)
            bit = self.bits[self.step, "leaf", 0, unit] + len(self.bits) * (
                self.trace.replicas > 1 and unit not in to_sum
            )
            leaf = self.gradient(*[bit] * (self.leaves or unit not in self.visited))
            self.leave(event, shard, Added(self.find(event, shard), leaf) if unit in self.touched else leaf)
        self.touched.update(self.trace.trained)

    def issue(self, op: Op) -> None:
        reads, writes = op.uses()
        if self.mode.weights_alias and isinstance(op, Gather | Stash):
            return  # slots are the shards
        if isinstance(op, Reduce):
            for unit, slot in zip(op.units, op.grad_slots, strict=True):
                self._trainable(unit)
                self.unreduced.pop(slot, None)
            if self.mode.grads_alias:
                self.touched.update(op.units)
                return
        if isinstance(op, Forward | Backward):
            visit = self.trace.visits[op.visit]
            if self.mode.weights_alias:
                reads = [b for b in reads if b[0] != "slot"] + [("shard", unit) for unit in visit.units]
            if self.mode.grads_alias and any(b[0] == "grad slot" for b in writes):
                writes = [b for b in writes if b[0] != "grad slot"] + [("grad shard", unit) for unit in visit.trained]
        self._there_is(op, [*reads, *writes])
        event = self._event(op, reads, writes)
        match op:
            case Gather():
                self.contents |= {s: (u, self.versions[u]) for u, s in zip(op.units, op.slots, strict=True)}
                places: list[tuple[Buffer, Buffer]] = [
                    (("secondary", 0, unit) if op.source == "node" else ("shard", unit), ("slot", 0, slot))
                    for unit, slot in zip(op.units, op.slots, strict=True)
                ]
                self._copy(event, places)
            case Stash():
                for unit, slot in zip(op.units, op.slots, strict=True):
                    if self.reserved["slot"][slot] < self.trace.units[unit].gather_bytes:
                        raise Stops("a slot that is too small for what is stashed from it")
                    held = self.find(event, ("slot", 0, slot))
                    kept = tuple(weights(unit, version) for version in range(STEPS + 1))
                    # a part of another unit is nothing
                    self.leave(event, ("secondary", 0, unit), If(held, kept, held, NOTHING))
            case Offload():
                if op.visit not in {visit for visit, _ in self.saved}:
                    raise Stops("it is not known how large a carry is before it was saved")
                self._copy(event, [(("carry slot", 0, op.carry_slot), ("host", 0, op.visit))])
            case Fetch():
                self._copy(event, [(("host", 0, op.visit), ("carry slot", 0, op.carry_slot))])
            case Forward():
                self._forward(event, op)
            case Backward():
                self._backward(event, op)
            case Reduce():
                for unit, slot in zip(op.units, op.grad_slots, strict=True):
                    self._into_shard(event, unit, self.find(event, ("grad slot", 0, slot)))
            case AllReduce(over="replicas"):
                for unit in op.units:
                    self._trainable(unit)
                    shard: Buffer = ("grad shard", unit)
                    self.leave(event, shard, Summed(self.find(event, shard)))
            case Norm():
                self._norm(event, op)
            case Update():
                self._update(event, op)
            case Exchange():
                for unit in op.units:
                    self._turn(event, unit, 2 * op.part + 1)
            case _:
                raise Stops("not an op of one stage")

    def _there_is(self, op: Op, buffers: list[Buffer]) -> None:
        if isinstance(op, Update | Exchange) and len(set(op.units)) < len(op.units):
            raise Stops("a part of an update twice")
        for buffer in buffers:
            if buffer[-1] not in self.reserved.get(str(buffer[0]), buffer):
                raise Stops(f"there is no {buffer}")

    def _crosses(self, event: int, op: Forward | Backward) -> None:
        """What comes from other segments of a pipeline, and goes there."""
        if op.takes or op.gives:
            raise Stops("there are no stages")

    def _copy(self, event: int, places: list[tuple[Buffer, Buffer]]) -> None:
        for source, to in places:
            self.leave(event, to, self.find(event, source))

    def _trainable(self, unit: int) -> None:
        if not self.trace.units[unit].trainable:
            raise Stops("a frozen unit has no gradient")

    # ---- computes

    def _compute(self, event: int, op: Forward | Backward, slots: tuple[int, ...]) -> None:
        """It is what the loss computes here, and reads its units' weights of this step."""
        now = next(self.computes, None)
        if now is None or now[:3] != (kind_of(op), op.visit, op.microbatch):
            raise Stops("the loss computes something else here")
        self._crosses(event, op)
        if kind_of(op) == "weights":
            return  # a graph has what it needs
        for unit, slot in zip(self.trace.visits[op.visit].units, slots, strict=True):
            record = self.trace.units[unit]
            held = self.find(event, ("shard", unit) if self.mode.weights_alias else ("slot", 0, slot))
            self.must(
                event, f"it reads no {record.name} of this step", held, weights(unit, self.step * record.trainable)
            )

    def _forward(self, event: int, op: Forward) -> None:
        self._compute(event, op, op.slots)
        if op.keep and op.carry_slot is not None:
            raise Stops("a graph that is kept, and a carry that is saved")
        key = (op.visit, op.microbatch)
        trained = self.trace.visits[op.visit].trained
        self.graphs[key] = op.slots if op.keep else None
        if op.carry_slot is not None:
            self.saved.add(key)
            self.leave(event, ("carry slot", 0, op.carry_slot), self._carry(key))
        if op.keep and not (self.mode.grads_alias and self.touched.intersection(trained)):
            for unit, slot in zip(trained, op.early, strict=False):
                place = self.begun.setdefault(key, {})[unit] = self._place(unit, slot)
                self.leave(event, place, self._beginning_of(key, unit))

    def _backward(self, event: int, op: Backward) -> None:
        key = (op.visit, op.microbatch)
        if op.half == "weights":
            self.halves.remove(key)
            self._compute(event, op, ())
        else:
            kept = self.graphs.pop(key)  # has views of the slots of its forward
            if kept is not None and len(kept) != len(op.slots):
                raise Stops("slots of other units")
            self._compute(event, op, kept or op.slots)
        if op.half == "inputs":
            self.halves.add(key)
        if op.carry_slot is None and key in self.saved and op.half != "weights":
            raise Stops("a backward that is not told where its carry is")
        if op.carry_slot is not None:
            carry = self.find(event, ("carry slot", 0, op.carry_slot))
            self.must(event, "it reads another carry than its own", carry, self._carry(key))
        trained = self.trace.visits[op.visit].trained if op.half != "inputs" else ()
        for unit, slot in zip(trained, op.grad_slots, strict=True):
            adds, self.unreduced[slot] = self.unreduced.get(slot) == unit, unit
            if self.mode.grads_alias:
                adds = unit in self.touched
                self.touched.add(unit)
            place = self._place(unit, slot)
            fresh = self.gradient(self.bits[self.step, *key, unit])
            if (begun := self.begun.get(key, {}).get(unit)) is not None:  # it completes what its forward began
                there = (self._beginning_of(key, unit),)
                completed = If(self.find(event, place), there, fresh, self.spoilt)
                self.leave(event, place, completed if begun == place else self.spoilt)
            else:
                self.leave(event, place, Added(self.find(event, place), fresh) if adds else fresh)

    def _place(self, unit: int, slot: int) -> Buffer:
        return ("grad shard", unit) if self.mode.grads_alias else ("grad slot", 0, slot)

    def _carry(self, key: tuple[int, int]) -> Constant:
        return Constant((self.step * self.trace.microbatches + key[1]) * len(self.trace.visits) + key[0])

    def _beginning_of(self, key: tuple[int, int], unit: int) -> Constant:
        return self.gradient(self.bits[self.step, *key, unit], self.width - 2)

    def _into_shard(self, event: int, unit: int, term: Term) -> None:
        shard: Buffer = ("grad shard", unit)
        self.leave(event, shard, Added(self.find(event, shard), term) if unit in self.touched else term)
        self.touched.add(unit)

    # ---- the optimizer

    def _complete(self, event: int, unit: int) -> None:
        held = self.find(event, ("grad shard", unit)) if unit in self.touched else self.gradient()
        name = self.trace.units[unit].name
        self.must(event, f"the gradient of {name} is not there, or not once", held, self.whole(unit))

    def _norm(self, event: int, op: Norm) -> None:
        if Counter(op.units) != Counter(self.trace.trained):
            raise Stops("the norm is that of the whole gradient")
        for unit in op.units:
            self._complete(event, unit)
        self.leave(event, ("norm",), Constant(self.step))

    def _turn(self, event: int, unit: int, at: int) -> None:
        """Parts of an update and what travels between them, one after the other."""
        last = 2 * self.trace.parts(unit) - 2
        if not 0 <= at <= last:
            raise Stops("an update has not so many parts")
        state: Buffer = ("optimizer", unit)
        words = f"the update of {self.trace.units[unit].name} is elsewhere"
        self.must(event, words, self.find(event, state), turn(self.step, at))
        self.leave(event, state, turn(self.step, at + 1) if at < last else turn(self.step + 1, 0))

    def _update(self, event: int, op: Update) -> None:
        for unit in op.units:
            self._trainable(unit)
            self._turn(event, unit, 2 * op.part)
            if op.part == 0:
                self._complete(event, unit)
                norm = self.find(event, ("norm",))
                self.must(event, "it has no norm of this step", norm, Constant(self.step))
            if op.part + 1 == self.trace.parts(unit):
                shard = self.find(event, ("shard", unit))
                self.must(event, "it updates weights of another step", shard, weights(unit, self.step))
                self.versions[unit] += 1
                self.leave(event, ("shard", unit), weights(unit, self.step + 1))
                self.leave(event, ("grad shard", unit), self.spoilt)  # scaled in place
                self.touched.add(unit)
