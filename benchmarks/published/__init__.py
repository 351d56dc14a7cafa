"""`python -m benchmarks published`: the planner against published tables of step times.

By itself: YaFSDP's table, each row predicted from the others. --better: what the planner expects to beat the published
schedule; --variants: what the times do not tell. --rows FILE.csv: runs of LLM Foundry, predicted with figures that
--fit has found in the committed ones on eight GPUs; --register: the same runs on more nodes.
"""

from benchmarks.published.command import main

__all__ = ["main"]
