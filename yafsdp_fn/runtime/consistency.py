"""Consistency checks of what ranks must have alike though no collective shows it: settings and versions."""

import dataclasses
import enum
import functools
import os
import re
import sys
import types
import warnings
import zlib
from collections.abc import Callable, Collection
from importlib import metadata
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.optim.base import Around, GradientTransformation, stages
from yafsdp_fn.params.sharded import is_sharded
from yafsdp_fn.util.mesh_axes import EXPERT

# ---- Describes settings that must be equal on all ranks although no collective shows it, in texts equal where ranks
# agree.
#
#   optimizer(tx)    {"transformation 0": "Adam(b1=0.9, b2=0.999, eps=1e-08)", "transformation 1": "Scale(by=-0.001)"}
#   environment()    versions of Python, torch and this library, flags of torch and variables that must not differ
#
# When in doubt a part is left out: memory, names of files, numbers of devices, objects of unknown classes.

VARIABLES = (
    *("ALGO", "PROTO", "NTHREADS", "BUFFSIZE", "MIN_NCHANNELS", "MAX_NCHANNELS", "MIN_CTAS", "MAX_CTAS", "NVLS_ENABLE"),
    *("COLLNET_ENABLE", "LAUNCH_ORDER_IMPLICIT", "P2P_DISABLE", "SHM_DISABLE", "IB_DISABLE", "CUMEM_ENABLE"),
)
"""NCCL's: ranks with another algorithm, protocol or transport than their peers wait for ever."""

OTHER_VARIABLES = ("GLOO_DEVICE_TRANSPORT", "TORCH_GLOO_LAZY_INIT", "NVIDIA_TF32_OVERRIDE")

DEEP, LONG = 16, 1000
"""Limits of what is described: levels of nesting, and entries of one container."""


def environment() -> dict[str, str]:
    """Describes this process. Network interfaces, debug levels and the like may differ, and are left out."""
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


def _version() -> str:
    try:
        return metadata.version("yafsdp_fn")
    except metadata.PackageNotFoundError:  # run from its sources
        return "unknown"


def optimizer(tx: Any) -> dict[str, str]:
    """Describes a transformation, or a foreign pair, by the parts of its chain."""
    parts = [part for part, _ in stages(tx)]
    return {f"transformation {number}": _text(part) for number, part in enumerate(parts)}


# ---- What may differ, but is seldom meant.


