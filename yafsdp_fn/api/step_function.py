"""A user's loss with its programs and its steps: shared by train_step, value_and_grad, grad and eval_step.

    ran = StepFunction(loss, ...).run(arguments, memory, shards, seed)

    its program          known, given, or from a recorded call; across stages from a trace (pipelines/crossing.py)
    session.run_calls    out = fun(own parameters, the microbatch's part of the batch), and its backward

A session turns visits to sharded parameters into a schedule. Plain tensors have a loop of their own (plain_state.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from yafsdp_fn import optim
from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.params.tree import must_be_function
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.runtime import consistency
from yafsdp_fn.runtime.arguments import Arguments, Results, Seed, StepLoss
from yafsdp_fn.runtime.batch import batch_axes, check_arguments
from yafsdp_fn.runtime.block_call import VisitRunner
from yafsdp_fn.runtime.errors import advice
from yafsdp_fn.runtime.execute import Session
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.plain_state import run_plain
from yafsdp_fn.runtime.programs import Programs, Verified
from yafsdp_fn.runtime.protocols import OBSERVE, ActivationBuffers, StepObserver
from yafsdp_fn.runtime.recording import CallRecording
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.runtime.state import StepUpdates
from yafsdp_fn.schedules.builders import AnySchedule, zero3

NOT_FROM_PLAIN = (
    "a gradient of plain tensors with a state on a deterministic mesh: each rank would have the part of its own "
    "micro-shards, which is another at another number of ranks. Put them into the state"
)


NOT_COMPILED = (
    "torch.compile of a loss or of a step: what they communicate cannot be traced. Compile blocks, once, outside of "
    "the loss: block = torch.compile(block)"
)


# ---- The function of a step, with its schedule, programs and state.


def default_schedule(trace: Trace) -> Program:
    """The default schedule: `zero3`, and `one_f_one_b` across stages."""
    if trace.split is None:
        return zero3()(trace)
    from yafsdp_fn.pipelines.orders import one_f_one_b

    return one_f_one_b()(trace)


class FunctionRun(NamedTuple):
    """A run of a function: its results; on a sharded state also its observer, if there is one, and its program."""

    results: Results
    observer: StepObserver | None = None
    program: Program | None = None


class StepFunction:
    """A function to differentiate or evaluate, with its schedule and its programs.

    track: it is differentiated; tx: the optimizer of its step, which ranks must have alike, as all of `settings`
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        has_aux: bool,
        schedule: AnySchedule,
        microbatches: int | None,
        track: bool = True,
        tx: optim.GradientTransformation | None = None,
        settings: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        must_be_function(fun, "train_step, eval_step, grad and planner.trace")
        if hasattr(fun, "_torchdynamo_orig_callable"):
            raise TypeError(NOT_COMPILED)
        if microbatches is not None and (type(microbatches) is not int or microbatches < 1):
            raise ValueError(f"microbatches={microbatches}: expected an integer >= 1")
        # what it computes, and how
        self.fun, self.has_aux, self.microbatches, self.track = fun, has_aux, microbatches, track
        self.schedule, self._tx = schedule, tx
        self._settings = {name: str(value) for name, value in settings.items()}
        self.programs = Programs(schedule, tx, trains=track)
        self._agreed: WeakSet[Communicators] = WeakSet()

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any], argnums: tuple[int, ...] = (0,)) -> Arguments:
        return Arguments(self.fun, args, kwargs, argnums, self.microbatches)

    def run(
        self,
        arguments: Arguments,
        memory: StateMemory | None,
        shards: Shards | None,
        seed: Seed,
        updates: StepUpdates | None = None,
    ) -> FunctionRun:
        """Runs the function, and the optimizer with it."""
        context = copy_context()  # ends the counter of visits, wherever an interrupt comes
        if memory is None:
            return FunctionRun(context.run(run_plain, arguments, seed, self.has_aux, self.track))
        # around the first run, what ranks must have alike is compared
        comms = memory.comms
        first = comms not in self._agreed  # run of this function on this mesh
        if first:
            if self._tx is not None and not comms.alone:
                comms.must_agree("the optimizer", consistency.optimizer(self._tx) | self._settings)
            self._agreed.add(comms)
            comms.named.clear()
        ran = context.run(self._run_sharded, arguments, memory, shards, seed, updates)
        if first and not comms.alone and (comms.axes or self._tx is not None):
            assert ran.program is not None
            trace = ran.program.trace
            visited = {unit for visit in trace.visits for unit in visit.units}
            split = {name for unit in visited for name in trace.units[unit].over}
            consistency.warn_of_ranks(comms, split, arguments.rest, batch_axes(memory.mesh))
        return ran

    # ---- in a session

    def _run_sharded(
        self,
        arguments: Arguments,
        memory: StateMemory,
        shards: Shards | None,
        seed: Seed,
        updates: StepUpdates | None,
    ) -> FunctionRun:
        """Runs in a session on `memory`; gradients of sharded leaves go to `shards`, None if none is differentiated.

        Before the first run its program is built, from a recorded call of the function; across stages, from a trace on
        fake tensors. An exception on all ranks leaves the state usable.
        """
        # gradients that would be of a part alone
        comms, track = memory.comms, self.track
        if comms.deterministic and track and arguments.plain:
            raise ValueError(NOT_FROM_PLAIN)
        with torch.inference_mode(False):  # slots made under it could never be trained with
            comms.check()
            comms.must_be_of_this_process()
            # the program
            verified = self._known_program(arguments, memory, shards, seed)
            # its session
            observe = OBSERVE.get()
            observer = None if observe is None else observe(comms.device.type == "cuda")
            kind = Session if comms.stages == 1 else _stage_session()
            with comms.guarded(f"the slots of step {seed.step}"):
                session = kind(
                    memory,
                    verified,
                    seed.step,
                    shards,
                    differentiates=track,
                    observer=observer,
                    updates=updates,
                    activations=_activation_buffers,
                )
            # the step
            learns = not verified.runs and bool(verified.collectives)  # of a recorded call, which has no backward
            with _run_by(session, verified.collectives, arguments, f"after step {seed.step}"):
                if session.watch:
                    check_arguments(arguments.rest)
                session.start()
                results = session.run_calls(StepLoss(arguments, self.has_aux, seed))
                if updates is not None:
                    updates.begin(results.losses, results.aux)
                session.finish()
            if learns:
                verified.list(session.collectives)
            session.close()
            verified.runs += 1
        if observer is not None:
            observer.finish(verified.program.trace, f"rank {comms.world_rank} of {comms.world}")
        return FunctionRun(results, observer, verified.all_stages)

    # ---- the first run: a call is recorded, unless a program is known

    def _known_program(self, arguments: Arguments, memory: StateMemory, shards: Shards | None, seed: Seed) -> Verified:
        """Returns the program to run, and learns it before the first run."""
        programs = self.programs
        if memory.comms.stages > 1:
            from yafsdp_fn.pipelines.crossing import program_of

            return program_of(arguments, memory, programs)
        known = programs.known.get((memory.key, arguments.microbatches, None))
        if known is not None:
            return known
        given = programs.given(memory, arguments.microbatches)
        if given is not None:
            return programs.remember(given, memory)
        return self._recorded(StepLoss(arguments, self.has_aux, seed), memory, shards is not None)

    def _recorded(self, loss: StepLoss, memory: StateMemory, trains: bool) -> Verified:
        """Learns the program from a call of the function on the first microbatch, which draws the random numbers of
        the step."""
        arguments, step = loss.arguments, loss.seed.step
        if self.track:
            check_arguments(arguments.rest)
        # a call without backward, on the numbers of the first microbatch
        recording = CallRecording(memory, step, differentiates=self.track, trains=trains)
        collectives: dict[Any, Any] = {}
        with _run_by(recording, collectives, arguments, f"before step {step}"):
            trace = self.programs.complete(recording.record(loss), memory)
            verified = self.programs.remember(self.programs.build(trace), memory)
        recording.close()
        verified.collectives = collectives
        return verified


