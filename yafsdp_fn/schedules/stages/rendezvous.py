"""Whether the programs of all stages end, where a send waits for its receive.

On each stage the host goes through its program: it waits for every compute, and when the backward is over for every
gradient; all else it hands to the streams. An op begins when the one before it on its stream is over, and what its
buffers wait for (scoreboard.py); a send and its receive begin together, and so do the norms of all stages, and the sums
of a gradient over stages. On a GPU kernels of several communicators begin in the order in which they were issued
(docs/gpu.md): so communication begins only when all that was issued before it has begun. Two receives that wait, one
behind the other, hold up whatever follows them.

No engine waits for more. Where sends are buffered, or the host goes on while a stream computes, each op waits for a
part of the same ones, so that a pipeline that ends here ends there, too. Nothing waits for a later step: one that ends
is enough.
"""

from typing import NamedTuple

from yafsdp_fn.schedules.further_ops import AllReduce, Receive, Send
from yafsdp_fn.schedules.ops import Backward, Forward, Norm, Op, Update
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.scoreboard import Scoreboard
from yafsdp_fn.schedules.stages.pipeline import Pipeline


class Stuck(NamedTuple):
    """A stage that does not end. at: the first op that has not, which waits for stage `other`; there: its first one."""

    stage: int
    at: int
    other: int
    there: int


def run(pipeline: Pipeline) -> list[Stuck]:
    """The stages that do not end; none, where all do."""
    runs = [_Stage(program) for program in pipeline.stages]
    normed = [stage for stage in runs if any(isinstance(op, Norm) for op in stage.ops)]
    split = pipeline.trace.split
    assert split is not None
    moved = True
    while moved:
        moved = False
        for stage in runs:
            for stream in stage.streams:
                while (at := stage.ready(stream)) is not None:
                    op = stage.ops[at]
                    together = [(stage, stream)]
                    if isinstance(op, Send):
                        together.append((runs[split.ends(op.flow, op.back)[1]], "receive"))
                    elif isinstance(op, Receive):
                        break  # when its send is met
                    elif isinstance(op, Norm):
                        together = [(other, stream) for other in normed]
                    elif isinstance(op, AllReduce) and op.over == "stages":
                        together = [(runs[other], stream) for other in split.holders(op.units[0])]
                    if not all(other.ready(way, op) is not None for other, way in together):
                        break
                    for other, way in together:
                        other.end(way)
                    moved = True
    left = [(number, stage) for number, stage in enumerate(runs) if not all(stage.ended)]
    out = []
    for number, waiting in left:
        at = waiting.ended.index(False)
        op = waiting.ops[at]
        if isinstance(op, Send | Receive):
            peer = split.ends(op.flow, op.back)[isinstance(op, Send)]
        else:
            peer = next(k for k, _ in left if k != number)
        there = runs[peer].ended
        out.append(Stuck(number, at, peer, there.index(False) if not all(there) else len(there)))
    return out


class _Stage:
    """How far a stage has come. ended: by op; streams: the ops that are left on each, the next one last"""

    def __init__(self, program: Program) -> None:
        self.ops = program.ops
        self.ended = [False] * len(self.ops)
        board: Scoreboard[int] = Scoreboard()
        self.waits = [board.use(at, op.stream, *op.uses()) for at, op in enumerate(self.ops)]
        self.streams: dict[str, list[int]] = {}
        self._end_of_backward()
        for at in reversed(range(len(self.ops))):
            self.streams.setdefault(self.ops[at].stream, []).append(at)

    def _end_of_backward(self) -> None:
        """It comes before the first norm or update after all computes, and waits for every gradient shard."""
        last = max((at for at, op in enumerate(self.ops) if isinstance(op, Forward | Backward)), default=-1)
        first = next((at for at, op in enumerate(self.ops) if at > last and isinstance(op, Norm | Update)), None)
        if first is not None:
            self.waits[first] += [at for at in range(first) if self.ops[at].stream in ("reduce", "replicate")]

    def ready(self, stream: str, meets: Op | None = None) -> int | None:
        """The next op of a stream, if it may begin. meets: what it must belong to, of several stages"""
        left, computes = self.streams.get(stream), self.streams.get("compute")
        if not left or (computes and left[-1] > computes[-1]):
            return None
        at = left[-1]
        op = self.ops[at]
        if not all(self._begun_before(at, other) for other in self.streams if {other, stream}.isdisjoint({"compute"})):
            return None
        there = op == meets or meets is None or _belong(op, meets)
        return at if there and all(self.ended[wait] for wait in self.waits[at]) else None

    def _begun_before(self, at: int, stream: str) -> bool:
        """Whether all ops of `stream` that were issued before op `at` have at least begun."""
        left = self.streams[stream]
        if not left or left[-1] >= at:
            return True
        return all(self.ended[wait] for wait in self.waits[left[-1]]) and (len(left) == 1 or left[-2] >= at)

    def end(self, stream: str) -> None:
        self.ended[self.streams[stream].pop()] = True


def _belong(op: Op, other: Op) -> bool:
    """Whether `op` is what another stage does at the same time: a receive at a send, a norm at a norm."""
    if isinstance(op, Receive) and isinstance(other, Send):
        return op.parcel == other.parcel
    return isinstance(op, Norm) and isinstance(other, Norm)
