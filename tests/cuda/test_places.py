"""The table of what only CUDA has knows all of it, and the page names what no test enters."""

from __future__ import annotations

import json

from tests.cuda.places import ROOT, TABLE, all_places
from tests.harness.pages import doc


def function_of(name: str) -> str:
    return name.partition(": ")[0]


def test_the_table_has_every_function_and_tests_that_exist() -> None:
    table = json.loads(TABLE.read_text())
    here, there = ({function_of(name) for name in names} for names in (all_places(), table))
    assert here == there, "run python -m tests.cuda.places, with the tests of what is new"
    for test in filter(None, table.values()):
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test


def test_the_page_names_what_no_test_enters() -> None:
    table = json.loads(TABLE.read_text())
    page = doc("gpu")
    missing = {function_of(name) for name, test in table.items() if test is None}
    assert [name for name in sorted(missing) if f"`{name.rpartition(' ')[2]}`" not in page] == []
