"""Head and loss, chunked and whole: one small run, and what is refused."""

from __future__ import annotations

import json

import pytest

from benchmarks.command import main
from benchmarks.head import Head


def test_a_small_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["head", "--vocab", "700", "--embed", "16", "--rows", "600", "--steps", "2", "--json"]) == 0
    out = capfd.readouterr().out
    found = json.loads(out[out.index("{") :])
    assert [row["vocab"] for row in found["heads"]] == [700]
    for row in found["heads"]:
        assert set(row["step_ms"]) == set(row["peak_tensor_bytes"]) == {"whole", "chunked"}
        assert 0 < row["over_whole"]["p10"] <= row["over_whole"]["median"] <= row["over_whole"]["p90"]


@pytest.mark.parametrize("wrong", [{"steps": 1}, {"rows": 0}, {"vocab": (0,)}])
def test_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        Head(**wrong)
