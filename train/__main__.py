"""`python -m train SUBCOMMAND ...`; each subcommand's own flags: `python -m train SUBCOMMAND --help`."""

from __future__ import annotations

import importlib
import os
import signal
import sys

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
"""name: (module with `main(argv) -> int`, what it does). Imported only when asked for: `--help` needs no torch."""


def main(argv: list[str]) -> int:
    if argv and argv[0] in SUBCOMMANDS:
        module = importlib.import_module(SUBCOMMANDS[argv[0]][0])
        status: int = module.main(argv[1:])
        return status
    usage = "usage: python -m train SUBCOMMAND ...\n\n" + "\n".join(
        f"  {name:<11}{text}" for name, (_, text) in SUBCOMMANDS.items()
    )
    if argv and argv[0] in ("-h", "--help"):
        print(usage)
        return 0
    came = f"unknown subcommand {argv[0]!r}" if argv else "no subcommand given"
    print(f"{came}\n{usage}", file=sys.stderr)
    return 2


def flushed(argv: list[str]) -> int:
    """`main`; a reader of its output that goes away (`| head`) ends it, without a word. For the end of a process: a
    signal that comes later is too late, and does not become its status."""
    try:
        try:
            status = main(argv)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            return status
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    try:
        sys.exit(flushed(sys.argv[1:]))
    except KeyboardInterrupt as interrupt:  # no traceback: one line, of rank 0
        if os.environ.get("RANK", "0") == "0":
            print(interrupt if interrupt.args else "interrupted", file=sys.stderr)
        sys.exit(130)
