"""README.md and docs/: pictures that are there, each once on its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.pages import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_a_picture_once(page: Path) -> None:
    shown = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())
    assert sorted(set(shown)) == sorted(shown)
    assert [picture for picture in shown if not (page.parent / picture).is_file()] == []
