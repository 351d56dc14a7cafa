"""A lower bound: the least that any program of a step takes on a cluster, under a memory.

It holds for every program of the trace that `verify` accepts and that `predict_memory` says fits, as `simulate` costs
it. A step is at least as long as each of these, of each stage:

    compute          its forwards, backwards and updates, one after the other; what must end before the first begins,
                     and what must follow the last; slower while communication must run beside it
    communication    one gather and one reduction of each unit, and messages: on each stream, and on each link
    fill             before its first backward a stage runs only forwards, as many as memory has room for
    drain            after its last backward of inputs the stages before it run theirs, and then those of weights
    memory           what does not fit is recomputed, gathered again, reduced in parts, or moved to the host: the least
                     seconds in which that can make enough room

It assumes the costs of `Costs`, so that merging collectives saves only latency. Every visit may recompute, every unit
may be freed between its forward and its backward, and every carry may be offloaded, in any fractions, which only lowers
the bound. It counts the memory of the state, of weights and gradients in slots, and of kept graphs: no other buffers.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from yafsdp_fn.planner.activations import held_values
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
    budget = where.memory_bytes if memory is None else memory
    path = _Path(trace, where)
    found: dict[str, float] = {}
    if trace.split is None or trace.stage is not None:
        found = _StageBound(trace, trace.stage or 0, where, path, budget).terms()
    else:
        for stage in range(trace.split.stages):
            for name, seconds in _StageBound(trace, stage, where, path, budget).terms().items():
                found[f"{name} of stage {stage}"] = seconds
    terms = tuple(sorted(found.items(), key=lambda term: -term[1]))
    by, most = terms[0]
    return Bound(most, by, terms)


# ---- One microbatch alone: the longest paths through the calls of its segments.


class _Path:
    """The calls of one microbatch: forwards of segments, 0 to n - 1, and then their backwards of inputs, in reverse.

    forward, inputs, weights: seconds of each segment's calls; seconds: of calls
    edges: `(call, call that waits for it, seconds between)`, in the order of those that wait
    begins, turns: segment -> the earliest begin of its forward, and of its backward
    drains: segment -> the least from the end of its backward of inputs to that of all that waits for it
    """

    def __init__(self, trace: Trace, cluster: Cluster) -> None:
        self.split = trace.split or Split(((0, len(trace.visits)),), (0,), ())
        if trace.stage is not None:  # alone, it waits for nobody
            self.split = self.split._replace(flows=())
        calls = CallGraph.of_step(trace._replace(split=self.split), cluster)
        self.forward = calls.forward
        self.inputs = calls.inputs
        self.weights = calls.weights
        count = len(self.forward)
        self.seconds = [*self.forward, *reversed(self.inputs)]
        self.edges = [(s, self._backward(s), 0.0) for s in range(count)]
        costs = Costs(trace, cluster)
        for number, flow in enumerate(self.split.flows):
            there = back = 0.0
            if self.split.crosses(Message(number)):
                there = costs.seconds(Send(number, 0))
                back = costs.seconds(Send(number, 0, back=True))
            self.edges.append((flow.source, flow.target, there))
            if flow.grad_bytes:
                self.edges.append((self._backward(flow.target), self._backward(flow.source), back))
        self.edges.sort(key=lambda edge: edge[1])
        begins = self._begins([0.0] * count)
        self.begins = begins[:count]
        self.turns = begins[: count - 1 : -1]
        self.drains = [self._drain(segment) for segment in range(count)]

    def again(self, segment: int) -> float:
        """Returns the least from the end of a segment's forward to the begin of its backward, in one microbatch."""
        return self._after(segment)[self._backward(segment)]

    def _drain(self, segment: int) -> float:
        begins = self._after(self._backward(segment))
        drains: list[float] = []
        for s, (inputs, weights) in enumerate(zip(self.inputs, self.weights, strict=True)):
            drains.append(begins[self._backward(s)] + (inputs + weights))
        return max(drains)

    def _after(self, call: int) -> list[float]:
        """Returns the begins of calls that wait for `call`, after its end."""
        begins = [-math.inf] * len(self.seconds)
        begins[call] = -self.seconds[call]
        return self._begins(begins)

    def _begins(self, begins: list[float]) -> list[float]:
        """Returns the begins of all calls, from those of the first ones."""
        begins = begins + [-math.inf] * (len(self.seconds) - len(begins))
        for call, waits, between in self.edges:
            begins[waits] = max(begins[waits], begins[call] + self.seconds[call] + between)
        return begins

    def _backward(self, segment: int) -> int:
        return 2 * len(self.split.homes) - 1 - segment


