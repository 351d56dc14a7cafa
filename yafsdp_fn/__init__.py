"""yafsdp_fn: sharded training of stacked models as functions, with the schedule as data."""

import importlib
from typing import Any

from yafsdp_fn import initializers, optim, schedules
from yafsdp_fn.algebra import global_norm, normal_like, vdot
from yafsdp_fn.batch import shard_batch
from yafsdp_fn.chunk import chunk
from yafsdp_fn.comm.agreement import RanksDisagree
from yafsdp_fn.comm.streams import CommunicationError
from yafsdp_fn.cross_entropy import linear_cross_entropy
from yafsdp_fn.emulated import emulate
from yafsdp_fn.linear import embedding, linear
from yafsdp_fn.map_layers import map_layers
from yafsdp_fn.mesh import mesh
from yafsdp_fn.planner import Cluster, DoesNotFit, calibrate, memory, plan, search, simulate, trace
from yafsdp_fn.precision import Precision
from yafsdp_fn.reductions import Max, Mean, Sum
from yafsdp_fn.runtime.session import OrderChanged
from yafsdp_fn.scan import apply, scan
from yafsdp_fn.schedules import Program, Refused, remat, verify
from yafsdp_fn.sharded import Sharded, leaf_mask
from yafsdp_fn.sources import Lazy, materialize
from yafsdp_fn.state import PlainState, ShardedState, init, shard, unshard
from yafsdp_fn.timeline import Timeline, compare, record
from yafsdp_fn.transform import eval_step, grad, train_step, value_and_grad
from yafsdp_fn.tree import Param, Pinned, Stacked, Unit, frozen, names, strip


def __getattr__(name: str) -> Any:
    if name == "checkpoint":  # torch.distributed.checkpoint takes a second to import
        return importlib.import_module("yafsdp_fn.checkpoint")
    raise AttributeError(f"module 'yafsdp_fn' has no attribute {name!r}")


__all__ = [
    "Cluster",
    "CommunicationError",
    "DoesNotFit",
    "Lazy",
    "Max",
    "Mean",
    "OrderChanged",
    "Param",
    "Pinned",
    "PlainState",
    "Precision",
    "Program",
    "RanksDisagree",
    "Refused",
    "Sharded",
    "ShardedState",
    "Stacked",
    "Sum",
    "Timeline",
    "Unit",
    "apply",
    "calibrate",
    "checkpoint",
    "chunk",
    "compare",
    "embedding",
    "emulate",
    "eval_step",
    "frozen",
    "global_norm",
    "grad",
    "init",
    "initializers",
    "leaf_mask",
    "linear",
    "linear_cross_entropy",
    "map_layers",
    "materialize",
    "memory",
    "mesh",
    "names",
    "normal_like",
    "optim",
    "plan",
    "record",
    "remat",
    "scan",
    "schedules",
    "search",
    "shard",
    "shard_batch",
    "simulate",
    "strip",
    "trace",
    "train_step",
    "unshard",
    "value_and_grad",
    "vdot",
    "verify",
]
