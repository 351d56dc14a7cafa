"""The pipelines of one step function: traced on fake tensors, cut as the state is, built, verified, agreed on, kept."""

from collections.abc import Callable, Hashable
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from yafsdp_fn.comm.communicators import Communicators
from yafsdp_fn.engine.building import Verified, difference
from yafsdp_fn.engine.memory import Memory
from yafsdp_fn.engine.placement import Placement
from yafsdp_fn.engine.steps import INDEPENDENT, Arguments
from yafsdp_fn.schedules.ops import Norm
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.stages.cut import cut
from yafsdp_fn.schedules.stages.pipeline import Pipeline
from yafsdp_fn.schedules.stages.proof import verify
from yafsdp_fn.schedules.trace import Trace
from yafsdp_fn.staged.crossing import Crossing, shapes
from yafsdp_fn.staged.same_batch import must_be_same
from yafsdp_fn.staged.session import Shown
from yafsdp_fn.tracing.tracer import Traced, traced


class Known(Verified):
    """A pipeline that has passed `verify`, and what this stage needs to run its part."""

    def __init__(self, pipeline: Pipeline, crossing: Crossing, stage: int) -> None:
        program = pipeline.stages[stage]
        super().__init__(program, program.trace.lent)
        self.pipeline, self.crossing = pipeline, crossing
        # a stage that trains nothing updates nothing, and takes part all the same in what others sum up for updates
        normed = any(isinstance(op, Norm) for program in pipeline.stages for op in program.ops)
        self.unmeasured = pipeline.has_updates and not normed
        self.shown = Shown(pipeline, stage)


class Pipelines:
    """schedule: from a trace that is cut to a pipeline; complete: adds to a trace what only the step knows"""

    def __init__(self, schedule: Any, complete: Callable[[Trace, Placement[Any]], Trace], trains: bool) -> None:
        self._schedule, self._complete, self._trains = schedule, complete, trains
        self._kept: dict[Hashable, Known] = {}
        self._last: dict[Hashable, Known] = {}

    def get(self, arguments: Arguments, memory: Memory) -> Known:
        """The pipeline for a state and a batch of these shapes; all ranks ask alike."""
        key = memory.key, arguments.parts, shapes(arguments.rest)
        if key not in self._kept:
            must_be_same(arguments.rest, memory.comms)
            crossing = self.crossing(arguments, memory)
            pipeline = self.build(crossing.trace)
            _agree(pipeline, memory.comms)
            self._kept[key] = Known(pipeline, crossing, memory.comms.stage)
        self._last[key[:2]] = self._kept[key]
        return self._kept[key]

    def crossing(self, arguments: Arguments, memory: Memory) -> Crossing:
        found = traced(arguments, memory, FakeTensorMode(allow_non_fake_inputs=True), every=not self._trains)
        if self._trains:
            _check(found)
        trace = self._complete(found.trace, memory.abstract())
        if not self._trains:
            trace = _forward_only(trace)
        assert memory.assignment is not None, "a mesh with stages"
        trace = cut(trace._replace(mesh=memory.mesh_axes), memory.assignment)
        return Crossing(trace, found)

    def peek(self, memory: Placement[Any], microbatches: int) -> Known | None:
        """What this stage ran last with so many microbatches."""
        return self._last.get((memory.key, microbatches))

    def build(self, trace: Trace) -> Pipeline:
        """The verified pipeline for a trace that is cut."""
        given = isinstance(self._schedule, Pipeline | Program)
        pipeline: Any = self._schedule if given else self._schedule(trace)
        if not isinstance(pipeline, Pipeline):
            raise TypeError(
                f"the mesh has {trace.stages} stages, and the schedule returned {type(pipeline).__name__}; expected a "
                "Pipeline: give the schedule to one, ya.schedules.one_f_one_b(ya.schedules.zero2()), say"
            )
        theirs = pipeline.trace
        careful = (theirs.update_when, trace.update_when) == ("after norm", "any time")
        if careful or not pipeline.has_updates:
            trace = trace._replace(update_when=theirs.update_when)
        if (differs := difference(theirs, trace)) is not None:
            raise ValueError(
                f"the pipeline does not fit: {differs}; lower it from this step, with a batch of this shape"
            )
        verify(pipeline)
        return pipeline


def _check(found: Traced) -> None:
    """Raises, on all ranks alike, for a loss that no cut into stages can run."""
    if found.untracked:
        raise RuntimeError(
            f"{found.untracked[0]}: a visit under no_grad inside of a step across stages, whose program has none. Take "
            "what it gives from an evaluation before the step (ya.eval_step), or detach its outputs instead"
        )
    if found.reads_leaves:
        raise RuntimeError(
            "the loss reads sharded leaves beside its visits (a regulariser, say): each stage has only its own, and "
            "the sum would lack the others'. Visit them (ya.apply, ya.scan)"
        )
    if found.rewritten:
        raise RuntimeError(
            f"{found.rewritten[0]}: an argument is written in place after the visit took it; another stage would take "
            "what is there in the end. Work on a copy"
        )
    if not found.total.requires_grad:
        raise ValueError(INDEPENDENT)


def _forward_only(trace: Trace) -> Trace:
    """The trace of an evaluation: nothing is trained, and no gradient comes back."""
    visits = []
    for visit in trace.visits:
        arguments = tuple(argument._replace(grad_bytes=0) for argument in visit.cost.arguments)
        visits.append(visit._replace(trained=(), cost=visit.cost._replace(arguments=arguments)))
    order = tuple(compute for compute in trace.order if compute.kind == "forward")
    return trace._replace(visits=tuple(visits), order=order)


def _agree(pipeline: Pipeline, comms: Communicators) -> None:
    """Raises RanksDisagree, naming the first op that differs, unless all ranks have the same pipeline."""
    if comms.same_on_all(pipeline.fingerprint(), "comparing pipelines"):
        return
    words = {f"line {at}": line for at, line in enumerate(pipeline.words())}
    comms.must_agree("the pipeline", words | {"fingerprint": pipeline.fingerprint()})
