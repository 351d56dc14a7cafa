"""docs/command.md: its commands print what it shows; errors are one line, and their status says what they are."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import yafsdp_fn as ya
from tests.harness.pages import ROOT, blocks, doc
from yafsdp_fn.command import main

PAGE = doc("command")
(MODEL,) = blocks(PAGE)
SHOWN = re.findall(r"^```\n\$ yafsdp ([^\n]*)\n(.*?)^```", PAGE, re.S | re.M)
PLAN = "plan my_model:loss my_model:params my_model:batch --ranks 16 --cluster a100-80g"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with the page's model in it."""
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_model", None)


def test_the_page_shows_what_the_commands_print(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(SHOWN) == 5
    for line, shown in SHOWN:
        command, _, head = line.partition(" | head -")
        assert main(shlex.split(command)) == 0
        said = capsys.readouterr()
        assert not said.err
        assert said.out.splitlines()[: int(head or 100)] == shown.splitlines(), line
    made = {path.name for path in folder.iterdir()} - {"my_model.py", "__pycache__"}
    assert made == {"zero3.json", "hsdp.json", "hsdp.png"}


@pytest.fixture
def program(folder: Path, capsys: pytest.CaptureFixture[str]) -> ya.Program:
    """The program of the page, in step.json."""
    assert main(shlex.split(f"{PLAN} --save step.json")) == 0
    capsys.readouterr()
    return ya.Program.from_json(Path("step.json").read_text())


def test_no_is_said_with_status_1(program: ya.Program, capsys: pytest.CaptureFixture[str]) -> None:
    Path("wrong.json").write_text(program.with_ops(program.ops[1:]).to_json())
    assert main(["verify", "wrong.json"]) == 1
    assert capsys.readouterr().out.startswith("no: op ")
    for command in ("draw wrong.json wrong.svg", "compare step.json wrong.json"):
        assert main(shlex.split(f"{command} --cluster a100-80g")) == 1
        assert capsys.readouterr().out.startswith("no: op ")
    assert main(shlex.split(f"{PLAN} --schedule my_model:ya.schedules.ddp")) == 2  # a builder, no schedule
    (Path("my_model.py")).write_text(MODEL.replace("empty(4, 2048,", "empty(64, 2048,"))
    sys.modules.pop("my_model")
    assert main(shlex.split(PLAN)) == 1
    assert "\nno: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (PLAN.replace(":loss", ":los"), "plan: AttributeError: module 'my_model' has no attribute 'los'"),
        (PLAN.replace(":loss", ""), "plan: my_model: expected MODULE:NAME, such as my_model:loss_fn"),
        (PLAN.replace("my_model:loss", "no_model:loss"), "plan: ModuleNotFoundError: No module named 'no_model'"),
        (PLAN.replace("a100-80g", "a100"), "plan: unknown cluster 'a100'"),
        (f"{PLAN} --schedule zero9", "plan: AttributeError: module 'yafsdp_fn.schedules' has no attribute 'zero9'"),
        ("draw step.json step.gif --cluster a100-80g", "draw: step.gif"),
        (f"{PLAN} --mesh tensor=3", "plan: mesh(shard=-1, tensor=3): the job has 16 ranks, not a multiple of 3"),
        (f"{PLAN} --mesh dp_shard=2", "plan: TypeError: mesh(dp_shard=...): it is here shard="),
        (PLAN.replace("--ranks 16", "--ranks 0"), "plan: ranks=0: expected the number of GPUs, 1 or more"),
        ("verify nothing.json", "verify: [Errno 2] No such file or directory: 'nothing.json'"),
        ("verify my_model.py", "verify: my_model.py: not a program in JSON"),
        ("draw step.json step.svg", "draw: TypeError: compare: 'step.json' is a program; name the cluster"),
    ],
)
def test_an_error_is_one_line(command: str, said: str, program: ya.Program, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"yafsdp {said}") and error.count("\n") == 1, error


def test_stages_have_a_pipeline_where_no_schedule_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"{PLAN} --mesh stages=2")) == 0
    assert "2 stages, 1 microbatch" in capsys.readouterr().out


def test_an_error_of_the_loss_is_shown_where_it_is_on_request(folder: Path) -> None:
    Path("my_model.py").write_text(MODEL.replace("    x = ya.apply(embed", "    1 / 0\n    x = ya.apply(embed"))
    assert main(shlex.split(PLAN)) == 2
    with pytest.raises(ZeroDivisionError):
        main(shlex.split(f"{PLAN} --traceback"))


@pytest.mark.parametrize(
    "command",
    ["", "plan", PLAN.replace("--cluster a100-80g", ""), "compare", "plan a:b a:c a:d --ranks 4 --mesh tensor"],
)
def test_what_argparse_refuses_has_its_usage(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(shlex.split(command))
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("usage: yafsdp")


def test_a_recorded_step_stands_beside_programs(program: ya.Program, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = ya.planner.simulate(program, "h100-80g")
    Path("measured.json").write_text(timeline.to_json())
    assert "spans" in json.loads(timeline.to_json())
    assert "spans" not in json.loads(program.to_json())
    assert main(["draw", "measured.json", "measured.svg"]) == 0
    assert Path("measured.svg").is_file()
    assert main(["compare", "step.json", "measured.json", "--cluster", "a100-80g", "--draw", "both.svg"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[2].startswith("measured.json")
    assert rows[3].startswith("step.json")
    assert Path("both.svg").is_file()


def test_a_reader_that_goes_away_ends_it_without_a_word(program: ya.Program) -> None:
    code = "import sys; from yafsdp_fn.command import main; sys.exit(main(sys.argv[1:]))"
    read, write = os.pipe()
    os.close(read)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run([sys.executable, "-c", code, "verify", "step.json"], stdout=write, stderr=-1, env=env)
    os.close(write)
    assert told.returncode == 141
    assert told.stderr == b""


def test_help_says_once_what_needs_a_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for command in ([], ["plan"], ["verify"], ["draw"], ["compare"]):
        with pytest.raises(SystemExit) as end:
            main([*command, "--help"])
        assert end.value.code == 0
        said.append(capsys.readouterr().out)
    assert "".join(said).count("in a checkout") == 1
    assert all(cluster in said[0] for cluster in ya.planner.CLUSTERS)


def test_a_program_draws_itself(program: ya.Program, folder: Path) -> None:
    program.draw(folder / "one.svg", "a100-80g")
    ya.planner.simulate(program, "a100-80g").save(folder / "two.svg")
    assert (folder / "one.svg").read_bytes() == (folder / "two.svg").read_bytes()
    with pytest.raises(ValueError, match="unknown cluster 'a100'"):
        program.draw(folder / "one.svg", "a100")
