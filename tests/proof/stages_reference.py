"""What the ops of all stages of a pipeline do, as terms: each stage's as for one stage, and how stages meet.

    the k-th send from one stage to another     is what its k-th receive from there leaves in its carry slot
    the k-th sum over a group of stages         leaves on all of them what all of them have found
    the k-th norm                               is that of all stages

A receive ends when its send has begun, and what meets ends when all of it has begun: more is not known of an order in
which anything goes wrong. Whether there is any order at all is asked where stages wait for each other as much as
engines ever do (`blocking`): a send also for its receive, hosts for devices, and messages for what was issued before
them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from tests.proof.reference import Account, Added, Constant, Found, Mode, Moment, ProgramAccount, Stops, Term
from yafsdp_fn.program.ops import kind_of
from yafsdp_fn.schedules import AllReduce, Backward, Fetch, Forward, Norm, Offload, Op, Program, Receive, Send, Split


class Flows:
    """What a compute takes and gives, read off the split."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.segment = {v: k for k, (first, end) in enumerate(split.segments) for v in range(first, end)}

    def of(self, op: Forward | Backward) -> tuple[list[int], list[int]]:
        """Flows that it takes, and those that it gives: values in a forward, gradients in a backward."""
        kind = kind_of(op)
        segment = self.segment[op.visit]
        ends = self.split.segments[segment]
        here, there = [[k for k, flow in enumerate(self.split.flows) if flow[end] == segment] for end in (1, 0)]
        first = op.visit == ends[0]
        last = op.visit == ends[1] - 1
        if kind == "forward":
            return here if first else [], there if last else []
        if kind == "weights":
            return [], []
        back = [[k for k in flows if self.split.flows[k].grad_bytes] for flows in (there, here)]
        return back[0] if last else [], back[1] if first else []


class PipelineAccount(Account):
    """blocking: further terms as those of `met`"""

    def __init__(self, pipeline: Program, mode: Mode) -> None:
        super().__init__(pipeline.trace)
        split = pipeline.trace.split
        assert split is not None
        self.split = split
        self.blocking: list[tuple[Moment, Moment]] = []
        self.stages = [StageAccount(program, mode, self) for program in pipeline.by_stage]
        for one, other in itertools.permutations(range(split.stages), 2):
            self._messages(self.stages[one].sent.get(other, []), self.stages[other].received.get(one, []))
        for holders in sorted({holders for _, holders in split.shared}):
            for together in _meeting([self.stages[k].summed.get(holders, []) for k in holders]):
                self._sum(together)
        self._measured(pipeline)
        for number_of in range(split.stages):
            self._host([at for at, event in enumerate(self.events) if event.stage == number_of])

    def _messages(self, sent: list[tuple[int, Send, Found]], received: list[tuple[int, Receive]]) -> None:
        for (send, first, content), (receive, then) in _meeting([sent, received]):
            if self._bytes(first) != self._bytes(then):
                raise Stops("a message of another size")
            self.left.append((receive, ("carry slot", 0, then.carry_slot), content))
            self.met.append((("begins", send), ("ends", receive)))
            self.blocking.append((("begins", receive), ("ends", send)))

    def _bytes(self, op: Send | Receive) -> int:
        flow = self.split.flows[op.flow]
        return flow.grad_bytes if op.back else flow.nbytes

    def _sum(self, together: tuple[tuple[int, int, Found], ...]) -> None:
        (_, unit, first), *rest = together
        total: Term = first
        if any(other != unit for _, other, _ in rest):
            raise Stops("a sum of two units")
        for _, _, term in rest:
            total = Added(total, term)
        self._meet([at for at, *_ in together])
        self.left += [(at, ("grad shard", unit), total) for at, *_ in together]

    def _meet(self, events: list[int]) -> None:
        self.met += [(("begins", one), ("ends", other)) for one, other in itertools.permutations(events, 2)]

    def _measured(self, pipeline: Program) -> None:
        """Updates follow a norm of all stages."""
        train = [program for program in pipeline.by_stage if program.trace.trained]
        if len({program.has_updates for program in train}) > 1:
            raise Stops("it waits for what never comes")
        for norms in _meeting([stage.normed for stage in self.stages]):
            self._meet(list(norms))

    def _host(self, events: list[int]) -> None:
        """The host of a stage may wait for the device before all but messages, which begin in the order of the host."""
        issued: list[int] = []  # the last event that is no message, and the messages after it
        for at in events:
            message = isinstance(self.events[at].op, Send | Receive)
            for other in issued:
                begun = message and isinstance(self.events[other].op, Send | Receive)
                self.blocking.append((("begins" if begun else "ends", other), ("begins", at)))
            issued = [*issued, at] if message else [at]


