"""Reads a recording that torch.profiler made of a step of FSDP2, as a timeline of the program that it ran.

    prof.export_chrome_trace("trace.json")                          # there, of one rank
    program = ya.schedules.fsdp2(module)(trace)                     # or of the settings of the job
    measured = ya.timeline.read_kineto("trace.json", program)       # here
    predicted.save("both.png", beside=measured)

FSDP2 names what its host does by ranges, in the order of the program's ops:

    FSDP::pre_forward (layers.0)                 FSDP::pre_backward (layers.1)
        FSDP::all_gather (layers.0)              gather        FSDP::all_gather (layers.0)       gather, ahead
    ...                                          forward   ...                                   backward
    FSDP::post_forward (layers.0)                FSDP::post_backward_reduce (layers.1)           reduce

On the CPU an op takes the time of its range. On a GPU it takes that of the kernels that were launched in the range:
collectives by their names, computes from the first to the last of all others.
"""

import itertools
import json
import re
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from yafsdp_fn.program.ops import Backward, Forward, Gather, Op, Reduce
from yafsdp_fn.program.program import Program
from yafsdp_fn.timeline.spans import MEASURED, Span
from yafsdp_fn.timeline.timeline import Timeline
from yafsdp_fn.util.schema import Within, shown, typed_at

RANGE = re.compile(r"FSDP::(\w+)(?: \((.*?)\))?(?: \[.*\])?$")
KERNELS = {"gather": re.compile(r"nccl.*AllGather"), "reduce": re.compile(r"nccl.*ReduceScatter")}
OF_NCCL = re.compile(r"nccl", re.I)
BEGINS = {"forward": "pre_forward", "backward": "pre_backward"}
"""The range after which a module computes."""
SIDES = {"forward": ("pre_forward", "post_forward"), "backward": ("pre_backward", "post_backward_reduce")}
"""The ranges between which it does, or a module around it."""


class Event(NamedTuple):
    """A range of the host, or a kernel. name, of: of a range the words after `FSDP::`, and the module's name; of
    anything else its name, and ""."""

    start: float
    end: float
    name: str
    of: str = ""


class Recording(NamedTuple):
    """A step, in microseconds. ranges: of FSDP2, by their beginnings; kernels: that a GPU ran, each with the time at
    which the host launched it, by that time."""

    start: float
    end: float
    ranges: list[Event]
    kernels: list[tuple[float, Event]]


def read_kineto(path: str | Path, program: Program, *, step: int | None = None) -> Timeline:
    """Reads a step of FSDP2 that torch.profiler has recorded, as a timeline of `program`, op by op.

    path: what `export_chrome_trace` or `tensorboard_trace_handler` wrote, .json or .json.gz, of one rank
    program: that FSDP2 ran, of `ya.schedules.fsdp2`; with copies, as the planner's peer has them, or without
    step: the number of its `ProfilerStep`; by default the last one; a recording without is one step

    Computes, gathers and reductions are read; copies, all-reduces over replicas and updates have no span. Raises
    ValueError where the file is no such recording, or where FSDP2 did other gathers, reductions or computes than the
    program says, with what it did. On the CPU it has been tried on recordings of torch 2.13; for GPUs it follows the
    format of kernels, and has not been tried on a real recording.

    >>> import json, pathlib
    >>> words = "pre_forward all_gather post_forward pre_backward post_backward_reduce".split()
    >>> times = (0, 300), (50, 200), (500, 50), (600, 50), (900, 100)                   # from, for, in microseconds
    >>> each = [(f"FSDP::{word}", *time) for word, time in zip(words, times)]
    >>> events = [{"ph": "X", "cat": "user_annotation", "name": n, "ts": at, "dur": d} for n, at, d in each]
    >>> path = pathlib.Path(folder, "trace.json")
    >>> _ = path.write_text(json.dumps({"traceEvents": events}))
    >>> loss = lambda w, x: ya.apply(lambda w, x: (x @ w).sum(), w, x)
    >>> one = ya.planner.trace(loss, ya.Param((8, 8)), tokens.float(), ranks=2)
    >>> for span in ya.timeline.read_kineto(path, ya.schedules.fsdp2()(one)).spans:
    ...     print(span.stream, round(1e6 * span.start), round(1e6 * span.end))
    gather 50 250
    compute 300 500
    compute 650 900
    reduce 900 1000
    """
    if len(program.stages) != 1:
        raise ValueError("read_kineto: expected the program of one stage, program.parts[0] say")
    found = _recorded(Path(path), step)
    windows = _windows(found, program, Path(path))
    spans: list[Span] = []
    for number, op in enumerate(program.ops):
        if (window := windows.get(number)) is None:
            continue
        times = window if not found.kernels else _on_gpu(found.kernels, op, window)
        if times is not None:
            start, end = (1e-6 * (time - found.start) for time in times)
            if start < 0:
                raise ValueError(f"read_kineto: {path}: op {number} runs {-start:.3g} s before its step begins")
            spans.append(Span(number, op, op.stream, start, end))
    seconds = 1e-6 * (max([found.end, *(event.end for _, event in found.kernels)]) - found.start)
    return Timeline(program.trace, tuple(spans), seconds, f"{MEASURED} by torch.profiler: {Path(path).name}")


