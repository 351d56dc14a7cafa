"""train_step: a training step as a function of the state and the batch.

state, metrics = train_step(loss_fn, tx)(state, batch)
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from yafsdp_fn import optim
from yafsdp_fn.api.step_function import NOT_COMPILED, StepFunction, default_schedule
from yafsdp_fn.communication.micro_shards import microbatches_on
from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.program.measured import OptimizerMemory
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.runtime.arguments import Seed
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.plain_state import PlainState
from yafsdp_fn.runtime.reductions import Mean, combined, divided
from yafsdp_fn.runtime.state import Measured, ShardedState, StepUpdates, must_be_sharded
from yafsdp_fn.schedules.builders import AnySchedule
from yafsdp_fn.util.foreign_names import with_hints
from yafsdp_fn.util.squares import squared_norm, sum_of_squares
from yafsdp_fn.util.torch_private import eval_frame_callback, transforms_active

Metrics = dict[str, Any]
State = TypeVar("State", ShardedState, PlainState)

NOT_TRANSFORMED = (
    "a training step inside torch.func (vmap, grad, ...): it writes to its state, through which nothing is "
    "differentiated or mapped. Transform the loss (docs/transforms.md), and take steps one after the other, in a loop"
)


# ---- A step: gradients, metrics, update.


class TrainStep:
    """The function that `train_step` returns: `(state, batch) -> (state, metrics)`."""

    def __init__(
        self,
        function: StepFunction,
        tx: optim.GradientTransformation,
        donate: bool,
        skip_nonfinite: bool,
        skip: Callable[[Metrics], Tensor] | None,
    ) -> None:
        self._function, self._tx, self._donate = function, tx, donate
        self._skip_nonfinite, self._skip = skip_nonfinite, skip

    def __call__(self, state: State, batch: Tree) -> tuple[State, Metrics]:
        if callable(eval_frame_callback()):
            raise TypeError(NOT_COMPILED)
        if transforms_active():
            raise TypeError(NOT_TRANSFORMED)
        if isinstance(state, PlainState):
            return self._plain(state, batch)
        given = must_be_sharded(state, "train_step takes a ShardedState or a PlainState").memory
        state = state.check() if self._donate else state.copy()
        memory = state.memory
        arguments, shards = self._function.arguments((state.params, batch), {}), memory.kept_grads()
        if any(isinstance(node, Tensor) for node in arguments.nodes):
            raise TypeError(
                "train_step: a plain tensor is among the state's params, all of which are shards: ya.shard them"
            )
        updates = StepUpdates(state, self._tx, arguments.gradients([], shards)[0], shards, self._measure)
        given.stepping = frozenset(map(id, given.masters()))
        try:
            ran = self._function.run(arguments, memory, shards, Seed(state.seed, state.step), updates)
        finally:
            given.stepping = frozenset()
        new, metrics = updates.finish()
        return dataclasses.replace(new, program=ran.program), metrics

    # ---- one step

    def _plain(self, state: PlainState, batch: Tree) -> tuple[PlainState, Metrics]:
        arguments = self._function.arguments((state.params, batch), {})
        results = self._function.run(arguments, None, None, Seed(state.seed, state.step, state.rank)).results
        squares = squared_norm([grad for grad in results.grads if grad is not None])
        metrics, weight, skipped = self._measure(results.losses, results.aux, squares, None, "")
        if skipped is not None and bool(skipped):
            return dataclasses.replace(state, step=state.step + 1), metrics
        grads = arguments.gradients(divided(results.grads, weight), None)[0]
        return state.apply_gradients(grads, self._tx), metrics

    def _measure(
        self, losses: Sequence[Mean], aux: Sequence[Tree], squares: Tensor, ranks: Ranks | None, own: str
    ) -> Measured:
        """Returns global metrics, the weight to divide gradients by, and the flag that skips the update."""
        replicas = 1 if ranks is None else ranks.replicas  # each holds the whole gradient
        ((total, weight), reduced), squares = combined(losses, aux, ranks, squares / replicas, own)
        squares = sum_of_squares(squares)
        dtype = losses[0].total.dtype
        norm = (squares.sqrt() / weight.abs()).to(torch.promote_types(dtype, torch.float32))
        metrics = {"loss": (total / weight).to(dtype), "grad_norm": norm}
        if self._function.has_aux:
            metrics["aux"] = reduced
        skipped = ~(norm.isfinite() & total.isfinite()) & self._skip_nonfinite
        if self._skip is not None:
            skipped = skipped | self._judged(metrics, ranks)
        metrics["skipped"] = skipped.float()
        return metrics, weight, metrics["skipped"] if self._skip_nonfinite or self._skip else None

    def _judged(self, metrics: Metrics, ranks: Ranks | None) -> Tensor:
        """Returns the user's flag; true where that of any rank is."""
        assert self._skip is not None
        with torch.no_grad():
            flag = self._skip(dict(metrics))
        if not isinstance(flag, Tensor) or flag.dtype != torch.bool or flag.ndim:
            what = f"{flag.dtype} of shape {tuple(flag.shape)}" if isinstance(flag, Tensor) else type(flag).__name__
            raise TypeError(f"skip returned {what}: expected a bool tensor without axes, true to leave the update out")
        return flag if ranks is None else ranks.all_reduce_max(flag.float().to(metrics["loss"].device)).bool()

    def __repr__(self) -> str:
        of = self._function
        loss, schedule = (getattr(given, "__name__", repr(given)) for given in (of.fun, of.schedule))
        return f"train_step({loss}, {self._tx!r}, schedule={schedule}, microbatches={of.microbatches})"

    # ---- its program

    def trace(self, state: ShardedState, batch: Tree) -> Trace:
        """Records the visits of `loss_fn` on fake tensors: nothing is computed, and the state is unchanged."""
        memory, programs = self._memory_of(state), self._function.programs
        arguments = self._function.arguments((state.params, batch), {})
        if memory.comms.stages > 1:
            from yafsdp_fn.pipelines.crossing import crossing_of

            return self._with_optimizer(crossing_of(arguments, memory, programs).trace, memory)
        from yafsdp_fn.tracing.tracer import traced

        return self._with_optimizer(programs.complete(traced(arguments, memory).trace, memory), memory)

    def _with_optimizer(self, trace: Trace, memory: StateMemory) -> Trace:
        from yafsdp_fn.tracing.optimizer_memory import with_optimizer

        skips = self._skip_nonfinite or self._skip is not None
        return with_optimizer(trace, self._tx, skips, memory.abstract())

    def lower(self, state: ShardedState, batch: Tree) -> Program:
        """Returns the verified `Program` of the step, of all stages; built on fake tensors if no step has run yet."""
        memory = self._memory_of(state)
        batch_shapes = None
        if memory.comms.stages > 1:
            from yafsdp_fn.pipelines.crossing import shapes

            batch_shapes = shapes(self._function.arguments((state.params, batch), {}).rest)
        known = self._known(memory, batch_shapes)
        return known or self._function.programs.build(self.trace(state, batch)).all_stages

    def program(self, state: ShardedState) -> Program:
        """Returns the program in use for this state. Raises RuntimeError before the first step on a state of its
        kind."""
        found = self._known(self._memory_of(state))
        if found is None:
            raise RuntimeError(
                "step.program(state): no step of this function has run on a state of this kind yet; "
                "step.lower(state, batch) returns its program, and runs nothing"
            )
        return found

    def _memory_of(self, state: ShardedState) -> StateMemory:
        return must_be_sharded(state, "a step's program is found for a ShardedState").check().memory

    def _known(self, memory: StateMemory, batch: Hashable = None) -> Program | None:
        microbatches = microbatches_on(memory.comms, self._function.microbatches)
        found = self._function.programs.peek(memory, microbatches, batch)
        if found is None:
            return None
        trace = found.all_stages.trace
        if memory.comms.stages > 1 and trace.optimizer == OptimizerMemory():  # all other costs are there
            found.all_stages = found.all_stages.with_trace(self._with_optimizer(trace, memory))
        return found.all_stages


