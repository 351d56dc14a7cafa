"""A slow interpreter of programs, independent of `verify`: what would come out, as symbols.

`issued` makes the decisions of the host once, for three steps: a list of ops, each with the buffers that it declares
to the scoreboard and a function from memory to what it writes. `run` applies them one after the other;
`overlapped.run_overlapped` in any order that waits permit. What comes out is compared with `symbols.expected(program)`.

A program must be right in every mode of `MODES`, where one rank is the shard group and slots are the shards themselves,
and also where the loss reads leaves beside its visits, as a regulariser does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tests.proof.symbols import STEPS, Memory, Result, beginning, expected, norm_of, outcome
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
    Update,
)


class Stops(Exception):
    """An engine would stop here with an error."""


class Mode(NamedTuple):
    """Whether weight slots and gradient slots are the shards themselves."""

    weights_alias: bool
    grads_alias: bool


SHARDED, ALIASED, ALIASED_WEIGHTS = Mode(False, False), Mode(True, True), Mode(True, False)
MODES = (SHARDED, ALIASED, ALIASED_WEIGHTS)


class Issued(NamedTuple):
    """An op with what the host has decided. act: memory -> what is written to it."""

    op: Op | None
    stream: str
    reads: list[Buffer]
    writes: list[Buffer]
    act: Callable[[Memory], Memory]


Place = tuple[int, Buffer, bool]
"""A unit, where its gradient goes, and whether it is added to what is there."""


class Host:
    """What the host of one rank decides as it issues ops, in order."""

    def __init__(self, program: Program, mode: Mode, leaves: bool) -> None:
        self.program, self.mode, self.trace, self.leaves = program, mode, program.trace, leaves
        self.issued: list[Issued] = []
        self.reserved = {  # a buffer that is not is an error when it is used
            "slot": program.slot_bytes().keys(),
            "grad slot": program.grad_slot_bytes().keys(),
            "secondary": program.secondary_bytes().keys(),
        }
        carried = program.carried()
        if carried:  # what the first step does not find in its slots
            self.issue(Gather(tuple(carried.values()), tuple(carried)))
        for self.step in range(STEPS):
            self._step()

    def _step(self) -> None:
        trace, ops = self.trace, self.program.ops
        self._computes, self._done = iter(trace.order), 0
        self._graphs: dict[tuple[int, int], tuple[int, ...] | None] = {}
        self._saved: set[tuple[int, int]] = set()  # (visit, microbatch) of those that saved a carry in a carry slot
        self._unreduced: dict[int, int] = {}  # gradient slot -> unit
        self._touched: set[int] = set()  # units whose gradient shard was written in this step
        self._begun: dict[tuple[int, int], dict[int, Buffer]] = {}  # (visit, microbatch) -> unit -> where
        self._normed = False
        self._turns: Counter[int] = Counter()
        self._steps_optimizer = self.program.has_updates and trace.update_when != "never"
        last = max((at for at, op in enumerate(ops) if isinstance(op, Forward | Backward)), default=-1)
        over = not trace.trains
        for at, op in enumerate(ops):
            if at > last and isinstance(op, Norm | Update) and not over:
                self._end_backward(ops[at:])
                over = True
            self.issue(op)
        if next(self._computes, None) is not None:
            raise Stops("the program has ended, the loss goes on")
        if not over:
            self._end_backward(())
        if not self.program.has_updates:  # the optimizer's step follows
            self._steps_optimizer = True
            trained = tuple(unit.id for unit in trace.units if unit.trainable)
            self.issue(Norm(trained))
            for unit in trained:
                for part in range(trace.parts(unit)):
                    self.issue(Update((unit,), part))
                    if part + 1 < trace.parts(unit):
                        self.issue(Exchange((unit,), part))

    def _end_backward(self, left: Iterable[Op]) -> None:
        """The gradients of leaves arrive; gradient shards that nothing has written are zero."""
        to_sum = {unit for op in left if isinstance(op, AllReduce) for unit in op.units}
        jobs = [(u.id, ("grad shard", u.id), u.id in self._touched) for u in self.trace.units if u.trainable]
        self._touched.update(unit for unit, _, _ in jobs)

        def act(memory: Memory) -> Memory:
            out: Memory = {}
            for unit, shard, touched in jobs:
                before = memory.get(shard) if touched else Counter()
                parts = 1 if unit in to_sum else self.trace.replicas
                out[shard] = _added(before, Counter({("leaf", unit): parts})) if self.leaves else before
            return out

        self.issued.append(Issued(None, "compute", [], [shard for _, shard, _ in jobs], act))

    def issue(self, op: Op) -> None:
        reads, writes = op.uses()
        alias = self.mode
        match op:
            case Gather(units, slots, source):
                act = self._gather(units, slots, source)
            case Stash(units, slots):
                act = self._stash(units, slots)
            case Forward() | Backward():
                visit = self.trace.visits[op.visit]
                act = self._forward(op) if isinstance(op, Forward) else self._backward(op)
                if alias.weights_alias:
                    reads = [b for b in reads if b[0] != "slot"] + [("shard", unit) for unit in visit.units]
                if alias.grads_alias and any(b[0] == "grad slot" for b in writes):
                    writes = [b for b in writes if b[0] != "grad slot"]
                    writes += [("grad shard", unit) for unit in visit.trained]
            case Reduce(units, slots):
                act = self._reduce(units, slots)
            case AllReduce(units):
                act = self._all_reduce(units)
            case Norm(units):
                act = self._norm(units)
            case Update(units, part):
                act = self._update(units, part)
            case Exchange(units, part):
                act = self._exchange(units, part)
            case Offload() | Fetch():
                act = self._moved(reads[0], writes[0])
            case _:
                raise Stops("not an op")
        silent = (alias.weights_alias and isinstance(op, Gather | Stash)) or (
            alias.grads_alias and isinstance(op, Reduce)
        )
        silent |= isinstance(op, AllReduce) and self.trace.replicas == 1  # as in the engine
        if not silent:
            for buffer in (*reads, *writes):
                if buffer[-1] not in self.reserved.get(str(buffer[0]), buffer):
                    raise Stops(f"there is no {buffer}")
            self.issued.append(Issued(op, op.stream, reads, writes, act))

    # ---- weights

    def _gather(self, units: tuple[int, ...], slots: tuple[int, ...], source: str) -> Callable[[Memory], Memory]:
        name = {"shard": ("shard",), "node": ("secondary", 0)}[source]
        jobs = [
            ((*name, self.trace.units[unit].id), ("slot", 0, slot)) for unit, slot in zip(units, slots, strict=True)
        ]
        return lambda memory: {slot: memory.get(part) for part, slot in jobs}

    def _stash(self, units: tuple[int, ...], slots: tuple[int, ...]) -> Callable[[Memory], Memory]:
        jobs = [(("slot", 0, slot), ("secondary", 0, unit)) for unit, slot in zip(units, slots, strict=True)]
        return lambda memory: {kept: memory.get(slot) for slot, kept in jobs}

    def _next(self, op: Forward | Backward) -> tuple[int, tuple[int, ...], int]:
        now = next(self._computes, None)
        self._done += 1
        if now is None or now[:3] != (kind_of(op), op.visit, op.microbatch):
            raise Stops("the loss computes something else here")
        if (len(op.takes), len(op.gives)) != self.crossing(op):
            raise Stops("more goes between segments, or less")
        if self._normed:
            raise Stops("a norm is taken when the whole backward is over")
        return op.visit, self.trace.visits[op.visit].trained, now.microbatch

    def crossing(self, op: Forward | Backward) -> tuple[int, int]:
        """How much a compute takes of other segments, and gives to them."""
        return 0, 0

    def _weights(self, visit: int, slots: Iterable[int]) -> list[Buffer]:
        pairs = list(zip(self.trace.visits[visit].units, slots, strict=True))
        return [("shard", unit) if self.mode.weights_alias else ("slot", 0, slot) for unit, slot in pairs]

    def _forward(self, op: Forward) -> Callable[[Memory], Memory]:
        visit, _, microbatch = self._next(op)
        if op.keep and op.carry_slot is not None:
            raise Stops("a graph that is kept, and a carry that is saved")
        self._graphs[visit, microbatch] = op.slots if op.keep else None
        step, places = self.step, self._weights(visit, op.slots)
        saved: Memory = {}
        if op.carry_slot is not None:
            self._saved.add((visit, microbatch))
            saved["carry slot", 0, op.carry_slot] = ("carry", step, visit, microbatch)
        trained = self.trace.visits[visit].trained
        if op.keep and not (self.mode.grads_alias and self._touched.intersection(trained)):
            begun = self._begun[visit, microbatch] = {}
            for unit, slot in zip(trained, op.early, strict=False):
                begun[unit] = ("grad shard", unit) if self.mode.grads_alias else ("grad slot", 0, slot)
                saved[begun[unit]] = ("begun", step, visit, microbatch, unit)
        return lambda memory: {
            ("forward", step, visit, microbatch): tuple(memory.get(place) for place in places),
            **saved,
        }

    def _moved(self, source: Buffer, to: Buffer) -> Callable[[Memory], Memory]:
        return lambda memory: {to: memory.get(source)}

    # ---- gradients

    def _backward(self, op: Backward) -> Callable[[Memory], Memory]:
        visit, trained, microbatch = self._next(op)
        kept = self._graphs[visit, microbatch]
        self._weights(visit, op.slots)
        weights = self._weights(visit, op.slots if kept is None else kept)  # a kept graph has views of its slots
        if (op.carry_slot is not None) != ((visit, microbatch) in self._saved):
            raise Stops("a carry slot where the carry is not, or none where it is")
        carry = None if op.carry_slot is None else ("carry slot", 0, op.carry_slot)
        begun = self._begun.get((visit, microbatch), {})
        step, places = self.step, self._places(trained, op.grad_slots)

        def act(memory: Memory) -> Memory:
            read = tuple(memory.get(place) for place in weights)
            if carry is not None and memory.get(carry) != ("carry", step, visit, microbatch):
                read = ("from another carry", memory.get(carry))
            out: Memory = {("backward", step, visit, microbatch): read}  # earlier gradients depend on it, too
            return out | written(memory, places, begun, (step, visit, microbatch), read)

        return act

    def _places(self, trained: Iterable[int], slots: Iterable[int]) -> list[Place]:
        """Where a backward writes the gradients of units."""
        places: list[Place] = []
        for unit, slot in zip(trained, slots, strict=True):
            add = self._unreduced.get(slot) == unit
            self._unreduced[slot] = unit
            place: Buffer = ("grad slot", 0, slot)
            if self.mode.grads_alias:
                add, place = unit in self._touched, ("grad shard", unit)
                self._touched.add(unit)
            places.append((unit, place, add))
        return places

    def _reduce(self, units: tuple[int, ...], slots: tuple[int, ...]) -> Callable[[Memory], Memory]:
        jobs: list[tuple[int, int, bool]] = []
        for unit, slot in zip(units, slots, strict=True):
            self._shard(unit)
            self._unreduced.pop(slot, None)
            jobs.append((unit, slot, unit in self._touched))
            self._touched.add(unit)

        def act(memory: Memory) -> Memory:
            out: Memory = {("receive",): None}
            for unit, slot, add in jobs:
                value, shard = memory.get(("grad slot", 0, slot)), ("grad shard", unit)
                out[shard] = _added(out.get(shard, memory.get(shard)), value) if add else value
            return out

        return act

    def _all_reduce(self, units: tuple[int, ...]) -> Callable[[Memory], Memory]:
        replicas = self.trace.replicas
        shards = [self._shard(unit) for unit in units]

        def act(memory: Memory) -> Memory:
            values = [(shard, memory.get(shard)) for shard in shards]
            return {("replicate",): None} | {
                shard: Counter({part: replicas * count for part, count in value.items()})
                if isinstance(value, Counter)
                else ("not a gradient", value)
                for shard, value in values
            }

        return act

    def _shard(self, unit: int) -> Buffer:
        if not self.trace.units[unit].trainable or unit < 0:
            raise Stops("a frozen unit has no gradient")
        return ("grad shard", unit)

    # ---- the optimizer

    def _norm(self, units: tuple[int, ...]) -> Callable[[Memory], Memory]:
        if not self._steps_optimizer:
            raise Stops("no optimizer")
        self._normed = True
        shards, step = [(unit, self._shard(unit), unit in self._touched) for unit in units], self.step

        def act(memory: Memory) -> Memory:
            norm = norm_of({unit: memory.get(shard) if touched else Counter() for unit, shard, touched in shards})
            return {("norm",): norm, ("measured", step): norm}

        return act

    def _turn(self, unit: int, number: int) -> None:
        """Parts of an update and what travels between them, in turn."""
        if number != self._turns[unit] or number > 2 * self.trace.parts(unit) - 2:
            raise Stops("a part of an update out of turn")
        self._turns[unit] += 1

    def _exchange(self, units: tuple[int, ...], part: int) -> Callable[[Memory], Memory]:
        for unit in units:
            self._turn(unit, 2 * part + 1)
        step = self.step

        def moved(held: Any) -> Any:
            fits = isinstance(held, tuple) and held[:3] == ("worked", step, part)
            return ("travelled", step, part, held[3]) if fits else ("wrong", held)

        return lambda memory: {("optimizer", unit): moved(memory.get(("optimizer", unit))) for unit in units}

    def _update(self, units: tuple[int, ...], part: int) -> Callable[[Memory], Memory]:
        if not self._steps_optimizer:
            raise Stops("no optimizer")
        for unit in units:
            self._turn(unit, 2 * part)
        step = self.step
        jobs = [(unit, self._shard(unit), unit in self._touched) for unit in units]
        normed, parts = self._normed, self.trace.parts
        self._touched.update(units)

        def act(memory: Memory) -> Memory:
            out: Memory = {}
            norm = memory.get(("norm",)) if normed else None
            for unit, shard, touched in jobs:
                before, grad = memory["shard", unit], memory.get(shard) if touched else Counter()
                taken = (before, grad, norm)
                if part > 0:
                    held = memory.get(("optimizer", unit))
                    taken = held[3] if held and held[:3] == ("travelled", step, part - 1) else ("wrong", held)
                if part + 1 < parts(unit):
                    out["optimizer", unit] = ("worked", step, part, taken)
                    continue
                after = (unit, before[1] + 1) if before[0] == unit else ("wrong", before)
                out |= {("shard", unit): after, shard: "scaled", ("update", step, unit): taken}
            return out

        return act


def written(
    memory: Memory, places: Iterable[Place], begun: dict[int, Buffer], of: tuple[int, int, int], read: Any
) -> Memory:
    """What a backward, `of` a step, visit and microbatch, leaves in `places` if it has read `read`; begun: what its
    forward has begun"""
    out: Memory = {}
    for unit, place, add in places:
        fresh: Any = Counter({(*of[1:], unit, read): 1})
        if unit in begun:  # what the forward began is completed, wherever it is
            there = begun[unit] == place and memory.get(place) == ("begun", *of, unit)
            out[place] = fresh if there else ("from another beginning", memory.get(place))
        else:
            out[place] = _added(memory.get(place), fresh) if add else fresh
    return out


def _added(a: Any, b: Any) -> Any:
    return a + b if isinstance(a, Counter) and isinstance(b, Counter) else ("not a gradient", a, b)


def issued(program: Program, mode: Mode = SHARDED, leaves: bool = False) -> list[Issued] | None:
    """The ops of all steps; None where an engine would stop."""
    try:
        return Host(program, mode, leaves).issued
    except (Stops, LookupError, ValueError):
        return None


def run(program: Program, mode: Mode = SHARDED, leaves: bool = False) -> Result | None:
    """What comes out in issue order; None where an engine would stop."""
    ops = issued(program, mode, leaves)
    if ops is None:
        return None
    memory = beginning(program.trace)
    for op in ops:
        memory.update(op.act(memory))
    return outcome(memory)


def right(program: Program) -> bool:
    """Whether `program` computes what it must in every mode, with leaves beside visits and without."""
    for leaves in (False, True):
        want = expected(program, leaves)
        if any(run(program, mode, leaves) != want for mode in MODES):
            return False
    return True
