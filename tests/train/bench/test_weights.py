"""Weights for a generator: every way brings the same bits, and what is counted of them."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from train.bench import main, weights
from train.bench.weights import Weights


def test_every_way_brings_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    """The command itself compares bits, and fails where they differ."""
    argv = ["weights", "--config", "tiny", "--steps", "2", "--warmup", "2", "--json"]
    assert main(argv) == 0, capfd.readouterr().err
    found = json.loads(capfd.readouterr().out)
    ways, whole = found["ways"], found["bytes"]
    elements = 2 * 256 * 32 + 32 + 3 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32)
    matrices = 3 * (4 * 32 * 32 + 3 * 32 * 48)
    assert whole == 2 * elements and list(ways) == ["whole", "sent", "ranges", "half"]
    assert [way["between_ranks_bytes"] for way in ways.values()] == [whole, whole, 0, 0]
    assert [way["read_bytes"] for way in ways.values()] == [whole, whole, whole, whole - matrices]
    assert all(way["ms"] > 0 and way["over_whole"]["median"] > 0 for way in ways.values())


def test_shown() -> None:
    spread = {"median": 0.75, "p10": 0.5, "p90": 1.0}
    each: dict[str, Any] = {"ms": 1.5, "over_whole": spread}
    each |= dict.fromkeys(("between_ranks_bytes", "written_bytes", "read_bytes"), 2**20)
    console = Console(file=io.StringIO(), width=200)
    console.print(*weights.show(Weights(), {"bytes": 2**20, "ways": {"whole": each, "ranges": each}}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("0.750 MISSED") == 1 and "0.500 - 1.000" in text and "1.00 MiB in bfloat16 from 2 rank(s)" in text


def test_refused() -> None:
    with pytest.raises(ValueError, match="--ranks 0: expected at least 1"):
        Weights(ranks=0)