# ---- The verb.


@with_hints
def train_step(
    loss_fn: Callable[[Tree, Tree], Any],
    tx: optim.GradientTransformation,
    *,
    schedule: AnySchedule = default_schedule,
    microbatches: int | None = None,
    has_aux: bool = False,
    donate: bool = True,
    skip_nonfinite: bool = True,
    skip: Callable[[Metrics], Tensor] | None = None,
) -> TrainStep:
    """Returns a training step `(state, batch) -> (state, metrics)`. In essence:

        loss, grads = value_and_grad(loss_fn, schedule=schedule, microbatches=microbatches)(state.params, batch)
        state = state.apply_gradients(grads, tx)

    but gradient shards are kept from step to step, and the optimizer's pass divides them by the weight.

    Before the first step of a kind of state one call of `loss_fn` is recorded, on the first microbatch without
    gradients: what the function does beside its result (a print, a running mean) it does once more than there are
    steps. torch's generators and the state are as before.

    loss_fn: `(params, batch)` -> scalar or `ya.Mean`; batch is this rank's part
    metrics: `loss`, `grad_norm` (before clipping) and `skipped` (1 if the update was), `aux` with `has_aux`; all
        global, tensors on the device: reading one waits for the step
    microbatches: parts in which the batch is computed, one after the other; default 1, on a deterministic mesh
        (`ya.mesh`) this rank's number of micro-shards
    donate: the old state's memory becomes the new one's; False copies it first
    skip_nonfinite: if the loss or the gradient is not finite, parameters and optimizer state keep their bits, without a
        wait of the host
    skip: judges a step by its metrics before its update: returns a flag on their device, true to skip the update, for a
        spike of the loss, say. It is called once a step; all ranks skip an update that one of them skips

    >>> step = ya.train_step(loss_fn, tx, schedule=ya.schedules.zero3(), microbatches=2)
    >>> state, metrics = step(state, batch)                    # recorded first, then run by its program
    >>> state, metrics = step(state, batch)
    >>> state.step, sorted(metrics)
    (2, ['grad_norm', 'loss', 'skipped'])
    >>> step.program(state).count(ya.schedules.Reduce)         # four units, twice
    12
    """
    settings = {"skip_nonfinite": skip_nonfinite, "a function skip": skip is not None}
    function = StepFunction(loss_fn, has_aux, schedule, microbatches, tx=tx, settings=settings)
    return TrainStep(function, tx, donate, skip_nonfinite, skip)
