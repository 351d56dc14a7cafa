"""Where ranks are, in words: what is alike is said once.

ranks 0-2: wait for gather of layers[4] (step 17), 31 s; op 21 of 96, forward of layers[4] (visit 5, step 17)
rank 3: op 30 of 96, forward of layers[6] (visit 7, step 17), 33 s; model.py:41 in block
Look at rank 3: it waits for no other.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Post(NamedTuple):
    """What one rank says of itself, as JSON.

    beat: how often it has looked; place: what it is doing, for so many `seconds`
    waits: the communication that it has under way, the longest for `waited` seconds; op: "op 21 of 96"
    program: its fingerprint; line: of the user's Python, "model.py:41 in block"
    late: it has waited for too long; shown: it has printed the table
    """

    beat: int
    place: str
    seconds: float
    waits: str = ""
    waited: float = 0.0
    op: str = ""
    program: str = ""
    line: str = ""
    late: bool = False
    shown: bool = False


def table(posts: Mapping[int, Post], silent: Mapping[int, float], programs: Mapping[str, Sequence[str]]) -> str:
    """posts: by rank; silent: rank -> seconds without a new post; programs: fingerprint -> ops in words, where known"""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, post in sorted(posts.items()):
        alike = post.place, post.waits, post.op, post.program, "" if post.waits else post.line, rank in silent
        groups.setdefault(alike, []).append(rank)
    lines = [f"  {named(ranks)}: {_place([posts[rank] for rank in ranks], silent, ranks)}" for ranks in groups.values()]
    return "\n".join([*lines, f"  {_advice(posts, silent)}", *_other_programs(posts, programs)])


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _place(posts: Sequence[Post], silent: Mapping[int, float], ranks: Sequence[int]) -> str:
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


def _advice(posts: Mapping[int, Post], silent: Mapping[int, float]) -> str:
    if silent:
        return f"Look at {named(sorted(silent))} first."
    free = [rank for rank, post in sorted(posts.items()) if not post.waits]
    if free:
        return f"Look at {named(free)}: {'they wait' if len(free) > 1 else 'it waits'} for no other."
    return "All wait, for each other: their programs, or their loops around steps, are not the same."


def _other_programs(posts: Mapping[int, Post], programs: Mapping[str, Sequence[str]]) -> list[str]:
    """Where the programs of ranks first differ, each against that of the lowest rank."""
    runs: dict[str, list[int]] = {}
    for rank, post in sorted(posts.items()):
        if post.program:
            runs.setdefault(post.program, []).append(rank)
    lines = []
    for other in list(runs)[1:]:
        one = next(iter(runs))
        sides = named(runs[one]), named(runs[other])
        if one not in programs or other not in programs:
            lines.append(f"  {sides[0]} and {sides[1]} run other programs.")
            continue
        pairs = list(enumerate(itertools.zip_longest(programs[one], programs[other], fillvalue="nothing")))
        differ = [pair for pair in pairs if pair[1][0] != pair[1][1]]
        # slots may be numbered in another way all along: what is done tells more
        number, ops = next((pair for pair in differ if _done(pair[1][0]) != _done(pair[1][1])), differ[0])
        lines.append(
            f"  {sides[0]} and {sides[1]} run other programs, which first differ at op {number}: "
            f'{sides[0]} "{ops[0]}", {sides[1]} "{ops[1]}".'
        )
    return lines


def _done(op: str) -> str:
    """An op in words, without its slots."""
    return re.split(r" (?:->|<-|in) ", op)[0]
