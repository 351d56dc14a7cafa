"""The places of ranks and their threads, in words."""

import faulthandler
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import torch

# ---- Describes the positions of ranks in words, ranks with equal status on one line.
#
# ranks 0-2: wait for gather of layers[4] (step 17), 31 s; op 21 of 96, forward of layers[4] (visit 5, step 17)
# rank 3: op 30 of 96, forward of layers[6] (visit 7, step 17), 33 s; model.py:41 in block
# Look at rank 3: it waits for no other.


class RankStatus(NamedTuple):
    """The status of one rank, stored as JSON.

    beat: how often it has looked; where: its position, for so many `seconds`, "op 21 of 96, forward of head" say
    waits: the communication under way, the longest for `waited` seconds
    program: its fingerprint; line: of the user's Python, "model.py:41 in block"
    shown: it has printed the table
    """

    beat: int
    where: str
    seconds: float
    waits: str = ""
    waited: float = 0.0
    program: str = ""
    line: str = ""
    shown: bool = False


def table(posts: Mapping[int, RankStatus], silent: Mapping[int, float]) -> str:
    """Formats the status of all ranks. silent: rank -> seconds without a new status"""
    alike: dict[tuple[object, ...], list[int]] = {}
    programs: dict[str, list[int]] = {}
    for rank, post in sorted(posts.items()):
        line = "" if post.waits else post.line
        alike.setdefault((post.where, post.waits, post.program, line, rank in silent), []).append(rank)
        if post.program:
            programs.setdefault(post.program, []).append(rank)
    lines = [f"{named(ranks)}: {_line(ranks, posts, silent)}" for ranks in alike.values()]
    if len(posts) > 1:  # of others, one rank alone tells nothing
        lines.append(_advice(posts, silent))
    first, *others = map(named, programs.values()) if programs else [""]
    lines += [f"{first} and {other} run other programs." for other in others]
    return "\n".join(f"  {line}" for line in lines)


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


def _line(ranks: Sequence[int], posts: Mapping[int, RankStatus], silent: Mapping[int, float]) -> str:
    """Describes where `ranks` are, all alike."""
    first = posts[ranks[0]]
    if first.waits:
        verb = "wait" if len(ranks) > 1 else "waits"
        text = f"{verb} for {first.waits}, {_seconds(posts[rank].waited for rank in ranks)}; {first.where}"
    else:
        since = _seconds(posts[rank].seconds for rank in ranks)
        text = "; ".join(filter(None, [f"{first.where}, {since}", first.line]))
    if ranks[0] in silent:
        since = _seconds(silent[rank] for rank in ranks)
        return f"no sign of life for {since}: ended, or in a call that holds Python's lock; before that: {text}"
    return text


def _seconds(values: Iterable[float]) -> str:
    return f"{_span(sorted(round(value) for value in values))} s"


def _advice(posts: Mapping[int, RankStatus], silent: Mapping[int, float]) -> str:
    if silent:
        return f"Look at {named(sorted(silent))} first."
    free = [rank for rank, post in sorted(posts.items()) if not post.waits]
    if free:
        return f"Look at {named(free)}: {'they wait' if len(free) > 1 else 'it waits'} for no other."
    return "All wait, for each other: their programs, or their loops around steps, are not the same."


# ---- Inspects another thread's Python stack: the user's line, and whether it is in a collective of torch.

OWN = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
STANDARD = str(Path(os.__file__).parent) + os.sep
COMMUNICATION = OWN + "communication" + os.sep
COLLECTIVES = TORCH + "distributed" + os.sep


def line(thread: int) -> str:
    """Returns `model.py:41 in block`, the innermost frame outside this library, torch and the standard library; "" if
    none."""
    for file, number, function in _calls(thread):
        if not file.startswith((OWN, TORCH, "<")) and not _standard(file):
            return f"{Path(file).name}:{number} in {function}"
    return ""


def collective(thread: int) -> str | None:
    """Returns the function of torch.distributed that the thread is in, such as a barrier; "" if it waits in
    communication otherwise, for a stream of ours, say; None if it is in none."""
    for depth, (file, _, function) in enumerate(_calls(thread)):
        if file.startswith(COLLECTIVES):
            return "" if depth else f"torch.distributed.{function}"
        if file.startswith(COMMUNICATION):
            return ""
        if not _standard(file):
            return None
    return None


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


def _standard(file: str) -> bool:
    return file.startswith(STANDARD) and "site-packages" not in file
