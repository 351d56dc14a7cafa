"""What a function does, as a key: functions with equal keys run the same code on the same values they close over.

A loss often defines its block anew in every call; the key is the same as long as the values are. As under `jax.jit`,
globals and attributes of objects count as constants.
"""

import functools
from collections.abc import Hashable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor

CONSTANT = frozenset({type(None), bool, int, float, str})


class Unfit(Exception):
    """Why a call has no key or no graph; the text continues `the block ...`."""


def code_of(value: Any, inside: tuple[Any, ...] = ()) -> Hashable:
    """The key of a function, or of another value that a call depends on.

    Raises Unfit for a tensor, whose values may change, and for what cannot be hashed, since it may change, too.
    inside: the functions that `value` was found in, for those that close over themselves
    """
    if type(value) in CONSTANT:  # the usual case, and quick
        return type(value), value
    if isinstance(value, Tensor):
        raise Unfit(
            f"uses a tensor of shape {tuple(value.shape)} that is not an argument: pass it as one, in xs, or in consts"
        )
    if isinstance(value, FunctionType):
        if any(value is outer for outer in inside):
            return "itself"
        compiled = getattr(value, "_torchdynamo_orig_callable", None)
        if compiled is not None:
            return value, code_of(compiled, inside)
        held = (value.__defaults__, tuple((value.__kwdefaults__ or {}).items()), value.__closure__ or ())
        return value.__module__, value.__code__, code_of(held, (*inside, value))
    if isinstance(value, MethodType):
        return code_of((value.__func__, value.__self__), inside)
    if isinstance(value, functools.partial):
        return code_of((functools.partial, value.func, value.args, tuple(value.keywords.items())), inside)
    if isinstance(value, CellType):
        try:
            return code_of(value.cell_contents, inside)
        except ValueError:  # not assigned yet
            return "empty"
    if isinstance(value, tuple):
        return type(value), tuple(code_of(item, inside) for item in value)
    try:
        hash(value)
    except TypeError:
        raise Unfit(f"depends on a {type(value).__name__}, which may change; pass it as an argument") from None
    return type(value), value
