"""`python -m train published`: the planner against a published table of step times, each row predicted from the others.

--better: what the planner expects to beat the published schedule; --variants: what the times do not tell.
"""

from train.published.command import main

__all__ = ["main"]
