"""What `make release-check` asks beside the wheel: one version everywhere, links that lead somewhere, licences."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import yafsdp_fn as ya
from tests.harness.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PERMISSIVE = re.compile(r"Apache|BSD|\bMIT\b|\bISC\b|PSF|Python Software Foundation")
COPYLEFT = re.compile(r"GPL|SSPL|MPL")


def test_one_version() -> None:
    changes = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert changes is not None
    assert {changes.group(1), citation["version"], ya.__version__} == {PROJECT["version"]}
    assert citation["license"] == PROJECT["license"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["authors"]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    heads = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there_and_a_picture_is_shown_once(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []
    pictures = re.findall(r"!\[[^]]*\]\(([^)\s]+)\)", text)
    assert len(pictures) == len(set(pictures))


def test_what_it_needs_has_permissive_licences() -> None:
    """Of what is installed, by each package's own word; extras are the user's choice, `dev` aside."""
    extras = [line for name, lines in PROJECT["optional-dependencies"].items() if name != "dev" for line in lines]
    names = {re.split(r"[\[<>=; ]", line)[0] for line in [*PROJECT["dependencies"], *extras]} - {PROJECT["name"]}
    seen = set()
    for name in sorted(names):
        try:
            about = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        classified = [line for line in about.get_all("Classifier") or [] if line.startswith("License ::")]
        short = (about["License"] or "").partition("\n")[0]  # some have all of its text
        said = " ".join([about["License-Expression"] or "", *classified]).strip() or short
        assert PERMISSIVE.search(said) and not COPYLEFT.search(said), (name, said)
        seen.add(name)
    assert {"torch", "optree", "einops"} <= seen
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:300]
