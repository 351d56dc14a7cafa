"""A session of one stage: the calls of its program, one way through a segment after the other.

    session.begin(call); loss(...); session.end(...)        forward: its visits run, the others stand by
    session.begin(call); backward;  session.end(...)        backward of what that has made

What arrives for a call is taken from carry slots when it begins; what leaves it is put there when it ends, and sent.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.dist.watchdog import RankPosition
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.program.ops import Backward, ComputeOp, Forward, kind_of
from yafsdp_fn.program.split import Call, StageMessage
from yafsdp_fn.program.trace import Visit
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.block_call import BlockCall
from yafsdp_fn.runtime.building import Verified
from yafsdp_fn.runtime.errors import SAME_ORDER, OrderChanged
from yafsdp_fn.runtime.memory import Memory
from yafsdp_fn.runtime.program_session import ProgramSession
from yafsdp_fn.runtime.session import Step
from yafsdp_fn.runtime.stage_io import Crossing, MessageBuffers
from yafsdp_fn.runtime.visit import visit
from yafsdp_fn.util.torch_private import asks_for_values


class StageSession(ProgramSession):
    """The session of one stage's program. now: the call under way; arrived: by flow, what its segment takes"""

    def __init__(self, verified: Verified, memory: Memory, step: Step) -> None:
        crossing: Crossing = verified.crossing
        step_hooks = step.step_hooks._replace(carries=partial(MessageBuffers, crossing))
        super().__init__(verified, memory, step._replace(step_hooks=step_hooks))
        self.crossing, self.split, self._stage = crossing, crossing.split, memory.comms.stage
        self._place = "", ""
        self.now: Call | None = None
        self._last: ComputeOp | None = None  # of the computes
        self.arrived: dict[int, list[Tensor]] = {}
        self.unlike: str | None = None  # the first visit of a call with another block than when it was traced
        self._left: dict[int, dict[int, tuple[Tensor, int]]] = {}  # flow -> piece -> tensor, and its version
        mail = self.slots.carries
        if isinstance(mail, MessageBuffers):
            mail.crossing = crossing
            mail.reserve(self.program)

    def sight(self) -> RankPosition:
        if self._place[0] is not self.place:  # as long as it is the same, it must be the same object
            self._place = self.place, f"{self.place}, stage {self._stage}"
        return RankPosition(self._place[1], self._cursor, self.verified.whole, self._stage)

    # ---- calls

    def calls(self) -> Iterator[Call]:
        """The calls of the stage, in the order of its program."""
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
            self.unlike = None
        self.microbatch = call.microbatch
        op = self.ops[self._cursor]
        assert isinstance(op, Forward | Backward), "issued ahead up to a compute"
        parcels = self.split.takes(kind_of(op), op.visit, op.microbatch)
        self.place = f"what arrives for {self._named(call)}"
        with self.memory.using([("carry slot", self.slots.number, slot) for slot in op.takes]):
            pairs = list(zip(parcels, op.takes, strict=True))
            values = self._mail.get(pairs) if pairs else []
        return {parcel.flow: tensors for parcel, tensors in zip(parcels, values, strict=True)}

    def end(self, call: Call, leaving: dict[int, Sequence[Tensor | None]]) -> None:
        """Puts what leaves after `call`, by flow, into its carry slots, and goes on."""
        self.raise_failure()
        op = self._last
        assert op is not None, "a segment has visits"
        parcels = self.split.gives(kind_of(op), op.visit, op.microbatch)
        self.place = f"what leaves after {self._named(call)}"
        with self.memory.using([], [("carry slot", self.slots.number, slot) for slot in op.gives]):
            if parcels:
                pairs = zip(parcels, op.gives, strict=True)
                self._mail.put(pairs, [leaving[parcel.flow] for parcel in parcels])
        self._forget()
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

    def abort(self, error: BaseException) -> None:
        self._forget()
        super().abort(error)

    def _forget(self) -> None:
        """The call is over. What left it hangs on a graph whose visits hold this session: a cycle that no collector
        sees, if it stayed here."""
        self.now, self.arrived, self._left = None, {}, {}

    # ---- visits

    def all_visited(self) -> None:
        """The function has returned."""
        found, expected = len(self.visits), self.crossing.trace.visits
        if found < len(expected):
            raise OrderChanged(
                f"the loss has ended after {found} visits; the trace has {expected[found].name} next. {SAME_ORDER}"
            )

    def leaving(self) -> dict[int, list[Tensor]]:
        """The values, by flow, that the loss has given to visits that are elsewhere."""
        out: dict[int, list[Tensor]] = {}
        for flow, pieces in self._left.items():
            for tensor, version in pieces.values():
                if tensor._version != version:
                    raise RuntimeError(
                        f"{self.place}: a tensor of shape {tuple(tensor.shape)} that goes to segment "
                        f"{self.split.flows[flow].target} was written in place after a visit there took it; work on a "
                        "copy"
                    )
            out[flow] = [pieces[number][0] for number in range(len(self.crossing.pieces(StageMessage(flow))))]
        return out

    def raised(self, error: Exception) -> Exception:
        """The error that a loss that raised `error` on stand-ins should have raised."""
        if asks_for_values(error):
            assert self.now is not None
            return errors.value_on_other_stage(f"the loss, called for {self._named(self.now)},", error)
        if self.unlike is not None and self._failure is None and not isinstance(error, OrderChanged):
            return errors.visit_differs_from_trace(
                self.unlike, f"the loss raised {type(error).__name__} ({error}), and the visit has another block"
            )
        return error

    def elsewhere(self, call: BlockCall) -> bool:
        """True if another stage runs the visit that now begins. Where this one does, its arguments have arrived."""
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
        traced, here = self.crossing.placeholders[number], first <= number < end
        if call.given != traced.given:
            raise errors.visit_differs_from_trace(
                f"{call.name} (visit {number})", "it is given tensors of other shapes or dtypes"
            )
        if call.source != traced.source and self.unlike is None:
            self.unlike = f"{call.name} (visit {number})"
        if not here:
            self.new_visit(call.name, call.units)
        for place, tensor in enumerate(call.tensors):
            flow, piece = self.crossing.place.get((number, place), (-1, 0))
            if here and flow >= 0:
                call.tensors[place] = self.arrived[flow][piece]
            elif flow in self._left:
                self._left[flow].setdefault(piece, (tensor, tensor._version))
        return not here

    def placeholders(self, call: BlockCall) -> Sequence[Tensor]:
        """Stand-ins for the outputs of a visit that is elsewhere."""
        stand_in = self.crossing.placeholders[len(self.visits) - 1]
        call.structure = stand_in.structure
        return stand_in.tensors

    def gave(self, call: BlockCall, out: Tree) -> Tree:
        """Checks what a visit of this stage has given: the others have what stands for it."""
        number = len(self.visits) - 1
        traced = self.crossing.placeholders[number]
        shapes = [(x.shape, x.dtype) for x in optree.tree_leaves(out) if isinstance(x, Tensor)]
        if call.structure[0] != traced.structure[0] or shapes != [(x.shape, x.dtype) for x in traced.tensors]:
            raise errors.visit_differs_from_trace(
                f"{call.name} (visit {number})", "it returns other shapes, or another tree"
            )
        return out

    @property
    def _mail(self) -> Any:
        return self.slots.carries

    def _named(self, call: Call) -> str:
        return f"{call.kind} of segment {call.segment} (microbatch {call.microbatch}, step {self.number})"


class Visits:
    """A stand-in for `session` that the loss sees: it runs the visits of the call under way, and the others
    stand by."""

    def __init__(self, session: StageSession) -> None:
        self._session, self.leaves = session, session.leaves

    @property
    def closed(self) -> bool:
        return self._session.closed

    def visit(self, call: BlockCall) -> Tree:
        session = self._session
        if session.elsewhere(call):
            return call.outputs(session.placeholders(call))
        return session.gave(call, visit(call, session))
