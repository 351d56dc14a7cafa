"""Slow interpreters of programs, independent of `verify`: what would come out, as symbols.

`run` executes ops one after the other with what an engine physically has: slots and gradient slots that hold whatever
was last written to them. `run_overlapped` executes them on three streams in a random order that the scoreboard's waits
allow; an op is not atomic there: it reads while it runs, and what it writes is unusable until it ends.

Both give the result of two steps, to be compared with `expected(trace)`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from yafsdp_fn.schedules import Backward, Forward, Gather, Op, Program, Reduce, Scoreboard, Trace, Update, uses
from yafsdp_fn.schedules.scoreboard import STREAM, Buffer

STEPS = 2
Result = list[Any]
"""Per step: the forwards with the weights that they read, and the gradient of each unit as a multiset."""
Begin = Callable[[], dict[Buffer, Any]]
"""Starts an op: reads what it reads, and gives what it will have written when it ends."""


class Stops(Exception):
    """An engine would stop here with an error."""


def expected(trace: Trace) -> Result:
    """What two steps must give: every compute reads its units' weights of that step, every gradient counts once."""
    results: Result = []
    for step in range(STEPS):
        forwards, grads = [], {unit.id: Counter[Any]() for unit in trace.units}
        for kind, visit, microbatch, _ in trace.order:
            weights = tuple((unit, step) for unit in trace.visits[visit].units)
            if kind == "forward":
                forwards.append((visit, microbatch, weights))
            else:
                for unit in trace.visits[visit].trained:
                    grads[unit][visit, microbatch, unit, weights] += 1
        results.append((forwards, grads))
    return results


