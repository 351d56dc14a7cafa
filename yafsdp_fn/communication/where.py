"""The places of ranks and their threads, in words."""

import faulthandler
import itertools
import os
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import torch

# ---- Describes the places of ranks in words, ranks with equal words on one line.
#
# rank 3: forward of layers[6] (visit 7, step 17), op 30 of 96 of program 3f2a91c0; model.py:41 in block
# ranks 0-2: waiting for gather of layers[4] (step 17); forward of layers[4] (visit 5, step 17), op 21 of 96 of ...

WAITING = "waiting for"
SILENT = "no sign of life: ended, or in a call that holds Python's lock; before that"


def table(places: Sequence[str], silent: Collection[int]) -> str:
    """Formats the places of all ranks. The silent ones are first, then those that wait for no other: there to look."""
    ranks_at = defaultdict[tuple[int, str], list[int]](list)
    for rank, place in enumerate(places):
        if rank in silent:
            ranks_at[0, f"{SILENT} {place}"].append(rank)
        else:
            ranks_at[2 if place.startswith(WAITING) else 1, place].append(rank)
    return "\n".join(f"  {named(ranks)}: {place}" for (_, place), ranks in sorted(ranks_at.items()))


def named(ranks: Sequence[int]) -> str:
    """Formats ranks as `rank 3` or `ranks 0-2, 5`."""
    spans = []
    # neighbours are as far from their places in the list
    for _, run in itertools.groupby(enumerate(ranks), key=lambda each: each[1] - each[0]):
        first, *others = [rank for _, rank in run]
        spans.append(f"{first}-{others[-1]}" if others else str(first))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spans)}"


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
