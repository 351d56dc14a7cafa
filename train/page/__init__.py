"""`python -m train report`: one page that shows a run, or two beside each other."""

from train.page.command import main

__all__ = ["main"]
