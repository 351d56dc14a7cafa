"""A lower bound: the least that any program of a step takes on a cluster, under a memory.

It holds for every program of the trace that `verify` accepts and that `predict_memory` says fits, as `simulate` costs
it. A step is at least as long as each of these, of each stage:

    compute          its forwards, backwards and updates, one after the other; what must have ended before the first one
                     begins, and what must follow the last one; slower for as long as communication must run beside it
    communication    one gather and one reduction of each unit, messages: on each stream, and on each link
    fill             before the first backward there are forwards alone, as many as memory holds the graphs of
    drain            after a stage's last backward of inputs those before it have theirs, and its weights' to do
    memory           what does not fit is computed again, gathered again, reduced in parts, or moved to the host: the
                     least seconds in which that can make enough room

What is assumed: costs as `costs.phases` has them, so that merging collectives saves latency alone; every visit may
recompute, every unit be let go between its forward and its backward, every carry be offloaded; all of this in any
fractions, which only lowers the bound. Of the memory it counts what the state holds, weights and gradients in slots,
and what graphs keep: other buffers are left out.
"""

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from yafsdp_fn.planner.activations import held_values
from yafsdp_fn.planner.cluster import Cluster, Phase
from yafsdp_fn.planner.cluster import cluster as named
from yafsdp_fn.planner.costs import groups, phases
from yafsdp_fn.planner.footprint import state_bytes
from yafsdp_fn.planner.simulate import LINKS, check_costs
from yafsdp_fn.program.ops import AllReduce, Backward, Forward, Gather, Norm, Op, Reduce, Send, Update
from yafsdp_fn.program.program import after_program, part_of
from yafsdp_fn.program.split import Call, Split
from yafsdp_fn.program.trace import Trace, UnitSpec
from yafsdp_fn.timeline.text import shown


class Bound(NamedTuple):
    """No program takes fewer `seconds`. by: the largest term, in words; terms: all of them, in seconds, by name

    Where nothing fits into the memory, `seconds` is infinite.

    >>> least = ya.planner.bound(trace, "a100-80g")
    >>> 0 < least.seconds == max(seconds for _, seconds in least.terms)
    True
    """

    seconds: float
    by: str
    terms: tuple[tuple[str, float], ...]

    def gap(self, seconds: float) -> float:
        """The part of a step of so many seconds that lies above the bound: 0 says that it is the best there is."""
        return max(0.0, 1 - self.seconds / seconds) if seconds > 0 else 0.0

    def against(self, seconds: float) -> str:
        """Words for it, beside a step of so many seconds."""
        if math.isinf(self.seconds):
            return "no program of this step fits into the memory"
        return (
            f"no program takes less than {shown(self.seconds, 4)} ({self.by}): {self.gap(seconds):.1%} below this one"
        )


def bound(trace: Trace, cluster: str | Cluster, memory: int | None = None) -> Bound:
    """The least seconds of a step of `trace` on `cluster`, with `memory` bytes per rank, by default the cluster's.

    trace: on its mesh, and cut into stages where it is to be. Raises ValueError for an unknown cluster and for a trace
    without costs.

    >>> ya.planner.bound(trace, "a100-80g").seconds <= ya.planner.simulate(program, "a100-80g").seconds
    True
    """
    where = named(cluster)
    check_costs(trace)
    budget = where.memory_bytes if memory is None else memory
    several = trace.split is not None and trace.stage is None
    path = _Path(trace, where)
    found: Counter[str] = Counter()
    for stage in range(trace.split.stages) if several and trace.split else (trace.stage or 0,):
        for name, seconds in _Stage(trace, stage, where, path, budget).terms().items():
            words = f"{name} of stage {stage}" if several else name
            found[words] = max(found[words], seconds)  # type: ignore[assignment]
    by, most = max(found.items(), key=lambda term: term[1])
    return Bound(most, by, tuple(sorted(found.items(), key=lambda term: -term[1])))


# ---- One microbatch alone: when each segment can begin.


