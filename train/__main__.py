"""`python -m train SUBCOMMAND ...`; each subcommand's own flags: `python -m train SUBCOMMAND --help`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable

from train.subcommands import SUBCOMMANDS, unknown


def main(argv: list[str]) -> int:
    if argv and argv[0] in SUBCOMMANDS:  # imported only when asked for
        module = importlib.import_module(SUBCOMMANDS[argv[0]][0])
        status: int = module.main(argv[1:])
        return status
    usage = "usage: python -m train SUBCOMMAND ...\n\n" + "\n".join(
        f"  {name:<11}{text}" for name, (_, text) in SUBCOMMANDS.items()
    )
    if argv and argv[0] in ("-h", "--help"):
        print(usage)
        return 0
    print(f"{usage}\n\n{unknown(argv[0]) if argv else 'no subcommand given'}", file=sys.stderr)
    return 2


def flushed(argv: list[str], main: Callable[[list[str]], int] = main) -> int:
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


def end(main: Callable[[list[str]], int]) -> None:
    """Runs `main` on the arguments of this process, and ends it."""
    try:
        sys.exit(flushed(sys.argv[1:], main))
    except KeyboardInterrupt as interrupt:  # no traceback: one line, of rank 0
        if os.environ.get("RANK", "0") == "0":
            print(interrupt if interrupt.args else "interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    end(main)
