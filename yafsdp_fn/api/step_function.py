"""A user's loss with its programs and its steps: shared by train_step, value_and_grad, grad and eval_step.

    ran = StepFunction(loss, ...).run(arguments, memory, shards, seed)

    its program          known, given, or from a recorded call; across stages from a trace (pipelines/crossing.py)
    session.run_calls    out = fun(own parameters, the microbatch's part of the batch), and its backward

A session turns visits to sharded parameters into a schedule. Plain tensors have a loop of their own, `run_plain`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, NamedTuple
from weakref import WeakSet

import optree
import torch
from torch import Tensor

from yafsdp_fn import optim
from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.params.tree import must_be_function
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.split import Call
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.runtime import consistency
from yafsdp_fn.runtime.arguments import (
    INDEPENDENT,
    Arguments,
    Results,
    Seed,
    StepLoss,
    add_to,
    returned,
)
from yafsdp_fn.runtime.batch import batch_axes
from yafsdp_fn.runtime.block_call import VisitRunner
from yafsdp_fn.runtime.execute import Session
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.programs import Programs, Verified
from yafsdp_fn.runtime.protocols import OBSERVE, ActivationBuffers, Replays, StepObserver
from yafsdp_fn.runtime.recording import CallRecording, LossWatch
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.runtime.state import StepUpdates
from yafsdp_fn.schedules.builders import AnySchedule, zero3
from yafsdp_fn.util.randomness import BACKWARD, LOSS, VisitCounter, counting, device_of_leaves, seeded

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


FIRST = Call("forward", 0, 0)
"""The call that is recorded."""


class StepFunction:
    """A function to differentiate or evaluate, with its schedule and its programs.

    track: it is differentiated; graphs: visits are replayed as CUDA graphs
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        has_aux: bool,
        schedule: AnySchedule,
        microbatches: int | None,
        track: bool = True,
        tx: optim.GradientTransformation | None = None,
        graphs: bool = False,
    ) -> None:
        must_be_function(fun, "train_step, eval_step, grad and planner.trace")
        if hasattr(fun, "_torchdynamo_orig_callable"):
            raise TypeError(NOT_COMPILED)
        if microbatches is not None and (type(microbatches) is not int or microbatches < 1):
            raise ValueError(f"microbatches={microbatches}: expected an integer >= 1")
        # what it computes, and how
        self.fun, self.has_aux, self.microbatches, self.track = fun, has_aux, microbatches, track
        self.schedule, self._tx, self._graphs = schedule, tx, graphs
        self.programs = Programs(schedule, tx, trains=track)
        self._replays: Replays | None = None
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
            if self._graphs:
                raise ValueError("graphs=True captures visits to a ShardedState; this state is plain")
            return FunctionRun(context.run(run_plain, arguments, seed, self.has_aux, self.track))
        # what this mesh cannot do
        comms = memory.comms
        if self._graphs and comms.axes:
            raise NotImplementedError(
                f"graphs=True on a mesh with axes inside blocks ({', '.join(comms.axes)}): NCCL wants a collective "
                "captured on all of its ranks or on none, and each rank finds out alone which visits can be; leave "
                "graphs out"
            )
        # around the first run, what ranks must have alike is compared
        first = comms not in self._agreed  # run of this function on this mesh
        if first:
            if self._tx is not None and not comms.alone:
                comms.must_agree("the optimizer", consistency.optimizer(self._tx))
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
            # the program
            verified = self._known_program(arguments, memory, shards, seed)
            if self._graphs and not verified.recomputes:
                raise ValueError(
                    "graphs=True, but this schedule keeps the autograd graph of every visit, and such visits are not "
                    "captured; recompute layers (remat=ya.schedules.remat.all), or leave graphs out"
                )
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
                    replays=self._replays_on(comms.device),
                    activations=_activation_buffers,
                )
            # the step
            learns = not verified.runs and bool(verified.collectives)  # of a recorded call, which has no backward
            with _run_by(session, verified.collectives, arguments, f"after step {seed.step}"):
                if session.watch:
                    arguments.check_rest()
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
            arguments.check_rest()
        # a call without backward, on the numbers of the first microbatch
        recording = CallRecording(memory, step, differentiates=self.track, trains=trains)
        collectives: dict[Any, Any] = {}
        with _run_by(recording, collectives, arguments, f"before step {step}"):
            recording.begin(FIRST)
            with LossWatch():
                mean, aux = recording.call_loss(loss, 0, copied=True)
            recording.end()
            recording.compare(mean.total, _outline(aux), arguments.plain)
            trace = self.programs.complete(recording.trace(arguments.microbatches), memory)
            verified = self.programs.remember(self.programs.build(trace), memory)
        recording.close()
        verified.collectives = collectives
        return verified

    def _replays_on(self, device: torch.device) -> Replays | None:
        if self._graphs and self._replays is None:
            from yafsdp_fn.extras.cuda_graphs import CudaCapture, Graphs

            self._replays = Graphs(CudaCapture(device))
        return self._replays


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


# ---- On plain tensors.


def run_plain(arguments: Arguments, seed: Seed, has_aux: bool, track: bool) -> Results:
    """Runs on plain tensors alone: the oracle."""
    results = Results([], [], [None] * len(arguments.plain))
    device = device_of_leaves((arguments.nodes, arguments.rest))
    for microbatch in range(arguments.microbatches):
        counter = VisitCounter(seed.seed, seed.step, microbatch, seed.rank)
        # a tree without a state has no step, by which every call would draw other numbers: torch's generators go on
        drawn, back = [counter.seed_beside(what) if seed.of_state else None for what in (LOSS, BACKWARD)]
        with torch.set_grad_enabled(track), counting(counter), seeded(drawn, device):
            mean, aux = returned(arguments.call(microbatch, None, track), has_aux)
        results.append(mean, aux)
        if track:
            if not mean.total.requires_grad:
                raise ValueError(INDEPENDENT)
            with seeded(back, device):
                add_to(results.grads, iter(torch.autograd.grad(mean.total, arguments.plain, allow_unused=True)))
    return results


# ---- Results of a call.


def _outline(aux: Any) -> str:
    """Returns structure and shapes of aux, which must be equal on all ranks: reductions pack them together."""
    return str(optree.tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__, aux))