class _Path:
    """Seconds of each segment's calls, and the earliest that they begin after one another.

    forward, inputs: of a call; begins, turns: segment -> the earliest begin of its forward, and of its backward
    drains: segment -> the least from the end of its backward of inputs to that of all that waits for it
    """

    def __init__(self, trace: Trace, cluster: Cluster) -> None:
        self.split = trace.split or Split(((0, len(trace.visits)),), (0,), ())
        if trace.stage is not None:  # alone, it waits for nobody
            self.split = self.split._replace(flows=())
        self.trace, self.cluster, self.places = trace, cluster, groups(trace, cluster)
        self.forward = [self._call(segment, Forward) for segment in range(len(self.split.homes))]
        self.inputs = [self._call(segment, Backward) for segment in range(len(self.split.homes))]
        self.begins, self.turns = self._from(None)
        self.drains = [max(0.0, self._call(s, Backward, "both") - inputs) for s, inputs in enumerate(self.inputs)]
        for number, flow in sorted(enumerate(self.split.flows), key=lambda each: each[1].target):
            if flow.grad_bytes:
                after = self._message(number, True) + self.inputs[flow.source] + self.drains[flow.source]
                self.drains[flow.target] = max(self.drains[flow.target], after)

    def again(self, segment: int) -> float:
        """The least from the end of a segment's forward to the begin of its backward, in one microbatch."""
        return self._from(segment)[1][segment]

    def _from(self, first: int | None) -> tuple[list[float], list[float]]:
        """Begins of forwards and of backwards; with `first`, of what follows this segment, after the end of its own."""
        split = self.split
        ends, begins = [-math.inf] * len(split.homes), [0.0 if first is None else -math.inf] * len(split.homes)
        for segment, seconds in enumerate(self.forward):
            came = [ends[f.source] + self._message(n, False) for n, f in enumerate(split.flows) if f.target == segment]
            begins[segment] = max(begins[segment], *came) if came else begins[segment]
            ends[segment] = 0.0 if segment == first else begins[segment] + seconds
        turns = [-math.inf] * len(split.homes)
        for segment in reversed(range(len(split.homes))):
            came = [ends[segment]]
            for number, flow in enumerate(split.flows):
                if flow.source == segment and flow.grad_bytes:
                    came.append(turns[flow.target] + self.inputs[flow.target] + self._message(number, True))
            turns[segment] = max(came)
        return begins, turns

    def _message(self, flow: int, back: bool) -> float:
        source, target = self.split.ends(flow, back)
        if source == target:
            return 0.0
        return seconds_of(phases(Send(flow, 0, 0, back), self.trace, self.cluster, self.places, False))

    def _call(
        self, segment: int, kind: type[Forward] | type[Backward], half: Literal["both", "inputs"] | None = None
    ) -> float:
        # where there are stages, segments wait for the first half of a backward alone
        half = half or ("both" if self.trace.split is None else "inputs")
        visits = self.split.visits(segment)
        ops = [Forward(v, (), True) if kind is Forward else Backward(v, (), (), half=half) for v in visits]
        return sum(seconds_of(phases(op, self.trace, self.cluster, self.places, False)) for op in ops)


# ---- One stage.


