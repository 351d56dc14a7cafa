"""Reads a recording that torch.profiler made of a step of FSDP2, as a timeline of the program that it ran.

    prof.export_chrome_trace("trace.json")                          # there, of one rank
    program = ya.schedules.fsdp2(wrap="all")(trace)                 # the settings of the job
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
from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from yafsdp_fn.program.ops import Backward, Forward, Gather, Op, Reduce
from yafsdp_fn.program.program import Program
from yafsdp_fn.timeline.spans import MEASURED, Span
from yafsdp_fn.timeline.timeline import Timeline
from yafsdp_fn.util.schema import Limits, shown, typed_at

RANGE = re.compile(r"FSDP::(\w+)(?: \((.*?)\))?(?: \[.*\])?$")
KERNELS = {"gather": re.compile(r"nccl.*AllGather"), "reduce": re.compile(r"nccl.*ReduceScatter")}
OF_NCCL = re.compile(r"nccl", re.I)
COLLECTIVES = {Gather: "all_gather", Reduce: "post_backward_reduce"}
"""The range of a collective."""
SIDES: dict[type, tuple[str, str]] = {
    Forward: ("pre_forward", "post_forward"),
    Backward: ("pre_backward", "post_backward_reduce"),
}
"""The ranges between which a module computes, or one around it. A compute follows the first of its own module."""

Window = tuple[float, float]
"""The times from which and to which the host did something, in microseconds."""


class Range(NamedTuple):
    """A range of FSDP2: `FSDP::word (module)`. key: word and module"""

    start: float
    end: float
    key: tuple[str, str]


class Kernel(NamedTuple):
    """A kernel that a GPU ran. launched: when the host did it"""

    launched: float
    start: float
    end: float
    name: str


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
        raise ValueError("read_kineto: expected the program of one stage, program.by_stage[0] say")
    spans = []
    try:
        window, ranges, kernels = _recorded(_timed(Path(path)), step)
        begin, end = window
        windows = _windows(ranges, window, program)
        for number, op in enumerate(program.ops):
            times = windows.get(number)
            if times is not None and kernels:
                times = _on_gpu(kernels, op, times)
            if times is None:
                continue
            if times[0] < begin:
                raise ValueError(f"op {number} runs {1e-6 * (begin - times[0]):.3g} s before its step begins")
            start, stop = (1e-6 * (time - begin) for time in times)
            spans.append(Span(number, op, op.stream, start, stop))
    except ValueError as error:
        raise ValueError(f"read_kineto: {path}: {error}") from error
    last = max([end, *(kernel.end for kernel in kernels)])
    title = f"{MEASURED} by torch.profiler: {Path(path).name}"
    return Timeline(program.trace, tuple(spans), 1e-6 * (last - begin), title)


# ---- the file


RATIO, FLOOR = 32, 2**24
"""A file is unpacked to so many times its bytes, and to `FLOOR` bytes at least; recordings are packed to a tenth."""
OF_HOST, LAUNCHES, KERNEL = ("user_annotation", "cpu_op"), ("cuda_runtime", "cuda_driver"), "kernel"
STEP = "ProfilerStep#"
NUMBERED = re.compile(STEP + "[0-9]{1,18}")


class Timed(NamedTuple):
    """An event of the file. ts, dur: in microseconds; correlation: of a kernel with what launched it"""

    name: str
    cat: str
    ts: Annotated[float, Limits(-1e18, 1e18)]
    dur: Annotated[float, Limits(0, 1e18)] = 0.0
    correlation: int | None = None

    @property
    def end(self) -> float:
        return self.ts + self.dur


def _recorded(timed: Sequence[Timed], step: int | None) -> tuple[Window, list[Range], list[Kernel]]:
    """Returns when one step began and ended; its ranges, by their beginnings; kernels, by when they were launched."""
    host = [e for e in timed if e.cat in OF_HOST and e.name.startswith("FSDP::")]
    steps = {int(e.name[len(STEP) :]): e for e in timed if NUMBERED.fullmatch(e.name) and not e.cat.startswith("gpu")}
    if step is not None and step not in steps:
        raise ValueError(f"there is no {STEP}{step}, but {sorted(steps) or 'none'}")
    whole = [steps[max(steps) if step is None else step]] if steps else host
    start = min((e.ts for e in whole), default=0.0)
    end = max((e.end for e in whole), default=0.0)
    host = [e for e in host if start <= e.ts < end]
    if not host:
        where = f" in {whole[0].name}" if whole else ""
        raise ValueError(
            f"no range of FSDP2, such as FSDP::all_gather, is in it{where}; record a step with ProfilerActivity.CPU, "
            "too"
        )
    ranges = []
    for e in host:
        if match := RANGE.match(e.name):
            ranges.append(Range(e.ts, e.end, (match[1], match[2] or "")))
    launches: dict[int | None, float] = {
        e.correlation: e.ts for e in timed if e.cat in LAUNCHES and e.correlation is not None
    }
    kernels = []
    for e in timed:
        launched = launches.get(e.correlation) if e.cat == KERNEL else None
        if launched is not None and start <= launched < end:
            kernels.append(Kernel(launched, e.ts, e.end, e.name))
    return (start, end), sorted(ranges), sorted(kernels)


def _unpacked(path: Path) -> bytes:
    """Returns the bytes of a file, unpacked where its name ends in .gz. Raises ValueError where they would be too
    many."""
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


def _timed(path: Path) -> list[Timed]:
    """Returns the events of a file that tell when the host and a GPU did something."""
    try:
        data = json.loads(_unpacked(path).decode())
        events = data.get("traceEvents") if isinstance(data, dict) else data
        if not isinstance(events, list):
            raise ValueError("traceEvents: expected a list of events")
        found = (_event(f"traceEvents[{at}]", event) for at, event in enumerate(events))
        return [event for event in found if event is not None]
    except (OSError, zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"expected a recording of torch.profiler in JSON: {error}") from error


def _event(where: str, event: Any) -> Timed | None:
    if not isinstance(event, dict):
        raise ValueError(f"{where}: expected an object, got {shown(event)}")
    if event.get("ph") != "X":
        return None
    name = event.get("name")
    cat = event.get("cat", "")
    args = event.get("args") or {}
    if not isinstance(name, str) or not isinstance(args, dict):
        raise ValueError(f"{where}: expected a name, and an object of args, got {shown(event)}")
    if not name.startswith(("FSDP::", STEP)) and cat not in (*LAUNCHES, KERNEL):
        return None
    known = {field: event[field] for field in ("name", "ts", "dur") if field in event}
    timed: Timed = typed_at(where, Timed, known | {"cat": cat, "correlation": args.get("correlation")})
    return timed


# ---- each op of the program, and when the host did it


def _windows(ranges: Sequence[Range], step: Window, program: Program) -> dict[int, Window]:
    """Op -> when the host did it.

    Modules are known by their order: the first that is gathered is the program's first group of units. The n-th time
    that the host does something for a module is of the n-th such op.
    """
    groups = dict.fromkeys(op.units for op in program.ops if isinstance(op, Gather))
    modules = dict.fromkeys(each.key[1] for each in ranges if each.key[0] == "all_gather")
    _same("modules gathered", len(modules), len(groups))
    module = {unit: of for units, of in zip(groups, modules, strict=True) for unit in units}
    visits = program.trace.visits
    users = Counter(of for visit in visits for of in {module[unit] for unit in visit.units})

    wanted: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    inside = []  # computes of a module that has others inside
    for number, op in enumerate(program.ops):
        if isinstance(op, Gather | Reduce):
            wanted[COLLECTIVES[type(op)], module[op.units[0]]].append(number)
        elif isinstance(op, Forward | Backward):
            units = visits[op.visit].units
            if units and users[module[units[0]]] == 1:
                wanted[SIDES[type(op)][0], module[units[0]]].append(number)
            else:
                inside.append(number)

    outer = _outermost(ranges)
    gaps = [(a.key, (a.end, b.start)) for a, b in itertools.pairwise(outer) if b.start > a.end]
    did: defaultdict[tuple[str, str], list[Window]] = defaultdict(list)
    for start, end, key in ranges:
        if key[0] in COLLECTIVES.values():
            did[key].append((start, end))
    for key, gap in gaps:
        if key[0].startswith("pre_") and key in wanted:
            did[key].append(gap)

    windows: dict[int, Window] = {}
    for key in [*wanted, *did]:
        word, of = key
        _same(f"FSDP::{word}" + f" ({of})" * bool(of), len(did[key]), len(wanted[key]))
        windows |= dict(zip(wanted[key], did[key], strict=True))

    for number in inside:
        before = max((windows[n][1] for n in windows if n < number), default=step[0])
        after = min((windows[n][0] for n in windows if n > number), default=step[1])
        sides = SIDES[type(program.ops[number])]
        near = [gap for key, gap in gaps if key[0] in sides and before <= gap[0] and gap[1] <= after]
        if near:
            windows[number] = max(near, key=lambda gap: gap[1] - gap[0])
    return windows


def _same(what: str, recorded: int, said: int) -> None:
    if recorded != said:
        raise ValueError(
            f"{what}: {recorded} in the recording, {said} in the program: expected the program of the settings that "
            "the step ran with (reshard_after_forward, wrap, prefetch, microbatches)"
        )


def _outermost(ranges: Sequence[Range]) -> list[Range]:
    """Returns the ranges that are in no other."""
    found: list[Range] = []
    for each in ranges:
        if not found or each.start >= found[-1].end:
            found.append(each)
    return found


def _on_gpu(kernels: Sequence[Kernel], op: Op, window: Window) -> Window | None:
    """Returns when the kernels ran that were launched in `window` for an op; None where there are none."""
    first, last = (bisect_left(kernels, time, key=attrgetter("launched")) for time in window)
    pattern = KERNELS.get(op.stream)
    mine = []
    for kernel in kernels[first:last]:
        if pattern.search(kernel.name) if pattern else not OF_NCCL.search(kernel.name):
            mine.append(kernel)
    return (min(k.start for k in mine), max(k.end for k in mine)) if mine else None
