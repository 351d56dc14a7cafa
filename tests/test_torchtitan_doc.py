"""docs/torchtitan.md: its files, its commands with what they print, and its code, as they are written."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.harness.calibration import brief
from tests.harness.pool import Pool
from tests.train.test_torchtitan import planned
from train.plan import main
from train.plan.job import read

PAGE = (Path(__file__).parents[1] / "docs" / "torchtitan.md").read_text()
FILES = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
COMMANDS = re.findall(r"^    \$ python -m train plan (.*)\n((?:    .*\n|\n)*)", PAGE, re.M)
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
CASES = pytest.mark.parametrize(("file", "command"), [*zip(FILES, COMMANDS, strict=True)], ids=["8b", "pipeline"])


def arguments_of(command: str, file: str) -> list[str]:
    """The words of a command, whose file is there now."""
    words = shlex.split(command)
    Path(words[words.index("--torchtitan") + 1]).write_text(file)
    return words


@CASES
def test_what_is_said_of_the_files(
    file: str, command: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what is searched for."""
    monkeypatch.chdir(tmp_path)
    words, shown = arguments_of(command[0], file), command[1]
    job = read(Path(words[words.index("--torchtitan") + 1]), int(words[words.index("--gpus") + 1]))
    program, plan = planned(job)
    assert f"proved: its program of {sum(map(len, program.stages))} ops, " in shown
    assert re.search(rf"the file +{plan.step_s:.3f} .* {plan.memory.peak_bytes / 2**30:.1f}\n", shown)
    assert all(f"{told}\n" in shown for told in job.not_modelled)


@pytest.mark.nightly
@CASES
def test_the_commands_print_what_is_shown(
    file: str,
    command: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    assert main([*arguments_of(command[0], file), "--timeline", "None"]) == 0
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for line in command[1].splitlines():
        shown = line.strip()
        if shown.endswith("..."):
            assert any(each.startswith(shown.removesuffix("...")) for each in printed)
        else:
            assert shown in printed
    if "--csv" in command[0]:
        rows = Path("schedule.csv").read_text().splitlines()
        assert len(rows) == 4 and rows[0].startswith("0F0,") and all(word in rows[0] for word in ("7I2", "7W2"))


SMALLER = {"range(6)": "range(2)", "8 * 128": "4 * 8", "(8, 128)": "(4, 8)"}


def run_blocks(_: Any, folder: str) -> str:
    """One rank's part, of fewer layers and tokens."""
    names: dict[str, Any] = {"__name__": "page"}
    with contextlib.chdir(folder), contextlib.redirect_stdout(None), brief():
        for block in BLOCKS:
            for large, small in SMALLER.items():
                block = block.replace(large, small)
            exec(block, names)
    return str(names["ya"].planner.compare({"predicted": names["predicted"], "measured": names["measured"]}))


def test_its_code_runs_on_two_ranks(pools: dict[int, Pool], tmp_path: Path) -> None:
    compared, _ = pools[2].run(run_blocks, str(tmp_path))
    assert re.search(r"\npredicted over measured: step [-+.\d]+%, gather [-+.\d]+%, compute ", compared)
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.json", "rank1.json", "recorded.png"}
