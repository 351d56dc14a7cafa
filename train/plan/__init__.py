"""`python -m train plan`: what a Llama would take on a cluster: time, memory, and the timeline as a picture."""

from train.plan.command import main

__all__ = ["main"]
