"""docs/gallery: pages are made by its command; every program and submission is proved, and ranked."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import yafsdp_fn as ya
from docs.gallery import make
from tests.harness import hostile
from tests.harness.browser import CHROMIUM, Browser, served
from tests.harness.marks import by_day
from tests.harness.meshes import made
from tests.harness.oracle import check_exact
from tests.harness.pages import blocks
from tests.harness.pool import on_ranks
from tests.harness.problems import PROBLEMS
from tests.steps.staged import test_exact_stages as staged
from yafsdp_fn.pipelines import orders
from yafsdp_fn.proof.verify import RULES
from yafsdp_fn.schedules import Program, builders, one_f_one_b

ENTRIES = {entry.name: entry for entry in make.PUBLISHED}
QUICK = ("zero3", "hpz", "1f1b")


@functools.cache
def shown() -> dict[str, make.Shown]:
    return make.all_shown()


@functools.cache
def texts() -> dict[str, str]:
    return dict(make.files(shown(), make.compared(shown())))


def test_pages_programs_and_pictures_are_made_where_one_says(tmp_path: Path) -> None:
    quick = tuple(ENTRIES[name] for name in QUICK)
    with mock.patch.object(make, "PUBLISHED", quick):
        make.write(tmp_path / "gallery")
    there = {path.name: path for path in (tmp_path / "gallery").iterdir()}
    names = (*QUICK, "every-other")
    pages = [f"{name}.md" for name in (*names, "index")]
    pictures = [f"{name}.png" for name in (*names, "index")]
    assert there.keys() == {*pages, *pictures, *(f"{name}.json" for name in QUICK)}
    assert all(there[name].read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_no_page_is_kept_beside_it() -> None:
    assert {path.name for path in Path(make.__file__).parent.iterdir() if path.is_file()} == {"make.py"}


@pytest.mark.parametrize("name", ["zero3", "dualpipe-v"])
def test_a_program_is_read_back_as_it_was(name: str) -> None:
    program = Program.from_json(texts()[f"{name}.json"])
    assert ya.verify(program) == shown()[name].program == ENTRIES[name].program()


def test_every_published_schedule_is_there() -> None:
    """Every factory of ya.schedules that takes no order or rows from its user."""
    lines = "".join(entry.line for entry in make.PUBLISHED)
    for factory in (*builders.FACTORIES, *orders.FACTORIES):
        assert f"ya.schedules.{factory}(" in lines


def test_the_page_compares_as_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code, _) = blocks(texts()["index.md"])
    exec(code, names := dict[str, Any]())
    assert names["trace"] == make.flat()
    assert names["programs"]["1F1B"] == shown()["1f1b"].program
    assert f"{make.compared(shown()).rows['zero3'].step_s:.3f}" in capsys.readouterr().out


# ---- submissions


def entry(program: Program, **changes: Any) -> Any:
    about = {"name": "mine", "author": "Somebody", "note": "A note.", "program": json.loads(program.to_json())}
    return about | changes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(make, "SUBMISSIONS", tmp_path)
    return tmp_path


def test_submissions_are_proved_and_ranked_beside_the_published_ones(folder: Path) -> None:
    program = one_f_one_b(ya.schedules.zero1(prefetch=1))(shown()["1f1b"].program.trace)
    (folder / "mine.json").write_text(json.dumps(entry(program)))
    found = shown() | make.all_shown()
    assert found["mine"].program == program
    assert found["mine"].source == "submitted by Somebody"
    ranked = make.compared(found)
    pages = dict(make.files(found, ranked))
    place = [*ranked.rows].index("mine") + 1
    assert f"| {place} | [mine](mine.md), submitted by Somebody | 4 x 4 |" in pages["index.md"]
    assert "mine.json" not in pages
    assert "proves the program" in pages["mine.md"]
    assert "z3" not in pages["mine.md"]


def changed(change: Callable[[Any], Any]) -> Any:
    """A submission that `change` has edited in place, or has made."""
    data = entry(shown()["1f1b"].program)
    return change(data) or data


def put(value: Any, *path: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def without_the_last_reduction(data: Any) -> None:
    ops = data["program"]["stages"][1]
    del ops[max(at for at, op in enumerate(ops) if op[0] == "reduce")]


ONCE = re.escape(next(rule.sentence for rule in RULES if rule.name == "once"))
WRONG = {
    "a rule": (without_the_last_reduction, rf"mine.json: stage 1: .*rule 'once': (.|\n)*rule 'once' says: {ONCE}"),
    "no object": (lambda data: [data], "mine.json: expected an object of name, author, note and program"),
    "keys": (lambda data: data | {"more": 1}, "mine.json: expected an object of name, author, note and program"),
    "note": (put("<b>fast</b>", "note"), "mine.json: note: expected a line of plain text"),
    "lines": (put("fast\r\r# A heading", "note"), "mine.json: note: expected a line of plain text"),
    "attributes": (put("fast {: onclick=x }", "note"), "mine.json: note: expected a line of plain text"),
    "names": (put("<script>", "program", "trace", "units", 1, 1), "mine.json: trace.units: not that of the gallery's"),
    "name": (put("other", "name"), "mine.json: name: expected that of the file, 'mine'"),
    "version": (put(2, "program", "version"), "mine.json: not a program in JSON: version: expected 1, got 2"),
    "ranks": (put([["stage", 4], ["shard", 2]], "program", "trace", "mesh"), "mine.json: expected 16 ranks and 32 mic"),
    "microbatches": (put(4, "program", "trace", "microbatches"), "mine.json: not a program in JSON: trace.order"),
    "costs": (put(1, "program", "trace", "visits", 3, 4, 0), "mine.json: trace.visits: not that of the gallery's step"),
    "messages": (put(1, "program", "trace", "split", 2, 0, 2), "mine.json: trace.split: not that of the gallery's"),
    "units": (put(2, "program", "trace", "units", 1, 5), "mine.json: trace.units: not that of the gallery's step"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_submission_is_refused_with_its_file_and_why(folder: Path, what: str) -> None:
    change, words = WRONG[what]
    (folder / "mine.json").write_text(json.dumps(changed(change)))
    with pytest.raises(ValueError, match=words):
        make.submissions()


def test_a_name_that_is_taken_is_refused(folder: Path) -> None:
    (folder / "zero3.json").write_text(json.dumps(entry(shown()["zero3"].program, name="zero3")))
    with pytest.raises(ValueError, match=r"zero3.json: name: 'zero3' is that of a published schedule"):
        make.submissions()


# ---- the proof of others, and runs


@pytest.mark.parametrize("name", by_day(ENTRIES, *QUICK))
def test_z3_finds_no_order_in_which_a_small_one_goes_wrong(name: str) -> None:
    """What every page says of its schedule."""
    pytest.importorskip("z3", reason="z3-solver, of the dev extra, is not installed")
    from tests.proof.z3_orders import opinion

    assert opinion(ENTRIES[name].small()) is None


MESHES = {"": "shard", "replicate=-1, shard=1": "copies", "replicate=2": "replicate", "local=8": "nodes"}


@pytest.mark.nightly
@on_ranks(4)
@pytest.mark.parametrize("name", ENTRIES)
def test_a_step_of_each_is_that_of_the_plain_loop(mesh: Any, name: str) -> None:
    """Steps of a small model on four ranks, against the plain loop: without stages, or on four."""
    entry = ENTRIES[name]
    if not entry.segments:
        on = made(MESHES[entry.axes])
        check_exact(on, PROBLEMS["base"], layers=4, schedules={name: entry.schedule()}, microbatches=(3,))
        return
    how = staged.How(lambda _: entry.schedule(), ya.schedules.zero2(), entry.segments, entry.shape)
    with mock.patch.dict(staged.HOW, {name: how}):
        staged.check(mesh, "skip", name, make.STAGES, (2 * make.STAGES,), True)


# ---- names of other people, as the site shows them, in a real browser


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_words_of_submissions_are_text(folder: Path, tmp_path: Path) -> None:
    """On a program's own page and in the list of all: what a submission says, where it is not refused; and, were they
    not refused, the names in its program."""
    mkdocs = pytest.importorskip("mkdocs.config")
    markdown = pytest.importorskip("markdown")
    site = mkdocs.load_config(str(Path(__file__).resolve().parents[1] / "mkdocs.yml"))
    ranked = make.compared(shown())
    each = shown()["zero3"]
    found = Counter[str]()
    with served(tmp_path) as url, Browser() as browser:
        for number, word in enumerate(hostile.MARKUP):
            about = {"author": "Somebody", "note": "A note"}
            for key, said in (("author", word), ("author", f"A{word}"), ("note", f"Fast.{word}")):
                (folder / "mine.json").write_text(json.dumps(entry(each.program, **{key: said})))
                try:
                    about[key] = getattr(make.submitted(folder / "mine.json"), key)
                    found["accepted"] += 1
                except ValueError as error:
                    assert re.match(r"mine\.json: (author|note): expected a line of plain text", str(error)), error
                    found["refused"] += 1
            what = f"{about['note']}."
            source = f"submitted by {about['author']}"
            foreign = each._replace(what=what, source=source, program=hostile.renamed(each.program, word), small=0)
            texts = make.page("zero3", foreign, ranked, [["", ""]]), make.index(shown() | {"zero3": foreign}, ranked)
            for text in texts:
                made = markdown.Markdown(extensions=site.markdown_extensions, extension_configs=site.mdx_configs)
                page = f"<!doctype html><meta charset=utf-8>{made.convert(text)}"
                (tmp_path / "page.html").write_text(page, encoding="utf-8", errors="replace")
                browser.open(f"{url}page.html?{number}")
                assert hostile.injected(browser) == [], word
    print(f"gallery: submissions: {dict(found)}")
    assert min(found["accepted"], found["refused"]) > 10
