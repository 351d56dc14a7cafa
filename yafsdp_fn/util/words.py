"""Numbers and functions in words: `counted(4096, "batch")` is "4,096 batches", a schedule `zero3(prefetch=2)`."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Factory = TypeVar("Factory", bound=Callable[..., Any])


def counted(number: int, noun: str) -> str:
    """Writes a number and its noun, in the plural unless there is one of it."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


class Made(functools.partial[Any]):
    """A function that a factory has returned. It prints as the call of the factory."""

    call: str

    def __repr__(self) -> str:
        return self.call


def shown(factory: Factory) -> Factory:
    """Decorates a factory: what it returns prints as the call that made it, not as a function's address."""

    def make(*args: Any, **kwargs: Any) -> Made:
        made = Made(factory(*args, **kwargs))
        given = [*map(repr, args), *[f"{name}={value!r}" for name, value in kwargs.items()]]
        made.call = f"{factory.__name__}({', '.join(given)})"
        return made

    return functools.wraps(factory)(make)  # type: ignore[return-value]
