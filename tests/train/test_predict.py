"""`python -m train predict`: a prediction and a measurement of the same ops, in words and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.predict import main


def test_both_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "both.svg"
    assert main(["--config", "tiny", "--steps", "3", "--timeline", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "Cluster(name='here'" in out and "\npredicted over measured: step " in out
    assert ", compute " in out and "ends differ most at op" in out
    assert "simulated on here" in picture.read_text() and "measured" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--config", "D"], "unknown model 'D'"),
        (["--steps", "0"], "--steps 0"),
        (["--schedule", "zero9"], "--schedule zero9: there is no builder 'zero9'"),
    ],
)
def test_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and says in " ".join((out + err).replace("│", " ").split())
