"""Draws refusals: the op, the rule, and the uses of the buffer that two ops want.

op 9 (backward layers[0] in slot 0 -> grad slot 0): rule 'weights': slot 0 holds layers[2], it must hold layers[0]
    slot 0
    write  op 6   gather layers[2] -> slot 0     <- this is there
    read   op 7   forward layers[2] in slot 0
    read   op 9   backward layers[0] in slot 0   <- refused
"""

from yafsdp_fn.program.ops import Buffer
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.text import describe, in_notebook

MOST = 8
"""Uses that a drawing shows; those in the middle are left out."""


class Refused(ValueError):
    """A program breaks a rule. `rule`: its name; `op`: index of the op, -1 for the end of the program; `stage`: the one
    whose program that is, None where there are no stages."""

    def __init__(self, rule: str, op: int, message: str, stage: int | None = None) -> None:
        super().__init__(message)
        self.rule = rule
        self.op = op
        self.stage = stage

    def _repr_html_(self) -> str:
        """Shown by a notebook, where it was caught."""
        return in_notebook(str(self))


# ---- A refusal, with the uses of the buffer drawn around it.


def refusal(program: Program, rule: str, at: int, why: str, buffer: Buffer | None, other: int | None) -> Refused:
    """Returns the refusal of op `at`, -1 for the end. other: the op that it collides with, -1 for the step before."""
    return Refused(rule, at, _drawn(program, rule, at, why, buffer, other))


def refusal_on(stage: int, rule: str, why: str, where: str = "", at: int = -1) -> Refused:
    """Returns the refusal of a whole stage, or of one of its ops. where: its beginning, in words"""
    return Refused(rule, at, f"stage {stage}: {where}rule {rule!r}: {why}", stage)


def _drawn(program: Program, rule: str, index: int, why: str, buffer: Buffer | None, other: int | None) -> str:
    """Returns the message: what is wrong, and the uses of `buffer` from one of the two ops to the other."""
    # the sentence
    here = f"op {index} ({describe(program.ops[index], program.trace)})" if index >= 0 else "end of program"
    head = f"{here}: rule {rule!r}: {why}"
    if other == -1:
        head += " (it was there when the step began)"
    if buffer is None or (other in (None, -1) and index < 0):
        return head
    # from which op to which one
    ends = [at for at in (index, other) if at is not None and at >= 0]
    first = min(ends)
    last = max(ends) if index >= 0 else len(program.ops) - 1
    if len(ends) == 1 and index >= 0:
        first = 0
    # what the buffer held before tells why it was lost
    first = next((at for at in reversed(range(first)) if _use(program, at, buffer)), first)
    # a line for each use
    lines: list[tuple[str, str, str, str]] = []
    for at in range(first, last + 1):
        use = _use(program, at, buffer)
        mark = "<- against this" if at == other else ""
        if at == index:
            mark = "<- refused"
        if use or mark:
            lines.append((use or "      ", f"op {at}", describe(program.ops[at], program.trace), mark))
    if len(lines) > MOST:
        lines[MOST // 2 : -MOST // 2] = [("...", "", "", "")]
    width = [max(len(line[column]) for line in lines) for column in range(3)]
    rows = [f"    {a.ljust(width[0])}  {b.ljust(width[1])}  {c.ljust(width[2])}  {d}".rstrip() for a, b, c, d in lines]
    return "\n".join([head, f"    uses of {_in_words(program, buffer)}:", *rows])


def _in_words(program: Program, buffer: Buffer) -> str:
    """Returns a buffer in words: `slot 1`, `grad shard of layers[3]`."""
    match buffer:
        case ("slot" | "grad slot" | "carry slot" as kind, _, number):
            return f"{kind} {number}"
        case ("host", _, int(visit)):
            return f"host memory of {program.trace.visits[visit].name}"
        case ("secondary", _, int(unit)):
            return f"secondary shard of {program.trace.units[unit].name}"
        case (str(kind), int(unit)):
            return f"{kind} of {program.trace.units[unit].name}"
    return f"the {buffer[0]}"


def _use(program: Program, at: int, buffer: Buffer) -> str:
    try:
        reads, writes = program.ops[at].uses()
    except (AttributeError, TypeError):  # no op of a program
        return ""
    if buffer in writes:
        return "write"
    return "read" if buffer in reads else ""
