"""What ranks must have alike though no collective shows it, in words that are equal where ranks agree.

    optimizer(tx)      {"transformation 0": "Adam(b1=0.9, b2=0.999, eps=1e-08)", "transformation 1": "Scale(by=-0.001)"}
    function(loss)     "loss_fn #1f0c22a4 (smoothing=0.1)": a digest of its code, and the constants that it closes over
    environment()      versions of Python, torch and this library, flags of torch and variables that must not differ

When in doubt a part is left out: memory, names of files, numbers of devices, objects of unknown classes.
"""

import dataclasses
import enum
import functools
import os
import re
import sys
import types
import warnings
import zlib
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.comm.communicators import Communicators
from yafsdp_fn.optim.around import Around
from yafsdp_fn.optim.base import GradientTransformation, stages

VARIABLES = (
    *("ALGO", "PROTO", "NTHREADS", "BUFFSIZE", "MIN_NCHANNELS", "MAX_NCHANNELS", "MIN_CTAS", "MAX_CTAS", "NVLS_ENABLE"),
    *("COLLNET_ENABLE", "LAUNCH_ORDER_IMPLICIT", "P2P_DISABLE", "SHM_DISABLE", "IB_DISABLE", "CUMEM_ENABLE"),
)
"""Of NCCL: where one rank takes another algorithm, protocol or transport than its peer, both wait for ever."""

OTHER_VARIABLES = ("GLOO_DEVICE_TRANSPORT", "TORCH_GLOO_LAZY_INIT", "NVIDIA_TF32_OVERRIDE")

DEEP, LONG = 16, 1000
"""Levels that are looked into, and entries of one container."""


def environment() -> dict[str, str]:
    """Of this process. Names of network interfaces, debug levels and the like may differ, and are not in it."""
    names = [*(f"NCCL_{name}" for name in VARIABLES), *OTHER_VARIABLES]
    return {
        "the version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "the version of torch": torch.__version__,
        "the version of yafsdp_fn": _version(),
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": str(torch.are_deterministic_algorithms_enabled()),
        **{f"the variable {name}": os.environ.get(name, "not set") for name in names},
    }


def speed() -> dict[str, str]:
    """What may differ, but makes all ranks as slow as the slowest, or other last bits."""
    return {"torch.get_num_threads()": str(torch.get_num_threads())}


def _version() -> str:
    try:
        return metadata.version("yafsdp_fn")
    except metadata.PackageNotFoundError:  # run from its sources
        return "unknown"


def optimizer(tx: Any) -> dict[str, str]:
    """A transformation or a foreign pair, by the parts of its chain."""
    parts = [part for part, _ in stages(tx)]
    return {f"transformation {number}": _text(part, strict=True) for number, part in enumerate(parts)}


def function(fun: Callable[..., Any]) -> str:
    """A function that may know its rank: of what it closes over, numbers that are no integers."""
    return _text(fun, strict=False)


def compare(comms: Communicators, fun: Callable[..., Any], tx: Any = None) -> None:
    """Before the first step of `fun` and `tx` on a mesh: all ranks call it. One small collective, where they agree.

    Raises RanksDisagree for another optimizer: nothing would show it, and replicas and shards would drift apart.
    Warns of another function, and of what may differ: each rank's part of a loss counts as it is.
    """
    if comms.alone:
        return
    must = {} if tx is None else optimizer(tx)
    may = {"the function": function(fun), **speed()}
    if not comms.same_on_all(repr((must, may)), "comparing optimizers and losses"):
        comms.must_agree("the optimizer", must)
        if (differs := comms.difference("what they run", may)) is not None:
            warnings.warn(f"{differs}\nSteps go on: is that meant?", stacklevel=2)


def _text(value: Any, *, strict: bool, above: tuple[int, ...] = ()) -> str:
    """strict: with integers, bools and texts among what functions close over, which may tell ranks apart"""
    if id(value) in above or len(above) > DEEP:
        return "..."
    inner = functools.partial(_text, strict=strict, above=(*above, id(value)))
    match value:
        case bool() | int() | str() if above and not strict:
            return type(value).__name__
        case str():
            return "a path" if os.sep in value else repr(re.sub(r"^(\w+):\d+$", r"\1", value))  # cuda:1
        case enum.Enum():
            return f"{type(value).__qualname__}.{value.name}"
        case None | bool() | int() | float() | complex() | bytes() | torch.dtype():
            return repr(value)
        case torch.device():
            return value.type
        case Tensor():
            return _of_tensor(value)
        case GradientTransformation():
            if value.rule is None or isinstance(value.rule, Around):  # the rule is not all of it
                return f"{inner(value.init)}, {inner(value.update)}"
            return inner(value.rule)
        case functools.partial():
            return f"partial({inner(value.func)}, {inner(value.args)}, {inner(value.keywords)})"
        case types.MethodType():
            return f"{inner(value.__func__)} of {inner(value.__self__)}"
        case types.FunctionType():
            return _of_function(value, inner)
        case type() | types.BuiltinFunctionType():
            return f"{value.__module__}.{value.__qualname__}"
        case dict() | list() | tuple() | set() | frozenset() if len(value) > LONG:
            return f"{type(value).__name__} of {len(value)}"
        case dict():
            return f"{{{', '.join(sorted(f'{inner(key)}: {inner(of)}' for key, of in value.items()))}}}"
        case set() | frozenset():
            return f"{{{', '.join(sorted(map(inner, value)))}}}"
        case list() | tuple():
            return f"({', '.join(map(inner, value))})"
        case _ if dataclasses.is_dataclass(value):
            named = [f"{f.name}={inner(getattr(value, f.name, None))}" for f in dataclasses.fields(value) if f.compare]
            return f"{type(value).__name__}({', '.join(named)})"
        case _:
            return f"{type(value).__module__}.{type(value).__qualname__}"


def _of_tensor(value: Tensor) -> str:
    known = value.ndim == 0 and type(value) is Tensor and value.device.type == "cpu"  # elsewhere the host would wait
    return f"{value.dtype} {list(value.shape)}{f' {value.item()!r}' if known else ''}"


def _of_function(value: types.FunctionType, inner: Callable[[Any], str]) -> str:
    closed = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    named = [f"{name}={_of_cell(cell, inner)}" for name, cell in closed]
    named += [inner(default) for default in value.__defaults__ or ()]
    named += [f"{name}={inner(default)}" for name, default in sorted((value.__kwdefaults__ or {}).items())]
    return f"{value.__qualname__} #{zlib.crc32(_of_code(value.__code__).encode()):08x} ({', '.join(named)})"


def _of_cell(cell: types.CellType, inner: Callable[[Any], str]) -> str:
    try:
        return inner(cell.cell_contents)
    except ValueError:
        return "nothing yet"


def _of_code(code: types.CodeType) -> str:
    """What it does, without where it lies. Constants of code are the same for all ranks that have the same source."""
    consts = [_of_code(c) if isinstance(c, types.CodeType) else _text(c, strict=True) for c in code.co_consts]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, consts))
