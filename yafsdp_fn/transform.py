"""grad, value_and_grad, eval_step: JAX's transformations, on sharded and on plain trees alike.

    loss, grads = value_and_grad(loss_fn)(state.params, batch)
    state = state.apply_gradients(grads, tx)

The value is sum(totals) / sum(weights) over all microbatches and ranks, and the gradient is the gradient of that.
Mind the order: the value comes first, as in JAX; torch.func returns the gradient first.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.engine.randomness import in_step
from yafsdp_fn.engine.steps import Arguments, Seed, zeros
from yafsdp_fn.objective import objective
from yafsdp_fn.params.sharded import Sharded, handles
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.plain_state import PlainState
from yafsdp_fn.schedules.stages.builders import AnySchedule
from yafsdp_fn.state import ShardedState, memory_of
from yafsdp_fn.step_function import DEFAULT, StepFunction
from yafsdp_fn.torch_private import transforms_active
from yafsdp_fn.updates import combined, divided


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    schedule: AnySchedule = DEFAULT,
    microbatches: int | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad`: a function that returns `(value, grads)`, or `((value, aux), grads)`.

    fun: `fun(params, batch, ...)` -> a scalar tensor or `ya.Mean`; with `has_aux` a pair of that and any tree, whose
        `Mean`, `Sum` and `Max` leaves are reduced over microbatches and ranks; its other leaves stay this rank's own,
        stacked [microbatches, ...] if there are several
    argnums: which positional arguments to differentiate; their gradients have their structure. Gradients of sharded
        leaves are this rank's flat shards of the global gradient, in memory of their own; those of plain leaves are
        this rank's contribution to it
    schedule: a function from a trace to a program, or a program
    microbatches: every tensor in the other arguments is cut along its first axis into so many parts, 1 if not given, on
        a deterministic mesh as in `train_step`; sharded parameters among them stay whole (close over plain ones that
        must)

    The first call runs on demand and records the visits; the schedule's program serves from the second on.
    Random numbers inside blocks depend on the seed and step of the state that the parameters come from.

    Inside another derivative (a step's, or one of torch.func) it is `torch.func.grad` of `ya.objective(fun)`, on the
    path that composes: exact, not overlapped.
    """
    function, one = StepFunction(fun, has_aux, schedule, microbatches), isinstance(argnums, int)
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def both(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if in_step() or transforms_active():  # inside another derivative
            if has_aux or (microbatches or 1) > 1:
                raise RuntimeError(
                    "ya.grad or ya.value_and_grad inside another derivative takes no has_aux and no microbatches: what "
                    "they give would not be differentiated. Leave them out there"
                )
            value, composed = _composed(Arguments(objective(fun), args, kwargs, numbers, 1))
            return value, composed[0] if one else tuple(composed)
        arguments = function.arguments(args, kwargs, numbers)
        found = handles(arguments.nodes)
        given = found or arguments.constants  # under plain adapters, weights that are not differentiated
        memory, seed = memory_of(given) if given else None, _seed(given)
        shards = memory.new_grads() if memory is not None and found else None
        results, record = function.run(arguments, memory, shards, seed)
        comms = None if memory is None else memory.comms
        with nullcontext() if comms is None else comms.guarded(f"the gradients of step {seed.step}"):
            (total, weight), aux = combined(results.losses, results.aux, comms)
            plain = divided(results.grads, weight)
            if memory is not None and shards is not None:
                with memory.using([], [("grad shard", unit) for unit in shards.rows]):
                    shards.divide_(weight)
        grads = arguments.gradients(plain, shards, record)
        value = (total / weight).to(results.losses[0].total.dtype)
        return (value, aux) if has_aux else value, grads[0] if one else tuple(grads)

    return both


def _composed(arguments: Arguments) -> tuple[Tensor, list[Any]]:
    """Value and gradients that can be differentiated. Those of plain leaves are a rank's part of the mean."""
    moving: list[Tensor] = []
    for node in arguments.nodes:
        if isinstance(node, Sharded):
            moving += [leaf for _, group, leaf in node.check().group_leaves() if group.trainable]
        elif isinstance(node, Tensor):
            moving.append(node)

    def at(leaves: Sequence[Tensor], still: Callable[[Any], Any], share: Callable[[Tensor], Tensor]) -> list[Any]:
        """The arguments' nodes with `leaves` in their place. still: of what is frozen; share: of a plain leaf"""
        given, nodes = iter(leaves), list[Any]()
        for node in arguments.nodes:
            if isinstance(node, Sharded):
                of_group = [next(given) if g.trainable else still(leaf) for _, g, leaf in node.group_leaves()]
                nodes.append(Sharded(tuple(of_group), node.context))
            else:
                nodes.append(share(next(given)) if isinstance(node, Tensor) else still(node))
        return nodes

    def value_of(*leaves: Tensor) -> Tensor:
        value: Tensor = arguments.on(at(leaves, lambda node: node, lambda leaf: leaf))
        return value

    grads, value = torch.func.grad_and_value(value_of, tuple(range(len(moving))))(*moving)
    found = handles(arguments.nodes) or arguments.constants
    ranks = found[0].owner.comms.world if found else 1
    nodes = at(grads, zeros, lambda grad: grad / ranks)
    return value, list(optree.tree_unflatten(arguments.spec, nodes))


def grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    schedule: AnySchedule = DEFAULT,
    microbatches: int | None = None,
) -> Callable[..., Any]:
    """`jax.grad`: `value_and_grad` without the value; returns `grads`, or `(grads, aux)`."""
    both = value_and_grad(fun, argnums, has_aux, schedule=schedule, microbatches=microbatches)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def eval_step(
    loss_fn: Callable[[Tree, Tree], Any],
    *,
    schedule: AnySchedule = DEFAULT,
    microbatches: int | None = None,
    has_aux: bool = False,
) -> Callable[[Any, Tree], dict[str, Any]]:
    """An evaluation `(state, batch) -> metrics`: `loss`, and `aux` with `has_aux`, as `train_step` reports them.

    The state may also be a tree of parameters, sharded or plain, such as an average of them. Nothing is donated.
    """
    function = StepFunction(loss_fn, has_aux, schedule, microbatches, track=False)

    def evaluate(state: Any, batch: Tree) -> dict[str, Any]:
        state = state.check() if isinstance(state, ShardedState) else state
        params = state.params if isinstance(state, ShardedState | PlainState) else state
        found = handles(params)
        seed = Seed(state.seed, state.step, state.rank) if isinstance(state, PlainState) else _seed(found)
        memory = memory_of(found) if found else None
        results, _ = function.run(function.arguments((params, batch), {}), memory, None, seed)
        comms = None if memory is None else memory.comms
        with nullcontext() if comms is None else comms.guarded("the metrics of an evaluation"):
            (total, weight), aux = combined(results.losses, results.aux, comms)
        metrics: dict[str, Any] = {"loss": (total / weight).to(results.losses[0].total.dtype)}
        return metrics | {"aux": aux} if has_aux else metrics

    return evaluate


def _seed(found: Sequence[Sharded]) -> Seed:
    return Seed(found[0].origin.seed, found[0].origin.step) if found else Seed(0, 0)
