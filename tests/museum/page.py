"""docs/museum.md, made of the bugs: `python -m tests.museum.page` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.museum import outside, pipelined, races, rows, runs, sharded
from tests.museum.exhibit import Bug

PAGE = Path(__file__).parents[2] / "docs" / "museum.md"
SECTIONS: dict[str, tuple[str, Sequence[Bug]]] = {
    "Refused before it runs": (
        "A program with the bug in it is refused by `verify`, which names op, buffer and rule. Without the bug "
        "it passes. "
        "With it, an interpreter that knows no rules computes something else, or waits for ever.",
        [*sharded.REFUSED, *pipelined.REFUSED, *rows.REFUSED],
    ),
    "Races that cannot be written": (
        "An op lacked a wait. Here no op names one: waits follow from the buffers that ops use. The wait that "
        "was missing "
        "is there, nothing else stands in for it, and with that one taken away an interpreter finds an order of "
        "events "
        "that gives something else.",
        [*races.RACES, *pipelined.RACES],
    ),
    "Accepted, and right": (
        "What hung there ends here, since the engine's streams are other ones; shown by running it with sends "
        "that wait.",
        rows.PROVED,
    ),
    "Numbers that are the plain loop's": (
        "A run on ranks, value and gradients of each leaf compared with those of a plain loop: equal bits on one "
        "rank, "
        "1e-12 on more in float64 (lengths: 1e-5 in float32).",
        runs.AGREES,
    ),
    "Ranks that differ are told": (
        "A run on two ranks raises on both, before any collective meets another one; both say what each of them has.",
        runs.TOLD,
    ),
    "Outside of what is proved": (
        "A program says which weights are where when a block runs, and where its gradient goes; not what the "
        "block does.",
        outside.OUTSIDE,
    ),
}
BUGS: list[Bug] = [bug for _, bugs in SECTIONS.values() for bug in bugs]

HEAD = """# A museum of bugs

{count} bugs of sharded and pipelined training that others have published, each written here: as a program, a change of
one, or a run on one to four ranks. The page is made by the tests that check it: `python -m pytest tests/museum` checks,
`python -m tests.museum.page` writes it anew. The test of a row is the one that its section names, with the row's name:
`-k "Megatron-LM#5222"`. Verdicts are, word for word, what `verify` and the ranks say.

| verdict | bugs |
|---|---|
{sums}
"""


def page() -> str:
    sums = "\n".join(f"| [{title}](#{anchor(title)}) | {len(bugs)} |" for title, (_, bugs) in SECTIONS.items())
    parts = [HEAD.format(count=len(BUGS), sums=sums)]
    for title, (text, bugs) in SECTIONS.items():
        (test,) = {bug.test for bug in bugs}
        lines = [
            f"| [{bug.name}]({bug.url}) | {cell(bug.there)} | {cell(bug.here)} | {cell(bug.says())} |" for bug in bugs
        ]
        head = "| bug | there | here | verdict |\n|---|---|---|---|"
        parts.append("\n".join([f"## {title}", "", f"{text} Test: `{test}`.", "", head, *lines, ""]))
    return "\n".join(parts)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def anchor(title: str) -> str:
    return title.lower().replace(" ", "-").replace(",", "").replace("'", "")


if __name__ == "__main__":
    PAGE.write_text(page())
