"""A session of one stage: the calls of its program, one way through a segment after the other.

    session.begin(call); loss(...); session.end(...)        forward: its visits run, the others stand by
    session.begin(call); backward;  session.end(...)        backward of what that has made

What arrives for a call is taken from carry slots when it begins; what leaves it is put there when it ends, and sent.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yafsdp_fn.comm.lookout import Sight
from yafsdp_fn.engine.block_call import BlockCall
from yafsdp_fn.engine.building import Verified
from yafsdp_fn.engine.memory import Memory
from yafsdp_fn.engine.program_session import ProgramSession
from yafsdp_fn.engine.refusals import SAME_ORDER, OrderChanged
from yafsdp_fn.engine.session import Step
from yafsdp_fn.engine.visit import visit
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.schedules.ops import Backward, ComputeOp, Forward, Op, kind_of
from yafsdp_fn.schedules.split import Call, Parcel
from yafsdp_fn.schedules.stages.pipeline import Pipeline
from yafsdp_fn.schedules.trace import Visit
from yafsdp_fn.staged.crossing import Crossing
from yafsdp_fn.staged.mail import Mail


class Shown(NamedTuple):
    """A stage's program, as the others are told of it: as what all ranks run, which is the pipeline."""

    pipeline: Pipeline
    stage: int

    @property
    def ops(self) -> Sequence[Op]:
        return self.pipeline.stages[self.stage].ops

    def fingerprint(self) -> str:
        return self.pipeline.fingerprint()

    def words(self) -> list[str]:
        return self.pipeline.words()


