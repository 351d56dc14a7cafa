"""`python -m train report`: what the page says is what the run did; runs that are damaged, foreign or old."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness import hostile
from tests.harness.browser import CHROMIUM, Browser, served
from tests.harness.calibration import brief
from tests.harness.pool import Pools
from tests.train.inside import flags, inside, text
from train.page.chart import COLUMNS, Line, axis, chart, medians, number, size, thinned
from train.page.command import main
from train.page.reading import Run, read
from yafsdp_fn.timeline.text import shown

STEPS = 12


def briefly(mesh: Any, argv: tuple[str, ...]) -> Any:
    with brief():
        return inside(mesh, argv)


@pytest.fixture(scope="module")
def folder(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run on two ranks that recorded a step and measured its machine; and of the same run without either."""
    base = tmp_path_factory.mktemp("page")
    text(base, 200)
    (base / "held.txt").write_text("other text " * 50)
    more = ("--eval-every", "4", "--data.heldout-files", str(base / "held.txt"), "--optim.learning-rate", "1e-3")
    argv = flags(base, *more, "--timeline-every", "50")
    for each in ((*argv, "--calibrate"), (*argv, "--name", "plain", "--timeline-every", "0")):
        assert [rank.error for rank in pools[2].run(briefly, each)] == ["", ""]
    return base / "runs"


class Page(HTMLParser):
    """text: what is read; open: tags without an end"""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.raw = path.read_text()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(self.raw)
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    def says(self, *texts: str) -> None:
        assert [text for text in texts if text not in self.text] == []


def page(*argv: str | Path) -> Page:
    out = Path(argv[0]).parent / "page.html"
    assert main([*map(str, argv), "--out", str(out)]) == 0
    return Page(out)


@pytest.mark.nightly
def test_a_run_records_a_step_and_trains_as_without(folder: Path) -> None:
    run = read(folder / "a")
    plain = read(folder / "plain")
    assert run.timeline is not None
    assert run.program is not None
    assert run.machine is not None
    assert plain.timeline is None
    assert plain.machine is None
    assert run.recorded in range(STEPS - 4, STEPS + 1)  # the last five
    assert run.timeline.title == "measured, rank 0 of 2"
    inside_program = [span.op for span in run.timeline.spans if span.number < len(run.program.ops)]
    assert inside_program == list(run.program.ops)
    assert any(visit.cost.flops for visit in run.program.trace.visits)
    assert [row["loss"] for row in run.steps] == [row["loss"] for row in plain.steps]
    assert [(row["step"], row["eval_loss"]) for row in run.evaluations] == plain.series("eval_loss")
    assert [each["event"] for each in run.events] == ["start", "machine", "end"]
    assert run.start["ranks"] == 2
    assert run.start["kind"] == "cpu"


def test_the_page_says_what_the_run_did_and_needs_nothing_else(folder: Path) -> None:
    found = page(folder / "a")
    run = read(folder / "a")
    assert run.timeline is not None
    assert run.program is not None
    assert run.machine is not None
    assert not re.search(r"(src|href)=\"(?!data:)|@import|url\(|<script", found.raw)
    assert "not written down" not in found.text
    assert found.raw.count('<svg class="chart"') == 4
    assert found.raw.count('<img class="picture"') == 1
    predicted = ya.planner.simulate(run.program, run.machine)
    least = ya.planner.Plan.of(run.program, run.machine).least
    memory = ya.planner.predict_memory(run.program, device="cpu")
    found.says(
        f"Finished after step {STEPS} of {STEPS}",
        f"{run.evaluations[-1]['eval_loss']:.4f} nats a byte; step {STEPS}",
        "loss, nats a byte",
        "median; a token is a byte",
        "tokens in 1 document",
        *(f"loss {number(row['loss'])}" for row in run.steps),  # under the pointer
        f"step {shown(predicted.seconds)} {shown(run.timeline.seconds)}",
        f"The bound there, below the prediction: {least.against(predicted.seconds)}.",
        f"peak {size(memory.peak_bytes)}",
        memory.at,
        "optim.learning_rate 0.001 0.002",
        "forward layers[0] in slot",
    )
    elsewhere = ya.planner.simulate(run.program, "h100-80g")
    page(folder / "a", "--cluster", "h100-80g").says(shown(elsewhere.seconds), "figures of h100")


