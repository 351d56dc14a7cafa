"""grad, value_and_grad, train_step, eval_step: JAX's transformations, on sharded and on plain trees alike.

    loss, grads = value_and_grad(loss_fn)(state.params, batch)
    state = state.apply_gradients(grads, tx)

The value is sum(totals) / sum(weights) over all microbatches and ranks, and the gradient is the gradient of that.
Mind the order: the value comes first, as in JAX; torch.func returns the gradient first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from yafsdp_fn import optim
from yafsdp_fn.algebra import squared_norm
from yafsdp_fn.in_program import InProgram, combined
from yafsdp_fn.optim.memory import memory_of
from yafsdp_fn.runtime.abstract import AbstractStore
from yafsdp_fn.runtime.graphs import CudaRecorder, Graphs, Recorder
from yafsdp_fn.runtime.programs import Programs
from yafsdp_fn.runtime.randomness import in_step
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.runtime.steps import Arguments, Results, Seed, run_plain, run_sharded
from yafsdp_fn.runtime.store import Store
from yafsdp_fn.runtime.tracing import trace_call
from yafsdp_fn.schedules import Norm, Program, Schedule, Trace, UpdateWhen, zero3
from yafsdp_fn.sharded import handles
from yafsdp_fn.state import PlainState, ShardedState, store_of
from yafsdp_fn.tree import Tree

Metrics = dict[str, Any]
State = TypeVar("State", ShardedState, PlainState)

DEFAULT: Schedule = zero3()


class StepFunction:
    """A function to differentiate or evaluate, with its schedule and its programs."""

    def __init__(
        self,
        fun: Callable[..., Any],
        has_aux: bool,
        schedule: Schedule | Program,
        microbatches: int,
        track: bool = True,
        tx: optim.GradientTransformation | None = None,
        skip_nonfinite: bool = False,
        capture: Callable[[torch.device], Recorder] | None = None,
    ) -> None:
        if not isinstance(microbatches, int) or microbatches < 1:
            raise ValueError(f"microbatches={microbatches}: expected an integer >= 1")
        self.fun, self.has_aux, self.microbatches, self.track = fun, has_aux, microbatches, track
        whole = None if tx is None else optim.why_not_unitwise(tx)
        after_norm = skip_nonfinite or (tx is not None and optim.needs_norm(tx))
        updates: UpdateWhen = "never" if tx is None else "after norm" if after_norm else "any time"
        self.programs = Programs(schedule, updates=updates, whole=whole, trains=track)
        self._tx, self._skips = tx, skip_nonfinite
        self._capture = capture
        self._graphs: Graphs | None = None

    def complete(self, trace: Trace, store: AbstractStore) -> Trace:
        """`trace` with what only the step knows: when units may be updated, and the memory of its optimizer."""
        trace = self.programs.complete(trace)
        if self._tx is None:
            return trace
        optimizer = memory_of(self._tx, store.layout, store.precision, self._skips, store.comms.device)
        return trace._replace(optimizer=optimizer)

    def run(
        self,
        arguments: Arguments,
        store: Store | None,
        shards: Shards | None,
        seed: Seed,
        updates: InProgram | None = None,
    ) -> Results:
        context = copy_context()  # the counter of visits ends with it, wherever an interrupt comes
        if store is None:
            if self._capture is not None:
                raise ValueError("graphs=True captures visits to a ShardedState; this state is plain")
            return context.run(run_plain, arguments, seed, has_aux=self.has_aux, track=self.track)
        if self._capture is not None and self._graphs is None:
            self._graphs = Graphs(self._capture(store.comms.device))
        run = partial(run_sharded, has_aux=self.has_aux, updates=updates, graphs=self._graphs)
        return context.run(run, arguments, store, self.programs, shards, seed)


class ValueAndGrad:
    """What `value_and_grad` returns. Call it as the function it differentiates."""

    def __init__(self, function: StepFunction, argnums: int | tuple[int, ...]) -> None:
        self._function = function
        self._one = isinstance(argnums, int)
        self._argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        function = self._function
        if in_step():
            raise RuntimeError(
                "ya.grad or ya.value_and_grad inside a function that a step runs: what it gives would count as a "
                "constant; use torch.func.grad there, which composes"
            )
        arguments = Arguments(function.fun, args, kwargs, self._argnums, function.microbatches)
        found = handles(arguments.nodes)
        store = store_of(arguments.nodes) if found else None
        shards = None if store is None else store.new_grads()
        seed = Seed(found[0].context.seed, found[0].context.step) if found else Seed(0, 0)
        results = function.run(arguments, store, shards, seed)
        with nullcontext() if store is None else store.comms.guarded(f"the gradients of step {seed.step}"):
            (total, weight), aux = combined(results, store)
            plain = [None if grad is None else (grad / weight).to(grad.dtype) for grad in results.grads]
            if store is not None and shards is not None:
                with store.using_grads(shards):
                    shards.divide_(weight)
        grads = arguments.gradients(plain, shards)
        value = (total / weight).to(results.losses[0].total.dtype)
        return (value, aux) if function.has_aux else value, grads[0] if self._one else tuple(grads)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    schedule: Schedule | Program = DEFAULT,
    microbatches: int = 1,
) -> ValueAndGrad:
    """`jax.value_and_grad`: a function that returns `(value, grads)`, or `((value, aux), grads)`.

    fun: `fun(params, batch, ...)` -> a scalar tensor or `ya.Mean`; with `has_aux` a pair of that and any tree, whose
        `Mean`, `Sum` and `Max` leaves are reduced over microbatches and ranks; its other leaves stay this rank's own,
        stacked [microbatches, ...] if there are several
    argnums: which positional arguments to differentiate; their gradients have their structure. Gradients of sharded
        leaves are this rank's flat shards of the global gradient, in memory of their own; those of plain leaves are
        this rank's contribution to it
    schedule: a function from a trace to a program, or a program
    microbatches: every tensor in the other arguments is cut along its first axis into so many parts; sharded parameters
        among them stay whole (close over plain ones that must)

    The first call runs on demand and records the visits; the schedule's program serves from the second on.
    Random numbers inside blocks depend on the seed and step of the state that the parameters come from.
    """
    return ValueAndGrad(StepFunction(fun, has_aux, schedule, microbatches), argnums)


def grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    schedule: Schedule | Program = DEFAULT,
    microbatches: int = 1,
) -> Callable[..., Any]:
    """`jax.grad`: `value_and_grad` without the value; returns `grads`, or `(grads, aux)`."""
    both = value_and_grad(fun, argnums, has_aux, schedule=schedule, microbatches=microbatches)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


class TrainStep:
    """What `train_step` returns: `(state, batch) -> (state, metrics)`."""

    def __init__(
        self, function: StepFunction, tx: optim.GradientTransformation, donate: bool, skip_nonfinite: bool
    ) -> None:
        self._function, self._tx = function, tx
        self._donate, self._skip = donate, skip_nonfinite

    def __call__(self, state: State, batch: Tree) -> tuple[State, Metrics]:
        arguments = self._arguments(state, batch)
        seed = Seed(state.seed, state.step)
        if isinstance(state, PlainState):
            return self._plain(state, self._function.run(arguments, None, None, seed), arguments)
        state = state.check()
        store = state.store
        shards = store.kept_grads()
        program = self.program(state)
        if program is not None and program.updates:
            return self._in_program(state, batch, program)
        results = self._function.run(arguments, store, shards, seed)
        place = f"the metrics of step {seed.step}"
        with store.comms.guarded(place), store.using_grads(shards, Norm(store.trained)):
            metrics, weight, found_inf = self._metrics(results, squared_norm(shards.present()), store)
        grads = arguments.gradients([], shards)[0]
        state = state if self._donate else state.copy()
        norm = metrics["grad_norm"]
        return state.update(grads, self._tx, scale=weight.float(), found_inf=found_inf, grad_norm=norm), metrics

    def _in_program(self, state: ShardedState, batch: Tree, program: Program) -> tuple[ShardedState, Metrics]:
        """A step whose program has the updates."""
        state = state if self._donate else state.copy()
        arguments = self._arguments(state, batch)
        shards = state.store.kept_grads()
        updates = InProgram(state, self._tx, arguments.gradients([], shards)[0], shards, program, self._metrics)
        seed = Seed(state.seed, state.step)
        self._function.run(arguments, state.store, shards, seed, updates)
        return updates.finish()

    def _arguments(self, state: State, batch: Tree) -> Arguments:
        if not isinstance(state, ShardedState | PlainState):
            raise TypeError(f"train_step takes a ShardedState or a PlainState, got {type(state).__name__}")
        function = self._function
        return Arguments(function.fun, (state.params, batch), {}, (0,), function.microbatches)

    def _metrics(self, results: Results, squares: Tensor, store: Store | None) -> tuple[Metrics, Tensor, Tensor | None]:
        """Global metrics, the weight to divide gradients by, and the flag that skips the update."""
        replicas = 1 if store is None else store.comms.replicas  # each holds the whole gradient
        ((total, weight), aux), squares = combined(results, store, squares / replicas)
        dtype = results.losses[0].total.dtype
        norm = (squares.sqrt() / weight).float()
        skipped = (~(norm.isfinite() & total.isfinite())).float()
        metrics = {
            "loss": (total / weight).to(dtype),
            "grad_norm": norm,
            "skipped": skipped if self._skip else 0 * skipped,
        }
        if self._function.has_aux:
            metrics["aux"] = aux
        return metrics, weight, skipped if self._skip else None

    def _plain(self, state: PlainState, results: Results, arguments: Arguments) -> tuple[PlainState, Metrics]:
        leaves = [grad for grad in results.grads if grad is not None]
        metrics, weight, skipped = self._metrics(results, squared_norm(leaves), None)
        grads = [None if grad is None else (grad / weight).to(grad.dtype) for grad in results.grads]
        new = state.apply_gradients(arguments.gradients(grads, None)[0], self._tx)
        if skipped is not None and bool(skipped):
            new = PlainState(state.params, state.opt_state, state.step + 1, state.seed)
        return new, metrics

    def trace(self, state: ShardedState, batch: Tree) -> Trace:
        """The visits of `loss_fn`, found on fake tensors: nothing is computed, and the state is left as it is."""
        state = state.check()
        return self._function.complete(trace_call(self._arguments(state, batch), state.store), state.store)

    def lower(self, state: ShardedState, batch: Tree) -> Program:
        """The program that the step runs, verified; built on fake tensors if no step has run yet."""
        program = self.program(state)
        return program or self._function.programs.build(self.trace(state, batch))

    def program(self, state: ShardedState) -> Program | None:
        """The program in use for this state, None before the first step."""
        return self._function.programs.peek(state.check().store, self._function.microbatches)


def train_step(
    loss_fn: Callable[[Tree, Tree], Any],
    tx: optim.GradientTransformation,
    *,
    schedule: Schedule | Program = DEFAULT,
    microbatches: int = 1,
    has_aux: bool = False,
    donate: bool = True,
    skip_nonfinite: bool = True,
    graphs: bool = False,
) -> TrainStep:
    """A training step `(state, batch) -> (state, metrics)`. In essence:

        loss, grads = value_and_grad(loss_fn, schedule=schedule, microbatches=microbatches)(state.params, batch)
        state = state.apply_gradients(grads, tx)

    but gradient shards are kept from step to step, and their division by the weight is part of the optimizer's pass.

    loss_fn: `(params, batch)` -> scalar or `ya.Mean`; batch is this rank's part
    metrics: `loss`, `grad_norm` (before clipping) and `skipped` (1 where the update was), `aux` with `has_aux`; all
        global, tensors on the device: reading one waits for the step
    donate: the old state's memory becomes the new one's; False copies it first
    skip_nonfinite: where the loss or the gradient is not finite, parameters and optimizer state keep their bits,
        without a wait of the host
    graphs: CUDA graphs of the visits that recompute (`remat`), which take the host out of the step: the third step
        captures them, one per slot parity. A block that a graph could not repeat runs as it is, with a warning that
        says why. Needs CUDA. Beside the slots it takes the memory of one layer's recomputation, for good
    """
    capture = CudaRecorder if graphs else None
    function = StepFunction(
        loss_fn, has_aux, schedule, microbatches, tx=tx, skip_nonfinite=skip_nonfinite, capture=capture
    )
    return TrainStep(function, tx, donate, skip_nonfinite)


def eval_step(
    loss_fn: Callable[[Tree, Tree], Any],
    *,
    schedule: Schedule | Program = DEFAULT,
    microbatches: int = 1,
    has_aux: bool = False,
) -> Callable[[Any, Tree], Metrics]:
    """An evaluation `(state, batch) -> metrics`: `loss`, and `aux` with `has_aux`, as `train_step` reports them.

    The state may also be a tree of parameters, sharded or plain, such as an average of them. Nothing is donated.
    """
    function = StepFunction(loss_fn, has_aux, schedule, microbatches, track=False)

    def evaluate(state: Any, batch: Tree) -> Metrics:
        whole = isinstance(state, ShardedState | PlainState)
        params = state.check().params if isinstance(state, ShardedState) else state.params if whole else state
        arguments = Arguments(function.fun, (params, batch), {}, (0,), microbatches)
        found = handles(params)
        seed = Seed(found[0].context.seed, found[0].context.step) if found else Seed(0, 0)
        seed = Seed(state.seed, state.step) if isinstance(state, PlainState) else seed
        store = store_of(params) if found else None
        results = function.run(arguments, store, None, seed)
        with nullcontext() if store is None else store.comms.guarded("the metrics of an evaluation"):
            (total, weight), aux = combined(results, store)
        metrics: Metrics = {"loss": (total / weight).to(results.losses[0].total.dtype)}
        return metrics | {"aux": aux} if has_aux else metrics

    return evaluate