# ---- Around a session or a recording: the watchdog, collectives inside blocks, errors.


@contextmanager
def _run_by(runner: VisitRunner, known: dict[Any, Any], arguments: Arguments, after: str) -> Iterator[None]:
    """Runs a session or a recording, which is aborted where it raises. known: collectives of blocks; after: where this
    rank is then, for the watchdog"""
    comms = runner.memory.comms
    around = comms.called
    if comms.axes:
        from yafsdp_fn.runtime.block_collectives import BlockCollectives

        runner.collectives = BlockCollectives(runner, known, arguments.rest)
        comms.called = runner.collectives.called
    try:
        with comms.seen(runner.rank_position, after):
            yield
    except BaseException as error:
        error.add_note(f"rank {comms.world_rank} of {comms.world}, {runner.position}")
        if (what_to_do := advice(error, runner.memory.precision.gather_dtype)) is not None:
            error.add_note(what_to_do)
        runner.abort(error)
        raise
    finally:
        comms.called = around


def _stage_session() -> type[Session]:
    from yafsdp_fn.pipelines.session import StageSession

    return StageSession


def _activation_buffers(memory: StateMemory, number: object) -> ActivationBuffers:
    from yafsdp_fn.extras.offload import HostActivationBuffers

    return HostActivationBuffers(memory, number)