class StageSession(ProgramSession):
    """now: the call under way; arrived: by flow, what its segment takes"""

    def __init__(self, verified: Verified, memory: Memory, step: Step, crossing: Crossing, shown: Shown) -> None:
        plugs = step.plugs._replace(carries=partial(Mail, crossing))
        super().__init__(verified, memory, step._replace(plugs=plugs))
        self.crossing, self.split, self._shown = crossing, crossing.split, shown
        self._place = "", ""
        self.now: Call | None = None
        self._last: ComputeOp | None = None  # of the computes
        self.arrived: dict[int, list[Tensor]] = {}
        self._left: dict[int, dict[int, tuple[Tensor, int]]] = {}  # flow -> piece -> tensor, and its version
        mail = self.slots.carries
        if isinstance(mail, Mail):
            mail.crossing = crossing
            mail.reserve(self.program)

    def sight(self) -> Sight:
        if self._place[0] is not self.place:  # as long as it is the same, it must be the same object
            self._place = self.place, f"{self.place}, stage {self._shown.stage}"
        return Sight(self._place[1], self._cursor, self._shown)

    # ---- calls

    def calls(self) -> Iterator[Call]:
        """Those of the stage, in the order of its program."""
        ends = {"forward": 0, "backward": -1, "inputs": -1, "weights": -1}
        for kind, number, microbatch, _ in self.program.trace.order:
            segment = self.split.segment(number)
            if range(*self.split.segments[segment])[ends[kind]] == number:
                yield Call(kind, segment, microbatch)

    def begin(self, call: Call) -> dict[int, list[Tensor]]:
        """Takes what arrives for `call` from its carry slots, by flow."""
        self.now = call
        if call.kind == "forward":
            self.begin_microbatch(call.microbatch)
            self._left = {flow: {} for flow in self.split.leaving(call.segment)}
        self.microbatch = call.microbatch
        op = self.program.ops[self._cursor]
        assert isinstance(op, Forward | Backward), "issued ahead up to a compute"
        parcels = self.split.takes(kind_of(op), op.visit, op.microbatch)
        self.place = f"what arrives for {self._named(call)}"
        with self.memory.using([("carry slot", self.slots.number, slot) for slot in op.takes]):
            pairs = list(zip(parcels, op.takes, strict=True))
            values = self._mail.get(pairs) if pairs else []
        return {parcel.flow: tensors for parcel, tensors in zip(parcels, values, strict=True)}

    def end(self, call: Call, leaving: dict[int, Sequence[Tensor | None]]) -> None:
        """Puts what leaves after `call`, by flow, into its carry slots, and goes on."""
        self.must_be_sound()
        op = self._last
        assert op is not None, "a segment has visits"
        parcels = self.split.gives(kind_of(op), op.visit, op.microbatch)
        self.place = f"what leaves after {self._named(call)}"
        with self.memory.using([], [("carry slot", self.slots.number, slot) for slot in op.gives]):
            if parcels:
                pairs = zip(parcels, op.gives, strict=True)
                self._mail.put(pairs, [leaving[parcel.flow] for parcel in parcels])
        self.now = None
        self._issue_ahead()

    def weights(self, call: Call) -> None:
        """The later halves of the backwards of a segment."""
        self.now, self.microbatch = call, call.microbatch
        for number in reversed(range(*self.split.segments[call.segment])):
            visit = self.program.trace.visits[number]
            with self.compute("weights", visit, call.microbatch) as op:
                assert isinstance(op, Backward)
                later = self.later.pop((number, call.microbatch))
                with torch.no_grad():
                    later.write(self.interpreter.places(op, visit.trained))

    def follow(self, op: ComputeOp, visit: Visit) -> None:
        self._cursor, self._last = self._cursor + 1, op
        if not op.gives:  # else what is to be sent is at hand when the call ends
            self._issue_ahead()

    # ---- visits

    def all_visited(self) -> None:
        """The function has returned."""
        found, expected = len(self.visits), self.crossing.trace.visits
        if found < len(expected):
            raise OrderChanged(
                f"the loss has ended after {found} visits; the trace has {expected[found].name} next. {SAME_ORDER}"
            )

    def leaving(self) -> dict[int, list[Tensor]]:
        """By flow, what the loss has given to visits that are elsewhere."""
        out: dict[int, list[Tensor]] = {}
        for flow, pieces in self._left.items():
            for tensor, version in pieces.values():
                if tensor._version != version:
                    raise RuntimeError(
                        f"{self.place}: a tensor of shape {tuple(tensor.shape)} that goes to segment "
                        f"{self.split.flows[flow].target} was written in place after a visit there took it; work on a "
                        "copy"
                    )
            out[flow] = [pieces[number][0] for number in range(len(self.crossing.pieces(Parcel(flow))))]
        return out

    def elsewhere(self, call: BlockCall) -> bool:
        """Whether another stage runs the visit that now begins. Where this one does, its arguments have arrived."""
        number, now = len(self.visits), self.now
        assert now is not None
        first, end = self.split.segments[now.segment]
        visits = self.crossing.trace.visits
        if number >= len(visits) or (visits[number].name, visits[number].units) != (call.name, call.units):
            expected = f"{visits[number].name} here" if number < len(visits) else "no further visit"
            raise OrderChanged(
                f"{call.name} (visit {number}, microbatch {now.microbatch}, step {self.number}): the trace has "
                f"{expected}. {SAME_ORDER}"
            )
        here = first <= number < end
        if not here:
            self.new_visit(call.name, call.units)
        for place, tensor in enumerate(call.tensors):
            flow, piece = self.crossing.place.get((number, place), (-1, 0))
            if here and flow >= 0:
                call.tensors[place] = self.arrived[flow][piece]
            elif flow in self._left:
                self._left[flow].setdefault(piece, (tensor, tensor._version))
        return not here

    def stand_ins(self, call: BlockCall) -> Sequence[Tensor]:
        """What stands for the outputs of a visit that is elsewhere."""
        call.structure, tensors = self.crossing.stand_ins[len(self.visits) - 1]
        return tensors

    @property
    def _mail(self) -> Any:
        return self.slots.carries

    def _named(self, call: Call) -> str:
        return f"{call.kind} of segment {call.segment} (microbatch {call.microbatch}, step {self.number})"


class Visits:
    """What the loss sees in place of `session`: it runs the visits of the call under way, and the others stand by."""

    def __init__(self, session: StageSession) -> None:
        self._session, self.leaves = session, session.leaves

    @property
    def closed(self) -> bool:
        return self._session.closed

    def visit(self, call: BlockCall) -> Tree:
        session = self._session
        return call.outputs(session.stand_ins(call)) if session.elsewhere(call) else visit(call, session)
