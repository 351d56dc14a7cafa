"""CONTRIBUTING.md names files that are there, with what it says of them, and leaves no registry out."""

from __future__ import annotations

import re
import tomllib

import pytest

import models
from tests.harness.pages import ROOT, doc
from tests.models.test_families_on_ranks import SMALL

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| .+ \|$", PAGE, re.M)
SUBJECTS = re.findall(r"^\*\*An? ([^*]+)\*\*", PAGE, re.M)


@pytest.mark.parametrize(("file", "name"), ROWS)
def test_a_row_names_a_file_and_what_is_in_it(file: str, name: str) -> None:
    assert re.search(rf"{re.escape(name)}(?!\w)", (ROOT / file).read_text())


def test_it_tells_how_to_add_each_kind_of_thing() -> None:
    assert SUBJECTS == ["op", "wire format", "builder", "model family", "optimizer"]
    assert len(ROWS) == sum(line.startswith("| `") for line in PAGE.splitlines()) > 25


def test_the_files_of_an_op_are_those_that_design_tells() -> None:
    design = doc("design").split("**To add an op: five files.**")[1].split("```")[0]
    told = re.findall(r"^    (\S+\.pyi?) ", design.split("A slot filled from a slot")[0], re.M)
    assert len(told) == 5
    assert {f"yafsdp_fn/{file}" for file in told} <= {file for file, _ in ROWS}


def test_the_layers_are_those_that_design_tells() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if "containers" in each]
    told = doc("design").split("Imports point down, in these layers")[1].split("The **core**")[0]
    assert [line.strip() for line in told.splitlines() if line.startswith("    ")] == layers


def test_every_family_is_where_a_family_belongs() -> None:
    page = doc("models")
    for family in models.FAMILIES:
        alone = ROOT / f"tests/models/test_{family.MODEL_TYPE}_sharded.py"  # llama's
        assert alone.exists() or any(name.startswith(family.MODEL_TYPE) for name in SMALL), family.MODEL_TYPE
        assert family.MODEL_TYPE in page.lower()


def test_the_targets_that_it_names_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"make ([\w-]+)", PAGE.split("What is asked")[0])) | {"release-check"}
    assert len(named) >= 5
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in named)
