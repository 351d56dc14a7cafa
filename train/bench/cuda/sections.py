"""The sections, in the order of their value: a time budget cuts off the end of the list."""

from __future__ import annotations

from typing import NamedTuple

PACKAGE = "train.bench.cuda"
ROWS = ("llama2-70b/256", "llama2-7b/64", "llama2-34b/256", "llama2-13b/128", "llama2-34b/128", "llama3-8b/64")


class Section(NamedTuple):
    """`run(setting, report, *arguments)` of a module, for at most `limit_s` seconds."""

    module: str
    arguments: tuple[str, ...]
    limit_s: float


SECTIONS: dict[str, Section] = {
    "calibration": Section(f"{PACKAGE}.calibration", (), 60),
    "one rank, 8b": Section(f"{PACKAGE}.one_rank", ("8b",), 120),
    f"emulated, {ROWS[0]}": Section(f"{PACKAGE}.emulated", (ROWS[0],), 90),
    "one rank, 1b": Section(f"{PACKAGE}.one_rank", ("1b",), 90),
    "memory": Section(f"{PACKAGE}.memory", (), 90),
    "order": Section(f"{PACKAGE}.order", (), 60),
    **{f"emulated, {row}": Section(f"{PACKAGE}.emulated", (row,), 75) for row in ROWS[1:]},
    "levers": Section(f"{PACKAGE}.levers", (), 150),
}
"""name -> Section. The first one gives the others this device's matrix rate."""
