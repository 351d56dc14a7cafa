"""A slow interpreter of pipelines, independent of `verify`: what would come out of all stages, as symbols.

Each stage's host issues its program as `tests.proof.reference` does. What goes from one stage to another is put
into a mailbox of the two and taken out in order, whatever it is. `run` picks at random what goes on next, on which
stage and stream: with messages that wait for each other and hosts that wait for their devices before all but messages,
or with neither.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from tests.proof.overlapped import waits_of
from tests.proof.reference import ALIASED, SHARDED, Host, Issued, Mode, Stops, _added, written
from tests.proof.symbols import STEPS, Memory, Result, beginning, norm_of, outcome
from yafsdp_fn.program.ops import kind_of
from yafsdp_fn.schedules import AllReduce, Backward, Forward, Norm, Op, Program, Receive, Send, Split, Trace


def digest(*parts: Any) -> str:
    """A value that depends on all of `parts`."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class Flows:
    """What a compute takes and gives, read off the split."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.segment = {v: k for k, (first, end) in enumerate(split.segments) for v in range(first, end)}

    def of(self, op: Forward | Backward) -> tuple[list[int], list[int]]:
        """Flows that it takes, and those that it gives: values in a forward, gradients in a backward."""
        kind, segment = kind_of(op), self.segment[op.visit]
        ends = self.split.segments[segment]
        here, there = [[k for k, flow in enumerate(self.split.flows) if flow[end] == segment] for end in (1, 0)]
        first, last = op.visit == ends[0], op.visit == ends[1] - 1
        if kind == "forward":
            return here if first else [], there if last else []
        if kind == "weights":
            return [], []
        back = [[k for k in flows if self.split.flows[k].grad_bytes] for flows in (there, here)]
        return back[0] if last else [], back[1] if first else []


class StageHost(Host):
    """The host of one stage. Between a segment's visits, `chain` is what one gives to the next."""

    def __init__(self, program: Program, mode: Mode, leaves: bool = False) -> None:
        assert program.trace.split is not None
        self.flows = Flows(program.trace.split)
        super().__init__(program, mode, leaves)

    def crossing(self, op: Forward | Backward) -> tuple[int, int]:
        takes, gives = self.flows.of(op)
        return len(takes), len(gives)

    def issue(self, op: Op) -> None:
        if isinstance(op, Send | Receive):
            self.issued.append(Issued(op, op.stream, *op.uses(), lambda memory: {}))
        elif isinstance(op, AllReduce) and op.over == "stages":
            for unit in op.units:
                self._shard(unit)
            self.issued.append(Issued(op, op.stream, *op.uses(), lambda memory: {}))
        else:
            super().issue(op)

    def _forward(self, op: Forward) -> Callable[[Memory], Memory]:
        base, step, m = super()._forward(op), self.step, op.microbatch
        segment, gives = self.flows.segment[op.visit], self.flows.of(op)[1]
        chain = ("chain", step, segment, m)

        def act(memory: Memory) -> Memory:
            out = base(memory)
            weights = out["forward", step, op.visit, m]
            took = [memory.get(("carry slot", 0, slot)) for slot in op.takes]
            before = digest(m, memory.get(chain), *took)  # microbatches have data of their own
            out["saved", step, op.visit, m] = before
            out["forward", step, op.visit, m] = digest(weights, before)
            out[chain] = out["forward", step, op.visit, m]
            for slot, flow in zip(op.gives, gives, strict=True):
                out["carry slot", 0, slot] = digest("value", flow, out[chain])
            return out

        return act

    def _backward(self, op: Backward) -> Callable[[Memory], Memory]:
        visit, trained, m = self._next(op)
        step, half = self.step, op.half
        segment, gives = self.flows.segment[visit], self.flows.of(op)[1]
        chain, saved = ("back chain", step, segment, m), ("saved", step, visit, m)
        weights = []
        if half != "weights":
            kept = self._graphs[visit, m]
            self._weights(visit, op.slots)
            weights = self._weights(visit, op.slots if kept is None else kept)
        elif op.slots:
            raise Stops("no weights are read")
        if (op.carry_slot is not None) != ((visit, m) in self._saved):
            raise Stops("a carry slot where the carry is not, or none where it is")
        begun = self._begun.get((visit, m), {}) if half != "inputs" else {}
        places = self._places(trained if half != "inputs" else (), op.grad_slots)

        def act(memory: Memory) -> Memory:
            out: Memory = {}
            if half == "weights":
                read = memory.get(("half", step, visit, m))
            else:
                took = [memory.get(("carry slot", 0, slot)) for slot in op.takes]
                before = digest(memory.get(chain), *took)
                read = digest(tuple(memory.get(place) for place in weights), memory.get(saved), before)
                out["half", step, visit, m] = out["backward", step, visit, m] = out[chain] = read
                for slot, flow in zip(op.gives, gives, strict=True):
                    out["carry slot", 0, slot] = digest("gradient", flow, read)
            return out | written(memory, places, begun, (step, visit, m), read)

        return act


