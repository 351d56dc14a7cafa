"""The subcommands of `python -m train`: no torch is imported to list them."""

from __future__ import annotations

import difflib

SUBCOMMANDS = {
    "clm": ("train.clm", "train a causal language model on text"),
    "sft": ("train.sft", "fine-tune a model on conversations"),
    "tokenizer": ("train.tokenizer", "learn a tokenizer from text"),
    "report": ("train.page", "a page about a run, or about two"),
    "sample": ("train.sample", "continue prompts, with a model of a run or of a Hugging Face directory"),
    "eval": ("train.evaluate", "perplexity of text, multiple choice, lm-eval's tasks, of such a model"),
    "export": ("train.export", "write a checkpoint as a Hugging Face directory"),
    "launch": ("train.launch", "start one of these on several ranks of this machine"),
    "plan": ("train.plan", "time, memory and money of a model on a cluster, before it runs"),
    "published": ("train.published", "the planner against a published table of step times"),
    "predict": ("train.predict", "a step predicted from this machine's figures, and measured"),
    "bench": ("train.bench", "step time and memory against other ways to shard"),
}
"""The subcommands by name: (module with `main(argv) -> int`, what it does)."""


def unknown(name: str) -> str:
    """The error of a name that is none of them."""
    close = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
    return f"unknown subcommand {name!r}" + (f"; did you mean {close[0]}?" if close else "")