class _Stage:
    def __init__(self, trace: Trace, stage: int, cluster: Cluster, path: _Path, budget: int) -> None:
        self.cluster, self.path, self.stage, self.microbatches = cluster, path, stage, trace.microbatches
        self.segments = path.split.of(stage)
        self.part = trace
        if trace.split is not None and trace.stage is None:
            kinds = ("forward", "backward") if trace.trains else ("forward",)
            calls = [Call(kind, segment, 0) for kind in kinds for segment in self.segments]  # type: ignore[arg-type]
            self.part = part_of(trace._replace(microbatches=1), stage, calls)
        self.visits = [v for segment in self.segments for v in path.split.visits(segment)]
        self.places = groups(self.part, cluster)
        self.used = sorted({unit for v in self.visits for unit in self.part.visits[v].units})
        self.trained = sorted(
            {unit for v in self.visits for unit in self.part.visits[v].trained} if trace.trains else ()
        )
        self.room = budget - sum(state_bytes(self.part).values()) if self.part.precision else math.inf
        self._work()

    def phases(self, op: Op, recompute: bool = False) -> tuple[Phase, ...]:
        return phases(op, self.part, self.cluster, self.places, recompute)

    def _work(self) -> None:
        """Adds up what there is to do at least: seconds of computes and of what else runs, by stream and by link."""
        part, m = self.part, self.microbatches
        self.forward = {v: seconds_of(self.phases(Forward(v, (), True))) for v in self.visits}
        self.backward = {v: seconds_of(self.phases(Backward(v, (), ()))) if part.trains else 0.0 for v in self.visits}
        self.recompute = {
            v: seconds_of(self.phases(Backward(v, (), ()), True)) - self.backward[v] if part.trains else 0.0
            for v in self.visits
        }
        self.computes = m * sum(self.forward[v] + self.backward[v] for v in self.visits)
        each: list[Op] = [Forward(v, (), True) for v in self.visits]
        each += [Backward(v, (), ()) for v in self.visits if part.trains]
        self.busy: Counter[str] = Counter()  # of streams but that of computes, and of links
        for op in each:
            for resource, seconds in self.phases(op):
                self.busy[resource] += m * seconds * (resource in LINKS)  # type: ignore[assignment]
        self.calls = sum(self.busy.values())
        self.norm, self.update, self.first_update = self._optimizer()
        fresh = tuple(unit for unit in self.used if part.units[unit].trainable)  # others may stay from step to step
        collectives: list[Op] = [Gather(fresh, fresh)] * bool(fresh)
        if self.trained:
            collectives += [Reduce((unit,), (0,)) for unit in self.trained if part.units[unit].sum_bytes]
            plain = tuple(unit for unit in self.trained if not part.units[unit].sum_bytes)
            collectives += [Reduce(plain, plain)] * bool(plain)
            collectives += [AllReduce((unit,)) for unit in self.trained if part.replicas > 1]
        for op in collectives:
            for resource, seconds in self.phases(op):
                self.busy[op.stream] += seconds  # type: ignore[assignment]
                self.busy[resource] += seconds * (resource in LINKS)  # type: ignore[assignment]
        for number, flow in enumerate(self.path.split.flows):
            for back in (False, True)[: 1 + bool(flow.grad_bytes and part.trains)]:
                ends = self.path.split.ends(number, back)
                if self.stage in ends and ends[0] != ends[1]:
                    for resource, seconds in self.phases(Send(number, 0, 0, back)):
                        self.busy["send" if ends[0] == self.stage else "receive"] += m * seconds  # type: ignore[assignment]
                        self.busy[resource] += m * seconds * (resource in LINKS)  # type: ignore[assignment]

    def _optimizer(self) -> tuple[float, float, float]:
        """Seconds of the norm, of all updates, and of the update of what the step's first visit uses."""
        part = self.part
        if part.update_when == "never" or not part.trained:
            return 0.0, 0.0, 0.0
        ops = [op for op in after_program(part.trained, part.lent) if isinstance(op, Norm | Update)]
        norms = [op for op in ops if isinstance(op, Norm)]
        norm = sum(seconds_of(self.phases(op)) for op in norms)
        first = [unit for unit in self.part.visits[self.visits[0]].units if part.units[unit].trainable]
        of_first = sum(seconds_of(self.phases(Update((unit,)))) for unit in first)
        return norm, sum(seconds_of(self.phases(op)) for op in ops if isinstance(op, Update)), of_first

    def terms(self) -> dict[str, float]:
        """Seconds of a step, by what they are the least for."""
        self.overhead = self.cluster.overhead(sum(u.numel > 0 or self.part.stage is None for u in self.part.units))
        least = self._compute(0.0)
        found = {"compute": least}
        for name, seconds in self.busy.items():
            if seconds:
                found[f"communication ({'stream' if name not in LINKS else 'link'} {name})"] = seconds
        if self.part.trains and len(self.path.split.homes) > 1:
            found["fill"] = self._fill()
            found["drain"] = self._drain()
        most = max(found.values())
        if self.part.trains and self.room < math.inf:
            found["memory"] = self._with_room(most)
        slowest = 1 + self.cluster.straggling(self.part.world)
        return {name: seconds * slowest + self.overhead for name, seconds in found.items()}

    # ---- compute

    def _ends(self) -> tuple[float, float, float]:
        """Seconds without any compute: before the first one may be gathered for, of the gather for it, and after the
        last one but for updates. The gather is none where others compute meanwhile."""
        fill = min(self.path.begins[segment] for segment in self.segments)
        first = tuple(unit for unit in self.part.visits[self.visits[0]].units if self.part.units[unit].trainable)
        gather = seconds_of(self.phases(Gather(first, first))) if first else 0.0
        if self.path.split.stages > 1:
            gather = 0.0  # other stages do something first
        if self.part.split is None and self.part.trains:  # the last backward is known
            last = self.part.visits[self.part.order[-1].visit].trained
            return fill, gather, max(map(self._reduction, last), default=0.0)
        return fill, gather, min(map(self._reduction, self.trained), default=0.0)

    def _reduction(self, unit: int) -> float:
        return seconds_of(self.phases(Reduce((unit,), (0,)))) + seconds_of(self.phases(AllReduce((unit,)))) * (
            self.part.replicas > 1
        )

    def _compute(self, again: float) -> float:
        """The stream of computes, and what is before and after; `again`: seconds of gathers beyond the first ones."""
        fill, gather, reduction = self._ends()
        beside = max((seconds for name, seconds in self.busy.items() if name not in LINKS), default=0.0)
        beside = max(beside, self.busy["gather"] + again) - self.calls - fill - reduction
        slower = self.cluster.contention / (1 + self.cluster.contention)
        computes = fill + self.computes + self.norm
        # the step before may have gathered it beside its last updates: these take longer then, or end before it
        whole = max(
            computes + self.update + slower * max(0.0, beside),
            computes + self.first_update + gather + slower * max(0.0, beside - gather),
        )
        return whole + reduction

    # ---- fill

    def _fill(self) -> float:
        """Until a stage can turn, it computes forwards alone; those whose graphs are not kept are done once more."""
        turn = min(self.path.turns[segment] for segment in self.segments)
        room, done = self._room_for_graphs(), 0.0
        costs = [(self._inner(v), self.forward[v]) for v in self.visits]
        for nbytes, seconds in sorted(costs, key=lambda cost: cost[0] / cost[1] if cost[1] else 0.0):
            times = min(self.microbatches, room / nbytes) if nbytes else self.microbatches
            room -= times * nbytes
            done += times * seconds
        free = sum(max(0.0, self.forward[v] - self.recompute[v]) for v in self.visits) * self.microbatches
        most = min(done + free, self.microbatches * sum(self.forward.values()))
        return turn + self.computes - most + self.norm + self.update

    def _drain(self) -> float:
        """Until a stage has sent its last gradient, it computes all forwards and backwards of inputs; updates that wait
        for the norm come when the stages before it are ready, too."""
        path = self.path
        own = [segment for segment in self.segments if path.inputs[segment] > 0]
        each = self.microbatches * sum(path.forward[segment] + path.inputs[segment] for segment in own)
        last = min((path.drains[segment] for segment in own), default=0.0)
        return min(path.begins[segment] for segment in self.segments) + each + last + self.update

    def _inner(self, visit: int) -> int:
        """Bytes that a kept graph holds, and a recomputed one does not."""
        return self.part.visits[visit].cost.inner_bytes if self.recompute[visit] > 0 else 0

    def _room_for_graphs(self) -> float:
        """Bytes beside the state and the fewest slots."""
        of = [unit for unit in self.part.units if not self._aliased(unit)]
        weights = max(
            (sum(u.gather_bytes for u in of if u.id in self.part.visits[v].units) for v in self.visits), default=0
        )
        gradients = max((u.reduce_bytes for u in of if u.id in self.trained), default=0)
        return max(0.0, self.room - weights - gradients)

    def _aliased(self, unit: UnitSpec) -> bool:
        return self.part.ranks_of(unit) == 1 and not self.part.ordered

    # ---- memory

    def _with_room(self, least: float) -> float:
        """The least seconds in which enough room can be made; `least`: what the step takes anyway."""
        needed, freed = self._of_stages() if self.part.split is not None else self._of_one()
        if needed(least) <= freed(least) * (1 + 1e-9):
            return least
        low, high = least, 2 * least + 1e-9
        while needed(high) > freed(high):
            low, high = high, 2 * high
            if high > 1e6 * least:
                return math.inf
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if needed(middle) <= freed(middle) else (middle, high)
        return low

    def _of_stages(self) -> tuple["_Bytes", "_Bytes"]:
        """Returns, of several stages, bytes times seconds: a graph is kept until its microbatch can come back."""
        m, room, fill = self.microbatches, self._room_for_graphs(), self._ends()[0]
        items = []
        for segment in self.segments:
            seconds = self.path.again(segment)
            items += [(self._inner(v) * seconds * m, self.recompute[v] * m) for v in self.path.split.visits(segment)]
        again, whole = _Freed(items), self._compute(0.0)
        all_kept = sum(held for held, _ in items)
        return lambda seconds: all_kept - room * (seconds - fill), lambda seconds: again(seconds - whole)

    def _of_one(self) -> tuple["_Bytes", "_Bytes"]:
        """Returns, of one stage, bytes between the last forward and the first backward of each microbatch, and those of
        gradients between microbatches."""
        part, m = self.part, self.microbatches
        cut = [part.units[unit] for unit in self.used if not self._aliased(part.units[unit])]
        always, carries = held_values(part)
        held = always + max(part.visits[-1].cost.peak_bytes, part.visits[-1].cost.bwd_peak_bytes)
        graphs = [(self._inner(v), self.recompute[v] * m) for v in self.visits if v != len(part.visits) - 1]
        weights = [(unit.gather_bytes, unit) for unit in cut]
        gradients = [(unit.reduce_bytes, unit) for unit in cut if unit.id in self.trained] * (m > 1)
        total = held + sum(nbytes for nbytes, _ in (*graphs, *weights, *gradients)) + carries
        again = _Freed(graphs)
        stream = _Freed((nbytes, m * self._gather(unit, None)) for nbytes, unit in weights)
        on: list[tuple[str, _Freed]] = [("gather", stream)]
        on.append(("reduce", _Freed((nbytes, (m - 1) * self._reduce(unit, None)) for nbytes, unit in gradients)))
        for link in LINKS:
            both = [(nbytes, m * self._gather(unit, link)) for nbytes, unit in weights]
            on.append((link, _Freed([*both, *((n, (m - 1) * self._reduce(unit, link)) for n, unit in gradients)])))
        of_weights, of_gradients = sum(n for n, _ in weights), sum(n for n, _ in gradients)
        all_of = {"gather": of_gradients, "reduce": of_weights, "node": 0, "network": 0}

        def freed(seconds: float) -> float:
            moved = min(of(seconds - self.busy[name]) + all_of[name] for name, of in on)
            host = min(carries, seconds * self.cluster.host_bandwidth / (2 * m))
            most = max(0.0, seconds - self.busy["gather"])
            # a gather more slows computes down, which leaves less for those that are done again
            tries = [0.0, most, *(at for at in stream.breaks if at < most)]
            if self.cluster.contention:
                slope = self.cluster.contention / (1 + self.cluster.contention)
                free = seconds - self._compute(0.0)
                tries += [at for left in (0.0, *again.breaks) if 0 < (at := (free - left) / slope) < most]
            best = max(again(seconds - self._compute(x)) + min(moved, stream(x) + of_gradients) for x in tries)
            return best + host

        return lambda seconds: total - self.room, freed

    def _gather(self, unit: UnitSpec, link: str | None) -> float:
        """Seconds of bytes in a further gather of `unit`, on a link or its stream; from the node where there is one."""
        ways = [self.phases(Gather((unit.id,), (0,)))]
        if self.part.local_ranks_of(unit) < self.part.ranks_of(unit):
            ways.append(self.phases(Gather((unit.id,), (0,), "node")))
        return min(sum(s for resource, s in way if resource in ((link,) if link else LINKS)) for way in ways)

    def _reduce(self, unit: UnitSpec, link: str | None) -> float:
        way = self.phases(Reduce((unit.id,), (0,)))
        return sum(s for resource, s in way if resource in ((link,) if link else LINKS))