# ---- One stage.


class _VisitCost(NamedTuple):
    """Seconds of a visit's passes.

    recompute: what a backward takes more that recomputes; inner: bytes that a kept graph holds beside a recomputed one
    """

    id: int
    forward: float
    backward: float
    recompute: float
    inner: int


class _StageBound:
    """The least that a stage's part of a step takes.

    each: the costs of its visits; computes: seconds of all of them; calls: of the collectives in them
    busy: seconds of the other streams, and of links; norm, update: seconds of the optimizer
    room: bytes beside the state
    """

    def __init__(self, trace: Trace, stage: int, cluster: Cluster, path: _Path, budget: int) -> None:
        self.cluster = cluster
        self.path = path
        self.stage = stage
        self.microbatches = trace.microbatches
        self.segments = path.split.of(stage)
        self.trace = trace
        if trace.split is not None and trace.stage is None:
            kinds: list[Kind] = ["forward", "backward"] if trace.trains else ["forward"]
            calls = [Call(kind, segment, 0) for kind in kinds for segment in self.segments]
            self.trace = stage_trace(trace._replace(microbatches=1), stage, calls)
        part = self.trace
        self.costs = Costs(part, cluster)
        self.visits = [part.visits[v] for segment in self.segments for v in path.split.visits(segment)]
        used = {unit for visit in self.visits for unit in visit.units}
        trained = {unit for visit in self.visits for unit in visit.trained} if part.trains else set()
        self.units = [part.units[unit] for unit in sorted(used)]
        self.trained = [unit for unit in self.units if unit.id in trained]
        self.room = budget - sum(state_bytes(part).values()) if part.precision else math.inf
        self.each = [self._of_visit(visit) for visit in self.visits]
        self.forwards = self.microbatches * sum(each.forward for each in self.each)
        seconds = [each.forward for each in self.each] + [each.backward for each in self.each]
        self.computes = self.microbatches * sum(seconds)
        self._optimizer()
        self._work()

    def _of_visit(self, visit: Visit) -> _VisitCost:
        forward = self.costs.seconds(Forward(visit.id, (), True))
        backward = recompute = 0.0
        if self.trace.trains:
            backward = self.costs.seconds(Backward(visit.id, (), ()))
            recompute = self.costs.seconds(Backward(visit.id, (), ()), True) - backward
        inner = visit.cost.inner_bytes if recompute > 0 else 0
        return _VisitCost(visit.id, forward, backward, recompute, inner)

    def _optimizer(self) -> None:
        part = self.trace
        self.first = [u for u in self.visits[0].units if part.units[u].trainable]  # what the first visit waits for
        self.norm = self.update = self.first_update = 0.0
        if part.update_when == "never" or not part.trained:
            return
        ops = [op for op in after_program(part.trained, part.lent) if isinstance(op, Norm | Update)]
        self.norm = sum(self.costs.seconds(op) for op in ops if isinstance(op, Norm))
        self.update = sum(self.costs.seconds(op) for op in ops if isinstance(op, Update))
        # the gather of one may begin while others are updated
        self.first_update = min((self.costs.seconds(Update((unit,))) for unit in self.first), default=0.0)

    def _work(self) -> None:
        """Adds up what streams and links do at least."""
        part = self.trace
        m = self.microbatches
        computes: list[Op] = [Forward(v.id, (), True) for v in self.visits]
        computes += [Backward(v.id, (), ()) for v in self.visits if part.trains]
        fresh = tuple(unit.id for unit in self.units if unit.trainable)  # others may stay from step to step
        plain = tuple(unit.id for unit in self.trained if not unit.sum_bytes)
        collectives: list[Op] = []
        if fresh:
            collectives.append(Gather(fresh, fresh))
        if plain:
            collectives.append(Reduce(plain, plain))
        collectives += [Reduce((unit.id,), (0,)) for unit in self.trained if unit.sum_bytes]
        collectives += [AllReduce((unit.id,)) for unit in self.trained if part.replicas > 1]
        messages: list[Op] = []
        for number, flow in enumerate(self.path.split.flows):
            for back in [False, True] if flow.grad_bytes and part.trains else [False]:
                source, target = self.path.split.ends(number, back)
                if source != target and self.stage in (source, target):
                    kind = Send if source == self.stage else Receive
                    messages.append(kind(number, 0, 0, back))
        self.busy: dict[str, float] = {"gather": 0.0, "reduce": 0.0, **dict.fromkeys(LINKS, 0.0)}
        self.calls = 0.0
        for ops, times in (computes, m), (collectives, 1), (messages, m):
            for op in ops:
                for resource, seconds in self.costs.phases(op):
                    if resource in LINKS:
                        self.busy[resource] += times * seconds
                        self.calls += times * seconds * (op.stream == "compute")
                    if op.stream != "compute":
                        self.busy[op.stream] = self.busy.get(op.stream, 0.0) + times * seconds

    def terms(self) -> dict[str, float]:
        """Returns the seconds of a step, by what they are the least for."""
        found = {"compute": self._compute()}
        for name, seconds in self.busy.items():
            if seconds:
                found[f"communication ({'link' if name in LINKS else 'stream'} {name})"] = seconds
        if self.trace.trains and len(self.path.split.homes) > 1:
            found["fill"] = self._fill()
            found["drain"] = self._drain()
        if self.trace.trains and self.room < math.inf:
            found["memory"] = self._with_room(max(found.values()))
        slowest = 1 + self.cluster.straggling(self.trace.world)
        after = overhead(self.trace, self.cluster)
        return {name: seconds * slowest + after for name, seconds in found.items()}

    # ---- compute

    @property
    def _begin(self) -> float:
        return min(self.path.begins[segment] for segment in self.segments)

    def _compute(self) -> float:
        """Returns the stream of computes, and what is before the first one and after the last."""
        part = self.trace
        # the gather for the first compute; with several stages others compute meanwhile
        alone = self.first and self.path.split.stages == 1
        gather = self.costs.seconds(Gather(tuple(self.first), tuple(self.first))) if alone else 0.0
        after = [self._reduction(unit.id) for unit in self.trained]
        reduction = min(after, default=0.0)
        if part.split is None and part.trains:  # the last backward is known
            last = part.visits[part.order[-1].visit].trained
            reduction = max(map(self._reduction, last), default=0.0)
        beside = max((seconds for name, seconds in self.busy.items() if name not in LINKS), default=0.0)
        beside -= self.calls + self._begin + reduction
        slower = self.cluster.contention / (1 + self.cluster.contention)
        computes = self._begin + self.computes + self.norm
        # the step before may have gathered it beside its last updates: these take longer then, or end before it
        beside_updates = computes + self.update + slower * max(0.0, beside)
        after_update = computes + self.first_update + gather + slower * max(0.0, beside - gather)
        return max(beside_updates, after_update) + reduction

    def _reduction(self, unit: int) -> float:
        replicas = self.costs.seconds(AllReduce((unit,))) if self.trace.replicas > 1 else 0.0
        return self.costs.seconds(Reduce((unit,), (0,))) + replicas

    # ---- fill and drain

    def _fill(self) -> float:
        """Until a stage can turn, it computes forwards alone; those whose graphs are not kept are done once more."""
        m = self.microbatches
        turn = min(self.path.turns[segment] for segment in self.segments)
        graphs = [(m * each.forward, m * each.inner) for each in self.each]
        free = m * sum(max(0.0, each.forward - each.recompute) for each in self.each)
        most = min(self.forwards, _most(graphs, self._room_for_graphs()) + free)
        return turn + self.computes - most + self.norm + self.update

    def _drain(self) -> float:
        """Until a stage has sent its last gradient, it computes all forwards and backwards of inputs; updates that wait
        for the norm come when the stages before it are ready, too."""
        path = self.path
        own = [segment for segment in self.segments if path.inputs[segment] > 0]
        each = self.microbatches * sum(path.forward[segment] + path.inputs[segment] for segment in own)
        last = min((path.drains[segment] for segment in own), default=0.0)
        return self._begin + each + last + self.update

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
        lacks = self._lacks_on_stages() if self.trace.split is not None else self._lacks()
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
            low, high = (middle, high) if lacks(middle) > 0 else (low, middle)
        return low

    def _lacks_on_stages(self) -> Callable[[float], float]:
        """Seconds -> bytes times seconds that lack: a graph is kept until its microbatch can come back."""
        m = self.microbatches
        room = self._room_for_graphs()
        whole = self._compute()
        graphs = []
        for segment in self.segments:
            kept_s = self.path.again(segment)
            visits = self.path.split.visits(segment)
            graphs += [(each.inner * kept_s * m, each.recompute * m) for each in self.each if each.id in visits]
        kept = sum(held for held, _ in graphs) * (1 - 1e-9)

        def lacks(seconds: float) -> float:
            return kept - room * (seconds - self._begin) - _most(graphs, seconds - whole)

        return lacks

    def _lacks(self) -> Callable[[float], float]:
        """Seconds -> bytes that lack between the last forward and the first backward of each microbatch, with gradients
        that are held between microbatches."""
        part = self.trace
        m = self.microbatches
        whole = self._compute()
        always, carries = held_values(part)
        head = part.visits[-1]
        held = always + carries + max(head.cost.peak_bytes, head.cost.bwd_peak_bytes)
        graphs = [(each.inner, each.recompute * m) for each in self.each[:-1]]  # all but the head's
        # what is gathered or reduced more often frees bytes, for seconds of each link
        again: list[tuple[int, int, list[Op]]] = []
        for unit in self._in_slots(self.units):
            again.append((unit.gather_bytes, m, self._gathers(unit)))
        for unit in self._in_slots(self.trained) if m > 1 else ():
            again.append((unit.reduce_bytes, m - 1, [Reduce((unit.id,), (0,))]))
        links: dict[str, list[tuple[int, float]]] = {link: [] for link in LINKS}
        for nbytes, times, ways in again:
            for link, items in links.items():
                items.append((nbytes, times * min(self._on(link, op) for op in ways)))
        of_graphs = sum(nbytes for nbytes, _ in graphs)
        in_slots = sum(nbytes for nbytes, *_ in again)
        total = (held + of_graphs + in_slots) * (1 - 1e-9)

        def lacks(seconds: float) -> float:
            offloaded = min(carries, seconds * self.cluster.host_bandwidth / (2 * m))
            moved = min(_most(items, seconds - self.busy[link]) for link, items in links.items())
            recomputed = _most(graphs, seconds - whole)
            return total - self.room - recomputed - moved - offloaded

        return lacks

    def _gathers(self, unit: UnitSpec) -> list[Op]:
        """Returns the ways to gather a unit once more: from all ranks, and from the node where there is one."""
        gather = Gather((unit.id,), (0,))
        nodes = self.trace.local_ranks_of(unit) < self.trace.ranks_of(unit)
        return [gather, gather._replace(source="node")] if nodes else [gather]

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
