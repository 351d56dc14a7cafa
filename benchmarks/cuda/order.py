"""One step seen twice: by `ya.timeline.record`, and by torch's profiler, whose trace has a range for each op of it.

    the same order    on every stream the ops begin in one order in both, and no two ops of different streams that one
                      has strictly after each other are the other way round in the other

On CUDA the profiler's ranges are those of kernels on the GPU's streams, by CUPTI; ours are CUDA events.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import yafsdp_fn as ya
from benchmarks.cuda import gpu, sides
from benchmarks.cuda.emulated import Report
from benchmarks.cuda.gpu import Place, Setting
from benchmarks.emulated import emulate
from yafsdp_fn.timeline import Span, Timeline

PLACE = Place("llama2-7b", 4, 2048, 8)
RANGE = re.compile(r"op (-?\d+) on (\w+)")
SLACK = 20e-6
"""Seconds between two ops of different streams below which they count as neither before nor after each other."""


def fit(setting: Setting) -> gpu.Fit:
    """The layers of the step that is seen."""
    return PLACE.fit(setting, lambda config: PLACE.planned(setting, config, ya.schedules.zero3()).peak_bytes)


def run(setting: Setting, report: Report) -> None:
    fitting = fit(setting)
    config = setting.config(PLACE.model, fitting.layers)
    with emulate("a100-80g", PLACE.ranks):
        mesh, batch = ya.mesh(device=setting.device), setting.batch(config, PLACE.seq)
        contender = sides.build(config, mesh, setting, {"zero3": ya.schedules.zero3()})["zero3"]
        for _ in range(3):
            contender.step(batch)
        recorded, events = both(contender, batch, setting)
    seen = profiled(events, recorded, on_gpu=setting.device == "cuda")
    found = compared(recorded, seen) | {"fits": fitting.words()}
    for name, timeline in (("recorded", recorded), ("profiled", seen)):
        path = Path(setting.pictures) / f"order_{name}.png"
        try:
            timeline.save(path)
            found.setdefault("pictures", []).append(path.name)
        except (ModuleNotFoundError, ValueError) as error:
            found["no pictures"] = str(error)
    report(found)


def both(contender: sides.Ours, batch: Any, setting: Setting) -> tuple[Timeline, list[dict[str, Any]]]:
    """The second of two steps under the profiler, which takes its time in the first; and the profiler's events."""
    kinds, every = [ProfilerActivity.CPU, ProfilerActivity.CUDA], None
    if setting.device == "cpu":  # streams are threads
        kinds, every = kinds[:1], torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    contender.step(batch)
    with profile(activities=kinds, experimental_config=every) as prof:
        contender.step(batch)
        setting.synchronize()
        with ya.timeline.record() as recording:
            contender.step(batch)
        contender.held.state.memory.comms.drain()
        setting.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return recording.timeline(), events


class Seen(NamedTuple):
    """A range of the trace: where, and seconds."""

    track: object
    start: float
    end: float


def profiled(events: Sequence[dict[str, Any]], like: Timeline, *, on_gpu: bool) -> Timeline:
    """`like` with the times of the profiler; ops that it has not seen are left out.

    A range around the issue of other streams' work covers that, too, in the GPU's tracks: of each op the one on its
    stream's own track counts, which is the track of most ops of that stream.
    """
    category = "gpu_user_annotation" if on_gpu else "user_annotation"
    ranges: dict[tuple[int, str], list[Seen]] = defaultdict(list)
    for event in events:
        named = RANGE.fullmatch(event.get("name", ""))
        if named and event.get("ph") == "X" and event.get("cat") == category:
            start = event["ts"] * 1e-6
            ranges[int(named[1]), named[2]].append(Seen(event["tid"], start, start + event["dur"] * 1e-6))
    tracks: dict[str, Counter[object]] = defaultdict(Counter)
    for (_, stream), those in ranges.items():
        tracks[stream].update({seen.track for seen in those})
    spans = []
    for span in like.spans:
        those = ranges.get((span.number, span.stream), [])
        main = tracks[span.stream].most_common(1)[0][0] if those else None
        own = [seen for seen in those if seen.track == main] if on_gpu else those
        if own:
            start, end = min(seen.start for seen in own), max(seen.end for seen in own)
            spans.append(span._replace(start=start, end=end, cause=None))
    first = min((span.start for span in spans), default=0.0)
    moved = tuple(span._replace(start=span.start - first, end=span.end - first) for span in spans)
    return like._replace(spans=moved, seconds=max((span.end for span in moved), default=0.0), title="torch's profiler")


def compared(recorded: Timeline, seen: Timeline) -> dict[str, Any]:
    """The check, by stream and between streams. Ops that the profiler has no range of fail it."""
    numbers = {span.number for span in seen.spans}
    lacking = [span.number for span in recorded.spans if span.number not in numbers]
    streams = {stream: _order(recorded, stream) == _order(seen, stream) for stream in recorded.streams}
    turned = _turned(recorded, seen)
    same = not lacking and all(streams.values()) and not turned
    return {
        "goals": {"profiler and timeline show the same order": same},
        "same order": same,
        "same order on": streams,
        "ops": len(recorded.spans),
        "not in the profile": lacking,
        "turned round": turned,
        "seconds": {"recorded": recorded.seconds, "profiled": seen.seconds},
    }


def _order(timeline: Timeline, stream: str) -> list[int]:
    return [span.number for span in sorted(timeline.on(stream), key=lambda span: span.start)]


def _turned(one: Timeline, two: Timeline) -> list[tuple[int, int]]:
    """Pairs of ops, of different streams, of which one is before the other in `one` and after it in `two`."""
    there = {span.number: span for span in two.spans}
    both = [span for span in one.spans if span.number in there]
    return [
        (a.number, b.number)
        for a, b in itertools.permutations(both, 2)
        if a.stream != b.stream and _before(a, b) and _before(there[b.number], there[a.number])
    ]


def _before(a: Span, b: Span) -> bool:
    return a.end + SLACK <= b.start
