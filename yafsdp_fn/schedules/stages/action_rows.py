"""Rows of actions, as torch.distributed.pipelining writes them, read.

    0F0  1B2  1I2  1W2        forward, backward, its halves, of a segment (torch's stage) in a microbatch
    0SEND_F2  1RECV_F2        what goes between segments; SEND_B, RECV_B: gradients
    0UNSHARD  0RESHARD        a segment's weights are gathered, and let go
    0REDUCE_GRAD              its gradient is reduced
    (0F3;1B0)OVERLAP_F_B      both of them

A row is a stage's (torch's rank). Empty actions are left out; errors name row and column as they were given.
"""

import csv
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from yafsdp_fn.schedules.refused import Refused
from yafsdp_fn.schedules.split import Call, Kind

KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}
LETTERS = {kind: letter for letter, kind in KINDS.items()}
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
WEIGHTS = ("UNSHARD", "RESHARD")
REDUCTION = "REDUCE_GRAD"
ACTION = re.compile(rf"(\d+)({'|'.join([*MESSAGES, *WEIGHTS, REDUCTION, *KINDS])})(\d*)")
BOTH = re.compile(r"\((.*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One action, and where it was. microbatch: -1 for those that have none"""

    word: str
    segment: int
    microbatch: int
    row: int
    column: int

    @property
    def call(self) -> Call | None:
        """The call that it is, if it is one."""
        kind = KINDS.get(self.word)
        return None if kind is None else Call(kind, self.segment, self.microbatch)

    def __str__(self) -> str:
        return f"{self.segment}{self.word}{self.microbatch if self.microbatch >= 0 else ''}"

    def refuse(self, rule: str, why: str) -> NoReturn:
        raise Refused(rule, -1, f"row {self.row}, column {self.column} ({self}): rule {rule!r}: {why}", self.row)


def written(call: Call) -> str:
    """A call as an action."""
    return f"{call.segment}{LETTERS[call.kind]}{call.microbatch}"


def read_rows(given: Any) -> list[list[Action]]:
    """Actions from lists of strings or of torch's actions, one list per row, or from the path of a CSV file. Raises
    ValueError or TypeError, naming row, column and action."""
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        if not path.is_file():
            raise ValueError(f"from_actions: there is no file {path}; expected a CSV, a row of actions per stage")
        with path.open(newline="") as file:
            given = list(csv.reader(file))
        while given and not given[-1]:
            given.pop()
    elif isinstance(given, Mapping):  # torch's pipeline_order: by rank
        given = [given[rank] for rank in sorted(given)]
    if not isinstance(given, list | tuple) or not given or not all(isinstance(row, list | tuple) for row in given):
        raise TypeError(f"from_actions: expected a list of actions for each stage, or a CSV's path, got {given!r:.80}")
    return [
        [action for column, item in enumerate(row) for action in _read(item, number, column)]
        for number, row in enumerate(given)
    ]


def _read(item: Any, row: int, column: int) -> Iterable[Action]:
    text = "" if item is None else str(item).strip()
    if not text:
        return
    if both := BOTH.fullmatch(text):
        for part in both[1].split(";"):
            yield from _read(part, row, column)
        return
    found = ACTION.fullmatch(text)
    takes_microbatch = found is not None and found[2] not in (*WEIGHTS, REDUCTION)
    if found is None or bool(found[3]) != takes_microbatch:
        raise ValueError(
            f"row {row}, column {column}: {text!r}: expected an action, such as 2F0 (segment 2, microbatch 0), 2B0, "
            "2I0, 2W0, 2SEND_F0, 2RECV_B0, 2UNSHARD, 2RESHARD, 2REDUCE_GRAD or (2F1;3B0)OVERLAP_F_B"
        )
    yield Action(found[2], int(found[1]), int(found[3]) if takes_microbatch else -1, row, column)
