"""The sections, in the order of their value: a time budget cuts off the end of the list."""

from __future__ import annotations

from typing import NamedTuple

from train.bench.cuda import includes
from train.bench.cuda.includes import Includes

PACKAGE = "train.bench.cuda"
ROWS = ("llama2-70b/256", "llama2-7b/64", "llama2-34b/256", "llama2-13b/128", "llama2-34b/128", "llama3-8b/64")


class Section(NamedTuple):
    """`run(setting, report, *arguments)` of a module, for at most `limit_s` seconds."""

    module: str
    arguments: tuple[str, ...]
    limit_s: float
    includes: Includes


SECTIONS: dict[str, Section] = {
    "calibration": Section(f"{PACKAGE}.calibration", (), 60, includes.CALIBRATION),
    "one rank, 8b": Section(f"{PACKAGE}.one_rank", ("8b",), 120, includes.ONE_RANK),
    f"emulated, {ROWS[0]}": Section(f"{PACKAGE}.emulated", (ROWS[0],), 90, includes.EMULATED),
    "one rank, 1b": Section(f"{PACKAGE}.one_rank", ("1b",), 90, includes.ONE_RANK),
    "memory": Section(f"{PACKAGE}.memory", (), 90, includes.MEMORY),
    "order": Section(f"{PACKAGE}.order", (), 60, includes.ORDER),
    **{f"emulated, {row}": Section(f"{PACKAGE}.emulated", (row,), 75, includes.EMULATED) for row in ROWS[1:]},
    "levers": Section(f"{PACKAGE}.levers", (), 150, includes.LEVERS),
}
"""name -> Section. The first one gives the others this device's matrix rate; without it they leave out MFU."""
