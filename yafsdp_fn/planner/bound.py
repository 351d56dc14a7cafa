"""A lower bound: the least that any program of a step takes on a cluster, under a memory.

It holds for every program of the trace that `verify` accepts and that `predict_memory` says fits, as `simulate` costs
it. A step is at least as long as each of these, of each stage:

    compute          its forwards, backwards and updates, one after the other; what must end before the first begins,
                     and what must follow the last
    communication    one gather and one reduction of each unit, and messages: on each stream, and on each link
    fill             before its first backward a stage runs only forwards, as many as memory has room for
    memory           without stages: what does not fit is recomputed, gathered again or reduced in parts: the least
                     seconds in which that can make enough room

It assumes the costs of `Costs`, so that merging collectives saves only latency. Every visit may recompute, and every
unit may be freed between its forward and its backward, in any fractions; carries may wait on the host at no cost: that
only lowers the bound. It counts the memory of the state, of weights and gradients in slots, and of kept graphs: no
other buffers.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from yafsdp_fn.planner.activations import always_held
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.cluster import cluster as named
from yafsdp_fn.planner.costs import Costs
from yafsdp_fn.planner.footprint import state_bytes
from yafsdp_fn.planner.orders import CallGraph
from yafsdp_fn.planner.simulate import LINKS, check_costs, overhead
from yafsdp_fn.program.ops import AllReduce, Backward, Forward, Gather, Norm, Op, Receive, Reduce, Send, Update
from yafsdp_fn.program.program import after_program, stage_trace
from yafsdp_fn.program.split import Call, Kind, Message, Split
from yafsdp_fn.program.trace import Trace, UnitSpec, Visit
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
        """Returns the part of a step of so many seconds that lies above the bound: 0 says that it is the best there
        is."""
        return max(0.0, 1 - self.seconds / seconds) if seconds > 0 else 0.0

    def against(self, seconds: float) -> str:
        """Words for it, beside a step of so many seconds."""
        if math.isinf(self.seconds):
            return "no program of this step fits into the memory"
        return (
            f"no program takes less than {shown(self.seconds, 4)} ({self.by}): {self.gap(seconds):.1%} below this one"
        )


def bound(trace: Trace, cluster: str | Cluster, memory: int | None = None) -> Bound:
    """Returns the least seconds of a step of `trace` on `cluster`, with `memory` bytes per rank, by default the
    cluster's.

    trace: on its mesh, and cut into stages where it is to be. Raises ValueError for an unknown cluster and for a trace
    without costs.

    >>> ya.planner.bound(trace, "a100-80g").seconds <= ya.planner.simulate(program, "a100-80g").seconds
    True
    """
    where = named(cluster)
    if trace.stage is None:
        check_costs(trace)
    split = trace.cut
    if trace.stage is not None:  # alone, it waits for nobody
        split = split._replace(flows=())
    earliest = _earliest(trace._replace(split=split), split, where)
    whole = trace.split is not None and trace.stage is None
    found: list[tuple[str, float]] = []
    for stage in range(split.stages) if whole else [trace.stage or 0]:
        for name, seconds in _StageBound(trace, stage, where, split, earliest, where.budget(memory)).terms().items():
            found.append((name + f" of stage {stage}" * whole, seconds))
    found.sort(key=lambda term: -term[1])
    by, most = found[0]
    return Bound(most, by, tuple(found))


# ---- One microbatch alone: the longest paths through the calls of its segments.


class _Begins(NamedTuple):
    """The earliest begins of each segment's forward, and of its backward."""

    forwards: list[float]
    backwards: list[float]


def _earliest(trace: Trace, split: Split, cluster: Cluster) -> _Begins:
    calls = CallGraph.of_step(trace, cluster)
    costs = Costs(trace, cluster)

    def message(number: int, back: bool) -> float:
        return costs.seconds(Send(number, 0, back=back)) if split.crosses(Message(number)) else 0.0

    flows = sorted(enumerate(split.flows), key=lambda each: each[1].target)
    forwards = [0.0] * len(split.homes)
    for number, flow in flows:
        made = forwards[flow.source] + calls.forward[flow.source]
        forwards[flow.target] = max(forwards[flow.target], made + message(number, back=False))
    backwards = [begin + seconds for begin, seconds in zip(forwards, calls.forward, strict=True)]
    for number, flow in sorted(flows, key=lambda each: -each[1].source):
        if flow.grad_bytes:
            made = backwards[flow.target] + calls.inputs[flow.target]
            backwards[flow.source] = max(backwards[flow.source], made + message(number, back=True))
    return _Begins(forwards, backwards)


# ---- One stage.


class _VisitCost(NamedTuple):
    """Seconds of a visit's passes.

    recompute: what a backward takes more that recomputes; inner: bytes that a kept graph holds beside a recomputed one
    """

    forward: float
    backward: float
    recompute: float
    inner: int


