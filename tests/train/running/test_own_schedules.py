"""`--sharding.schedule FILE.py:NAME`: a run on a schedule of its own, and what becomes of it without the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.inside import Runs, losses
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
    own, seen = tmp_path / "own.py", tmp_path / "seen"
    own.write_text(OWN.format(seen=str(seen)))

    def trained(*more: str) -> None:
        runs.fine(2, *more)

    trained("--name", "plain", "--steps", "4")
    trained("--name", "plain", "--steps", "8", "--resume")
    trained("--sharding.schedule", f"{own}:resident", "--steps", "4")
    assert seen.read_text().split() == ["built"] * 2
    own.unlink()  # from here on nothing of it may be run
    trained("--resume", "--steps", "8")
    assert seen.read_text().split() == ["built"] * 2
    assert losses(tmp_path, "a") == losses(tmp_path, "plain")
    (error,) = {rank.error for rank in runs(1, "--resume", "--steps", "9")}
    assert "ConfigError" in error and "the program in the checkpoint is not for this step" in error
    trained("--resume", "--steps", "9", "--sharding.schedule", "zero2")


def test_a_config_of_others_runs_no_code(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nf = print")
    (folder / "config.json").write_text(json.dumps({"sharding": {"schedule": f"{tmp_path / 'evil.py'}:f"}}))
    config = run.parse(["--resume", "--runs", str(tmp_path), "--name", "a"], Config, quiet=False)
    assert config.sharding.schedule == "saved" and not (tmp_path / "ran").exists()
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
