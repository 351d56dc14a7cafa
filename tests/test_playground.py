"""docs/playground: its Python where there is no torch, and the page in a browser.

python -m tests.test_playground docs/images/playground.png      takes the picture of docs/schedules.md
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness import hostile
from tests.harness.browser import CHROMIUM, Browser, served
from tests.harness.pages import ROOT
from tests.program.test_hazards import EVERY_OP

HERE = ROOT / "docs" / "playground"
MODELS = json.loads((HERE / "traces" / "index.json").read_text())
SMALL = MODELS[0]
SEVEN = MODELS[2]


def module(name: str) -> Any:
    spec = util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def text_of(model: dict[str, Any]) -> str:
    """The file of its trace."""
    return (HERE / "traces" / model["file"]).read_text()


def words_of(built: Any) -> list[str]:
    """Of the ops of the first stage."""
    return [words for _, words, _ in built["rows"][0]]


Ask = Callable[..., Any]


def asking(playground: Any) -> Ask:
    """As the page does: all in JSON."""
    page = playground.Playground()

    def ask(method: str, *given: Any) -> Any:
        return json.loads(page.answer(method, json.dumps(given)))

    for model in MODELS:
        assert "error" not in ask("open", model["file"], text_of(model), model["tokens"])
    return ask


@pytest.fixture(scope="module")
def ask() -> Ask:
    return asking(module("playground"))


def settings(model: dict[str, Any] = SMALL, **changes: Any) -> dict[str, Any]:
    usual = {"trace": model["file"], "cluster": "a100-80g", "gpus": model["gpus"], "microbatches": 1, "stages": 1}
    return usual | {"order": "one_f_one_b", "builder": "zero3", "mesh": "", "options": {}} | changes


# ---- its Python


WITHOUT_TORCH = f"""
import sys
sys.modules |= dict.fromkeys(("torch", "optree", "einops", "numpy"))
sys.path.insert(0, {str(HERE)!r})
import json, playground
page = playground.Playground()
for method, given in json.load(sys.stdin):
    print(page.answer(method, json.dumps(given)))
