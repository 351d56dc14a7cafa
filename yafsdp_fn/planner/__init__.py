"""What a program will cost before it runs: clusters, costs, simulation, memory, search."""

from yafsdp_fn.planner.abstract_trace import trace
from yafsdp_fn.planner.cluster import CLUSTERS, Cluster
from yafsdp_fn.planner.footprint import Memory, memory
from yafsdp_fn.planner.plan import DoesNotFit, Plan, plan
from yafsdp_fn.planner.search import Found, min_ckpt_layers, search
from yafsdp_fn.planner.simulate import simulate

__all__ = ["CLUSTERS", "Cluster", "DoesNotFit", "Found", "Memory", "Plan"]
__all__ += ["memory", "min_ckpt_layers", "plan", "search", "simulate", "trace"]