def test_two_runs_beside_each_other(folder: Path) -> None:
    a = read(folder / "a")
    b = read(folder / "plain")
    found = page(folder / "a", folder / "plain")
    held = [number(run.evaluations[-1]["eval_loss"]) for run in (a, b)]
    found.says(
        "calibrate True False",
        "timeline_every 50 0",
        f"held-out loss, last nats a byte {held[0]} {held[1]} 1.000",
        "Not both of them have recorded one",
    )
    assert re.search(r"step, median m?s [\d.]+ [\d.]+ ", found.text)
    assert re.search(r"most memory [GM]iB [\d.]+ [\d.]+ ", found.text)
    assert found.raw.count('<svg class="chart"') == 4
    assert "Their tokens" not in found.text
    twice = page(folder / "a", folder / "a")
    assert twice.raw.count('<img class="picture"') == 1
    twice.says(" schedule ranks microbatches step ", "step +0.0%, ")


@pytest.fixture
def mine(folder: Path, tmp_path: Path) -> Path:
    """A copy to spoil, under a name that means something in HTML."""
    path = tmp_path / "x<i>&"
    shutil.copytree(folder / "a", path, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    return path


@pytest.mark.parametrize("before", [False, True])
def test_tokens_that_are_not_the_same_have_no_ratio(folder: Path, mine: Path, before: bool) -> None:
    """A byte against a token; tokens of two tokenizers; runs of before, whose starts do not say."""
    other = mine.parent / "other"
    shutil.copytree(mine, other)
    for path, tokenizer in ((mine, "one"), (other, "another")):
        (path / "tokenizer").mkdir()
        counted = "" if before else f', "unit": "token", "tokenizer": "{tokenizer}"'
        events = (path / "events.jsonl").read_text()
        (path / "events.jsonl").write_text(re.sub(r', "unit": "byte", "tokenizer": "bytes"', counted, events))
    for pair, units in (((folder / "a", mine), ("byte", "token")), ((mine, other), ("token", "token"))):
        held, found, (a, b) = number(read(mine).series("eval_loss")[-1][1]), page(*pair), units
        assert found.raw.count('<svg class="chart"') == 6
        found.says(
            f"held-out loss, last {held} nats a {a} {held} nats a {b} most memory",
            "what is by the token has no ratio",
            f"loss, nats a {a}",
            "speed, median tokens/s",
        )
        assert not re.search(r"speed, median tokens/s \S+ \S+ \d", found.text)
    assert page(mine, mine).raw.count('<svg class="chart"') == (6 if before else 4)


def test_a_run_of_before_says_what_is_missing(mine: Path) -> None:
    for name in ("events.jsonl", "timeline.json"):
        (mine / name).unlink()
    found = page(mine)
    assert "<h1>x&lt;i&gt;&amp;</h1>" in found.raw
    found.says("it has no events.jsonl", "it has no timeline.json")
    assert main([str(mine), "--cluster", "h100-80g"]) == 2, "it would be left unused"


def test_runs_that_ended_otherwise(mine: Path) -> None:
    events = (mine / "events.jsonl").read_text().splitlines()
    start = json.loads(events[0])
    end = json.loads(events[-1])
    warning = {"time": start["time"], "event": "warning", "text": "step 3: <not> finite"}

    def written(*lines: Any) -> Page:
        (mine / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return page(mine)

    rows = (mine / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [row for row in rows if json.loads(row)["step"] <= 7]
    (mine / "metrics.jsonl").write_text("".join(kept) + '{"step": 8, "lo')  # killed in the middle of a line

    written(start).says("After step 7 of 12; no end was written: it goes on, or it was killed")
    written(start, warning, end | {"error": "CommunicationError: rank 1 is gone"}).says(
        "Failed after step 7 of 12: CommunicationError: rank 1 is gone", "warning: step 3: <not> finite"
    )
    written(start, end).says("Stopped after step 7 of 12; --name x<i>& --resume goes on", "end, after step 12")
    written(start, start | {"step": 4, "attempt": 1}, end).says(
        "start, from step 4, restart 1", "2 starts, 1 without an end and not counted"
    )


def spoilt(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text(change((run / name).read_text())) and None


def without_its_first_gather(text: str) -> str:
    data = json.loads(text)
    return json.dumps(data | {"ops": data["ops"][1:]})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (shutil.rmtree, "is no folder of a run"),
        (lambda run: (run / "config.json").unlink(), "config.json does not exist: not a folder that"),
        (lambda run: (run / "metrics.jsonl").unlink(), "the run has not come to its first step"),
        (spoilt("config.json", lambda text: text[:-9]), "config.json cannot be read as the config of a run"),
        (spoilt("metrics.jsonl", lambda text: "{\n" + text), "metrics.jsonl, line 1, is no JSON"),
        (spoilt("metrics.jsonl", lambda text: "[1]\n" + text), "line 1: expected an object, got [1]"),
        (
            spoilt("metrics.jsonl", lambda text: text.replace('"step": 3', '"step": "3"', 1)),
            "line 4.step: expected an int of 64 bits, got '3'",
        ),
        (
            spoilt("metrics.jsonl", lambda text: re.sub(r'"lr": [^,]*', '"lr": [1]', text)),
            "line 2.lr: expected a finite number, got [1]",
        ),
        (spoilt("events.jsonl", lambda text: text.replace('"event"', '"what"', 1)), "line 1: no event"),
        (
            spoilt("events.jsonl", lambda text: text.replace('"ranks": 2', '"ranks": "2"')),
            "line 1.ranks: expected an int of 64 bits, got '2'",
        ),
        (
            spoilt("metrics.jsonl", lambda text: text.replace('"loss": ', '"loss": 9' + 400 * "9")),
            "expected a finite number",
        ),
        (spoilt("events.jsonl", lambda text: text.replace("matmul_flops", "flops")), "is not what a run leaves there"),
        (spoilt("timeline.json", lambda text: text[:-30]), "timeline.json is not what a run leaves there"),
        (spoilt("timeline.json", lambda text: text.replace('"compute"', '"gather"', 1)), "runs on compute"),
        (spoilt("timeline.json", without_its_first_gather), "rule 'weights'"),
    ],
)
def test_what_is_damaged_is_named(
    mine: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], says: str
) -> None:
    spoil(mine)
    assert main([str(mine)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and says in said and str(mine) in said and said.count("\n") < 12


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--cluster", "a100"), "--cluster a100: unknown cluster 'a100'; did you mean a100-80g"),
        (("--out", "/nowhere/x.html"), "/nowhere/x.html cannot be written"),
    ],
)
def test_what_cannot_be_done_is_said(mine: Path, capsys: pytest.CaptureFixture[str], argv: Any, says: str) -> None:
    assert main([str(mine), *argv]) == 2
    assert says in capsys.readouterr().err


# ---- axes and lines


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [-1e-9, 2e-9], [5.6, 2.3], [1e-7, 1.0], [-3.0, 1e12], []])
@pytest.mark.parametrize("log", [False, True])
def test_an_axis_holds_its_values_and_has_ticks(values: list[float], log: bool) -> None:
    if log and not (values and min(values) > 0):
        return
    found = axis(values, log=log)
    assert all(0 <= found.at(value) <= 1 for value in values)
    assert sorted(found.ticks) == list(found.ticks)
    assert 1 <= len(found.ticks) <= 10
    assert all(found.low * 0.99 <= tick <= found.high * 1.01 or not log for tick in found.ticks)


