"""The places of ranks and their threads, in words."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

# ---- Describes the positions of ranks in words, ranks with equal status on one line.
#
# ranks 0-2: wait for gather of layers[4] (step 17), 31 s; op 21 of 96, forward of layers[4] (visit 5, step 17)
# rank 3: op 30 of 96, forward of layers[6] (visit 7, step 17), 33 s; model.py:41 in block
# Look at rank 3: it waits for no other.


class RankStatus(NamedTuple):
    """The status of one rank, stored as JSON.

    beat: how often it has looked; place: its position, for so many `seconds`
    waits: the communication under way, the longest for `waited` seconds; op: "op 21 of 96"
    program: its fingerprint; line: of the user's Python, "model.py:41 in block"
    shown: it has printed the table
    """

    beat: int
    place: str
    seconds: float
    waits: str = ""
    waited: float = 0.0
    op: str = ""
    program: str = ""
    line: str = ""
    shown: bool = False


def table(posts: Mapping[int, RankStatus], silent: Mapping[int, float]) -> str:
    """Formats the status of all ranks. silent: rank -> seconds without a new status"""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, post in sorted(posts.items()):
        alike = post.place, post.waits, post.op, post.program, "" if post.waits else post.line, rank in silent
        groups.setdefault(alike, []).append(rank)
    lines = [f"  {named(ranks)}: {_place([posts[rank] for rank in ranks], silent, ranks)}" for ranks in groups.values()]
    advice = [f"  {_advice(posts, silent)}"] if len(posts) > 1 else []  # of others, one rank alone tells nothing
    return "\n".join([*lines, *advice, *_other_programs(posts)])


def named(ranks: Sequence[int]) -> str:
    """Formats ranks as `rank 3` or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _place(posts: Sequence[RankStatus], silent: Mapping[int, float], ranks: Sequence[int]) -> str:
    first = posts[0]
    where = ", ".join(filter(None, [first.op, first.place]))
    if first.waits:
        verb = "wait" if len(posts) > 1 else "waits"
        text = f"{verb} for {first.waits}, {_seconds(post.waited for post in posts)}; {where}"
    else:
        text = "; ".join(filter(None, [f"{where}, {_seconds(post.seconds for post in posts)}", first.line]))
    if ranks[0] in silent:
        since = _seconds(silent[rank] for rank in ranks)
        return f"no sign of life for {since}: ended, or in a call that holds Python's lock; before that: {text}"
    return text


def _seconds(values: Iterable[float]) -> str:
    shown = sorted({f"{value:.0f}" for value in values}, key=int)
    return f"{shown[0]} s" if len(shown) == 1 else f"{shown[0]}-{shown[-1]} s"


def _advice(posts: Mapping[int, RankStatus], silent: Mapping[int, float]) -> str:
    if silent:
        return f"Look at {named(sorted(silent))} first."
    free = [rank for rank, post in sorted(posts.items()) if not post.waits]
    if free:
        return f"Look at {named(free)}: {'they wait' if len(free) > 1 else 'it waits'} for no other."
    return "All wait, for each other: their programs, or their loops around steps, are not the same."


def _other_programs(posts: Mapping[int, RankStatus]) -> list[str]:
    runs: dict[str, list[int]] = {}
    for rank, post in sorted(posts.items()):
        runs.setdefault(post.program, []).append(rank)
    one, *others = [named(ranks) for program, ranks in runs.items() if program] or [""]
    return [f"  {one} and {other} run other programs." for other in others]


# ---- Inspects another thread's Python stack: the user's line, and whether it is in a collective of torch.

OWN = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
STANDARD = str(Path(os.__file__).parent) + os.sep
COMMUNICATION = OWN + "dist" + os.sep
COLLECTIVES = TORCH + "distributed" + os.sep


def line(thread: int) -> str:
    """Returns `model.py:41 in block`, the innermost frame outside this library, torch and the standard library; "" if
    none."""
    for frame in _frames(thread):
        code = frame.f_code
        if not code.co_filename.startswith((OWN, TORCH, "<")) and not _standard(code.co_filename):
            return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_qualname}"
    return ""


def collective(thread: int) -> str | None:
    """Returns the function of torch.distributed that the thread is in, such as a barrier, or None."""
    code = next((frame.f_code for frame in _frames(thread)), None)
    return (
        f"torch.distributed.{code.co_name}" if code is not None and code.co_filename.startswith(COLLECTIVES) else None
    )


def waits(thread: int) -> bool:
    """Returns whether the thread is in communication: it waits for a stream, or is in a collective."""
    for frame in _frames(thread):
        file = frame.f_code.co_filename
        if not _standard(file):
            return file.startswith((COMMUNICATION, COLLECTIVES))
    return False


def _frames(thread: int) -> Iterator[FrameType]:
    """Yields the thread's frames, the innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _standard(file: str) -> bool:
    return file.startswith(STANDARD) and "site-packages" not in file
