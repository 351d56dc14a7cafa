"""`--sharding.schedule FILE.py:NAME`: a run on a schedule of its own, and what becomes of it without the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.inside import Runs, losses, of_others, resumed
from train.config import ConfigError, Sharding
from train.running import run, setup
from train.settings import Config

OWN = """
import yafsdp_fn as ya

def resident(trace):
    (open({seen!r}, "a")).write("built ")
    return ya.schedules.zero3(resident=1)(trace)

number = 3
"""


def test_a_run_goes_on_with_the_program_that_its_checkpoint_has(runs: Runs, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    seen = tmp_path / "seen"
    own.write_text(OWN.format(seen=str(seen)))

    runs.fine(2, "--name", "plain", "--steps", "4")
    runs.fine(2, "--name", "plain", "--steps", "8", "--resume")
    runs.fine(2, "--sharding.schedule", f"{own}:resident", "--steps", "4")
    assert seen.read_text().split() == ["built"] * 2
    own.unlink()  # from here on nothing of it may be run
    runs.fine(2, "--resume", "--steps", "8")
    assert seen.read_text().split() == ["built"] * 2
    assert losses(tmp_path, "a") == losses(tmp_path, "plain")
    (error,) = {rank.error for rank in runs(1, "--resume", "--steps", "9")}
    assert "ConfigError" in error
    assert "the program in the checkpoint is not for this step" in error
    runs.fine(2, "--resume", "--steps", "9", "--sharding.schedule", "zero2")


def test_a_config_of_others_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nf = print")
    config = resumed(of_others(tmp_path, sharding={"schedule": f"{tmp_path}/evil.py:f"}))
    assert config.sharding.schedule == "saved"
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ConfigError, match="for runs that --resume"):
        run.parse(["--sharding.schedule", "saved"], Config, quiet=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "zero4"}, r"schedule is 'zero4': ddp, zero1, zero2, zero3, hsdp, hpz, FILE.py:NAME or saved"),
        ({"schedule": "own.py:f", "remat": "all"}, "decides itself about --sharding.remat and --sharding.update"),
        ({"schedule": "own.py:f", "update": True}, "decides itself about --sharding.remat"),
        ({"schedule": "nowhere.py:f"}, "there is no file nowhere.py"),
        ({"schedule": "{own}:nothing"}, "has no function nothing; expected one from a trace to a program"),
        ({"schedule": "{own}:number"}, "has no function number"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN.format(seen=""))
    with pytest.raises(ConfigError, match=message):
        setup.schedule(Sharding(**{**settings, "schedule": settings["schedule"].replace("{own}", str(own))}))
