"""Prints the page of the command line, made of `--help`, when the site is built: `python -m docs.cli`."""

from __future__ import annotations

import contextlib
import io
import os

from train.__main__ import main
from train.subcommands import SUBCOMMANDS

TOLD = {
    "clm": "running",
    "sft": "data",
    "tokenizer": "data",
    "report": "running",
    "sample": "models",
    "eval": "models",
    "export": "models",
    "launch": "running",
    "plan": "planner",
}
"""The page that tells how a subcommand is used."""
TEXT = """# python -m train

In a checkout, `python -m train SUBCOMMAND ...`: reference code that trains models of this repository, and looks at
plans, runs and other libraries; [`yafsdp`](command.md) does what needs no checkout.
`make train` is `launch clm`, `report` and `sample`.

| subcommand | does | more |
|---|---|---|
{rows}

What follows is their `--help`.
"""


def page() -> str:
    """Returns the page, with the help of every subcommand as a terminal of 100 columns shows it."""
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    rows = [
        f"| [{name}](#{name}) | {text} | [{TOLD[name]}.md]({TOLD[name]}.md) |"
        for name, (_, text) in SUBCOMMANDS.items()
    ]
    return TEXT.format(rows="\n".join(rows)) + "".join(
        f"\n## {name}\n\n```\n{usage(name)}\n```\n" for name in SUBCOMMANDS
    )


def usage(name: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([name, "--help"])
    return "\n".join(line.rstrip() for line in said.getvalue().strip().splitlines())


if __name__ == "__main__":
    print(page(), end="")