def test_numbers_as_people_read_them() -> None:
    values = (0, 2.8714, 1291, 12345, 2e6, 6.5e-5, 0.002, -3.2)
    assert [number(value) for value in values] == ["0", "2.871", "1291", "12.35k", "2M", "6.5e-5", "0.002", "-3.2"]
    assert [size(value) for value in (4, 3 * 2**10, 5 * 2**19, 2**30)] == ["4 B", "3 KiB", "2.5 MiB", "1.00 GiB"]


def test_a_long_run_is_thinned_and_keeps_its_extremes() -> None:
    points = [(float(step), float(step % 7)) for step in range(1, 50_001)]
    points[30_000] = (30_001.0, 999.0)
    found = thinned(points)
    assert len(found) <= 2 * (COLUMNS + 1)
    assert found == sorted(found)
    assert (30_001.0, 999.0) in found
    assert max(value for _, value in medians(points)) < 7
    assert len(chart("loss", [Line("loss", points, noisy=True)], 50_000)) < 150_000


def test_no_points_no_chart() -> None:
    assert chart("loss", [Line("loss", [])], 10) == ""


def test_the_typical_step_leaves_out_the_first_of_each_start(folder: Path) -> None:
    from train.page.facts import typical

    run = read(folder / "a")
    rows = [{**row, "step_ms": 1e6 if row["step"] in (1, 5) else 2.0} for row in run.steps]
    events = [*run.events, {"event": "start", "time": "", "step": 4}]
    assert typical(Run(**{**vars(run), "steps": rows, "events": events}), "step_ms") == 2.0


