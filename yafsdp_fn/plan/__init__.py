"""What a program will cost before it runs: clusters, costs, simulation, memory, search."""

from yafsdp_fn.plan.calibrate import calibrate
from yafsdp_fn.plan.cluster import CLUSTERS, Cluster
from yafsdp_fn.plan.memory import Memory, memory
from yafsdp_fn.plan.plan import DoesNotFit, Plan, plan
from yafsdp_fn.plan.search import Found, min_ckpt_layers, search
from yafsdp_fn.plan.simulate import simulate
from yafsdp_fn.plan.trace import trace

__all__ = [
    "CLUSTERS",
    "Cluster",
    "DoesNotFit",
    "Found",
    "Memory",
    "Plan",
    "calibrate",
    "memory",
    "min_ckpt_layers",
    "plan",
    "search",
    "simulate",
    "trace",
]