class _StageBound:
    """The least that a stage's part of a step takes.

    begin, turn: the earliest begins of its first forward and of its first backward
    each: the costs of its visits; computes: seconds of all of them
    busy: seconds of the other streams, and of links; norm, update: seconds of the optimizer
    room: bytes beside the state
    """

    def __init__(
        self, trace: Trace, stage: int, cluster: Cluster, split: Split, earliest: _Begins, budget: int
    ) -> None:
        self.cluster = cluster
        self.split = split
        self.stage = stage
        self.microbatches = trace.microbatches
        segments = split.of(stage)
        self.begin = min(earliest.forwards[segment] for segment in segments)
        self.turn = min(earliest.backwards[segment] for segment in segments)
        if trace.split is not None and trace.stage is None:
            kinds: list[Kind] = ["forward", "backward"] if trace.trains else ["forward"]
            calls = [Call(kind, segment, 0) for kind in kinds for segment in segments]
            trace = stage_trace(trace._replace(microbatches=1), stage, calls)
        self.trace = trace
        self.costs = Costs(trace, cluster)
        self.visits = [trace.visits[v] for segment in segments for v in split.visits(segment)]
        used = {unit for visit in self.visits for unit in visit.units}
        trained = {unit for visit in self.visits for unit in visit.trained if trace.trains}
        self.units = [trace.units[unit] for unit in sorted(used)]
        self.trained = [trace.units[unit] for unit in sorted(trained)]
        self.room = budget - sum(state_bytes(trace).values()) if trace.precision else math.inf
        self.each = [self._of_visit(visit) for visit in self.visits]
        seconds = [each.forward for each in self.each] + [each.backward for each in self.each]
        self.computes = self.microbatches * sum(seconds)
        self.first = [u for u in self.visits[0].units if trace.units[u].trainable]  # what the first visit waits for
        # the gather of one may begin while others are updated
        self.norm = self.update = self.first_update = 0.0
        if trace.update_when != "never" and trace.trained:
            ops = after_program(trace.trained, trace.lent)
            self.norm = self._seconds(op for op in ops if isinstance(op, Norm))
            self.update = self._seconds(op for op in ops if isinstance(op, Update))
            self.first_update = min((self.costs.seconds(Update((unit,))) for unit in self.first), default=0.0)
        self._work()

    def _seconds(self, ops: Iterable[Op]) -> float:
        return sum(map(self.costs.seconds, ops))

    def _of_visit(self, visit: Visit) -> _VisitCost:
        forward = self.costs.seconds(Forward(visit.id, (), True))
        backward = recompute = 0.0
        if self.trace.trains:
            backward = self.costs.seconds(Backward(visit.id, (), ()))
            recompute = self.costs.seconds(Backward(visit.id, (), ()), True) - backward
        inner = visit.cost.inner_bytes if recompute > 0 else 0
        return _VisitCost(forward, backward, recompute, inner)

    def _work(self) -> None:
        """Adds up what streams and links do at least."""
        part = self.trace
        computes: list[Op] = [Forward(v.id, (), True) for v in self.visits]
        computes += [Backward(v.id, (), ()) for v in self.visits if part.trains]
        fresh = tuple(unit.id for unit in self.units if unit.trainable)  # others may stay from step to step
        plain = tuple(unit.id for unit in self.trained if not unit.sum_bytes)
        collectives: list[Op] = [Gather(fresh, fresh), Reduce(plain, plain)]
        collectives += [Reduce((unit.id,), (0,)) for unit in self.trained if unit.sum_bytes]
        collectives += [AllReduce((unit.id,)) for unit in self.trained if part.replicas > 1]
        self.busy: dict[str, float] = {"gather": 0.0, "reduce": 0.0, **dict.fromkeys(LINKS, 0.0)}
        for ops, times in (computes, self.microbatches), (collectives, 1), (self._messages(), self.microbatches):
            for op in ops:
                for resource, seconds in self.costs.phases(op):
                    if resource in LINKS:
                        self.busy[resource] += times * seconds
                    if op.stream != "compute":
                        self.busy[op.stream] = self.busy.get(op.stream, 0.0) + times * seconds

    def _messages(self) -> list[Op]:
        """Returns what the stage sends and receives in a microbatch."""
        messages: list[Op] = []
        for number, flow in enumerate(self.split.flows):
            for back in (False, True):
                source, target = self.split.ends(number, back)
                exists = not back or (flow.grad_bytes and self.trace.trains)
                if exists and source != target and self.stage in (source, target):
                    kind = Send if source == self.stage else Receive
                    messages.append(kind(number, 0, 0, back))
        return messages

    def terms(self) -> dict[str, float]:
        """Returns the seconds of a step, by what they are the least for."""
        found = {"compute": self._compute()}
        for name, seconds in self.busy.items():
            if seconds:
                found[f"communication ({'link' if name in LINKS else 'stream'} {name})"] = seconds
        if self.trace.trains and len(self.split.homes) > 1:
            found["fill"] = self._fill()
        if self.trace.trains and self.trace.split is None and self.room < math.inf:
            found["memory"] = self._with_room(max(found.values()))
        slowest = 1 + self.cluster.straggling(self.trace.world)
        after = overhead(self.trace, self.cluster)
        return {name: seconds * slowest + after for name, seconds in found.items()}

    # ---- compute

    def _compute(self) -> float:
        """Returns the stream of computes, and what is before the first one and after the last."""
        part = self.trace
        gather = 0.0  # for the first compute; with several stages others compute meanwhile
        if self.first and self.split.stages == 1:
            gather = self.costs.seconds(Gather(tuple(self.first), tuple(self.first)))
        reduction = min((self._reduction(unit.id) for unit in self.trained), default=0.0)
        if part.split is None and part.trains:  # the last backward is known
            last = part.visits[part.order[-1].visit].trained
            reduction = max(map(self._reduction, last), default=0.0)
        # the step before may have gathered it beside its last updates
        end = max(self.update, self.first_update + gather)
        return self.begin + self.computes + self.norm + end + reduction

    def _reduction(self, unit: int) -> float:
        replicas = self.costs.seconds(AllReduce((unit,))) if self.trace.replicas > 1 else 0.0
        return self.costs.seconds(Reduce((unit,), (0,))) + replicas

    # ---- fill

    def _fill(self) -> float:
        """Until a stage can turn, it computes forwards alone; those whose graphs are not kept are done once more."""
        m = self.microbatches
        graphs = [(m * each.forward, m * each.inner) for each in self.each]
        free = m * sum(max(0.0, each.forward - each.recompute) for each in self.each)
        forwards = m * sum(each.forward for each in self.each)
        most = min(forwards, _most(graphs, self._room_for_graphs()) + free)
        return self.turn + self.computes - most + self.norm + self.update

    def _room_for_graphs(self) -> float:
        """Bytes beside the state and the fewest slots."""
        in_slots = {unit.id: unit.gather_bytes for unit in self._in_slots(self.units)}
        weights = [sum(in_slots.get(unit, 0) for unit in visit.units) for visit in self.visits]
        gradients = [unit.reduce_bytes for unit in self._in_slots(self.trained)]
        return max(0.0, self.room - max(weights, default=0) - max(gradients, default=0))

    def _in_slots(self, units: Iterable[UnitSpec]) -> list[UnitSpec]:
        """Returns the units whose slots are not their shards: several ranks have parts of them."""
        return [unit for unit in units if self.trace.ranks_of(unit) > 1 or self.trace.ordered]

    # ---- memory

    def _with_room(self, least: float) -> float:
        """Returns the least seconds in which enough room can be made; `least`: what the step takes anyway."""
        lacks = self._lacks()
        if lacks(least) <= 0:
            return least
        low = least
        high = 2 * least + 1e-9
        while lacks(high) > 0:
            low = high
            high = 2 * high
            if high > 1e6 * least:
                return math.inf
        for _ in range(50):
            middle = (low + high) / 2
            if lacks(middle) > 0:
                low = middle
            else:
                high = middle
        return low

    def _lacks(self) -> Callable[[float], float]:
        """Seconds -> bytes that lack between the last forward and the first backward of each microbatch, with gradients
        that are held between microbatches."""
        part = self.trace
        m = self.microbatches
        whole = self._compute()
        head = part.visits[-1]
        held = always_held(part) + max(head.cost.peak_bytes, head.cost.bwd_peak_bytes)
        graphs = [(each.inner, each.recompute * m) for each in self.each[:-1]]  # all but the head's
        # what is gathered or reduced more often frees bytes, for seconds of each link
        again: list[tuple[int, int, Op]] = []
        for unit in self._in_slots(self.units):
            nodes = part.local_ranks_of(unit) < part.ranks_of(unit)  # from a node, or from all ranks: over either link
            again.append((unit.gather_bytes, 0 if nodes else m, Gather((unit.id,), (0,))))
        for unit in self._in_slots(self.trained) if m > 1 else ():
            again.append((unit.reduce_bytes, m - 1, Reduce((unit.id,), (0,))))
        links: dict[str, list[tuple[float, float]]] = {}
        for link in LINKS:
            links[link] = [(nbytes, times * self._on(link, op)) for nbytes, times, op in again]
        of_graphs = sum(nbytes for nbytes, _ in graphs)
        in_slots = sum(nbytes for nbytes, *_ in again)
        total = (held + of_graphs + in_slots) * (1 - 1e-9)

        def lacks(seconds: float) -> float:
            moved = min(_most(items, seconds - self.busy[link]) for link, items in links.items())
            return total - self.room - _most(graphs, seconds - whole) - moved

        return lacks

    def _on(self, link: str, op: Op) -> float:
        """Returns the seconds of a link that an op takes: its latency is saved where collectives are merged."""
        return sum(seconds for resource, seconds in self.costs.phases(op) if resource == link)


def _most(items: Iterable[tuple[float, float]], budget: float) -> float:
    """Returns the most that a budget buys of items, `(gain, cost)`, any part of each; less than all where it is
    negative."""
    if budget < 0:
        return -math.inf
    most = 0.0
    for gain, cost in sorted(items, key=lambda item: item[1] / item[0] if item[0] else math.inf):
        part = min(1.0, budget / cost) if cost > 0 else 1.0
        most += part * gain
        budget -= part * max(cost, 0.0)
    return most
