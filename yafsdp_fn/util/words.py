"""Numbers and functions in words: `counted(4096, "batch")` is "4,096 batches", a schedule `zero3(prefetch=2)`."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Taken = ParamSpec("Taken")
Result = TypeVar("Result")


def counted(number: int, noun: str) -> str:
    """Writes a number and its noun, in the plural unless there is one of it."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


class Made:
    """A function that a factory has returned. It prints as the call of the factory."""

    def __init__(self, function: Callable[..., Any], call: str) -> None:
        self._function, self._call = function, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return self._call


def shown(factory: Callable[Given, Callable[Taken, Result]]) -> Callable[Given, Callable[Taken, Result]]:
    """Decorates a factory: what it returns prints as the call that made it, not as a function's address."""

    @functools.wraps(factory)
    def make(*args: Given.args, **kwargs: Given.kwargs) -> Callable[Taken, Result]:
        given = [*map(repr, args), *[f"{name}={value!r}" for name, value in kwargs.items()]]
        return Made(factory(*args, **kwargs), f"{factory.__name__}({', '.join(given)})")

    return make
