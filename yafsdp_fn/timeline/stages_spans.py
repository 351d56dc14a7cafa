"""The stages of a pipeline on one time axis: bubbles, and what crosses between stages: the data."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from yafsdp_fn.schedules.ops import Backward, Forward
from yafsdp_fn.schedules.trace import Trace
from yafsdp_fn.timeline.perfetto import Place
from yafsdp_fn.timeline.spans import Span
from yafsdp_fn.timeline.text import Gap, gaps
from yafsdp_fn.timeline.timeline import Timeline


class Crossing(NamedTuple):
    """What each rank of stage `source` sends to its like on stage `target` in a step. link: "node" or "network" """

    source: int
    target: int
    link: str
    messages: int
    nbytes: int


class StageSpans(NamedTuple):
    """One step of a pipeline.

    trace: of the whole step; stages: a timeline for each, as long as the step; seconds, title: as a `Timeline` has them
    across: of spans that were let begin by the end of one on another stage, which
    """

    trace: Trace
    stages: tuple[Timeline, ...]
    seconds: float
    title: str
    across: Mapping[Place, Place]
    crossings: tuple[Crossing, ...]

    @property
    def overhead(self) -> float:
        """The part of `seconds`, at its end, that no op explains: of the stage that has most."""
        return max(stage.overhead for stage in self.stages)

    @property
    def bubble(self) -> float:
        """The part of the step in which compute is idle, a mean over stages; without the overhead."""
        seconds = self.seconds - self.overhead
        busy = sum(stage.compute_s for stage in self.stages) / len(self.stages)
        return 1 - busy / seconds if seconds else 0.0

    def bubbles(self, stage: int | None = None) -> Counter[str]:
        """Seconds that compute was idle, by reason, on a stage or on all together.

        fill: before a stage's first microbatch has come; drain: after its last compute; receive: waits for another
        stage in between; gather, reduce, ...: for such an op of its own, which a slot may have kept back; overhead
        """
        found: Counter[str] = Counter()
        for number in range(len(self.stages)) if stage is None else (stage,):
            for gap in self.gaps(number):
                found[gap.why] += gap.end - gap.start  # type: ignore[assignment]
        return found

    def gaps(self, stage: int) -> list[Gap]:
        """When compute was idle on `stage`, and why, as `bubbles` has it."""
        own = self.stages[stage]
        computes = [span for span in own.on("compute") if isinstance(span.op, Forward | Backward)]
        first = computes[0].start if computes else self.seconds
        last, end = computes[-1].end if computes else 0.0, self.seconds - self.overhead
        found = []
        for gap in gaps(own):
            if gap.end <= first and gap.why == "receive":
                gap = gap._replace(why="fill")
            elif gap.start >= last and gap.cause is None:
                gap = gap._replace(why="drain", end=min(gap.end, max(end, gap.start)))
            found += [gap] if gap.end > gap.start else []
        if self.overhead:
            found.append(Gap(end, self.seconds, "overhead"))
        return found

    def critical_path(self) -> tuple[tuple[int, Span], ...]:
        """`(stage, span)` of the chain that made the step as long as it was."""
        at = {(number, span.number): span for number, stage in enumerate(self.stages) for span in stage.spans}
        place: Place | None = max(at, key=lambda each: at[each].end, default=None)
        path = []
        while place is not None:
            path.append((place[0], at[place]))
            own = at[place].cause
            place = self.across.get(place) if own is None else (place[0], own)
        return tuple(reversed(path))
