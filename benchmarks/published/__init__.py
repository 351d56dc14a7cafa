"""`python -m benchmarks published`: the planner against published runs.

By itself: YaFSDP's table. --rows FILE.csv: runs of other frameworks, with the columns of published_runs.csv; --sources:
the committed ones, each by rates that were fitted without its source.
"""

from benchmarks.published.command import main

__all__ = ["main"]