# ---- the file


RATIO, FLOOR = 32, 2**24
"""A file is unpacked to so many times its bytes, and to `FLOOR` bytes at least; recordings are packed to a tenth."""
OF_HOST, LAUNCHES, KERNEL = ("user_annotation", "cpu_op"), ("cuda_runtime", "cuda_driver"), "kernel"
STEP = re.compile("ProfilerStep#([0-9]{1,18})")


class Timed(NamedTuple):
    """An event of the file. ts, dur: in microseconds; correlation: of a kernel with what launched it"""

    name: str
    cat: str
    ts: Annotated[float, Within(-1e18, 1e18)]
    dur: Annotated[float, Within(0, 1e18)] = 0.0
    correlation: int | None = None

    @property
    def end(self) -> float:
        return self.ts + self.dur


def _recorded(path: Path, step: int | None) -> Recording:
    try:
        timed = list(_timed(json.loads(_unpacked(path).decode())))
    except (OSError, zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"read_kineto: {path}: expected a recording of torch.profiler in JSON: {error}") from error
    steps = {int(named[1]): e for e in timed if (named := STEP.fullmatch(e.name)) and not e.cat.startswith("gpu")}
    if step is not None and step not in steps:
        raise ValueError(f"read_kineto: {path}: there is no ProfilerStep#{step}, but {sorted(steps) or 'none'}")
    of = steps[max(steps) if step is None else step] if steps else None
    host = [e for e in timed if e.cat in OF_HOST and e.name.startswith("FSDP::")]
    if of is not None:
        host = [e for e in host if of.ts <= e.ts < of.end]
    if not host:
        raise ValueError(
            f"read_kineto: {path}: no range of FSDP2, such as FSDP::all_gather, is in it"
            f"{'' if of is None else ' in ' + of.name}; record a step with ProfilerActivity.CPU, too"
        )
    start = host[0].ts if of is None else of.ts
    end = max(e.end for e in host) if of is None else of.end
    ranges = [Event(e.ts, e.end, match[1], match[2] or "") for e in host if (match := RANGE.match(e.name))]
    return Recording(min(start, *(r.start for r in ranges)), end, sorted(ranges), _launched(timed, start, end))


def _unpacked(path: Path) -> bytes:
    """The bytes of a file, unpacked where its name ends in .gz. Raises ValueError where they would be too many."""
    packed = path.read_bytes()
    if path.suffix != ".gz":
        return packed
    most = max(FLOOR, RATIO * len(packed))
    reader = zlib.decompressobj(wbits=31)  # of gzip
    text = reader.decompress(packed, most)
    if len(text) == most:
        raise ValueError(f"it unpacks to {most:,} bytes or more; if you know where it comes from, unpack it yourself")
    if not reader.eof or reader.unused_data:
        raise ValueError("it is cut short, or goes on behind its end")
    return text


def _timed(data: Any) -> Iterator[Timed]:
    """The events that tell when the host and a GPU did something, of what JSON was read as."""
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise ValueError("traceEvents: expected a list of events")
    for at, event in enumerate(events):
        if not isinstance(event, dict):
            raise ValueError(f"traceEvents[{at}]: expected an object, got {shown(event)}")
        if event.get("ph") != "X":
            continue
        name, cat, args = event.get("name"), event.get("cat", ""), event.get("args") or {}
        if not isinstance(name, str) or not isinstance(args, dict):
            raise ValueError(f"traceEvents[{at}]: expected a name, and an object of args, got {shown(event)}")
        if name.startswith(("FSDP::", "ProfilerStep#")) or cat in (*LAUNCHES, KERNEL):
            known = {field: event[field] for field in ("name", "ts", "dur") if field in event}
            yield typed_at(f"traceEvents[{at}]", Timed, known | {"cat": cat, "correlation": args.get("correlation")})


def _launched(timed: list[Timed], start: float, end: float) -> list[tuple[float, Event]]:
    """The kernels that the host launched between `start` and `end`, by that time."""
    launches = {e.correlation: e.ts for e in timed if e.cat in LAUNCHES and e.correlation is not None}
    found = [
        (launches[e.correlation], Event(e.ts, e.end, e.name))
        for e in timed
        if e.cat == KERNEL and e.correlation in launches
    ]
    return sorted((at, kernel) for at, kernel in found if start <= at < end)


