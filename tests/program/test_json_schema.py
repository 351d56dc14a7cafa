"""docs/program-1.schema.json is what the code says, and tells programs from other data; version 1 stays readable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from docs.program_schema import FILE, schema
from tests.harness.damage import put
from tests.harness.marks import nightly
from tests.program.test_program import PROGRAMS
from tests.program.traces import cut, model, on
from yafsdp_fn.program.json import VERSION
from yafsdp_fn.schedules import Program, one_f_one_b, verify, zero2, zero3

KEPT = Path(__file__).parent / "program_1.json"
PIPELINE = one_f_one_b(zero2(remat="all", update=True))(cut(on(model(2, 2), "ranks", "after norm"), (0, 1)))
VALIDATOR = jsonschema.Draft202012Validator(schema())


def test_the_published_schema_is_what_the_code_says() -> None:
    """`python docs/program_schema.py` makes it; an older version's file stays as it is."""
    assert FILE.read_text() == json.dumps(schema(), indent=1) + "\n"
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("programs", [[PROGRAMS[5], PIPELINE], nightly(PROGRAMS)])
def test_programs_are_valid(programs: list[Program]) -> None:
    for program in programs:
        VALIDATOR.validate(json.loads(program.to_json()))


@pytest.mark.parametrize(
    "path",
    [
        ("version", VERSION + 1),
        ("stages", []),
        ("stages", 0, 0, ["gather", [0.5], [0]]),
        ("stages", 0, 0, ["gather"]),
        ("stages", 0, 0, ["scatter", [0], [0]]),
        ("stages", 0, 0, ["gather", [0], [0], "shards"]),
        ("stages", 0, 0, ["gather", [0], [0], "shard", 1]),
        ("trace", "units", 0, [0, "a", None, 0]),
        ("trace", "microbatches", True),
        ("trace", "unknown", 1),
        ("trace", "order", 0, 0, "sideways"),
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(path: tuple[Any, ...]) -> None:
    text = put(PIPELINE.to_json(), *path)
    assert not VALIDATOR.is_valid(json.loads(text))
    with pytest.raises(ValueError, match="not a program in JSON"):
        Program.from_json(text)


def test_programs_of_version_1_are_read() -> None:
    """`program_1.json` was written with version 1, and is never written anew."""
    kept = json.loads(KEPT.read_text())
    program = verify(Program.from_json(json.dumps(kept)))
    assert program.trace.microbatches == 2
    assert len(program.stages) == 2
    assert program == Program.from_json(program.to_json())
    for version in (2, None):  # none was written at first
        text = f"version: expected 1, got {version}; what another yafsdp_fn has written .* a schedule builds it anew"
        with pytest.raises(ValueError, match=text):
            Program.from_json(json.dumps(kept | {"version": version}))
    assert zero3()(model(2)).to_json().startswith('{"version": 1, ')
