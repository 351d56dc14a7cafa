"""Transformations around another one: hyperparameters in its state, several gradients to one step, and steps that are
not finite."""

import functools
import inspect
from collections.abc import Callable, Iterable
from numbers import Integral, Number
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import Around, GradientTransformation, State, as_transformation, chosen, new_count, updated
from yafsdp_fn.params.algebra import global_norm
from yafsdp_fn.params.tree import Tree, number_dtype

# ---- Hyperparameters in the optimizer's state, as in Optax: they may be changed between steps, and are saved with
# it.
#
# tx = inject_hyperparams(adamw, static_args="mask")(learning_rate=3e-4, weight_decay=0.1, mask=rule)
# state.opt_state.hyperparams["learning_rate"].fill_(1e-4)       # 0-dim: on every rank; no program is built anew


class InjectHyperparamsState(NamedTuple):
    """The state around injected hyperparameters.

    count: int32 [], completed steps; hyperparams: by name, [] each; inner_state: of the inner transformation
    """

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count
    hyperparams: dict[str, Any]
    inner_state: State


def inject_hyperparams(
    inner_factory: Callable[..., Any],
    static_args: str | Iterable[str] = (),
    hyperparam_dtype: torch.dtype | None = None,
) -> Callable[..., GradientTransformation]:
    """Returns `inner_factory`, such as `adamw`, with numeric arguments turned into 0-dim tensors in the state.

    A function among the arguments counts as a schedule: its hyperparameter is its value at the count, and overwriting
    it has no effect. Bools, and anything that is not a number, are passed on as they are.

    static_args: names of arguments to pass on as they are: functions that are not schedules, such as a mask rule, and
        numbers that must be known on the host
    hyperparam_dtype: of those given as floats; default float32, float64 if a parameter is

    The transformation is made anew in every step, so it runs by its definition, not by a fused kernel: a step of AdamW
    takes 16 times as long (50 ms instead of 3 for 4M parameters on one core of a CPU), and memory for all new values at
    once. If a factory tests a number, as `adam` tests the ranges of b1, b2 and eps, the host reads the tensor, and
    waits for the device: `static_args=("b1", "b2", "eps")` avoids that. Raises ValueError if `static_args` names no
    argument.

    >>> tx = ya.optim.inject_hyperparams(ya.optim.sgd)(learning_rate=0.1)
    >>> opt_state = tx.init(w)
    >>> _ = opt_state.hyperparams["learning_rate"].fill_(0.5)  # a tensor of the state: changed between steps
    >>> tx.update(g, opt_state, w)[0]
    tensor([-1.5000,  2.0000])
    """
    signature = inspect.signature(inner_factory)
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    if unknown := static.difference(signature.parameters):
        raise ValueError(
            f"inject_hyperparams: static_args has {', '.join(sorted(unknown))}, no argument of "
            f"{getattr(inner_factory, '__name__', inner_factory)}, which has {', '.join(signature.parameters)}"
        )

    @functools.wraps(inner_factory)
    def factory(*args: Any, **kwargs: Any) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        free = {name: value for name, value in given.items() if name not in static and not isinstance(value, bool)}
        schedules = {name: value for name, value in free.items() if callable(value)}
        numbers = {name: value for name, value in free.items() if isinstance(value, Number | Tensor)}

        def made(values: dict[str, Any]) -> GradientTransformation:
            call = inspect.BoundArguments(signature, {**given, **values})
            return as_transformation(inner_factory(*call.args, **call.kwargs))

        # first with plain numbers, so that the host refuses bad ones here
        tx = made({name: _first_value(name, schedule) for name, schedule in schedules.items()})

        def floats(like: Tree) -> torch.dtype:
            return hyperparam_dtype or number_dtype(like)

        def tensors(values: dict[str, Any], like: Tree) -> dict[str, Tensor]:
            leaves = optree.tree_leaves(like)
            device = leaves[0].device if leaves else None

            def tensor(value: Any) -> Tensor:
                if isinstance(value, Tensor):
                    return value.to(device=device)
                kind = torch.int32 if isinstance(value, Integral) else floats(like)
                return torch.full((), value, dtype=kind, device=device)

            return {name: tensor(value) for name, value in values.items()}

        def at(count: Tensor, like: Tree) -> dict[str, Tensor]:
            values = tensors({name: schedule(count) for name, schedule in schedules.items()}, like)
            return {
                name: value.to(floats(like)) if value.is_floating_point() else value for name, value in values.items()
            }

        def init(params: Tree) -> State:
            count = new_count(params)
            values = {**tensors(numbers, params), **at(count, params)}
            values = {name: value.clone() for name, value in values.items()}  # to be written to
            return InjectHyperparamsState(count, values, tx.init(params))

        def update(updates: Tree, state: InjectHyperparamsState, params: Tree | None = None) -> tuple[Tree, State]:
            like = updates if params is None else params
            values = {**state.hyperparams, **at(state.count, like)}
            out, inner = updated(made(tensors(values, like)), updates, state.inner_state, params)
            return out, InjectHyperparamsState(state.count + 1, values, inner)

        return GradientTransformation(init, update, tx.elementwise, Around(tx))

    return factory


