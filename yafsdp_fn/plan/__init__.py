"""What a program will cost before it runs: clusters, costs, simulation, memory, search."""

from yafsdp_fn.plan.cluster import CLUSTERS, Cluster
from yafsdp_fn.plan.memory import DoesNotFit, Memory, memory
from yafsdp_fn.plan.simulate import simulate
from yafsdp_fn.plan.trace import trace

__all__ = ["CLUSTERS", "Cluster", "DoesNotFit", "Memory", "memory", "simulate", "trace"]
