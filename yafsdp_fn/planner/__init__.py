"""Predicts what a program will cost before it runs: clusters, costs, simulation, memory, comparison, search."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from yafsdp_fn.planner.bound import Bound, bound
from yafsdp_fn.planner.cluster import CLUSTERS, Cluster
from yafsdp_fn.planner.compare import Comparison, compare
from yafsdp_fn.planner.footprint import Memory, predict_memory
from yafsdp_fn.planner.plan import DoesNotFit, Plan
from yafsdp_fn.planner.search import Found, min_ckpt_layers, search
from yafsdp_fn.planner.simulate import simulate
from yafsdp_fn.planner.synthesize import Synthesized
from yafsdp_fn.util.late_names import imported

if TYPE_CHECKING or find_spec("torch"):  # programs are planned without it, losses are not
    from yafsdp_fn.planner.loss_plan import plan
    from yafsdp_fn.planner.search_formats import FormatsFound, search_formats
    from yafsdp_fn.planner.trace import trace

__all__ = ["CLUSTERS", "Bound", "Cluster", "Comparison", "DoesNotFit", "Found", "Memory", "Plan", "Synthesized"]
__all__ += ["bound", "compare", "min_ckpt_layers", "plan", "predict_memory", "search", "simulate", "trace"]
__all__ += ["FormatsFound", "calibrate", "search_formats"]


def __getattr__(name: str) -> Any:
    return imported(__name__, {"calibrate": "yafsdp_fn.lab.calibrate"}, name)  # which needs ranks


def __dir__() -> list[str]:
    return sorted(__all__)
