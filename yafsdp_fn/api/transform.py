"""grad, value_and_grad, eval_step, functional_loss: JAX's transformations, on sharded and on plain trees alike."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.api.step_function import StepFunction, default_schedule
from yafsdp_fn.communication.differentiable import SumOfRanks
from yafsdp_fn.params.one_state import states_of
from yafsdp_fn.params.sharded import Sharded, handles
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.runtime.arguments import Arguments, Seed, zero
from yafsdp_fn.runtime.plain_state import PlainState
from yafsdp_fn.runtime.reductions import as_mean, combined, divided
from yafsdp_fn.runtime.state import ShardedState, memory_of
from yafsdp_fn.schedules.builders import AnySchedule
from yafsdp_fn.util.randomness import acting_over, in_step
from yafsdp_fn.util.torch_private import transforms_active

# ---- ya.functional_loss: a loss as a function of one number for torch.func, whose gradient is the one that a step
# descends.
#
# def functional_loss(fun)(*args):
#     total, weight = fun(*args)
#     return sum over ranks of total / sum over ranks of weight
#
# The meaning of gradients at every number of ranks: communication/differentiable.py.

NOT_HERE = (
    "ya.functional_loss on a deterministic mesh: it is of all micro-shards of a rank at once. Use ya.value_and_grad, "
    "ya.eval_step or ya.train_step, or a mesh without deterministic"
)


def functional_loss(fun: Callable[..., Any]) -> Callable[..., Tensor]:
    """Turns `fun(params, batch, ...)` -> a scalar tensor or `ya.Mean` into a function that returns the global weighted
    mean.

    The value, a 0-dim tensor in the dtype of the total, is the same on every rank, and that of `ya.value_and_grad`
    without microbatches. `torch.func.grad(ya.functional_loss(fun))` and all other transforms differentiate it; a bare
    `fun` is differentiated as the mean over ranks of each rank's result, whatever the weights. Every rank must call it.

    Ranks are those of the first sharded argument; without one, the value is this process's own.

    >>> loss = ya.functional_loss(lambda w, x: (x * w**3).sum())
    >>> torch.func.grad(torch.func.grad(loss))(torch.tensor(2.0), torch.tensor([1.0]))
    tensor(12.)
    """

    def mean(*args: Any, **kwargs: Any) -> Tensor:
        found = handles((args, kwargs))
        comms = found[0].owner.comms if found else None
        with nullcontext() if comms is None else acting_over(comms):
            total, weight = as_mean(fun(*args, **kwargs))
        weight = torch.as_tensor(weight, device=total.device)
        both = torch.stack([total.double(), weight.double()])
        if comms is not None and comms.deterministic:
            raise RuntimeError(NOT_HERE)
        if comms is not None and not comms.alone:
            both = SumOfRanks(comms, step=in_step())(both)
        return (both[0] / both[1]).to(total.dtype)

    return mean


# ---- grad, value_and_grad, eval_step: JAX's transformations, on sharded and on plain trees alike.
#
#     loss, grads = value_and_grad(loss_fn)(state.params, batch)
#     state = state.apply_gradients(grads, tx)
#
# The value is sum(totals) / sum(weights) over all microbatches and ranks, and the gradient is that value's gradient.
# The value comes first, as in JAX; torch.func returns the gradient first.


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    schedule: AnySchedule = default_schedule,
    microbatches: int | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that returns `(value, grads)`, or `((value, aux), grads)`, as `jax.value_and_grad`.

    fun: `fun(params, batch, ...)` -> a scalar tensor or `ya.Mean`; with `has_aux` a pair of that and any tree, whose
        `Mean`, `Sum` and `Max` leaves are reduced over microbatches and ranks; its other leaves stay this rank's own,
        stacked [microbatches, ...] if there are several
    argnums: the positional arguments to differentiate; their gradients have their structure. Gradients of sharded
        leaves are this rank's flat shards of the global gradient, in memory of their own; those of plain leaves are
        this rank's part of it (`ya.params.sum_over_ranks` adds them up)
    schedule: a function from a trace to a program, or a program
    microbatches: the number of parts into which every tensor in the other arguments is cut along its first axis;
        default 1, on a deterministic mesh as in `train_step`. Sharded parameters among them stay whole (close over
        plain tensors that must)

    Before the first call on a kind of state one call of `fun` is recorded, as in `train_step`. Random numbers depend on
    the seed and step of the parameters' state.

    Inside another derivative (a step's, or one of torch.func) it is `torch.func.grad` of `ya.functional_loss(fun)`, on
    the path that composes: exact, not overlapped.

    >>> loss, grads = ya.value_and_grad(loss_fn)(state.params, batch)
    >>> round(loss.item(), 2), ya.unshard(grads)["head"]["out"].shape
    (2.77, torch.Size([16, 8]))
    >>> state = state.apply_gradients(grads, tx)
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
            value, composed = _composed(Arguments(functional_loss(fun), args, kwargs, numbers, 1))
            return value, composed[0] if one else tuple(composed)
        arguments = function.arguments(args, kwargs, numbers)
        found = handles(arguments.nodes)
        given = found or arguments.constants  # under plain adapters, weights that are not differentiated
        memory = memory_of(given) if given else None
        seed = _seed(given)
        shards = memory.new_grads() if memory is not None and found else None
        results, record, _ = function.run(arguments, memory, shards, seed)
        comms = None if memory is None else memory.comms
        with nullcontext() if comms is None else comms.guarded(f"the gradients of step {seed.step}"):
            (total, weight), aux = combined(results.losses, results.aux, comms, own=states_of(given))
            plain = divided(results.grads, weight)
            if memory is not None and shards is not None:
                with memory.using([], [("grad shard", unit) for unit in shards.rows]):
                    for shard in shards.present:
                        shard.div_(weight)
        grads = arguments.gradients(plain, shards, record)
        value = (total / weight).to(results.losses[0].total.dtype)
        return (value, aux) if has_aux else value, grads[0] if one else tuple(grads)

    return both


def _composed(arguments: Arguments) -> tuple[Tensor, list[Any]]:
    """Returns value and gradients that can be differentiated. Those of plain leaves are a rank's part of the mean."""
    moving: list[Tensor] = []
    for node in arguments.nodes:
        if isinstance(node, Sharded):
            moving += [leaf for _, group, leaf in node.check().group_leaves() if group.trainable]
        elif isinstance(node, Tensor):
            moving.append(node)

    def at(leaves: Sequence[Tensor], still: Callable[[Tensor], Tensor], share: Callable[[Tensor], Tensor]) -> list[Any]:
        """The arguments' nodes with `leaves` in their place. still: maps frozen leaves; share: maps plain leaves"""
        given = iter(leaves)
        nodes = list[Any]()
        for node in arguments.nodes:
            if isinstance(node, Sharded):
                of_group = [next(given) if g.trainable else still(leaf) for _, g, leaf in node.group_leaves()]
                nodes.append(Sharded(tuple(of_group), node.context))
            else:
                nodes.append(share(next(given)) if isinstance(node, Tensor) else optree.tree_map(still, node))
        return nodes

    def value_of(*leaves: Tensor) -> Tensor:
        value: Tensor = arguments.on(at(leaves, lambda leaf: leaf, lambda leaf: leaf))
        return value

    grads, value = torch.func.grad_and_value(value_of, tuple(range(len(moving))))(*moving)
    found = handles(arguments.nodes) or arguments.constants
    ranks = found[0].owner.comms.world if found else 1
    nodes = at(grads, zero, lambda grad: grad / ranks)
    return value, list(optree.tree_unflatten(arguments.spec, nodes))


def grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    schedule: AnySchedule = default_schedule,
    microbatches: int | None = None,
) -> Callable[..., Any]:
    """Returns a function that returns `grads`, or `(grads, aux)`, as `jax.grad`: `value_and_grad` without the value.

    The arguments are those of `value_and_grad`.

    >>> grads = ya.grad(loss_fn)(state.params, batch)          # this rank's flat shards, like the parameters
    >>> ya.unshard(grads)["head"]["out"].shape
    torch.Size([16, 8])
    """
    both = value_and_grad(fun, argnums, has_aux, schedule=schedule, microbatches=microbatches)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def eval_step(
    loss_fn: Callable[[Tree, Tree], Any],
    *,
    schedule: AnySchedule = default_schedule,
    microbatches: int | None = None,
    has_aux: bool = False,
) -> Callable[[Any, Tree], dict[str, Any]]:
    """Returns an evaluation `(state, batch) -> metrics`: `loss`, and `aux` with `has_aux`, as `train_step` reports
    them.

    The state may also be a tree of parameters, sharded or plain, such as an average of them. Nothing is donated.

    loss_fn: as for `train_step`; schedule, microbatches, has_aux: as for `value_and_grad`

    >>> evaluate = ya.eval_step(loss_fn)
    >>> round(evaluate(state, batch)["loss"].item(), 2)        # log(16): it knows nothing yet
    2.77
    """
    function = StepFunction(loss_fn, has_aux, schedule, microbatches, track=False)

    def evaluate(state: Any, batch: Tree) -> dict[str, Any]:
        params, seed = state, None
        if isinstance(state, ShardedState):
            params, seed = state.check().params, Seed(state.seed, state.step)
        elif isinstance(state, PlainState):
            params = state.params
            seed = Seed(state.seed, state.step, state.rank)
        found = handles(params)
        memory = memory_of(found) if found else None
        results = function.run(function.arguments((params, batch), {}), memory, None, seed or _seed(found)).results
        comms = None if memory is None else memory.comms
        with nullcontext() if comms is None else comms.guarded("the metrics of an evaluation"):
            (total, weight), aux = combined(results.losses, results.aux, comms, own=states_of(found))
        metrics: dict[str, Any] = {"loss": (total / weight).to(results.losses[0].total.dtype)}
        return metrics | {"aux": aux} if has_aux else metrics

    return evaluate


def _seed(found: Sequence[Sharded]) -> Seed:
    return Seed(found[0].origin.seed, found[0].origin.step) if found else Seed(0, 0, of_state=False)
