"""`python -m train predict`: a prediction and a measurement of the same ops, in words and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.predict import main


def test_both_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "both.svg"
    assert main(["--config", "tiny", "--steps", "3", "--timeline", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "Cluster(name='local'" in out and "predicted  measured" in out
    assert "\ncompute " in out and "ends differ most at op" in out
    assert "simulated on local" in picture.read_text() and "measured" in picture.read_text()