# ---- each op of the program, and when the host did it


def _windows(found: Recording, program: Program, path: Path) -> dict[int, tuple[float, float]]:
    """Op -> when the host did it, from and to.

    Modules are known by their order: the first that is gathered is the program's first group of units.
    """
    ops = dict(enumerate(program.ops))
    gathers = {number: op for number, op in ops.items() if isinstance(op, Gather)}
    groups = [*dict.fromkeys(op.units for op in gathers.values())]
    names = [*dict.fromkeys(r.of for r in found.ranges if r.name == "all_gather")]
    _same(path, "modules gathered", len(names), len(groups))
    name = {unit: of for units, of in zip(groups, names, strict=True) for unit in units}
    windows = _in_order(path, found, "all_gather", {n: name[op.units[0]] for n, op in gathers.items()})
    reductions = {number: name[op.units[0]] for number, op in ops.items() if isinstance(op, Reduce)}
    windows |= _in_order(path, found, "post_backward_reduce", reductions)
    visits = program.trace.visits
    computes = {n: op for n, op in ops.items() if isinstance(op, Forward | Backward)}
    users: defaultdict[str, set[int]] = defaultdict(set)  # module -> visits that use it
    for visit in visits:
        for unit in visit.units:
            users[name[unit]].add(visit.id)
    top = _outermost(found.ranges)
    gaps = [(a, b) for a, b in itertools.pairwise(top) if b.start > a.end]
    alone: dict[int, tuple[str, str]] = {}
    for number, op in computes.items():
        of = name[visits[op.visit].units[0]] if visits[op.visit].units else ""
        if visits[op.visit].units and users[of] == {op.visit}:
            alone[number] = of, BEGINS["forward" if isinstance(op, Forward) else "backward"]
    for key in dict.fromkeys(alone.values()):
        mine = [(a.end, b.start) for a, b in gaps if (a.of, a.name) == key]
        numbers = [number for number, each in alone.items() if each == key]
        _same(path, f"FSDP::{key[1]} ({key[0]})", len(mine), len(numbers))
        windows |= dict(zip(numbers, mine, strict=True))
    for number, op in computes.items():  # of a module that has others inside, between these
        if number not in alone:
            before = max((windows[n][1] for n in windows if n < number), default=found.start)
            after = min((windows[n][0] for n in windows if n > number), default=found.end)
            sides = SIDES["forward" if isinstance(op, Forward) else "backward"]
            own = [(a.end, b.start) for a, b in gaps if a.name in sides and before <= a.end and b.start <= after]
            if own:
                windows[number] = max(own, key=lambda gap: gap[1] - gap[0])
    return windows


def _same(path: Path, what: str, recorded: int, said: int) -> None:
    if recorded != said:
        raise ValueError(
            f"read_kineto: {path}: {what}: {recorded} in the recording, {said} in the program: expected the program of "
            "the settings that the step ran with (reshard_after_forward, wrap, prefetch, microbatches)"
        )


def _in_order(path: Path, found: Recording, word: str, ops: dict[int, str]) -> dict[int, tuple[float, float]]:
    """The windows of collectives: the n-th range of a module's is of the n-th op of it."""
    windows: dict[int, tuple[float, float]] = {}
    for of in dict.fromkeys([*ops.values(), *(r.of for r in found.ranges if r.name == word)]):
        numbers = [number for number, name in ops.items() if name == of]
        mine = [(r.start, r.end) for r in found.ranges if (r.name, r.of) == (word, of)]
        _same(path, f"FSDP::{word}" + f" ({of})" * bool(of), len(mine), len(numbers))
        windows |= dict(zip(numbers, mine, strict=True))
    return windows


def _outermost(ranges: Sequence[Event]) -> list[Event]:
    """The ranges that are in no other."""
    found: list[Event] = []
    for each in ranges:
        if not found or each.start >= found[-1].end:
            found.append(each)
    return found


def _on_gpu(kernels: Sequence[tuple[float, Event]], op: Op, window: tuple[float, float]) -> tuple[float, float] | None:
    """Returns when the kernels ran that were launched in `window` for an op; None where there are none."""
    inside: Iterable[Event] = (
        kernel for _, kernel in kernels[bisect_left(kernels, (window[0],)) : bisect_left(kernels, (window[1],))]
    )
    pattern = KERNELS.get(op.stream)
    mine = [k for k in inside if (pattern.search(k.name) if pattern else not OF_NCCL.search(k.name))]
    return (min(k.start for k in mine), max(k.end for k in mine)) if mine else None
