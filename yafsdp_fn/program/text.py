"""Ops and programs in words: `gather layers[3] -> slot 1`; a line per op, a column per stream."""

import html
import itertools
from collections.abc import Sequence
from typing import Any

from yafsdp_fn.program import ops
from yafsdp_fn.program.ops import OPS, STREAMS, Op, name_of, slot_fields
from yafsdp_fn.program.split import Message
from yafsdp_fn.program.trace import Collectives, Trace

# ---- One op.


def describe(op: Op, trace: Trace) -> str:
    """Returns one op in words; as Python shows it where it names what does not exist."""
    try:
        return _in_words(op, trace)
    except (IndexError, TypeError):
        return repr(op)


WHERE = {"node": " in node", "stages": " over stages"}
"""Words of an op for where it takes weights from, or for the ranks that it sums over."""


def _in_words(op: Any, trace: Trace) -> str:
    """Returns one op in words. Raises IndexError or TypeError where it names what does not exist."""
    match op:
        case ops.Norm(units):
            return f"norm of {len(units)} units"
        case ops.Update(units, part):
            several = any(trace.parts(unit) > 1 for unit in units)
            which = f", part {part}" if several else ""
            return f"update {_units(units, trace)}{which}"
        case ops.Exchange(units, part):
            way = "return" if part % 2 else "lend"
            return f"{way} {_units(units, trace)}"
        case ops.Forward() | ops.Backward():
            return _compute(op, trace)
        case _ if isinstance(op, OPS):  # what is moved follows from its annotations
            where = WHERE.get(getattr(op, "source", getattr(op, "over", "")), "")
            return f"{name_of(op)} {_subject(op, trace)}{where}{_moved(op)}"
        case _ if hasattr(op, "stream"):  # of a peer: simulated, never run
            return f"copy {_units(op.units, trace)}".strip()
    return repr(op)


# ---- computes

ENDS_OF_CALLS = {"takes": ", from carry {}", "gives": ", to carry {}"}
PHRASES = {
    "forward": {"slots": " in {}", "keep": "", "carry_slot": ", save in carry slot {}", "early": ", may begin grad {}"},
    "backward": {"slots": " in {}", "carry_slot": ", carry slot {}", "grad_slots": " -> grad {}"},
}
"""The fields of computes in words, of a forward after whether it keeps its graph."""


def _compute(op: ops.ComputeOp, trace: Trace) -> str:
    name = name_of(op)
    words = f"{name} "
    if isinstance(op, ops.Backward) and op.half != "both":
        words += f"({op.half}) "
    words += trace.visits[op.visit].name
    if trace.microbatches > 1:
        words += f" (microbatch {op.microbatch})"
    for field, phrase in (PHRASES[name] | ENDS_OF_CALLS).items():
        value = getattr(op, field)
        if field == "keep":
            words += ", keep graph" if value else ", recompute"
        elif field == "carry_slot" and value is not None:
            words += phrase.format(value)
        elif value:
            words += phrase.format(_slots(value))
    return words


# ---- what ops name


def _units(units: tuple[int, ...], trace: Trace) -> str:
    return ", ".join(trace.units[unit].name for unit in units)


def _slots(slots: tuple[int, ...]) -> str:
    word = "slots" if len(slots) > 1 else "slot"
    return f"{word} {', '.join(map(str, slots))}"


def _subject(op: Any, trace: Trace) -> str:
    """Returns what an op is about: a message, a visit, or units."""
    if hasattr(op, "message"):
        return describe_message(op.message, trace)
    return trace.visits[op.visit].name if hasattr(op, "visit") else _units(op.units, trace)


def _moved(op: Any) -> str:
    """Returns the slots that an op reads and fills: ` <- grad slot 2`."""
    words = ""
    for field, (kind, way) in slot_fields(op):
        numbers = getattr(op, field)
        words += " <- " if way == "reads" else " -> "
        words += f"{kind} {numbers}" if kind == "carry slot" else kind.removesuffix("slot") + _slots(numbers)
    return words


# ---- What blocks communicate.


def collectives(trace: Trace) -> list[str]:
    """Returns the collectives over axes inside blocks: a line for visits that follow each other and call the same."""
    named: list[tuple[str, Collectives, Collectives]] = []
    for visit in trace.visits:
        named.append((visit.name, visit.collectives, visit.adjoints))
        for after, calls, adjoints in trace.between:
            if max(after, 0) == visit.id:
                named.append(("the loss", calls, adjoints))
    lines = []
    for (calls, adjoints), alike in itertools.groupby(named, lambda each: each[1:]):
        if calls or adjoints:
            names = [name for name, *_ in alike]
            where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            lines.append(f"in {where}: {_called(calls)}; backward: {_called(adjoints)}")
    return lines


def _called(calls: Collectives) -> str:
    """Returns collectives in words, those in a row that are alike as one."""
    each = []
    for call, alike in itertools.groupby(calls):
        count = len(list(alike))
        times = f"{count} x " if count > 1 else ""
        each.append(f"{times}{call.kind} {call.axis} ({call.nbytes / 2**10:,.1f} KiB)")
    return ", ".join(each) or "none"


def describe_message(message: Message, trace: Trace) -> str:
    """Names what crosses between two segments."""
    source, target, *_ = trace.cut.flows[message.flow]
    words = f"gradient {source} <- {target}" if message.back else f"segment {source} -> {target}"
    return words if trace.microbatches == 1 else f"{words} (microbatch {message.microbatch})"


# ---- A program.


def table(sequence: Sequence[Op], trace: Trace) -> list[str]:
    """Returns one line per op, one column per stream."""
    rows = [(getattr(op, "stream", "compute"), describe(op, trace)) for op in sequence]
    shown = [stream for stream in STREAMS if stream in dict(rows)]
    title = {stream: f"{stream} stream" for stream in shown} | {"compute": "compute"}
    width = {stream: len(head) for stream, head in title.items()}
    for stream, words in rows:
        width[stream] = max(width[stream], len(words))

    def line(number: object, cells: dict[str, str]) -> str:
        padded = [cells.get(stream, "").ljust(width[stream]) for stream in shown]
        return f"{number:>5}  {'  '.join(padded)}".rstrip()

    return [line("op", title), *[line(number, {stream: words}) for number, (stream, words) in enumerate(rows)]]


# ---- In a notebook.

MARKS = {"&lt;- refused": "#d1242f", "&lt;- against this": "#bf8700"}
"""The ends of lines that a notebook shows in colour, legible on light and on dark."""


def in_notebook(text: str) -> str:
    """Returns `text` as HTML: its columns kept, never wrapped, the ops of a refusal in colour."""
    lines = []
    for line in html.escape(text, quote=False).splitlines():
        for mark, colour in MARKS.items():
            if line.endswith(mark):
                line = f'<span style="color: {colour}; font-weight: bold">{line}</span>'
        lines.append(line)
    return '<pre style="white-space: pre; overflow-x: auto; line-height: 1.25">' + "\n".join(lines) + "</pre>"