"""


def test_it_answers_the_same_without_torch(ask: Ask) -> None:
    calls = [
        ["open", [SEVEN["file"], text_of(SEVEN), SEVEN["tokens"]]],
        ["build", [settings(SEVEN)]],
        ["meshes", [settings(SEVEN)]],
    ]
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input=json.dumps(calls), capture_output=True, text=True, cwd=ROOT
    )
    assert ran.stderr == ""
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [ask(method, *given) for method, given in calls]


@pytest.mark.parametrize("builder", ["ddp", "zero1", "zero2", "zero3", "hsdp", "hpz"])
def test_every_builder_on_every_mesh(ask: Ask, builder: str) -> None:
    """As the library itself builds it, with the figures of its plan."""
    options = {"layers": 2} if builder == "hpz" else {"remat": "first:1", "update": True}
    asked = settings(gpus=16, builder=builder, options=options)
    for mesh in ask("meshes", asked):
        found = ask("build", asked | {"mesh": mesh})
        sizes = tuple((name, int(size)) for name, size in (each.split("=") for each in mesh.split(", ")))
        trace = ya.Program.from_json(text_of(SMALL)).trace.on(sizes)
        factory = getattr(ya.schedules, builder)
        plan = ya.planner.Plan.of(factory(**options)(trace), "a100-80g")
        assert words_of(found) == plan.program.words()
        assert found["figures"]["least"] == plan.least.against(plan.step_s)
        assert found["figures"]["step_s"] == plan.step_s
        assert found["figures"]["peak"] == plan.memory.peak_bytes
        assert dict(found["figures"]["wire"]) == {name: n for name, n in plan.program.wire_bytes().items() if n}
        ops = [op for kind, *_, op in found["picture"]["boxes"] if kind in ("op", "again")]
        timed = {span.number for span in plan.timeline.spans}
        assert sorted(ops) == sorted(timed)


@pytest.mark.parametrize("order", ["gpipe", "one_f_one_b", "interleaved", "zero_bubble", "v_shaped", "v_min"])
def test_every_order_of_a_pipeline(ask: Ask, order: str) -> None:
    found = ask("build", settings(stages=2, microbatches=4, order=order))
    assert len(found["stages"]) == 2
    assert "refused" not in found
    assert [lane for lane, *_ in found["picture"]["lanes"]] == ["stage 0", "stage 1"]
    assert 0 < found["figures"]["bubble"] < 1
    assert dict(found["figures"]["wire"])["to other stages"] > 0
    found["stages"][1].pop()
    assert ask("check", found["stages"])["refused"]["stage"] == 1


def test_what_is_refused_says_by_which_rule(ask: Ask) -> None:
    (ops,) = ask("build", settings())["stages"]
    at = max(number for number, op in enumerate(ops) if op.startswith('["gather"'))
    refused = ask("check", [ops[:at] + ops[at + 1 :]])["refused"]
    assert refused["rule"] == "weights"
    assert refused["sentence"].startswith("a compute reads slots that hold")
    assert refused["why"] == "slot 0 holds layers[2], it must hold layers[0]"
    assert json.loads(ops[refused["op"] + 1])[0] == "backward"
    assert json.loads(ops[refused["against"]])[0] == "gather"
    assert [use.endswith("<- refused") for use in refused["uses"]][-1]
    later = ask("check", [[ops[0], *ops[2:5], ops[1], *ops[5:]]])
    assert later["refused"]["rule"] == "weights"
    assert len(later["rows"][0]) == len(ops)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gpus": 12}, "do not fill nodes of 8"),
        ({"gpus": 8, "stages": 3}, "3 stages do not divide 8 GPUs"),
        ({"builder": "hpz", "options": {"layers": 1}}, "hpz has no mesh of 8 GPUs"),
        ({"microbatches": 0}, "expected one or more"),
        ({"options": {"remat": "some"}}, "expected none, all, offload"),
        ({"options": {"prefetch": -1}}, "expected an integer >= 0"),
    ],
)
def test_what_cannot_be_built_says_why(ask: Ask, changed: dict[str, Any], said: str) -> None:
    assert said in ask("build", settings(**changed))["error"]


def test_an_op_that_is_none_says_what_was_expected(ask: Ask) -> None:
    (ops,) = ask("build", settings())["stages"]
    for op, said in (
        ('["gather",[0],["2"],"shard"]', "gather.slots[0]: expected an int of 64 bits, got '2'"),
        ('["grab",[0],[2]]', "there is no op 'grab'"),
    ):
        assert said in ask("check", [[op, *ops[1:]]])["error"]


def test_a_program_goes_out_and_comes_in(ask: Ask) -> None:
    built = ask("build", settings())
    text = ask("save", built["stages"])
    assert ya.Program.from_json(text).words() == words_of(built)
    assert ask("open", "mine.json", text)["has ops"]
    again = ask("build", settings(trace="mine.json", builder=""))
    assert again["stages"] == built["stages"]
    assert again["figures"]["step_s"] == built["figures"]["step_s"]
    assert "not a program in JSON" in ask("open", "broken.json", text[:-9])["error"]


def test_every_op_is_a_string_and_has_fields_to_edit(ask: Ask) -> None:
    playground = module("playground")
    known = ask("choices")["ops"]
    for op in EVERY_OP:
        text = playground._text(op)
        assert playground._op(text) == op
        assert [name for name, _, _ in known[json.loads(text)[0]]] == list(op._fields)


def test_the_smallest_trace_is_what_the_command_makes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build = module("build")
    (tmp_path / "traces").mkdir()
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "SHIPPED", ())
    build.traces()
    made = [path.name for path in (tmp_path / "traces").iterdir()]
    assert sorted(made) == sorted([SMALL["file"], "index.json"])
    assert (tmp_path / "traces" / SMALL["file"]).read_text() == text_of(SMALL)
    assert json.loads((tmp_path / "traces" / "index.json").read_text()) == [SMALL]


# ---- the page


def built(folder: Path) -> Path:
    """The page with all that it needs."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    if shutil.which("npm") is None:
        pytest.skip("no npm here, which fetches Python for the browser")
    ran = subprocess.run([sys.executable, HERE / "build.py", "build", folder], capture_output=True, text=True)
    if ran.stderr.startswith("npm pack"):
        pytest.skip(f"the npm registry does not answer: {ran.stderr.splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr
    return folder


class Page(Browser):
    """The playground, used."""

    def begin(self, url: str) -> None:
        self.open(url)
        self.wait("document.body.dataset.state == 'right'")

    @property
    def said(self) -> dict[str, str]:
        return self.evaluate("({...document.body.dataset})")

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")

    def changed(self, act: Callable[[], object]) -> dict[str, str]:
        """Does something that changes the program, and waits for what the page says of it."""
        before = int(self.said["changes"])
        act()
        self.wait(f"Number(document.body.dataset.changes) > {before}")
        return self.said

    def choose(self, name: str, value: object) -> dict[str, str]:
        script = (
            f"(({{form}}) => {{ const input = document.forms.settings['{name}']; input.value = {json.dumps(value)};"
        )
        script += "input.dispatchEvent(new Event('change', {bubbles: true})) })({})"
        return self.changed(lambda: self.evaluate(script))

    def opened(self, path: Path) -> dict[str, str]:
        """Imports a file, and waits for what the page says of it."""
        document = self.call("DOM.getDocument")["root"]["nodeId"]
        found = self.call("DOM.querySelector", nodeId=document, selector="#file")["nodeId"]
        return self.changed(lambda: self.call("DOM.setFileInputFiles", files=[str(path)], nodeId=found))

    def row(self, words: str) -> int:
        """The number of the last op with these words."""
        return max(number for number, row in enumerate(self.order()) if words in row)

    def undo(self) -> dict[str, str]:
        return self.changed(lambda: self.click("#undo"))

    def delete(self, at: int) -> dict[str, str]:
        """The op with this number, by the key."""
        self.click(f"#op-{at}")
        return self.changed(lambda: self.press("Delete"))

    def order(self) -> list[str]:
        return self.evaluate("[...document.querySelectorAll('li.op span')].map((row) => row.textContent)")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with served(built(tmp_path_factory.mktemp("playground") / "page")) as url, Page() as page:
        page.begin(url)
        yield page
        assert page.problems == []
        assert {address.split("/")[2] for address in page.requests if address.startswith("http")} == {url.split("/")[2]}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_page_draws_what_is_right_and_refuses_what_is_not(page: Page) -> None:
    """A program of 32 layers: an op is deleted, moved by keys and by the mouse, edited, and all of it undone."""
    assert page.evaluate("performance.getEntriesByType('paint')[0].startTime") < 3000
    page.choose("trace", SEVEN["file"])
    found = asking(module("playground"))("build", settings(SEVEN))
    expected = words_of(found)
    boxes = [box for box in found["picture"]["boxes"] if box[0] == "op" and box[2] > box[1]]
    assert page.order() == expected
    assert page.evaluate("document.querySelectorAll('#drawing .box[data-op]').length") == len(boxes)
    right = page.text("#figures")
    assert "The bound: no program takes less than" in page.text("#verdict")

    at = page.row("gather layers[0]")
    said = page.delete(at)
    assert said["state"] == "refused"
    assert said["rule"] == "weights"
    assert "slot 0 holds layers[2], it must hold layers[0]" in page.text("#verdict")
    assert "backward layers[0]" in page.text("li.refused")
    assert "gather layers[2]" in page.text("li.against")
    assert page.evaluate("document.querySelector('#picture').classList.contains('stale')")
    assert page.text("#figures") == right  # the last right picture stays
    assert page.undo()["state"] == "right"

    start = page.middle(f"#op-{at} span")
    end = start[0], start[1] + 22 * 4
    page.drag(start, end)
    page.wait("document.body.dataset.state == 'refused'")  # before it is dropped
    assert page.order() == expected
    assert page.said["rule"] == "weights"
    assert page.changed(lambda: page.drop(end))["rule"] == "weights"
    assert page.order()[at + 4] == "gather layers[0] -> slot 0"
    assert sorted(page.order()) == sorted(expected)
    page.undo()
    assert page.order() == expected

    page.click(f"#op-{at}")
    moves = [page.changed(lambda: page.press("ArrowDown", alt=True)) for _ in range(3)]  # the third is too late
    assert [said["state"] for said in moves] == ["right", "right", "refused"]
    assert page.order()[at + 3] == "gather layers[0] -> slot 0"
    assert page.text("li[aria-selected=true] b") == str(at + 3)
    assert min(float(said["changeMs"]) for said in moves[:2]) < 300
    page.changed(lambda: page.click("#reset"))

    page.click(f"#op-{at}")
    page.press("Enter")
    typed = "(slots => { slots.value = '1'; slots.dispatchEvent(new Event('input', {bubbles: true})) })"
    said = page.changed(lambda: page.evaluate(f"{typed}(document.querySelector('.editor [data-field=slots]'))"))
    assert said["state"] == "refused"
    assert page.order()[at] == "gather layers[0] -> slot 1"
    said = page.changed(lambda: page.press("Escape"))
    assert said["state"] == "right"
    assert page.text(".editor") == ""


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_pipeline_and_an_address_that_opens_what_was_seen(page: Page) -> None:
    page.choose("trace", SMALL["file"])
    said = page.choose("stages", "2")
    assert said["state"] == "right"
    assert page.text("#title").startswith("simulated on a100-80g, 2 stages of 4 ranks")
    assert page.evaluate("document.querySelectorAll('#stages button').length") == 2
    said = page.choose("stages", "3")
    assert said["state"] == "error"
    assert "3 stages do not divide 8 GPUs" in page.text("#verdict")
    page.choose("stages", "1")
    page.choose("microbatches", "1")
    assert page.delete(0)["state"] == "refused"
    page.click("#link")
    page.wait("location.hash.length > 20")
    page.call("Page.reload")
    page.wait("document.body && document.body.dataset.state == 'refused'")
    assert page.text("#count").endswith("edited")
    assert "gather embed" not in page.order()[0]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_program_of_ones_own_is_opened_and_shown_as_it_is(page: Page, ask: Ask, tmp_path: Path) -> None:
    built = ask("build", settings(stages=2, microbatches=2, builder="zero2"))
    (tmp_path / "mine.json").write_text(ask("save", built["stages"]))
    said = page.opened(tmp_path / "mine.json")
    assert said["state"] == "right"
    assert page.order() == words_of(built)
    assert page.text("#figures dd") == built["figures"]["step"]
    assert page.evaluate("[document.forms.settings.builder.value, document.forms.settings.gpus.disabled]") == ["", True]
    said = page.choose("builder", "zero3")
    assert said["state"] == "error"
    assert "has been cut into stages already" in page.text("#verdict")
    said = page.choose("trace", SMALL["file"])
    assert said["state"] == "right"
    assert page.evaluate("document.forms.settings.builder.value") == "zero3"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_names_of_an_imported_program_are_text(page: Page, ask: Ask, tmp_path: Path) -> None:
    """In the list of ops, the picture, the editor, what is said of a refusal, and the name of the file."""
    shown = Counter[str]()
    for number, word in enumerate(hostile.MARKUP):
        stages = 1 + number % 2
        built = ask("build", settings(stages=stages, microbatches=stages, builder="zero2"))
        program = hostile.renamed(ya.Program.from_json(ask("save", built["stages"])), word)
        path = tmp_path / re.sub(r"[/\0\n]", "", f"{word[:80]}{number}.json")
        path.write_text(program.to_json())
        said = page.opened(path)
        if said["state"] == "error":
            assert re.search(r"trace\.(units|visits)\[\d+\]\.name: expected letters", page.text("#verdict"))
            shown["refused by name"] += 1
            continue
        words = program.by_stage[0].words()
        assert said["state"] == "right" and page.order() == words, word
        assert page.evaluate("[...document.querySelectorAll('li.op')].map((row) => row.title)") == words
        assert hostile.injected(page) == [], word
        page.evaluate("document.getElementById('edit').click()")
        assert hostile.injected(page) == [], word
        page.evaluate("document.querySelector('.editor form').requestSubmit()")
        shown[page.changed(lambda: page.evaluate("document.getElementById('delete').click()"))["state"]] += 1
        assert hostile.injected(page) == [], word
        assert float(page.said["changeMs"]) < 10_000 and page.call("Runtime.getHeapUsage")["usedSize"] < 500e6, word
    print(f"playground: shown, and then without their first op: {dict(shown)}")
    assert shown["right"] + shown["refused"] > 30


def report(picture: Path) -> None:
    """Writes what the page looks like, with an op of a small program moved."""
    with tempfile.TemporaryDirectory() as scratch, served(built(Path(scratch) / "page")) as url, Page() as page:
        page.begin(url)
        page.size(1280, 980)
        page.click(f"#op-{page.row('gather layers[0]')}")
        page.changed(lambda: page.press("ArrowUp", alt=True))
        page.picture(picture)


if __name__ == "__main__":
    report(Path(sys.argv[1]))
