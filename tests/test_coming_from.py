"""Pages for those who come from other libraries: each row of their tables runs on two ranks, as does their code."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.pages import doc
from tests.harness.pool import on_ranks

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {path.stem: path.read_text() for path in sorted((DOCS / "coming_from").glob("*.md"))}


def examples() -> dict[str, Any]:
    """What docs/api/index.md says that examples share, with new tensors."""
    code = re.search(r"^```python\n(.*?)^```", doc("api/index"), re.S | re.M)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names


ROW_OR_BLOCK = re.compile(r"^\| (?!you write)(?P<row>[^\n]*) \|$|^```python\n(?P<block>.*?)^```", re.S | re.M)
EMPTY = re.compile(r"^\|[-| ]+\|$", re.M)


def rows(page: str) -> Iterator[tuple[str, str]]:
    """Yields `(what one writes there, the code that it is here)` of each row, and blocks of code, in their order."""
    for found in re.finditer(ROW_OR_BLOCK, EMPTY.sub("", PAGES[page])):
        if found["block"]:
            yield "a block", found["block"]
            continue
        theirs, ours, _ = f"{found['row']} ".split(" | ")
        yield theirs, "\n".join(re.findall(r"`([^`]+)`", ours))


@on_ranks(2)
@pytest.mark.parametrize("page", PAGES)
def test_every_row_runs_on_two_ranks(_: Any, page: str, tmp_path: Path) -> None:
    names = examples()
    failed = list[str]()
    names["folder"] = str(tmp_path)
    assert len(list(rows(page))) > 10
    for theirs, ours in rows(page):
        if "ya.launch(" in ours:  # it starts ranks, and this is one
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(ours, names)
        except Exception as error:
            failed.append(f"{theirs}\n    {ours}\n    {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("page", PAGES)
def test_rows_that_start_ranks_run(page: str, tmp_path: Path) -> None:
    names = {"ya": ya}
    for _, ours in rows(page):
        if "ya.launch(" in ours:
            exec(ours, names)


@pytest.mark.parametrize("page", PAGES)
def test_every_row_has_code(page: str) -> None:
    assert [theirs for theirs, ours in rows(page) if not ours] == []