_Bytes = Callable[[float], float]
"""Seconds -> bytes."""


class _Freed:
    """The most bytes that so many seconds make free. items: bytes that are freed, and the seconds that it takes."""

    def __init__(self, items: Iterable[tuple[float, float]]) -> None:
        pairs = [(nbytes, seconds) for nbytes, seconds in items if nbytes > 0]
        self.free = sum(nbytes for nbytes, seconds in pairs if seconds <= 0)
        costly = sorted((pair for pair in pairs if pair[1] > 0), key=lambda pair: pair[1] / pair[0])
        merged = [
            (sum(n for n, _ in alike), sum(s for _, s in alike))
            for _, group in itertools.groupby(costly, key=lambda pair: pair[1] / pair[0])
            for alike in [[*group]]
        ]
        self.breaks = [*itertools.accumulate(seconds for _, seconds in merged)]
        self.bytes = [0.0, *itertools.accumulate(nbytes for nbytes, _ in merged)]

    def __call__(self, seconds: float) -> float:
        if seconds < 0:
            return -math.inf
        at = bisect_left(self.breaks, seconds)
        if at == len(self.breaks):
            return self.free + self.bytes[-1]
        before = self.breaks[at - 1] if at else 0.0
        part = (seconds - before) / (self.breaks[at] - before)
        return self.free + self.bytes[at] + part * (self.bytes[at + 1] - self.bytes[at])


def seconds_of(found: Iterable[Phase]) -> float:
    """Returns the seconds of phases, one after the other."""
    return sum(phase.seconds for phase in found)