class Machine:
    """Memory and decisions of one rank. Weights are `(unit, version)`, gradients multisets of contributions."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.memory: dict[Buffer, Any] = {("shard", unit.id): (unit.id, 0) for unit in trace.units}
        self.results: Result = []
        self._steps = 0
        self._begin_step()

    def _begin_step(self) -> None:
        self._computes = iter(self.trace.order)
        self._forwards: list[Any] = []
        self._graphs: dict[tuple[int, int], tuple[int, ...] | None] = {}
        self._unreduced: dict[int, int] = {}  # gradient slot -> unit
        self._touched: set[int] = set()  # units whose gradient shard was written in this step

    def plan(self, op: Op | Update) -> Begin:
        """What the host decides when it issues `op`."""
        match op:
            case Gather(units, slots):
                return lambda: {
                    ("slot", 0, slot): self.memory["shard", unit] for unit, slot in zip(units, slots, strict=True)
                }
            case Forward():
                return self._forward(op)
            case Backward():
                return self._backward(op)
            case Reduce(units, slots):
                jobs = []
                for unit, slot in zip(units, slots, strict=True):
                    self._unreduced.pop(slot, None)
                    jobs.append((unit, slot, unit in self._touched))
                    self._touched.add(unit)
                return lambda: self._reduced(jobs)
            case Update(units):
                return self._update(units)
        raise Stops(op)

    def _next(self, op: Forward | Backward) -> tuple[int, tuple[int, ...], int]:
        now = next(self._computes, None)
        if now is None or (now.kind, now.visit) != (type(op).__name__.lower(), op.visit):
            raise Stops("the loss computes something else here")
        return op.visit, self.trace.visits[op.visit].trained, now.microbatch

    def _weights(self, slots: Iterable[int]) -> tuple[Any, ...]:
        return tuple(self.memory.get(("slot", 0, slot)) for slot in slots)

    def _forward(self, op: Forward) -> Begin:
        visit, _, microbatch = self._next(op)
        self._graphs[visit, microbatch] = op.slots if op.keep else None
        forwards = self._forwards

        def begin() -> dict[Buffer, Any]:
            forwards.append((visit, microbatch, self._weights(op.slots)))
            return {}

        return begin

    def _backward(self, op: Backward) -> Begin:
        visit, trained, microbatch = self._next(op)
        kept = self._graphs[visit, microbatch]
        at = op.slots if kept is None else kept  # a kept graph has views of the slots of its forward
        places = []
        for unit, slot in zip(trained, op.grad_slots, strict=True):
            places.append((unit, slot, self._unreduced.get(slot) == unit))
            self._unreduced[slot] = unit

        def begin() -> dict[Buffer, Any]:
            out: dict[Buffer, Any] = {}
            weights = self._weights(at)
            for unit, slot, add in places:
                fresh = Counter({(visit, microbatch, unit, weights): 1})
                out["grad slot", 0, slot] = _added(self.memory.get(("grad slot", 0, slot)), fresh) if add else fresh
            return out

        return begin

    def _reduced(self, jobs: list[tuple[int, int, bool]]) -> dict[Buffer, Any]:
        out: dict[Buffer, Any] = {("receive",): None}
        for unit, slot, add in jobs:
            value = self.memory.get(("grad slot", 0, slot))
            before = out.get(("grad shard", unit), self.memory.get(("grad shard", unit)))
            out["grad shard", unit] = _added(before, value) if add else value
        return out

    def _update(self, units: tuple[int, ...]) -> Begin:
        if next(self._computes, None) is not None:
            raise Stops("the program has ended, the loss goes on")
        forwards, touched, version = self._forwards, self._touched, self._steps + 1
        self._steps = version
        self._begin_step()

        def begin() -> dict[Buffer, Any]:
            grads = {unit: self.memory["grad shard", unit] if unit in touched else Counter() for unit in units}
            self.results.append((forwards, grads))
            written: dict[Buffer, Any] = {("optimizer", unit): version for unit in units}
            # a new version for frozen units as well: it only asks for more than is needed
            return written | {("shard", unit): (unit, version) for unit in units}

        return begin


def _added(a: Any, b: Any) -> Any:
    return a + b if isinstance(a, Counter) and isinstance(b, Counter) else ("not a gradient", a, b)


def everything(program: Program) -> list[Op | Update]:
    """The ops of two steps, each followed by its update."""
    update = Update(tuple(unit.id for unit in program.trace.units))
    return [*program.ops, update] * STEPS


def run(program: Program) -> Result | None:
    """The results of two steps in issue order; None where an engine would stop."""
    machine = Machine(program.trace)
    try:
        for op in everything(program):
            machine.memory.update(machine.plan(op)())
    except (Stops, LookupError, ValueError):
        return None
    return machine.results


def run_overlapped(program: Program, seed: int, *, keep_wait: Callable[[int], bool] = lambda number: True) -> Result:
    """Two steps on three streams, interleaved at random; the host issues everything first, even the second step.

    keep_wait: whether the n-th of all waits is honoured. Raises AssertionError on a race or a deadlock.
    """
    rng, machine = random.Random(seed), Machine(program.trace)
    board: Scoreboard[int] = Scoreboard()
    ops = everything(program)
    streams: dict[str, list[int]] = {}
    waits: list[list[int]] = []
    number = 0
    for key, op in enumerate(ops):
        found = board.add(key, STREAM[type(op)], *uses(op))
        waits.append([wait for n, wait in enumerate(found, number) if keep_wait(n)])
        number += len(found)
        streams.setdefault(STREAM[type(op)], []).append(key)
    plans = [machine.plan(op) for op in ops]
    done: set[int] = set()
    running: dict[str, tuple[int, list[Any], dict[Buffer, Any]]] = {}
    while len(done) < len(ops):
        ready = [
            ("begin", name)
            for name, keys in streams.items()
            if name not in running and keys and done.issuperset(waits[keys[0]])
        ]
        choices = [*ready, *(("end", name) for name in running)]
        if not choices:
            raise AssertionError(f"deadlock before {[ops[keys[0]] for keys in streams.values() if keys]}")
        action, name = rng.choice(choices)
        if action == "begin":
            key = streams[name].pop(0)
            reads, _ = uses(ops[key])
            running[name] = (key, [machine.memory.get(buffer) for buffer in reads], written := plans[key]())
            machine.memory.update(dict.fromkeys(written, ("half written by", key)))
        else:
            key, before, written = running.pop(name)
            reads, _ = uses(ops[key])
            if before != [machine.memory.get(buffer) for buffer in reads]:
                raise AssertionError(f"op {key} {ops[key]}: what it reads changed while it ran")
            if any(machine.memory[buffer] != ("half written by", key) for buffer in written):
                raise AssertionError(f"op {key} {ops[key]}: another op writes the same buffer")
            machine.memory.update(written)
            done.add(key)
    return machine.results