# ---- names out of other people's runs, in a real browser


def spoken(value: Any, word: str) -> Any:
    """A value of JSON with the word behind all of its own."""
    if isinstance(value, dict):
        fixed = ("event", "time", "kind", "unit", "command")
        return {key: each if key in fixed else spoken(each, word) for key, each in value.items()}
    if isinstance(value, list):
        return [spoken(each, word) for each in value]
    return value + word if isinstance(value, str) else value


def hostile_run(source: Path, run: Run, into: Path, word: str) -> None:
    """A run whose events, settings, units and recorded step have hostile names."""
    assert run.program is not None
    assert run.timeline is not None
    shutil.copytree(source, into, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    lines = [json.loads(line) for line in (into / "events.jsonl").read_text().splitlines()]
    lines.insert(1, {"time": lines[0]["time"], "event": "warning", "text": ""})
    lines[-1] |= {"error": ""}
    lines = [line if line["event"] == "machine" else spoken(line, word) for line in lines]
    (into / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | {"data": config["data"] | {"files": [word]}}))
    program = hostile.renamed(run.program, word)
    timeline = run.timeline._replace(trace=program.trace, title=word)
    recorded = json.loads((into / "timeline.json").read_text())
    (into / "timeline.json").write_text(json.dumps(recorded | {"timeline": json.loads(timeline.to_json())}))


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.timeout(7200)
def test_names_of_a_run_are_text(folder: Path, tmp_path: Path) -> None:
    """On the page of one run and of two, and in the picture of the step, opened by itself."""
    good = read(folder / "a")
    pictures = 0
    with served(tmp_path) as url, Browser() as browser:
        for number, word in enumerate(hostile.MARKUP):
            run = tmp_path / re.sub(r"[/\0]", "", f"{number}{word[:60]}")
            hostile_run(folder / "a", good, run, word)
            for runs in ([run, folder / "plain"], [run]):
                assert main([*map(str, runs), "--out", str(tmp_path / "page.html")]) == 0, word
                browser.open(f"{url}page.html?{len(runs)}-{number}")
                assert hostile.injected(browser) == [], word
            for picture in re.findall(r"data:image/svg\+xml;base64,([^\"]*)", (tmp_path / "page.html").read_text()):
                (tmp_path / "step.svg").write_bytes(base64.b64decode(picture))
                browser.open(f"{url}step.svg?{number}")
                assert browser.evaluate("document.documentElement.tagName") == "svg", word
                assert hostile.injected(browser) == [], word
                pictures += 1
        assert pictures > 30
        assert [each for each in browser.problems if "404" not in each] == []  # favicon.ico
