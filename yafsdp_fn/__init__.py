"""yafsdp_fn: sharded training of stacked models as functions, with the schedule as data."""

from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from yafsdp_fn import planner, schedules, timeline
from yafsdp_fn.program.program import Program
from yafsdp_fn.schedules import verify

# Programs are built, proved and simulated without torch: in a browser, say (docs/playground). It is not imported late
# where it is there: `scan`, `mesh` and five other names are of a function and of its module, which would replace it.
if TYPE_CHECKING or find_spec("torch"):
    from yafsdp_fn import optim, params
    from yafsdp_fn.checksum import checksum
    from yafsdp_fn.chunk import chunk
    from yafsdp_fn.dist.axes import (
        all_gather,
        all_to_all,
        axis_index,
        axis_size,
        pmax,
        ppermute,
        psum,
        psum_scatter,
    )
    from yafsdp_fn.launch import launch
    from yafsdp_fn.mesh import mesh
    from yafsdp_fn.modules.functionalize import functionalize, load_into
    from yafsdp_fn.modules.lora import lora, merge_lora
    from yafsdp_fn.named_weights import named_weights
    from yafsdp_fn.nn.cross_entropy import linear_cross_entropy
    from yafsdp_fn.nn.linear import embedding, linear
    from yafsdp_fn.nn.low_rank import LowRank
    from yafsdp_fn.params.algebra import global_norm, normal_like, vdot
    from yafsdp_fn.params.sharded import Precision, Sharded
    from yafsdp_fn.params.sources import Lazy, materialize
    from yafsdp_fn.params.tree import Param, Pinned, Stacked, Unit, frozen
    from yafsdp_fn.runtime.arguments import shard_batch
    from yafsdp_fn.runtime.reductions import Max, Mean, Sum
    from yafsdp_fn.runtime.state import PlainState, ShardedState
    from yafsdp_fn.runtime.whole_layers import map_whole_layers
    from yafsdp_fn.scan import apply, scan
    from yafsdp_fn.sharding import init, shard, unshard
    from yafsdp_fn.train_step import train_step
    from yafsdp_fn.transform import eval_step, functional_loss, grad, value_and_grad


__version__ = "0.1.0"

_MODULES = ("schedules", "planner", "optim", "params", "timeline")


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "errors"):  # checkpoints take their time to import
        return import_module(f"yafsdp_fn.{name}")
    if name in __all__:
        raise AttributeError(f"module 'yafsdp_fn' has no attribute {name!r} without torch, which is not installed")
    meant = [f"ya.{module}.{name}" for module in _MODULES if name in getattr(globals().get(module), "__all__", ())]
    meant = meant or [f"ya.{near}" for near in get_close_matches(name, __all__, 1)]
    hint = f"; did you mean {meant[0]}?" if meant else ""
    raise AttributeError(f"module 'yafsdp_fn' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted(__all__)


# fmt: off
__all__ = [
    "Lazy", "LowRank", "Max", "Mean", "Param", "Pinned", "PlainState", "Precision", "Program", "Sharded",
    "ShardedState", "Stacked", "Sum", "Unit", "all_gather", "all_to_all", "apply", "axis_index", "axis_size",
    "checkpoint", "checksum", "chunk", "embedding", "errors", "eval_step", "frozen", "functional_loss", "functionalize",
    "global_norm", "grad", "init", "launch", "linear", "linear_cross_entropy", "load_into", "lora", "map_whole_layers",
    "materialize", "merge_lora", "mesh", "named_weights", "normal_like", "optim", "params", "planner", "pmax",
    "ppermute", "psum", "psum_scatter", "scan", "schedules", "shard", "shard_batch",
    "timeline", "train_step", "unshard", "value_and_grad", "vdot", "verify",
]
# fmt: on