class StageAccount(ProgramAccount):
    """sent, received: by the other stage, in order, with what a send finds; summed: by the stages that sum, with the
    unit and what this one has found of it; normed: norms"""

    def __init__(self, program: Program, mode: Mode, joint: PipelineAccount) -> None:
        self.split = joint.split
        self.flows = Flows(joint.split)
        self.trains = joint.trace.trains
        self.sent: dict[int, list[tuple[int, Send, Found]]] = {}
        self.received: dict[int, list[tuple[int, Receive]]] = {}
        self.summed: dict[tuple[int, ...], list[tuple[int, int, Found]]] = {}
        self.normed: list[int] = []
        self.passed = Counter[tuple[int, int, int, bool]]()  # visits, of a step, segment and microbatch, and a way
        super().__init__(program, mode, joint)

    def _steps(self) -> None:
        own = {visit for segment in self.split.of(self.stage) for visit in range(*self.split.segments[segment])}
        calls = Counter(itertools.product(own, range(self.trace.microbatches)))
        for kinds in (("forward",), ("backward", "inputs"))[: 1 + self.trains]:
            if calls != Counter(c[1:3] for c in self.trace.order if c.kind in kinds):
                raise Stops("each microbatch goes through each segment once, and back")
        self.there = {("carry slot", 0, slot) for op in self.program.ops for _, slot in self.trace.messages_of(op)}
        super()._steps()

    @property
    def stage(self) -> int:
        assert self.trace.stage is not None
        return self.trace.stage

    def issue(self, op: Op) -> None:
        if not isinstance(op, Send | Receive | Norm) and not (isinstance(op, AllReduce) and op.over == "stages"):
            if isinstance(op, Offload | Fetch) or (isinstance(op, Forward | Backward) and op.carry_slot is not None):
                raise Stops("carries stay where they are")
            super().issue(op)
            return
        event = len(self.events)
        if isinstance(op, Norm):
            super().issue(op)
            self.normed.append(event)
            return
        self._event(op, *op.uses())
        if isinstance(op, AllReduce):
            (unit,) = op.units
            self._trainable(unit)
            if not (holders := self.split.holders(unit)):
                raise Stops("no other stage has it")
            self.summed.setdefault(holders, []).append((event, unit, self.find(event, ("grad shard", unit))))
            return
        other = self.split.ends(op.flow, op.back)[isinstance(op, Send)]
        if other == self.stage:
            raise Stops("a message to itself")
        if isinstance(op, Send):
            message = event, op, self.find(event, ("carry slot", 0, op.carry_slot))
            self.sent.setdefault(other, []).append(message)
        else:
            self.received.setdefault(other, []).append((event, op))

    def _crosses(self, event: int, op: Forward | Backward) -> None:
        takes, gives = self.flows.of(op)
        back = isinstance(op, Backward)
        if not (back and op.half == "weights"):
            self._follows(op, back)
        for flow, slot in zip(takes, op.takes, strict=True):
            held = self.find(event, ("carry slot", 0, slot))
            self.must(event, "it takes something else than what is for it", held, self._parcel(op, flow, back))
        for flow, slot in zip(gives, op.gives, strict=True):
            self.leave(event, ("carry slot", 0, slot), self._parcel(op, flow, back))

    def _follows(self, op: Forward | Backward, back: bool) -> None:
        """Each visit of a segment takes what the one before it gives, from the last to the first in a backward."""
        segment = self.flows.segment[op.visit]
        first, end = self.split.segments[segment]
        passed = self.passed[self.step, segment, op.microbatch, back]
        if op.visit != (end - 1 - passed if back else first + passed):
            raise Stops("visits of a segment follow each other")
        self.passed[self.step, segment, op.microbatch, back] += 1

    def _parcel(self, op: Forward | Backward, flow: int, back: bool) -> Constant:
        of = (self.step * self.trace.microbatches + op.microbatch) * len(self.split.flows) + flow
        return Constant(2 * of + back)


def _meeting(lists: list[list[Any]]) -> list[tuple[Any, ...]]:
    """What meets: the first of each list, the second of each, ..."""
    if len({len(of) for of in lists}) > 1:
        raise Stops("it waits for what never comes")
    return list(zip(*lists, strict=True))
