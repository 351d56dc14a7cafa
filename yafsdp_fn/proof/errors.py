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
    """Returns the refusal of op `at`, -1 for the end, with the uses of `buffer` from there to op `other`, with which it
    collides, -1 for the step before."""
    place = "end of program"
    if at >= 0:
        place = f"op {at} ({describe(program.ops[at], program.trace)})"
    head = f"{place}: rule {rule!r}: {why}"
    if other == -1:
        head += " (it was there when the step began)"
    ends = [end for end in (at, other) if end is not None and end >= 0]
    if buffer is None or not ends:
        return Refused(rule, at, head)
    # from which op to which one
    first = min(ends)
    last = max(ends)
    if at < 0:
        last = len(program.ops) - 1
    elif len(ends) == 1:
        first = 0
    # what the buffer held before tells why it was lost
    first = next((earlier for earlier in reversed(range(first)) if _use(program, earlier, buffer)), first)
    # a line for each use
    marks = {other: "<- against this", at: "<- refused"}
    lines: list[tuple[str, str, str, str]] = []
    for number in range(first, last + 1):
        use = _use(program, number, buffer)
        mark = marks.get(number, "")
        if use or mark:
            lines.append((use or "      ", f"op {number}", describe(program.ops[number], program.trace), mark))
    if len(lines) > MOST:
        lines[MOST // 2 : -MOST // 2] = [("...", "", "", "")]
    width = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = [head, f"    uses of {_in_words(program, buffer)}:"]
    for line in lines:
        cells = map(str.ljust, line, width)
        drawn.append(f"    {'  '.join(cells)}".rstrip())
    return Refused(rule, at, "\n".join(drawn))


def refusal_on(stage: int, rule: str, why: str, where: str = "", at: int = -1) -> Refused:
    """Returns the refusal of a whole stage, or of one of its ops. where: its beginning, in words"""
    return Refused(rule, at, f"stage {stage}: {where}rule {rule!r}: {why}", stage)


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
    """Returns how an op uses a buffer: `write`, `read`, or "" if it does not."""
    try:
        reads, writes = program.ops[at].uses()
    except (AttributeError, TypeError):  # no op of a program
        return ""
    if buffer in writes:
        return "write"
    return "read" if buffer in reads else ""
