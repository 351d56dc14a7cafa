"""A user's loss with its programs and its calls in a step: shared by train_step, value_and_grad, grad and eval_step.

    ran = StepFunction(loss, ...).run(arguments, memory, shards, seed)

    for call in calls:                 # of a plain step: forward and backward of each microbatch in turn
        forward                        out = fun(own parameters, the microbatch's part of the batch)
        backward                       from the total and the visits' token: every visit gets one, in reverse order
        weights                        what a backward in two halves has left for later

A session turns visits to sharded parameters into a schedule. Plain tensors have a loop of their own, `run_plain`.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from typing import Any, NamedTuple
from weakref import WeakSet

import optree
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from yafsdp_fn import optim
from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.communication.micro_shards import micro_shard_seed
from yafsdp_fn.params.tree import Tree, must_be_function
from yafsdp_fn.program.split import Call
from yafsdp_fn.runtime import consistency, errors
from yafsdp_fn.runtime.arguments import INDEPENDENT, Arguments, Results, Seed
from yafsdp_fn.runtime.batch import batch_axes
from yafsdp_fn.runtime.execute import Session, VisitRunner
from yafsdp_fn.runtime.graph_walks import depends, foreign, leaves_behind, of_other_calls
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.pipeline import StageResults, StageSession, must_be_same, smooth
from yafsdp_fn.runtime.programs import Programs, Verified
from yafsdp_fn.runtime.protocols import OBSERVE, ActivationBuffers, Replays, StepObserver
from yafsdp_fn.runtime.pure import content
from yafsdp_fn.runtime.recording import CallRecording
from yafsdp_fn.runtime.reductions import Mean, as_mean, of_tensors
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.runtime.stage_io import MessageBuffers, shapes
from yafsdp_fn.runtime.state import StepUpdates
from yafsdp_fn.schedules import Program, Trace, one_f_one_b, zero3
from yafsdp_fn.schedules.builders import AnySchedule
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
    return (zero3() if trace.split is None else one_f_one_b())(trace)


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
        if comms.stages > 1 and arguments.plain:
            raise ValueError("a gradient of plain tensors on a mesh with stages: put them into the state")
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
            activations = MessageBuffers if comms.stages > 1 else _activation_buffers
            kind = StageSession if comms.stages > 1 else Session
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
                    activations=activations,
                )
            # the step
            learns = not verified.runs and bool(verified.collectives)  # of a recorded call, which has no backward
            with _run_by(session, verified.collectives, arguments, f"after step {seed.step}"):
                if session.watch:
                    arguments.check_rest()
                session.start()
                results = _run_calls(session, arguments, self.has_aux, seed)
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
        comms = memory.comms
        batch = None if comms.stages == 1 else shapes(arguments.rest)
        known, key = self.programs.known, (memory.key, arguments.microbatches, batch)
        if key in known:
            found = known[key] = known.pop(key)  # the last to run
            return found
        if comms.stages == 1:
            given = self.programs.given(memory, arguments.microbatches)
            if given is not None:
                return self.programs.remember(given, memory)
            return self._recorded(arguments, memory, shards is not None, seed)
        from yafsdp_fn.tracing.stages import crossing_of

        must_be_same(arguments.rest, comms)
        crossing = crossing_of(arguments, memory, self.programs)
        cut = self.programs.build(crossing.trace, comms.stage, crossing)
        return self.programs.remember(cut, memory, batch)

    def _recorded(self, arguments: Arguments, memory: StateMemory, trains: bool, seed: Seed) -> Verified:
        """Learns the program from a call of the function on the first microbatch, which draws the random numbers of
        the step."""
        comms = memory.comms
        if self.track:
            arguments.check_rest()
        # a call without backward, on the numbers of the first microbatch
        recording = CallRecording(memory, seed.step, differentiates=self.track, trains=trains)
        collectives: dict[Any, Any] = {}
        with _run_by(recording, collectives, arguments, f"before step {seed.step}"):
            recording.begin(FIRST)
            counter = counter_of(comms, seed, microbatch=0)
            around = seeded(counter.seed_beside(LOSS), comms.device)
            with torch.set_grad_enabled(self.track), counting(counter), around, recording.watch():
                mean, aux = returned(arguments.call(0, recording, self.track, copied=True), self.has_aux)
            recording.end(FIRST, {})
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


def _activation_buffers(memory: StateMemory, number: object) -> ActivationBuffers:
    from yafsdp_fn.extras.offload import HostActivationBuffers

    return HostActivationBuffers(memory, number)


# ---- The calls of a step.


def counter_of(comms: Communicators, seed: Seed, microbatch: int) -> VisitCounter:
    """Returns the counter that seeds a microbatch, on all stages alike."""
    if comms.deterministic:
        return VisitCounter(seed.seed, seed.step, *micro_shard_seed(comms, microbatch), batch_rank=0, ranks=comms)
    rank, batch_rank = comms.seed_rank, comms.batch_rank
    return VisitCounter(seed.seed, seed.step, microbatch, rank, batch_rank=batch_rank, ranks=comms)


class Passed(NamedTuple):
    """A forward, until its backward.

    arrived: by flow, the tensors that its segment took and that have a gradient; roots: by flow, the tensors that left,
    whose gradients come back; own: further roots, with their gradients: the last token, and the loss if it is made here
    """

    arrived: dict[int, list[Tensor]]
    roots: dict[int, list[GradientEdge]]
    own: list[tuple[GradientEdge, Tensor]]


def _run_calls(session: Session, arguments: Arguments, has_aux: bool, seed: Seed) -> Results:
    """Runs the loss of one step in its session: forwards, backwards and later halves, in the program's order."""
    comms, track, crossing = session.memory.comms, session.differentiates, session.verified.crossing
    of_stage = None if crossing is None else StageResults(crossing, arguments.microbatches, comms.device)
    results = Results([], [], [None] * len(arguments.plain))
    # of leaves that the loss reads beside its visits, over all microbatches
    leaves = [leaf for leaf in session.leaves if leaf.requires_grad]
    leaf_grads: list[Tensor | None] = [None] * len(leaves)
    passed: dict[tuple[int, int], Passed] = {}

    def forward(call: Call) -> None:
        arrived = session.begin(call)
        counter = counter_of(comms, seed, call.microbatch)
        watched = session.memory.masters() if session.watch else []
        before = content(watched, False)
        with torch.set_grad_enabled(track), counting(counter), seeded(counter.seed_beside(LOSS), comms.device):
            # the loss
            try:
                # across stages, of other microbatches and segments at once, what it writes to its batch stays its own
                given = arguments.call(call.microbatch, session, track, copied=crossing is not None)
                mean, aux = returned(given, has_aux)
            except Exception as error:
                if session.explained(error) is error:  # under no name: a cycle through its traceback, and this frame
                    raise
                raise session.explained(error) from error
        if content(watched, False) != before:
            raise errors.leaf_written()
        # what it has made, and what leaves for other segments
        left = session.leaving()
        has_loss = True
        if of_stage is None:
            _append(results, mean, aux)
        else:
            has_loss = of_stage.store(call, mean, aux)
        session.end(call, {flow: [x.detach() for x in tensors] for flow, tensors in left.items()})
        if not track:
            return
        # for its backward: edges, not tensors, since what has left needs no memory here, nor has the loss
        own = []
        if has_loss:
            if not mean.total.requires_grad:
                raise ValueError(INDEPENDENT)
            if session.watch:
                _check_graph_of(mean.total, session)
            own.append((get_gradient_edge(mean.total), torch.ones_like(mean.total)))
        # the token is a root, too: visits that the loss does not use get their backward, in its place
        own.append((get_gradient_edge(session.token), torch.zeros_like(session.token)))
        roots: dict[int, list[GradientEdge]] = {}
        for flow, tensors in left.items():
            roots[flow] = [get_gradient_edge(x) for x in smooth(crossing, flow, tensors)]
        taken = {flow: smooth(crossing, flow, tensors) for flow, tensors in arrived.items()}
        passed[call.segment, call.microbatch] = Passed(taken, roots, own)

    def backward(call: Call) -> None:
        # roots: the loss and the token, and what has left, whose gradients have come back
        before = passed.pop((call.segment, call.microbatch))
        back = session.begin(call)
        roots = [root for root, _ in before.own]
        seeds = [seed for _, seed in before.own]
        for flow, edges in before.roots.items():
            roots += edges
            seeds += back.get(flow, [])
        # ends: what has arrived, and leaves that the loss read beside its visits
        arrived = [x for tensors in before.arrived.values() for x in tensors]
        of_leaves = [*leaves, *arguments.plain] if crossing is None else []
        drawn = counter_of(comms, seed, call.microbatch).seed_beside(BACKWARD)
        collectives = _foreign_collectives_refused() if session.watch else nullcontext()
        with seeded(drawn, comms.device), collectives:
            grads = torch.autograd.grad(roots, [session.leaf_token, *arrived, *of_leaves], seeds, allow_unused=True)
        rest = iter(grads[1:])
        leaving: dict[int, list[Tensor | None]] = {}
        for flow, tensors in before.arrived.items():
            leaving[flow] = list(itertools.islice(rest, len(tensors)))
        _add(leaf_grads, rest)
        _add(results.grads, rest)
        session.end(call, leaving)

    for call in session.calls():
        if call.kind == "forward":
            forward(call)
        elif call.kind == "weights":
            assert isinstance(session, StageSession)
            session.weights(call)
        else:
            backward(call)
    found = iter(leaf_grads)
    session.end_backward([next(found) if leaf.requires_grad else None for leaf in session.leaves])
    if of_stage is None:
        return results
    return Results(of_stage.losses, of_stage.aux, [])


