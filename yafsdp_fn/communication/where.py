"""The places of ranks and their threads, in words."""

import faulthandler
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import torch

# ---- Describes the positions of ranks in words, ranks with equal status on one line.
#
# rank 3: forward of layers[6] (visit 7, step 17), op 30 of 96 of program 3f2a91c0; model.py:41 in block
# ranks 0-2: waiting 31 s for gather of layers[4] (step 17); forward of layers[4] (visit 5, step 17), op 21 of 96 of ...


class RankStatus(NamedTuple):
    """The status of one rank, stored as JSON.

    beat: how often it has looked; where: its position in a step, and the line of the user's Python
    waits: the communication under way, the longest for `waited` seconds
    """

    beat: int
    where: str
    waits: str = ""
    waited: float = 0.0


def table(posts: Mapping[int, RankStatus], silent: Collection[int]) -> str:
    """Formats the status of all ranks. The silent ones are first, then those that wait for no other: there to look."""
    alike: dict[tuple[bool, str, str], list[int]] = {}
    for rank, post in sorted(posts.items()):
        alike.setdefault((rank not in silent, post.waits, post.where), []).append(rank)
    lines = []
    for (alive, waits, text), ranks in sorted(alike.items()):
        if waits:
            seconds = sorted(round(posts[rank].waited) for rank in ranks)
            text = f"waiting {_span(seconds)} s for {waits}; {text}"
        if not alive:
            text = f"no sign of life: ended, or in a call that holds Python's lock; before that {text}"
        lines.append(f"  {named(ranks)}: {text}")
    return "\n".join(lines)


def named(ranks: Sequence[int]) -> str:
    """Formats ranks as `rank 3` or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(_span, runs))}"


def _span(values: Sequence[int]) -> str:
    first = values[0]
    last = values[-1]
    return str(first) if first == last else f"{first}-{last}"


# ---- Inspects another thread's Python stack.

OWN = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
STANDARD = str(Path(os.__file__).parent) + os.sep
COMMUNICATION = OWN + "communication" + os.sep


def standing(thread: int) -> tuple[str, bool]:
    """Returns `model.py:41 in block`, the innermost call outside this library, torch and the standard library, or "";
    and whether the thread is in communication of this library, where it waits."""
    calls = [call for call in _calls(thread) if not _is_foreign(call[0])]
    waits = bool(calls) and calls[0][0].startswith(COMMUNICATION)
    for file, number, function in calls:
        if not file.startswith(OWN):
            return f"{Path(file).name}:{number} in {function}", waits
    return "", waits


def _is_foreign(file: str) -> bool:
    """Returns whether a file is of torch or of the standard library."""
    return file.startswith((TORCH, "<")) or (file.startswith(STANDARD) and "site-packages" not in file)


CALL = re.compile(r'File "(.*)", line (.*) in (.*)')


def _calls(thread: int) -> list[tuple[str, str, str]]:
    """Returns file, line and function of the calls that the thread is in, the innermost first.

    They are read in one piece, by faulthandler. A thread that goes on while another walks along its frames (`f_back`)
    has ended the process by a segmentation fault, with Python 3.11.7.
    """
    # in memory, where it can be: a disk may be full
    with os.fdopen(os.memfd_create("calls"), "w+b") if sys.platform == "linux" else TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode()
    _, _, of_thread = text.partition(f"hread 0x{thread:016x} ")
    return CALL.findall(of_thread.partition("\n\n")[0])
