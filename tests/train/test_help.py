"""`python -m train SUBCOMMAND --help` in terminals of two widths."""

from __future__ import annotations

import importlib
import io
import itertools

import pytest

from train.subcommands import SUBCOMMANDS

OWN = "launch"
"""Written by hand."""


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("argv", [[name] for name in SUBCOMMANDS if name != OWN])
def test_lines_break_where_the_terminal_ends(argv: list[str], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr("sys.stdout", out)
    with pytest.raises(SystemExit):
        importlib.import_module(SUBCOMMANDS[argv[0]][0]).main([*argv[1:], "--help"])
    out.seek(0)
    rows = [line[2:-2] for line in out.read().splitlines() if line.startswith("│")]
    helps = max(len(row) - len(row.lstrip()) for row in rows if row.strip())  # the column where they begin
    for row, below in itertools.pairwise(rows):
        if below.startswith(" " * helps) and "  " in row.rstrip():  # else the row is a flag alone
            word = below.split()[0]
            assert len(row.rstrip()) + 1 + len(word) > len(row), f"{row.strip()} | {below.strip()}"