def _check_graph_of(total: Tensor, session: Session) -> None:
    """Raises if a loss depends on what gets no gradient: parameters of modules, and visits of earlier calls."""
    if of_modules := foreign(leaves_behind([total])):
        raise errors.parameter_of_a_module(of_modules[0])
    if others := of_other_calls(total, session):
        raise errors.of_an_earlier_call(others[0])


@contextmanager
def _foreign_collectives_refused() -> Iterator[None]:
    """Raises where a gradient passes a collective of torch.distributed, unchanged, of which torch only warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "c10d::.*an autograd kernel was not registered")
        try:
            yield
        except UserWarning as warned:
            raise errors.not_by_torch(str(warned).partition(": an")[0]) from warned


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
        _append(results, mean, aux)
        if track:
            if not mean.total.requires_grad:
                raise ValueError(INDEPENDENT)
            with seeded(back, device):
                _add(results.grads, iter(torch.autograd.grad(mean.total, arguments.plain, allow_unused=True)))
    return results


# ---- Results of a call.


def _outline(aux: Any) -> str:
    """Returns structure and shapes of aux, which must be equal on all ranks: reductions pack them together."""
    return str(optree.tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__, aux))


def _append(results: Results, mean: Mean, aux: Tree) -> None:
    results.losses.append(Mean(mean.total.detach(), mean.weight))
    results.aux.append(optree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux))


def pair_of(out: Any) -> tuple[Any, Tree]:
    """Returns loss and aux, as they came. Raises TypeError for anything else."""
    if not isinstance(out, tuple) or len(out) != 2 or isinstance(out, Mean):
        raise TypeError(f"has_aux=True: the function must return (loss, aux), got {type(out).__name__}")
    return out


def returned(out: Any, has_aux: bool) -> tuple[Mean, Tree]:
    """Returns loss and aux from the function's result. Raises TypeError for anything else."""
    out, aux = pair_of(out) if has_aux else (out, None)
    mean = as_mean(out, depends=depends)
    return mean, of_tensors(aux, mean.total.device)


def _add(sums: list[Tensor | None], found: Iterator[Tensor | None]) -> None:
    """Adds to each of `sums` the next of the gradients `found`, if there is one."""
    for index, (before, grad) in enumerate(zip(sums, found, strict=False)):
        if grad is not None:
            sums[index] = grad if before is None else before + grad
