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
    "launch": ("train.launch.command", "start one of these on several ranks of this machine"),
    "plan": ("train.plan", "time and memory of a model on a cluster, before it runs"),
}
"""The subcommands by name: (module with `main(argv) -> int`, what it does)."""

GONE = {
    "bench": "python -m benchmarks",
    "published": "python -m benchmarks published",
    "predict": "python -m train clm --calibrate, then python -m train report",
}
"""Subcommands that have gone, and the commands in their place."""


def unknown(name: str) -> str:
    """The error of a name that is none of them."""
    if name in GONE:
        return f"{name} has gone; in its place: {GONE[name]}"
    close = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
    return f"unknown subcommand {name!r}" + (f"; did you mean {close[0]}?" if close else "")