def expected(pipeline: Program) -> list[Result]:
    """What every stage must give."""
    return [_expected(pipeline.trace, program) for program in pipeline.by_stage]


def _expected(trace: Trace, program: Program) -> Result:
    held = {unit.id for unit in program.trace.units if unit.numel}
    computed, added = _computed(trace)
    result = {key: value for stage, key, value in computed if stage == program.trace.stage}
    for step in range(STEPS):
        grads = {unit.id: added[step].get(unit.id, Counter()) for unit in program.trace.units if unit.trainable}
        norm = norm_of(grads)
        result["measured", step] = norm
        for unit, grad in grads.items():
            result["update", step, unit] = ((unit, step), grad, norm)
    shards = {("shard", unit.id): (unit.id, STEPS * unit.trainable) for unit in program.trace.units if unit.id in held}
    return result | shards


@functools.lru_cache(maxsize=4)
def _computed(trace: Trace) -> tuple[list[tuple[int, Any, str]], list[dict[int, Counter[Any]]]]:
    """`(stage, what, value)` of every compute of all steps, and what each unit's gradient adds up to, by step; also
    what several stages add to one that they share."""
    split = trace.split
    assert split is not None
    flows = Flows(split)
    computed: list[tuple[int, Any, str]] = []
    added: list[dict[int, Counter[Any]]] = []
    for step in range(STEPS):
        weights = {v.id: tuple((unit, step * trace.units[unit].trainable) for unit in v.units) for v in trace.visits}
        added.append({})
        for m in range(trace.microbatches):
            saved: dict[int, str] = {}
            values: dict[int, str] = {}
            chain: str | None = None
            for v in range(len(trace.visits)):
                first = split.segments[flows.segment[v]][0]
                takes, gives = flows.of(Forward(v, (), True))
                saved[v] = digest(m, None if v == first else chain, *[values[k] for k in takes])
                chain = digest(weights[v], saved[v])
                values |= {k: digest("value", k, chain) for k in gives}
                computed.append((split.homes[flows.segment[v]], ("forward", step, v, m), chain))
            for v in reversed(range(len(trace.visits))) if trace.trains else ():
                end = split.segments[flows.segment[v]][1]
                takes, gives = flows.of(Backward(v, (), ()))
                before = digest(None if v == end - 1 else chain, *[values[k] for k in takes])
                chain = digest(weights[v], saved[v], before)
                values |= {k: digest("gradient", k, chain) for k in gives}
                computed.append((split.homes[flows.segment[v]], ("backward", step, v, m), chain))
                for unit in trace.visits[v].trained:
                    added[-1].setdefault(unit, Counter())[v, m, unit, chain] += trace.replicas
    return computed, added


class Stage:
    """How far one stage has come."""

    def __init__(self, ops: list[Issued], trace: Trace) -> None:
        self.ops, self.memory, self.waits = ops, beginning(trace), waits_of(ops)
        self.done = [False] * len(ops)
        self.left: dict[str, deque[int]] = {}
        for at, op in enumerate(ops):
            self.left.setdefault(op.stream, deque()).append(at)

    def next(self, stream: str, blocking: bool) -> Issued | None:
        """The next op of a stream, if it may begin."""
        left = self.left.get(stream)
        if not left or not all(self.done[wait] for wait in self.waits[left[0]]):
            return None
        message = ("send", "receive")
        waits = [of[0] for other, of in self.left.items() if of and not (stream in message and other in message)]
        return None if blocking and min(waits, default=left[0]) < left[0] else self.ops[left[0]]

    def end(self, stream: str) -> None:
        at = self.left[stream].popleft()
        self.memory.update(self.ops[at].act(self.memory))
        self.done[at] = True