def warn_of_ranks(comms: Communicators, split: Collection[str], batch: Any, batch_axes: Collection[str]) -> None:
    """Warns, after the first step of a function on a mesh, of ranks that have other numbers of threads, of ranks that
    all have the same rows, of axes inside blocks that it has not named, and of ranks that compute parts of a layer on
    other batches. All ranks call it.

    split: axes that leaves in visits are split over; batch: all arguments that are not differentiated
    batch_axes: axes that batches have been cut along
    """
    # each rank says how many threads and what batch it has, and which axes it has named
    axes = [name for name, axis in comms.axes.items() if axis.size > 1]
    told = [name in comms.named for name in axes]
    threads = torch.get_num_threads()
    mine = digest(batch)
    # parameters in it may be of the state that the step has donated
    whole = sum(getattr(leaf, OF_A_RANK, 0) for leaf in optree.tree_leaves(batch, is_leaf=is_sharded))
    every = comms.numbers_of_all(torch.tensor([mine, whole, *told, threads], device="cpu"), "comparing batches")
    if (every[:, -1] != threads).any():
        warnings.warn(
            f"ranks compute with other numbers of threads, {every[:, -1].tolist()}: all wait for the slowest, and last "
            "bits may differ. Call torch.set_num_threads alike on all, or set OMP_NUM_THREADS",
            stacklevel=2,
        )
    if comms.batch_ranks > 1 and mine and (every[:, 0] == mine).all():
        warnings.warn(
            "all ranks have the same batch, so that each row counts once for every rank. Give each its own rows: "
            "ya.shard_batch(batch, mesh) of a batch that all have, or a DistributedSampler",
            stacklevel=2,
        )
    if (every[:, 1] != whole).any():
        warnings.warn(
            "ranks have given other rows to ya.shard_batch, which cuts a batch that all have alike: most rows of each "
            "rank are never seen. Its own rows, as a DistributedSampler gives them, go into the step as they are",
            stacklevel=2,
        )
    first = comms.world_rank - comms.rank
    for at, name in enumerate(axes, 2):
        (members,) = [ranks for ranks in comms.subgroups(along=(name,)) if comms.rank in ranks]
        of_subgroup = [first + rank for rank in members]
        alike = len(set(every[of_subgroup, 0].tolist())) == 1
        if every[:, at].any():
            if not alike and name in split and name not in (EXPERT, *batch_axes):
                warnings.warn(
                    f"ranks of {name} have other batches, and leaves are split over {name}: each computes its part of "
                    f"a layer on rows of its own, and sums over {name} mix them. Give them the same rows, as "
                    f"ya.shard_batch(batch, mesh) does; its split={{{name!r}: 1}} splits what is cut along {name}",
                    stacklevel=2,
                )
        elif name in split:
            warnings.warn(
                f"leaves are split over {name}, and neither a block nor the loss names it: each rank computes with its "
                f"own parts alone, where one rank would with whole leaves. What is computed from parts is put together "
                f"by ya.psum(x, {name!r}), say (docs/axes.md)",
                stacklevel=2,
            )
        elif alike:
            warnings.warn(
                f"the ranks of {name} all do the same: their batches are equal, no leaf is split over {name}, and "
                f"neither a block nor the loss names it. Leave it out of the mesh, for more ranks of shard",
                stacklevel=2,
            )


OF_A_RANK = "_yafsdp_rows_of_a_rank"
"""Attribute of the tensors that `shard_batch` returns: a digest of some elements of the whole batch."""


def digest(batch: Any) -> int:
    """Returns a number, equal for equal tensors. Shards do not count, nor do sparse and nested tensors."""
    found = 0
    for leaf in optree.tree_leaves(batch, is_leaf=is_sharded):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            found = zlib.crc32(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, found)
    return found


# ---- Values in texts; a function with what it closes over.


def _text(value: Any, above: tuple[int, ...] = ()) -> str:
    if id(value) in above or len(above) > DEEP:
        return "..."
    inner = functools.partial(_text, above=(*above, id(value)))
    match value:
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
            items = sorted(f"{inner(key)}: {inner(of)}" for key, of in value.items())
            return f"{{{', '.join(items)}}}"
        case set() | frozenset():
            return f"{{{', '.join(sorted(map(inner, value)))}}}"
        case list() | tuple():
            return f"({', '.join(map(inner, value))})"
        case _ if dataclasses.is_dataclass(value):
            compared = [field.name for field in dataclasses.fields(value) if field.compare]
            named = [f"{name}={inner(getattr(value, name, None))}" for name in compared]
            return f"{type(value).__name__}({', '.join(named)})"
        case _:
            return f"{type(value).__module__}.{type(value).__qualname__}"


def _of_tensor(value: Tensor) -> str:
    text = f"{value.dtype} {list(value.shape)}"
    if value.ndim == 0 and type(value) is Tensor and value.device.type == "cpu":  # elsewhere the host would wait
        text += f" {value.item()!r}"
    return text


def _of_function(value: types.FunctionType, inner: Callable[[Any], str]) -> str:
    parts = []
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        parts.append(f"{name}={_of_cell(cell, inner)}")
    parts += map(inner, value.__defaults__ or ())
    keywords = value.__kwdefaults__ or {}
    for name in sorted(keywords):
        parts.append(f"{name}={inner(keywords[name])}")
    return f"{value.__qualname__}({', '.join(parts)})"


def _of_cell(cell: types.CellType, inner: Callable[[Any], str]) -> str:
    try:
        return inner(cell.cell_contents)
    except ValueError:
        return "nothing yet"
