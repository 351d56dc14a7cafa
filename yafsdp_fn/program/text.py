"""Ops and programs in words: `gather layers[3] -> slot 1`; a line per op, a column per stream."""

import difflib
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


def _in_words(op: Any, trace: Trace) -> str:
    # what ops name, in words

    def units(ids: tuple[int, ...]) -> str:
        return ", ".join(trace.units[unit].name for unit in ids)

    def slots(ids: tuple[int, ...]) -> str:
        return f"slot{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"

    def crossing(takes: tuple[int, ...], gives: tuple[int, ...]) -> str:
        took = f", from carry {slots(takes)}" if takes else ""
        return took + (f", to carry {slots(gives)}" if gives else "")

    def subject() -> str:
        if hasattr(op, "message"):
            return describe_message(op.message, trace)
        return trace.visits[op.visit].name if hasattr(op, "visit") else units(op.units)

    def moved() -> str:
        words = ""
        for field, (kind, way) in slot_fields(op):
            at = getattr(op, field)
            words += " <- " if way == "reads" else " -> "
            words += f"{kind} {at}" if kind == "carry slot" else kind.removesuffix("slot") + slots(at)
        return words

    # a sentence for each kind
    match op:
        case ops.Gather(ids, into, source):
            return f"gather {units(ids)}{' in node' if source == 'node' else ''} -> {slots(into)}"
        case ops.AllReduce(ids, over):
            return f"all-reduce {units(ids)}{' over stages' * (over == 'stages')}"
        case ops.Norm(ids):
            return f"norm of {len(ids)} units"
        case ops.Update(ids, part):
            several = any(trace.parts(unit) > 1 for unit in ids)
            return f"update {units(ids)}{f', part {part}' if several else ''}"
        case ops.Exchange(ids, part):
            return f"{'return' if part % 2 else 'lend'} {units(ids)}"
        case ops.Forward(visit, at, keep, microbatch, carry, early, takes, gives):
            detail = f"{slots(at)}, {'keep graph' if keep else 'recompute'}"
            detail += "" if carry is None else f", save in carry slot {carry}"
            detail += f", may begin grad {slots(early)}" if early else ""
            detail += crossing(takes, gives)
            name = f"forward {trace.visits[visit].name}"
        case ops.Backward(visit, at, into, microbatch, carry, takes, gives, half):
            detail = (slots(at) if at else "") + ("" if carry is None else f", carry slot {carry}")
            detail += f" -> grad {slots(into)}" if into else ""
            detail += crossing(takes, gives)
            name = f"backward{'' if half == 'both' else f' ({half})'} {trace.visits[visit].name}"
        case _ if isinstance(op, OPS):  # what is moved follows from its annotations
            return f"{name_of(op)} {subject()}{moved()}"
        case _ if hasattr(op, "stream"):  # of a peer: simulated, never run
            return f"copy {units(op.units)}".strip()
        case _:
            return repr(op)
    where = "" if trace.microbatches == 1 else f" (microbatch {microbatch})"
    return f"{name}{where}{' in' * detail.startswith('slot')} {detail}".rstrip()


# ---- What blocks communicate.


def collectives(trace: Trace) -> list[str]:
    """Returns the collectives over axes inside blocks: a line for visits that follow each other and call the same."""
    named: list[tuple[str, Collectives, Collectives]] = []
    for visit in trace.visits:
        named.append((visit.name, visit.collectives, visit.adjoints))
        named += [("the loss", *each[1:]) for each in trace.between if max(each.after, 0) == visit.id]
    lines = []
    for (calls, adjoints), alike in itertools.groupby(named, lambda each: each[1:]):
        if calls or adjoints:
            names = [name for name, *_ in alike]
            where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            lines.append(f"in {where}: {_called(calls)}; backward: {_called(adjoints)}")
    return lines


def _called(calls: Collectives) -> str:
    runs = [(call, len(list(alike))) for call, alike in itertools.groupby(calls)]
    each = []
    for call, count in runs:
        times = f"{count} x " if count > 1 else ""
        each.append(f"{times}{call.kind} {call.axis} ({call.nbytes / 2**10:,.1f} KiB)")
    return ", ".join(each) or "none"


def describe_message(message: Message, trace: Trace) -> str:
    """Names what crosses between two segments."""
    flows = trace.split.flows if trace.split else ()
    source, target, *_ = flows[message.flow]
    where = "" if trace.microbatches == 1 else f" (microbatch {message.microbatch})"
    return f"segment {source} -> {target}{where}" if not message.back else f"gradient {source} <- {target}{where}"


# ---- A program.


def table(sequence: Sequence[Op], trace: Trace) -> list[str]:
    """Returns one line per op, one column per stream."""
    rows = [(getattr(op, "stream", "compute"), describe(op, trace)) for op in sequence]
    title = {at: at if at == "compute" else f"{at} stream" for at in STREAMS if at in dict(rows)}
    width = {at: max(len(head), *(len(words) for stream, words in rows if stream == at)) for at, head in title.items()}
    lines = [f"{'op':>5}  " + "  ".join(head.ljust(width[at]) for at, head in title.items())]
    for index, (stream, words) in enumerate(rows):
        lines.append(f"{index:>5}  " + "  ".join((words if at == stream else "").ljust(width[at]) for at in width))
    return [line.rstrip() for line in lines]


def diff(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """Returns a unified diff of two programs' ops in words."""
    return "\n".join(difflib.unified_diff(mine, theirs, "this", "other", lineterm="", n=2))


# ---- In a notebook.

MARKS = {"&lt;- refused": "#d1242f", "&lt;- against this": "#bf8700"}
"""The ends of lines that a notebook shows in colour, legible on light and on dark."""


def in_notebook(text: str) -> str:
    """Returns `text` as HTML: its columns kept, never wrapped, the ops of a refusal in colour."""
    lines = []
    for line in html.escape(text, quote=False).splitlines():
        colour = next((colour for mark, colour in MARKS.items() if line.endswith(mark)), None)
        lines.append(line if colour is None else f'<span style="color: {colour}; font-weight: bold">{line}</span>')
    return '<pre style="white-space: pre; overflow-x: auto; line-height: 1.25">' + "\n".join(lines) + "</pre>"