def run(pipeline: Program, rng: random.Random, mode: Mode = SHARDED, blocking: bool = True) -> list[Result] | None:
    """What comes out; None where an engine would stop, or go on for ever. blocking: messages wait for each other, and
    hosts for devices"""
    split = pipeline.trace.split
    assert split is not None
    try:
        stages = [Stage(StageHost(program, mode).issued, program.trace) for program in pipeline.by_stage]
    except (Stops, LookupError, ValueError):
        return None
    normed = [stage for stage in stages if any(isinstance(op.op, Norm) for op in stage.ops)]
    held = [{unit.id for unit in program.trace.units if unit.numel} for program in pipeline.by_stage]
    boxes: dict[tuple[int, int], deque[Any]] = {}
    speed = {(number, stream): rng.choice((1, 20)) for number, stage in enumerate(stages) for stream in stage.left}
    while any(any(left) for stage in stages for left in stage.left.values()) or not all(all(s.done) for s in stages):
        ways: dict[tuple[int, str], Callable[[], None]] = {}
        for number, stage in enumerate(stages):
            for stream in stage.left:
                if (issued := stage.next(stream, blocking)) is None:
                    continue
                way = _way(issued.op, number, stage, stream, stages, split, boxes, normed, held, blocking)
                if way is not None:
                    ways[number, stream] = way
        if not ways:
            return None
        (chosen,) = rng.choices(list(ways), [speed[key] for key in ways])
        ways[chosen]()
    if any(boxes.values()):
        return None
    out = []
    for stage, own in zip(stages, held, strict=True):
        found = outcome(stage.memory)
        out.append({key: value for key, value in found.items() if key[0] != "shard" or key[1] in own})
    return out


def _way(
    op: Op | None,
    number: int,
    stage: Stage,
    stream: str,
    stages: list[Stage],
    split: Split,
    boxes: dict[tuple[int, int], deque[Any]],
    normed: list[Stage],
    held: list[set[int]],
    blocking: bool,
) -> Callable[[], None] | None:
    """What goes on, if it can."""
    if isinstance(op, Norm) and blocking:
        met = [other.next("compute", True) for other in normed]
        if not all(one is not None and isinstance(one.op, Norm) for one in met):
            return None
        return lambda: [other.end("compute") for other in normed] and None
    if isinstance(op, AllReduce) and op.over == "stages":
        holders = [stages[k] for k, units in enumerate(held) if set(op.units) <= units]
        met = [other.next(stream, blocking) for other in holders]
        if not all(one is not None and one.op == op for one in met):
            return None

        def summed() -> None:
            for unit in op.units:
                parts = [other.memory.get(("grad shard", unit)) for other in holders]
                total = functools.reduce(_added, parts)
                for other in holders:
                    other.memory["grad shard", unit] = total
            for other in holders:
                other.end(stream)

        return summed
    if isinstance(op, Send):
        other = split.ends(op.flow, op.back)[1]
        if blocking:
            met = stages[other].next("receive", True)
            if met is None or not isinstance(met.op, Receive) or split.ends(met.op.flow, met.op.back)[0] != number:
                return None
            received = met.op

            def together() -> None:
                value = stage.memory.get(("carry slot", 0, op.carry_slot))
                stage.end("send")
                stages[other].end("receive")
                stages[other].memory["carry slot", 0, received.carry_slot] = value

            return together

        def post() -> None:
            boxes.setdefault((number, other), deque()).append(stage.memory.get(("carry slot", 0, op.carry_slot)))
            stage.end("send")

        return post
    if isinstance(op, Receive):
        if blocking:
            return None
        box = boxes.get((split.ends(op.flow, op.back)[0], number))
        if not box:
            return None

        def take() -> None:
            stage.end("receive")
            stage.memory["carry slot", 0, op.carry_slot] = box.popleft()

        return take
    return lambda: stage.end(stream)


def right(pipeline: Program, seed: int = 0) -> bool:
    """Whether all stages give what they must: where messages wait and where not, also where slots are shards."""
    want = expected(pipeline)
    tries = [(SHARDED, True), (SHARDED, False), (ALIASED, True)]
    return all(run(pipeline, random.Random(seed), mode, blocking) == want for mode, blocking in tries)
