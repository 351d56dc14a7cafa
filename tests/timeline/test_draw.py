"""Pictures, trace events and text of timelines: what is in them, and what they refuse."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_rgb

from tests.planner.pipelines import NO_LINKS, chain, pipeline
from tests.program.traces import model, on
from tests.timeline import trace_events
from yafsdp_fn.lab.peers import Copy
from yafsdp_fn.pipelines.orders import gpipe, one_f_one_b, zero_bubble
from yafsdp_fn.planner import Cluster, simulate
from yafsdp_fn.program.measured import Value
from yafsdp_fn.schedules import Backward, Forward, Gather, Reduce, Schedule, Trace, remat, zero1, zero2, zero3
from yafsdp_fn.timeline import Span, Timeline
from yafsdp_fn.timeline.layout import MANY_SLOTS, Palette, on_ramp
from yafsdp_fn.timeline.perfetto import document
from yafsdp_fn.timeline.spans import Held, grad_slots, weight_slots
from yafsdp_fn.timeline.text import shown

MESH = (("shard", 2),)
PLAIN = Cluster(
    name="round",
    gpus_per_node=8,
    matmul_flops=1.0,
    attention_flops=1.0,
    memory_bandwidth=1e30,
    memory_bytes=2**40,
    node_bandwidth=1e30,
    network_bandwidth=1e30,
    node_latency=1.0,
    network_latency=1.0,
    contention=0.0,
)
"""A unit of work takes a second; a collective of two ranks takes its latency alone."""


def costed(count: int, flops: int) -> Trace:
    trace = on(model(count), MESH, "after norm")
    return trace._replace(
        visits=tuple(v._replace(cost=v.cost._replace(flops=flops, bwd_flops=2 * flops)) for v in trace.visits)
    )


def simulated(count: int, schedule: Schedule | None = None, flops: int = 4, title: str = "") -> Timeline:
    return simulate((schedule or zero3())(costed(count, flops)), PLAIN, title=title)


def by_hand() -> Timeline:
    """Gather and compute a layer, a late gather for the next, both backwards, one reduction; and a pause at the end.

    seconds   0    1    2    3    4    5    6    7    8
    gather    [0 ]      [ 1     ]
    compute        [F0]           [F1][B1   ][B0]
    reduce                                       [R0]
    """
    trace = on(model(2), MESH)
    embed = 0
    first = 1
    ops = [
        Span(0, Gather((embed,), (0,)), "gather", 0.0, 1.0),
        Span(1, Gather((first,), (1,)), "gather", 2.0, 4.0, cause=2),
        Span(2, Forward(0, (0,), True), "compute", 1.0, 2.0, cause=0),
        Span(3, Forward(1, (1,), False), "compute", 4.0, 4.5, cause=1),
        Span(4, Backward(1, (1,), (1,)), "compute", 4.5, 6.0, cause=3),
        Span(5, Backward(0, (0,), (0,)), "compute", 6.0, 6.5, cause=4),
        Span(6, Reduce((first,), (1,)), "reduce", 6.5, 7.0, cause=5),
    ]
    return Timeline(trace, tuple(ops), 8.0, "by hand")


# ---- text


def test_text() -> None:
    assert str(by_hand()).splitlines() == [
        "by hand: 8.00 s",
        "  gather           3.00 s   38% busy, 2 ops",
        "  compute          3.50 s   44% busy, 4 ops",
        "  reduce           500 ms    6% busy, 1 op",
        "  compute idle     4.50 s  3.00 s waiting for gathers, 1.50 s after the last op",
        "  critical path    7.00 s  7 ops: 3.50 s compute, 3.00 s gather, 500 ms reduce; between and after them 1.00 s",
    ]


def test_gaps_after_the_op_before_are_the_hosts() -> None:
    late = by_hand().spans[5]._replace(start=6.25)
    timeline = by_hand()._replace(spans=(*by_hand().spans[:5], late, by_hand().spans[6]))
    assert timeline.bubbles() == {"gather": 3.0, "end": 1.5, "host": 0.25}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.345, "12.3 s"), (0.5, "500 ms"), (2e-3, "2.00 ms"), (3.25e-5, "32.5 µs"), (0.0, "0 s")],
)
def test_times_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert shown(seconds) == text


# ---- slots


def test_slots_by_hand() -> None:
    assert weight_slots(by_hand()) == [Held(0, 0, 0.0, 1.0, 6.5), Held(1, 1, 2.0, 4.0, 6.0)]
    assert grad_slots(by_hand()) == [Held(0, 0, 6.0, 6.5, 8.0), Held(1, 1, 4.5, 6.0, 7.0)]


@pytest.mark.parametrize("update", [False, True])
def test_a_slot_holds_one_unit_at_a_time(update: bool) -> None:
    timeline = simulated(6, zero3(update=update))
    for held in (weight_slots(timeline), grad_slots(timeline)):
        for one, two in itertools.pairwise(held):
            assert one.slot < two.slot or one.end <= two.start
        assert all(each.start <= each.ready <= each.end <= timeline.seconds for each in held)


def test_what_is_carried_over_is_there_from_the_beginning() -> None:
    program = zero2(update=True)(on(costed(3, 4), MESH, "after norm"))
    timeline = simulate(program, PLAIN)
    begun = {held.slot: held.unit for held in weight_slots(timeline) if held.start == held.ready == 0.0}
    assert begun == program.carried()
    gathered = [held for held in weight_slots(timeline) if held.end == timeline.seconds]
    assert {held.slot: held.unit for held in gathered} == program.carried()


# ---- pictures


def texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def drawn(timeline: Timeline, folder: Path, beside: Timeline | None = None) -> list[str]:
    timeline.save(folder / "x.svg", beside=beside)
    return texts(folder / "x.svg")


def test_a_picture_says_what_it_shows(tmp_path: Path) -> None:
    found = drawn(by_hand(), tmp_path)
    for text in ("gather", "compute", "reduce", "slot 0", "slot 1", "grad slot 1", "by hand", "embed", "critical path"):
        assert text in found, text
    assert "time since the step began, s" in found
    assert "step 8.00 s, compute busy 44%; idle 3.00 s waiting for gathers, 1.50 s after the last op" in found
    assert "gather 0" in found  # layer 0, unit 1: what the gap of compute waits for
    assert "recomputes its forward first" in found
    assert "replicate" not in found


def test_eight_layers_are_numbered_in_every_lane(tmp_path: Path) -> None:
    found = drawn(simulated(8), tmp_path)
    assert {text: found.count(text) >= 4 for text in map(str, range(8))} == dict.fromkeys(map(str, range(8)), True)


def test_eighty_layers_are_numbered_where_there_is_room(tmp_path: Path) -> None:
    found = drawn(simulated(80, zero2(remat=remat.every(2))), tmp_path)
    numbers = [int(text) for text in found if text.isdigit()]
    assert {0, 10, 20, 40, 70} <= set(numbers)
    assert len(numbers) < 200
    assert "82 slots" in found
    assert MANY_SLOTS < 82
    assert "forward and weights, layers 0 to 79" in found


def test_what_takes_no_time_has_no_label(tmp_path: Path) -> None:
    """The reductions of a rank that holds everything: boxes without a width."""
    timeline = by_hand()
    *others, reduction = timeline.spans
    shown = drawn(timeline, tmp_path).count("0")
    without = timeline._replace(spans=(*others, reduction._replace(end=reduction.start)))
    assert drawn(without, tmp_path).count("0") == shown - 1


def test_two_timelines_share_one_axis(tmp_path: Path) -> None:
    predicted = simulated(3, title="predicted")
    measured = simulated(3, flops=8, title="measured")
    found = drawn(predicted, tmp_path, beside=measured)
    assert found.index("predicted") < found.index("measured")
    assert found.count("compute") == 2
    assert found.count("time since the step began, s") == 1


def test_a_title_with_dollars_is_no_formula(tmp_path: Path) -> None:
    simulated(2, title="from $_$").save(tmp_path / "x.svg")
    assert ">from $_$<" in (tmp_path / "x.svg").read_text()


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_other_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    simulated(2).save(path)
    assert path.read_bytes()[:4] == {"png": b"\x89PNG", "pdf": b"%PDF"}[suffix]


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.jpeg: a picture is a file that ends in one of \.pdf, \.png, \.svg"):
        simulated(2).save(tmp_path / "x.jpeg")
    with pytest.raises(ValueError, match="the timeline 'nothing' has no ops to draw"):
        by_hand()._replace(spans=(), title="nothing").save(tmp_path / "x.png")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'yafsdp_fn\[plan\]'"):
        simulated(2).save(tmp_path / "x.png")


def test_colours_of_layers_differ_and_weights_are_lighter_than_gradients() -> None:
    trace = on(model(80), MESH)
    palette = Palette(trace)
    for dark in (False, True):
        assert len({palette.of(unit.id, dark) for unit in trace.units}) == len(trace.units)
    light, dark_ones = ([sum(to_rgb(palette.of(u.id, dark))) for u in trace.units] for dark in (False, True))
    assert all(weights > gradients for weights, gradients in zip(light, dark_ones, strict=True))
    ramp = "000000 ff0000 ffff00"
    found = [on_ramp(ramp, part) for part in (0.0, 0.25, 0.5, 1.0)]
    assert found == ["#000000", "#800000", "#ff0000", "#ffff00"]


# ---- trace events


EVENTS = """[
    {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "by hand"}},
    {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "gather"}},
    {"ph": "M", "pid": 0, "tid": 0, "name": "thread_sort_index", "args": {"sort_index": 0}},
    {"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": {"name": "compute"}},
    {"ph": "M", "pid": 0, "tid": 1, "name": "thread_sort_index", "args": {"sort_index": 1}},
    {"ph": "X", "pid": 0, "tid": 0, "name": "gather embed -> slot 0", "cat": "gather", "ts": 0.0, "dur": 1e6,
     "args": {"op": 0, "units": ["embed"], "slots": [0], "bytes": 40}},
    {"ph": "X", "pid": 0, "tid": 0, "name": "gather a[0] -> slot 1", "cat": "gather", "ts": 2e6, "dur": 2e6,
     "args": {"op": 1, "units": ["a[0]"], "slots": [1], "bytes": 48,
              "cause": {"op": 2, "name": "forward embed in slot 0, keep graph"}}},
    {"ph": "X", "pid": 0, "tid": 1, "name": "forward embed in slot 0, keep graph", "cat": "compute", "ts": 1e6,
     "dur": 1e6, "args": {"op": 2, "units": ["embed"], "slots": [0], "microbatch": 0,
                          "cause": {"op": 0, "name": "gather embed -> slot 0"}}},
    {"ph": "s", "pid": 0, "tid": 1, "name": "lets begin", "cat": "cause", "ts": 1999999.875, "id": 8},
    {"ph": "f", "pid": 0, "tid": 0, "name": "lets begin", "cat": "cause", "ts": 2e6, "id": 8, "bp": "e"},
    {"ph": "s", "pid": 0, "tid": 0, "name": "lets begin", "cat": "cause", "ts": 999999.875, "id": 9},
    {"ph": "f", "pid": 0, "tid": 1, "name": "lets begin", "cat": "cause", "ts": 1e6, "id": 9, "bp": "e"}
]"""
"""Of the first three ops of `by_hand`."""


def test_trace_events_exactly(tmp_path: Path) -> None:
    timeline = by_hand()
    timeline._replace(spans=timeline.spans[:3]).perfetto(tmp_path / "x.json")
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["displayTimeUnit"] == "ms"
    assert found["traceEvents"] == json.loads(EVENTS)


@pytest.mark.parametrize("seconds", [1.0, 1 / 3, 1e-5 / 7])
def test_trace_events_keep_the_rules_of_their_format(seconds: float, tmp_path: Path) -> None:
    def scaled(timeline: Timeline) -> Timeline:
        spans = tuple(s._replace(start=s.start * seconds, end=s.end * seconds) for s in timeline.spans)
        return timeline._replace(spans=spans, seconds=timeline.seconds * seconds)

    one = scaled(simulated(5, title="one"))
    two = scaled(simulated(2, flops=8, title="two"))
    one.perfetto(tmp_path / "x.json", beside=two)
    text = (tmp_path / "x.json").read_text()
    trace_events.check(text)
    events = json.loads(text)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [event["pid"] for event in slices] == [0] * len(one.spans) + [1] * len(two.spans)
    for span, event in zip((*one.spans, *two.spans), slices, strict=True):
        assert event["ts"] == pytest.approx(1e6 * span.start, abs=0.0626)
        assert event["dur"] == pytest.approx(1e6 * span.seconds, abs=0.126)
    assert sum(event["ph"] == "s" for event in events) > 5


def test_copies_of_peers(tmp_path: Path) -> None:
    """They are simulated and drawn, though nothing here runs them."""
    timeline = by_hand()
    copy: Any = Copy((1,), "compute", 8.0)
    late = timeline.spans[4]._replace(start=5.5, cause=7)
    spans = (*timeline.spans[:4], Span(7, copy, "compute", 4.5, 5.5, cause=3), late, *timeline.spans[5:])
    timeline = timeline._replace(spans=spans)
    assert "copy" in drawn(timeline, tmp_path)
    assert [event["name"] for event in document([timeline])["traceEvents"] if event.get("cat") == "copy"] == [
        "copy a[0]"
    ]
    assert "1.00 s copy" in str(timeline).splitlines()[-1]


def test_copies_to_the_host(tmp_path: Path) -> None:
    """A lane of their own, numbered by layers; what compute waits for; bytes in trace events."""
    values = [Value(k, 4096, 4096) for k in range(6)]
    trace = costed(5, 4)
    visits = [
        v._replace(cost=v.cost._replace(takes=(x,), carries=(x.number,)))
        for v, x in zip(trace.visits[1:], values, strict=True)
    ]
    trace = trace._replace(visits=(trace.visits[0], *visits))
    program = zero3(remat=remat.offload())(trace)
    timeline = simulate(program, PLAIN.replace(host_bandwidth=256.0))
    assert timeline.busy("offload") == pytest.approx(6 * 16.0)
    assert timeline.comm_s >= timeline.busy("offload")
    assert {"offload", "fetch"} <= set(timeline.bubbles())
    assert "96.0 s" in str(timeline).splitlines()[4]
    assert "waiting for fetches" in str(timeline)
    found = drawn(timeline, tmp_path)
    assert "offload" in found
    assert "idle: waiting for fetches" in found
    assert "offload" not in drawn(simulated(5), tmp_path)
    events = [event for event in document([timeline])["traceEvents"] if event.get("cat") in ("offload", "fetch")]
    assert [event["name"] for event in events][:3] == [f"offload a[{k}] <- carry slot {k % 2}" for k in range(3)]
    assert all(event["args"]["bytes"] == 4096 and event["args"]["carry_slot"] in (0, 1) for event in events)
    assert [event["args"]["units"] for event in events][3:] == [["a[2]"], ["a[1]"], ["a[0]"]]


# ---- pipelines beside each other


def test_pipelines_beside_each_other(tmp_path: Path) -> None:
    one, two = (simulate(pipeline(chain(2, 2), 2, f(zero1())), NO_LINKS) for f in (one_f_one_b, gpipe))
    one = one._replace(title="one")
    two = two._replace(title="two")
    one.save(tmp_path / "x.svg", beside=two)
    picture = (tmp_path / "x.svg").read_text()
    assert picture.count(">stage 1<") == 2
    assert ">one<" in picture
    assert ">two<" in picture
    one.perfetto(tmp_path / "x.json", beside=two)
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {0: "one, stage 0", 1: "one, stage 1", 2: "two, stage 0", 3: "two, stage 1"}
    ends: dict[int, list[int]] = {}
    for event in events:
        if event["name"] == "lets begin":
            ends.setdefault(event["id"], []).append(event["pid"])
    across = {tuple(both) for both in ends.values() if both[0] != both[1]}
    assert across == {(0, 1), (1, 0), (2, 3), (3, 2)}  # never from one timeline to the other
    one.by_stage[0].save(tmp_path / "part.svg", beside=two)
    assert (tmp_path / "part.svg").read_text().count(">stage 0<") == 2  # its title, and a row of the other
    for name, suffix in (("save", "svg"), ("perfetto", "json")):
        with pytest.raises(TypeError, match=rf"{name}\(beside=\): expected a Timeline, got str"):
            getattr(one, name)(tmp_path / f"x.{suffix}", beside="two")


@pytest.mark.parametrize("schedule", [one_f_one_b, zero_bubble])
def test_each_stage_is_drawn_alone(schedule: Callable[[Schedule], Schedule], tmp_path: Path) -> None:
    """Also one whose compute waits for another's messages, and one whose backwards come in halves."""
    timeline = simulate(pipeline(chain(4, 4), 2, schedule(zero3())), NO_LINKS)
    for part in timeline.by_stage:
        assert {"receive", "send", "compute"} <= set(drawn(part, tmp_path))


@pytest.mark.parametrize("name", [" ", "\u202e", "\u200b\u00a0", "\x00", "$\\frac{$", "</text>"])
def test_any_name_is_drawn(name: str, tmp_path: Path) -> None:
    """Names without ink, and those of which no XML can be; what is drawn is read back as XML."""
    drawn = simulated(3, title=name)
    units = tuple(unit._replace(name=name, stack=unit.stack and name) for unit in drawn.trace.units)
    drawn._replace(trace=drawn.trace._replace(units=units)).save(tmp_path / "step.svg")
    ElementTree.parse(tmp_path / "step.svg")
