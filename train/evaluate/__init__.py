"""`python -m train eval`: what a model of a run, or of a Hugging Face directory, is worth: perplexity of text, multiple
choice, and the tasks of lm-eval where it is installed."""

from train.evaluate.command import main

__all__ = ["main"]
