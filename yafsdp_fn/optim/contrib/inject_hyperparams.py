"""Hyperparameters in the optimizer's state, as in Optax: they may be changed between steps, and are saved with
it.

tx = inject_hyperparams(adamw, static_args="mask")(learning_rate=3e-4, weight_decay=0.1, mask=rule)
state.opt_state.hyperparams["learning_rate"].fill_(1e-4)       # 0-dim: on every rank; no program is built anew
"""

import inspect
from collections.abc import Callable, Iterable
from functools import reduce, wraps
from numbers import Integral, Number
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim import Around, GradientTransformation, as_transformation, checked_update, new_count


class InjectHyperparamsState(NamedTuple):
    """The state around injected hyperparameters.

    count: int32 [], completed steps; hyperparams: by name, [] each; inner_state: of the inner transformation
    """

    count: Tensor  # type: ignore[assignment]  # Optax's name; it hides tuple.count
    hyperparams: dict[str, Any]
    inner_state: Any


def inject_hyperparams(
    inner_factory: Callable[..., Any], static_args: str | Iterable[str] = ()
) -> Callable[..., GradientTransformation]:
    """Returns `inner_factory`, such as `adamw`, with numeric arguments turned into 0-dim tensors in the state: floats
    in float32, in float64 if a parameter is.

    A function among the arguments counts as a schedule: its hyperparameter is its value at the count, and overwriting
    it has no effect. Bools, and anything that is not a number, are passed on as they are.

    static_args: names of arguments to pass on as they are: functions that are not schedules, such as a mask rule, and
        numbers that must be known on the host

    The transformation is made anew in every step, so it runs by its definition, not by a fused kernel: a step of AdamW
    takes 16 times as long (50 ms instead of 3 for 4M parameters on one core of a CPU), and memory for all new values at
    once. If a factory tests a number, as `adam` tests the ranges of b1, b2 and eps, the host reads the tensor, and
    waits for the device: `static_args=("b1", "b2", "eps")` avoids that. Raises ValueError if `static_args` names no
    argument.

    >>> tx = ya.optim.contrib.inject_hyperparams(ya.optim.sgd)(learning_rate=0.1)
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

    @wraps(inner_factory)
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

        def tensors(kept: dict[str, Any], count: Tensor, like: Any) -> dict[str, Tensor]:
            """Returns those that are kept, and the values of schedules at the count, as tensors on its device."""
            dtypes = [leaf.dtype for leaf in optree.tree_leaves(like)]
            floats = reduce(torch.promote_types, dtypes, torch.float32)
            values = {}
            for name, value in {**kept, **{name: schedule(count) for name, schedule in schedules.items()}}.items():
                if not isinstance(value, Tensor):
                    kind = torch.int32 if isinstance(value, Integral) else floats
                    value = torch.full((), value, dtype=kind, device=count.device)
                elif name in schedules and value.is_floating_point():
                    value = value.to(floats)
                values[name] = value.to(count.device)
            return values

        def init(params: Any) -> Any:
            count = new_count(params)
            values = {
                name: value.clone() for name, value in tensors(numbers, count, params).items()
            }  # to be written to
            return InjectHyperparamsState(count, values, tx.init(params))

        def update(updates: Any, state: InjectHyperparamsState, params: Any | None = None) -> tuple[Any, Any]:
            values = tensors(state.hyperparams, state.count, updates if params is None else params)
            out, inner = checked_update(made(values), updates, state.inner_state, params)
            after = {**state.hyperparams, **{name: values[name] for name in schedules}}
            return out, InjectHyperparamsState(state.count + 1, after, inner)

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
