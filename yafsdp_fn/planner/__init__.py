"""Predicts what a program will cost before it runs: clusters, costs, simulation, memory, search."""

from importlib import import_module
from typing import Any

from yafsdp_fn.planner.abstract_trace import trace
from yafsdp_fn.planner.bound import Bound, bound
from yafsdp_fn.planner.cluster import CLUSTERS, Cluster
from yafsdp_fn.planner.footprint import Memory, predict_memory
from yafsdp_fn.planner.plan import DoesNotFit, Plan, plan
from yafsdp_fn.planner.search import Found, min_ckpt_layers, search
from yafsdp_fn.planner.simulate import simulate
from yafsdp_fn.planner.synthesize import Written

__all__ = ["CLUSTERS", "Bound", "Cluster", "DoesNotFit", "Found", "Memory", "Plan", "Written"]
__all__ += ["bound", "min_ckpt_layers", "plan", "predict_memory", "search", "simulate", "trace"]
__all__ += ["calibrate", "emulate"]

_LATE = {"calibrate": "yafsdp_fn.lab.calibrate", "emulate": "yafsdp_fn.lab.emulated"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'yafsdp_fn.planner' has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)