def _first_value(name: str, schedule: Callable[[Any], Any]) -> Any:
    """Returns the value at count 0. Raises TypeError if `schedule` is not a function of a count."""
    try:
        return schedule(0)
    except TypeError as error:
        raise TypeError(
            f"inject_hyperparams: {name} is a function, so it is taken for a schedule, `count -> value`, but at count "
            f"0: {error}. If it is no schedule, say inject_hyperparams(..., static_args={name!r})"
        ) from error


# ---- One optimizer step for several gradients, as in Optax's `MultiSteps`:
#
#     mean += (gradient - mean) / (mini_step + 1)
#     every k-th time:  update, inner state = inner optimizer(mean);  mean = 0
#     else:             update = 0, the inner state stays
#
# Only the device knows which of the two a step is, since steps skipped there are not counted. So the inner optimizer
# is computed every time, and thrown away k - 1 times out of k. `train_step(microbatches=k)` has the same gradients in
# one step, without that, and without memory for the mean; this is for steps that cannot be one, or for a changing k.


class MultiStepsState(NamedTuple):
    """The state of `multi_steps`.

    mini_step: int32 [], gradients in the mean; gradient_step: int32 [], steps of the inner optimizer
    inner_opt_state: its state; acc_grads: the mean, or sum, a tree like the parameters
    """

    mini_step: Tensor
    gradient_step: Tensor
    inner_opt_state: State
    acc_grads: Tree


