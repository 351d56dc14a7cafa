"""Hyperparameters in the optimizer's state, as in Optax: they may be changed between steps, and are saved with it.

tx = inject_hyperparams(adamw, static_args="mask")(learning_rate=3e-4, weight_decay=0.1, mask=rule)
state.opt_state.hyperparams["learning_rate"].fill_(1e-4)       # 0-dim: on every rank; no program is built anew
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from numbers import Integral, Number
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.around import Around
from yafsdp_fn.optim.base import GradientTransformation, State, as_transformation, new_count
from yafsdp_fn.params.tree import Tree


class InjectHyperparamsState(NamedTuple):
    """count: int32 [], completed steps; hyperparams: by name, [] each; inner_state: of what they are injected into."""

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count
    hyperparams: dict[str, Any]
    inner_state: State


def inject_hyperparams(
    inner_factory: Callable[..., Any],
    static_args: str | Iterable[str] = (),
    hyperparam_dtype: torch.dtype | None = None,
) -> Callable[..., GradientTransformation]:
    """`inner_factory`, such as `adamw`, whose numeric arguments become 0-dim tensors in the state.

    A function among the arguments is taken for a schedule: its hyperparameter is its value at the count, and what is
    written over that has no effect. bools, and whatever is no number, are passed on as they are.

    static_args: names of arguments to be passed on as they are: functions that are no schedules, such as a mask that is
        a rule, and numbers that must be known on the host
    hyperparam_dtype: of those that were given as floats; by default float32, float64 where a parameter is

    The transformation is made anew in every step, so that it follows its definition, not a fused kernel: a step of
    AdamW takes 16 times as long (50 ms instead of 3 for 4M parameters on one core of a CPU), and memory for all new
    values at once. What a factory asks of a number, such as `adam` whether b1, b2 and eps are in range, the host asks
    of the tensor, which on a device it waits for: `static_args=("b1", "b2", "eps")` spares that.
    Raises ValueError where `static_args` names no argument.
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

        # with numbers first: a bad one is refused here, and by the host
        tx = made({name: _first_value(name, schedule) for name, schedule in schedules.items()})

        def tensors(values: dict[str, Any], like: Tree) -> dict[str, Tensor]:
            leaves = optree.tree_leaves(like)
            wide = any(leaf.dtype == torch.float64 for leaf in leaves)
            floats = hyperparam_dtype or (torch.float64 if wide else torch.float32)
            device = leaves[0].device if leaves else None

            def tensor(value: Any) -> Tensor:
                if isinstance(value, Tensor):
                    return value.to(device=device)
                kind = torch.int32 if isinstance(value, Integral) else floats
                return torch.full((), value, dtype=kind, device=device)

            return {name: tensor(value) for name, value in values.items()}

        def at(count: Tensor, like: Tree) -> dict[str, Tensor]:
            return tensors({name: schedule(count) for name, schedule in schedules.items()}, like)

        def init(params: Tree) -> State:
            count = new_count(params)
            values = {**tensors(numbers, params), **at(count, params)}
            values = {name: value.clone() for name, value in values.items()}  # to be written to
            return InjectHyperparamsState(count, values, tx.init(params))

        def update(updates: Tree, state: InjectHyperparamsState, params: Tree | None = None) -> tuple[Tree, State]:
            like = updates if params is None else params
            values = {**state.hyperparams, **at(state.count, like)}
            out, inner = made(tensors(values, like)).update(updates, state.inner_state, params)
            return out, InjectHyperparamsState(state.count + 1, values, inner)

        return GradientTransformation(init, update, tx.elementwise, Around(tx))

    return factory


def _first_value(name: str, schedule: Callable[[Any], Any]) -> Any:
    """At count 0. Raises TypeError where it is no function of a count."""
    try:
        return schedule(0)
    except TypeError as error:
        raise TypeError(
            f"inject_hyperparams: {name} is a function, so it is taken for a schedule, `count -> value`, but at count "
            f"0: {error}. If it is no schedule, say inject_hyperparams(..., static_args={name!r})"
        ) from error
