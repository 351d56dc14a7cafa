"""The cut of a step into pipeline stages: segments of visits, the stage that runs each, and what crosses between them.

    visits     e 0 1 2 | 3 4 | 5 6 7 h         segments 0, 1, 2: consecutive visits
    homes          0      1       0            the stage of each
    flows       segment 0 -> 1, 1 -> 2         what a segment takes of what another has made, in each microbatch

A stage calls the whole loss for each of its segments and microbatches; visits of other segments are elsewhere.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from yafsdp_fn.util.mesh_axes import round_up
from yafsdp_fn.util.schema import Limits

Kind = Literal["forward", "backward", "inputs", "weights"]
"""The kind of a compute. A backward is one, or two: the gradients of its arguments, "inputs", and then those of its
weights."""

Natural = Annotated[int, Limits(0)]
Positive = Annotated[int, Limits(1)]
"""Numbers that count what there may be none of, and what there is at least one of."""

LINE = 16
"""The alignment of the tensors in a message, in bytes."""


def in_carry_slot(nbytes: int) -> int:
    """Returns the bytes that a value takes in a carry slot: aligned as CUDA's allocator would, since kernels may look
    at that."""
    return round_up(nbytes, 512)


# ---- What crosses between segments.


class Argument(NamedTuple):
    """A tensor argument of a visit that other visits have made, directly or by operations of the loss between visits.

    place: among the visit's tensors; number: equal for the same tensor, in a microbatch; made: by which visits
    shape, dtype: of the tensor, the dtype as torch names it
    """

    place: int
    number: int
    made: tuple[int, ...]
    nbytes: int
    grad_bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = "float32"


class Flow(NamedTuple):
    """The values of segment `source` that `target` takes. nbytes: in a microbatch; grad_bytes: of the gradient that
    comes back, 0 where there is none.

    >>> flow = two_stages.split.flows[0]
    >>> flow.source, flow.target, flow.nbytes                  # x [4, 8, 8] in fp32
    (0, 1, 1024)
    """

    source: int
    target: int
    nbytes: Natural
    grad_bytes: Natural


class Call(NamedTuple):
    """One way through a segment in a microbatch: its visits' forwards, or their backwards in reverse.

    >>> ya.schedules.Call("forward", segment=0, microbatch=0)
    Call(kind='forward', segment=0, microbatch=0)
    """

    kind: Kind
    segment: int
    microbatch: int


CallRows = Sequence[Sequence[Call]]
"""The calls of each stage, in their order."""


class Message(NamedTuple):
    """The values of a flow in a microbatch, or, on the way back, their gradients: what one carry slot holds."""

    flow: int
    microbatch: int = 0
    back: bool = False


# ---- The cut of a step.


class Split(NamedTuple):
    """The segments of a step that is cut, and the flows between them.

    segments: `(first visit, last + 1)`; homes: segment -> stage; flows: by source, then target

    shared: `(unit, stages)` of the units that several stages hold, since visits of each use them: a tied embedding
    unused: `(unit, stage)` of the units that no visit uses, if another stage than the first holds them

    >>> two_stages.split.segments, two_stages.split.homes
    (((0, 3), (3, 6)), (0, 1))
    """

    segments: tuple[tuple[int, int], ...]
    homes: tuple[int, ...]
    flows: tuple[Flow, ...]
    shared: tuple[tuple[int, tuple[int, ...]], ...] = ()
    unused: tuple[tuple[int, int], ...] = ()

    @property
    def stages(self) -> int:
        return max(self.homes) + 1

    # ---- stages and segments

    def holders(self, unit: int) -> tuple[int, ...]:
        """Returns the stages that share `unit`, ascending; none where one has it alone."""
        return dict(self.shared).get(unit, ())

    def segment(self, visit: int) -> int:
        """Returns the segment that `visit` is in."""
        return next(number for number, (first, end) in enumerate(self.segments) if first <= visit < end)

    def visits(self, segment: int) -> range:
        """Returns the numbers of the visits of a segment."""
        return range(*self.segments[segment])

    def of(self, stage: int) -> tuple[int, ...]:
        """Returns the segments of `stage`."""
        return tuple(number for number, home in enumerate(self.homes) if home == stage)

    def visits_on(self, stage: int) -> set[int]:
        """Returns the numbers of the visits of `stage`."""
        return {visit for segment in self.of(stage) for visit in self.visits(segment)}

    # ---- messages

    def taken_by(self, call: Call) -> tuple[Message, ...]:
        """Returns the messages that a call takes: those that arrive; in a backward the gradients of those that have
        left."""
        return self._messages(call, leaving=call.kind != "forward")

    def given_by(self, call: Call) -> tuple[Message, ...]:
        """Returns the messages that a call gives: those that leave; in a backward the gradients of those that have
        arrived."""
        return self._messages(call, leaving=call.kind == "forward")

    def _messages(self, call: Call, leaving: bool) -> tuple[Message, ...]:
        """Returns the messages of the flows from a call's segment, or to it."""
        found: list[Message] = []
        back = call.kind != "forward"
        for number, flow in enumerate(self.flows if call.kind != "weights" else ()):  # which nobody waits for
            if call.segment == (flow.source if leaving else flow.target) and (flow.grad_bytes or not back):
                found.append(Message(number, call.microbatch, back))
        return tuple(found)

    def takes(self, kind: Kind, visit: int, microbatch: int) -> tuple[Message, ...]:
        """Returns the messages that a compute takes from carry slots: those of its call, if it is the first of it."""
        segment = self.segment(visit)
        first = self.visits(segment)[0 if kind == "forward" else -1]
        return self.taken_by(Call(kind, segment, microbatch)) if visit == first else ()

    def gives(self, kind: Kind, visit: int, microbatch: int) -> tuple[Message, ...]:
        """Returns the messages that a compute puts into carry slots: those of its call, if it is the last of it."""
        segment = self.segment(visit)
        last = self.visits(segment)[-1 if kind == "forward" else 0]
        return self.given_by(Call(kind, segment, microbatch)) if visit == last else ()

    def ends(self, flow: int, back: bool) -> tuple[int, int]:
        """Returns the stages that a message of `flow` comes from and goes to."""
        source = self.homes[self.flows[flow].source]
        target = self.homes[self.flows[flow].target]
        return (target, source) if back else (source, target)

    def bytes_of(self, message: Message) -> int:
        """Returns the bytes of a message."""
        flow = self.flows[message.flow]
        return flow.grad_bytes if message.back else flow.nbytes

    def crosses(self, message: Message) -> bool:
        """Tells whether a message goes to another stage."""
        source, target = self.ends(message.flow, message.back)
        return source != target


# ---- The cut of a model, before there is a step.


class Assignment(NamedTuple):
    """The stages that hold each unit: what a state on a mesh with stages is made with.

    units: unit -> the segments whose visits use it, none if no visit does; homes: segment -> stage

    >>> ya.schedules.assign(trace, stages=2)
    Assignment(units=((0,), (1,), (0,), (0,), (1,), (1,)), homes=(0, 1))
    """

    units: tuple[tuple[int, ...], ...]
    homes: tuple[int, ...]

    @property
    def stages(self) -> int:
        return max(self.homes) + 1

    def held(self, stage: int) -> frozenset[int]:
        """Returns the units that `stage` holds; the first stage also those that no visit uses."""
        return frozenset(unit for unit, stages in enumerate(self.holders) if stage in stages)

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Unit -> the stages that hold it, ascending: at least one."""
        return tuple(tuple(sorted({self.homes[segment] for segment in segments})) or (0,) for segments in self.units)
