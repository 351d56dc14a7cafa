"""`verify` against z3, on random programs: what it accepts goes wrong in no order, and what it refuses, mostly does.

    python -m tests.proof.compare_z3 [--programs 20000] [--stages] [--seed 0] [--seconds S]

Programs of up to 40 ops, of every builder and all its options, on one stage; most are changed once or twice
(mutants.py). With --stages pipelines of as many ops on two or three stages, of every order and sharding, with calls,
messages or the program of a stage changed (changed.py): z3 chooses an order of the ops of all stages.
Only different ones count, and only those in form: others are no programs, and z3 could not be asked.
Prints what was found, and in what words rules refuse what z3 finds right. Exit status 1 where an accepted one goes
wrong.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from tests.program.traces import on
from tests.proof.changed import a_pipeline, in_form
from tests.proof.mutants import mutant
from tests.proof.z3_orders import opinion
from tests.schedules.cases import LARGER, SMALL
from tests.schedules.drawn import builder
from yafsdp_fn.proof.form import check_form
from yafsdp_fn.schedules import Program, Refused, UpdateWhen, verify

MOST = 40
"""Ops of a program, or of all stages."""


TRACES = [*SMALL.values(), *LARGER.values()]


def a_program(rng: random.Random) -> Program:
    """As built, or changed up to twice."""
    updates: UpdateWhen = rng.choice(("never", "after norm"))
    schedule, mesh = builder(rng, update=updates != "never" and rng.random() < 0.7)
    made = schedule(on(rng.choice(TRACES), mesh, updates, rng.choice((1, 1, 1, 2, 3))))
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2))):
        if in_form(made):
            made = mutant(made, rng)
    return made


def different(drawn: Callable[[random.Random], Program | None], seed: int) -> Iterator[Program]:
    """Different ones of up to MOST ops, without end."""
    rng = random.Random(seed)
    seen = set[Any]()
    while True:
        made = drawn(rng)
        if made is None or not 0 < len(made) <= MOST:
            continue
        key = made.trace.units, made.trace[1:6], made.trace.lent, made.trace.split, made.stages
        if key not in seen:
            seen.add(key)
            yield made


def refusal(program: Program) -> tuple[str, str]:
    """The rule that refuses `program`, "" if none does, and why, with "…" for names and numbers."""
    try:
        for one in program.by_stage:
            check_form(one)  # before what stages do together
        verify(program)
    except Refused as refused:
        why = str(refused).partition("\n")[0].partition(f"rule {refused.rule!r}: ")[2]
        names = sorted({record.name for record in (*program.trace.units, *program.trace.visits)}, key=len)
        return refused.rule, re.sub(rf"(?<!\w)({'|'.join(map(re.escape, reversed(names)))}|\d+)(?!\w)", "…", why)
    return "", ""


class Found(NamedTuple):
    """said: programs by (rule that refuses, "" if none does; what z3 says); whys: of those refused that z3 finds
    right, by (rule, why)."""

    said: Counter[tuple[str, str]]
    whys: Counter[tuple[str, str]]


def compare(number: int, made: Iterable[Program], seconds: float = float("inf")) -> Found:
    """What both say of the first `number` of `made` that are in form, or of as many as there is time for.

    Raises AssertionError for one that is accepted, and goes wrong in some order."""
    found = Found(Counter(), Counter())
    begin = time.monotonic()
    asked = 0
    for program in made:
        if asked >= number or time.monotonic() - begin > seconds:
            break
        rule, why = refusal(program)
        if rule == "form":
            found.said["form", "not asked"] += 1
            continue
        asked += 1
        bad = opinion(program)
        if bad is not None and not rule:
            raise AssertionError(f"accepted, and wrong ({bad.mode}): {bad.why}\n{program}\norder: {bad.order}")
        found.said[rule, "right" if bad is None else "stops" if bad.order is None else "goes wrong"] += 1
        if rule and bad is None:
            found.whys[rule, why] += 1
    return found


def report(found: Found) -> str:
    said: Counter[str] = Counter()
    for (rule, says), number in found.said.items():
        said["accepted" if not rule else says] += number
    refused = found.said.total() - said["accepted"]
    asked = refused - said["not asked"]
    right = said["right"]
    lines = [
        f"{found.said.total() - said['not asked']} different programs in form, and {said['not asked']} that are not",
        f"accepted: {said['accepted']}; z3 proves of all of them that no order goes wrong",
        f"refused: {asked} in form: {said['stops']} that no engine would run, {said['goes wrong']} with a bad order "
        f"that z3 names, and {right} that z3 finds right",
        f"right, of the refused: {right / max(1, asked):.1%} in form, {right / max(1, refused):.1%} of all",
        "",
        f"{'rule':10} {'refuses':>8} {'of these right':>15}",
    ]
    for rule in sorted({rule for rule, _ in found.said if rule}, key=lambda rule: -found.said[rule, "right"]):
        total = sum(number for (other, _), number in found.said.items() if other == rule)
        lines.append(f"{rule:10} {total:8} {found.said[rule, 'right']:15}")
        lines += [f"{number:35}  {why}" for (other, why), number in found.whys.most_common() if other == rule]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.compare_z3", description=__doc__)
    parser.add_argument("--programs", type=int, default=20000, help="how many that are in form")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then, whatever is done")
    parser.add_argument("--stages", action="store_true", help="pipelines instead")
    args = parser.parse_args()
    begin = time.monotonic()
    cpu = time.process_time()
    try:
        found = compare(args.programs, different(a_pipeline if args.stages else a_program, args.seed), args.seconds)
    except AssertionError as wrong:
        sys.exit(str(wrong))
    print(report(found))
    print(f"\n{time.monotonic() - begin:.0f} s, {time.process_time() - cpu:.0f} s of CPU, seed {args.seed}")


if __name__ == "__main__":
    main()