def multi_steps(
    opt: Any,
    every_k_schedule: int | Callable[[Tensor], Any],
    use_grad_mean: bool = True,
    accumulator_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Applies `opt` to the mean of k gradients, every k-th step; updates are zero in between.

    every_k_schedule: k, at least 1, or a function of `gradient_step`, an int32 [] that the host should not read
    use_grad_mean: False for the sum; accumulator_dtype: of the mean or sum, default float32, float64 for parameters in
        float64

    A step skipped because it is not finite has no effect: the mean keeps its bits. (Optax has `should_skip_update_fn`
    for that.) `state.mini_step == 0` after a step means that `opt` has taken one. Raises ValueError if k is a number
    below 1.

    >>> tx = ya.optim.multi_steps(ya.optim.sgd(0.1), every_k_schedule=2)
    >>> first, opt_state = tx.update(g, tx.init(w), w)
    >>> second, _ = tx.update(g, opt_state, w)
    >>> first, second
    (tensor([0., 0.]), tensor([-0.3000,  0.4000]))
    """
    tx = as_transformation(opt)
    if not callable(every_k_schedule) and every_k_schedule < 1:
        raise ValueError(f"multi_steps: expected a number of gradients of at least 1, got {every_k_schedule}")

    def init(params: Tree) -> State:
        def mean(p: Tensor) -> Tensor:
            return torch.zeros_like(p, dtype=accumulator_dtype or torch.promote_types(p.dtype, torch.float32))

        return MultiStepsState(new_count(params), new_count(params), tx.init(params), optree.tree_map(mean, params))

    def update(updates: Tree, state: MultiStepsState, params: Tree | None = None) -> tuple[Tree, State]:
        mini, k = state.mini_step, every_k_schedule
        k = k(state.gradient_step) if callable(k) else k
        emit = mini == k - 1

        def gathered(g: Tensor, acc: Tensor) -> Tensor:
            return (acc + (g - acc) / (mini + 1) if use_grad_mean else acc + g).to(acc.dtype)

        acc = optree.tree_map(gathered, updates, state.acc_grads)
        given = optree.tree_map(lambda mean, g: mean.to(g.dtype), acc, updates)
        steps, inner = updated(tx, given, state.inner_opt_state, params)
        after = MultiStepsState(
            mini_step=((mini + 1) % k).to(mini.dtype),
            gradient_step=state.gradient_step + emit,
            inner_opt_state=chosen(emit, inner, state.inner_opt_state),
            acc_grads=chosen(emit, optree.tree_map(torch.zeros_like, acc), acc),
        )
        return chosen(emit, steps, optree.tree_map(torch.zeros_like, steps)), after

    return GradientTransformation(init, update, tx.elementwise, Around(tx))


# ---- Skips steps that are not finite, as in Optax, but not for ever.


class ApplyIfFiniteState(NamedTuple):
    """The state of `apply_if_finite`.

    notfinite_count: int32 [], steps in a row that were not finite, up to the last; last_finite: bool []
    total_notfinite: int32 [], all of them; inner_state: of the inner transformation
    """

    notfinite_count: Tensor
    last_finite: Tensor
    total_notfinite: Tensor
    inner_state: State


def apply_if_finite(inner: Any, max_consecutive_errors: int) -> GradientTransformation:
    """Leaves out steps with an infinite element or NaN in the updates, on any rank; after `max_consecutive_errors` of
    them in a row, they are taken.

    `train_step` skips such steps before any transformation sees them, and without a limit: pass `skip_nonfinite=False`
    to leave it to this one. It needs the updates of all units first, so programs with `update=True` refuse it.

    >>> tx = ya.optim.apply_if_finite(ya.optim.sgd(0.1), max_consecutive_errors=3)
    >>> updates, opt_state = tx.update(g / 0, tx.init(w), w)
    >>> updates, opt_state.notfinite_count
    (tensor([0., 0.]), tensor(1, dtype=torch.int32))
    """
    tx = as_transformation(inner)

    def init(params: Tree) -> State:
        count = new_count(params)
        return ApplyIfFiniteState(count, torch.ones_like(count, dtype=torch.bool), count.clone(), tx.init(params))

    def update(updates: Tree, state: ApplyIfFiniteState, params: Tree | None = None) -> tuple[Tree, State]:
        # a norm of flags is a sum over all ranks of what each has; one of updates may overflow
        finite = global_norm(optree.tree_map(lambda u: u.isfinite().logical_not().to(u.dtype), updates)) == 0
        in_row = chosen(finite, torch.zeros_like(state.notfinite_count), state.notfinite_count + 1)
        takes = finite | (in_row > max_consecutive_errors)
        steps, after = updated(tx, updates, state.inner_state, params)
        total = chosen(finite, state.total_notfinite, state.total_notfinite + 1)
        kept = ApplyIfFiniteState(in_row, finite, total, chosen(takes, after, state.inner_state))
        return chosen(takes, steps, optree.tree_map(torch.zeros_like, steps)), kept

    why = "apply_if_finite looks at the updates of all units first"
    return GradientTransformation(init, update, tx.elementwise, Around(tx, why))
