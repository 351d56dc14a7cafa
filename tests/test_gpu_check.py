"""`make gpu-check`: its plan, steps that fail, die or hang, what ends it early, and the folder of wheels."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import forked
from tests.harness.pages import ROOT
from tests.harness.stalls import until

CI = str(ROOT / ".ci")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The module; modules of `tmp_path` are found by what it starts."""
    monkeypatch.syspath_prepend(CI)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield importlib.import_module("gpu_check")
    for name in ("gpu_check", "wheels"):
        sys.modules.pop(name, None)


WRITES = "import json, sys; json.dump({'part': 1}, open(sys.argv[1], 'w')); "
"""What a step does that finds something before it ends as it does."""


def step(gpu_check: Any, tmp_path: Path, name: str, text: str, *, together: bool = False) -> Any:
    """A step that runs `text`, given the file for what it finds."""
    (tmp_path / f"{name}.py").write_text(text)
    return gpu_check.Step(60, 1, together, "", f"-m {name} {{json}}")


def check(gpu_check: Any, out: Path, *argv: str, device: str = "cpu") -> tuple[int, dict[str, Any], dict[str, str]]:
    """The exit status, the line of each step's end, and how it ended."""
    status = gpu_check.main([*argv, "--device", device, "--out", str(out)])
    ends = {line["step"]: line for line in json.loads((out / "results.json").read_text()) if "outcome" in line}
    return status, ends, {name: line["outcome"] for name, line in ends.items()}


# ---- what there is to run


def test_the_plans_of_both_commands_fit_a_quarter_of_an_hour() -> None:
    limits = []
    for which, first in (("--plan", "machine"), ("--plan --second", "ranks4")):
        command = ["make", "-s", "-C", str(ROOT), "gpu-check", f"PYTHON={sys.executable}", f"ARGS={which}"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert lines[0].split()[0] == first
        likely, limit = map(int, re.findall(r"(\d+) s", lines[-1]))
        assert max(int(found) for line in lines for found in re.findall(r"over after +(\d+)", line)) == likely < limit
        limits.append(limit)
    assert limits == [480, 150]


def test_steps_name_what_there_is(gpu_check: Any) -> None:
    """Tests marked gpu, some for each, or a section of the bench, or a step of ours; all of the latter are there."""
    from benchmarks.cuda.command import Gpu
    from train.command_line import cli

    commands = {name: shlex.split(each.command) for name, each in gpu_check.STEPS.items()}
    for words in commands.values():
        if words[1] == "train":
            cli(Gpu, [word.format(device="cpu", json="x") for word in words[3:]], prog="bench")
    for module in ("gpu_steps", "gpu_times"):
        own = {words[2] for words in commands.values() if words[1] == module}
        assert own == importlib.import_module(module).STEPS.keys()
    which = {name: words[words.index("{json}") + 1 :] for name, words in commands.items() if words[1] == "pytest"}
    files = {word for words in which.values() for word in words if word.startswith("tests/")}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--collect-only", "-p", "no:cacheprovider", *files]
    status, said = forked.run(command, env=os.environ, cwd=ROOT)
    found = [line for line in said.splitlines() if "::test_" in line]
    assert status == 0 and len(found) > 50, said
    for name, words in which.items():
        prefixes = tuple(word for word in words if word.startswith("tests/"))
        keys = words[words.index("-k") + 1] if "-k" in words else "test"
        for key in re.findall(r"(?<!not )\b(?!and\b|or\b|not\b)\w+", keys):
            assert any(test.startswith(prefixes) and key in test for test in found), (name, key)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_step_runs_on_a_cpu(gpu_check: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On tiny models."""
    for which in ("--limit-s", "800"), ("--limit-s", "800", "--second"):
        status, _, outcomes = check(gpu_check, tmp_path / which[-1], *which)
        assert status == 0, outcomes
        heading, *_ = json.loads((tmp_path / which[-1] / "results.json").read_text())
        assert len(heading["code"]) == 12 and heading["revision"] and heading["date"] and heading["device"] == "cpu"
    said = capfd.readouterr().out.partition("=== summary")[2]
    assert "traced: 8192 rows: traced" in said
    assert "micro: embedding, skewed: zero_" in said
    assert "==== micro: passed" in (tmp_path / "800" / "log.txt").read_text()


def test_edited_code_is_other_code(gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_check.code() == gpu_check.code()
    (tmp_path / "models").mkdir()
    (tmp_path / "README.md").write_text("")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    digests = []
    for text in ("x = 1", "x = 2"):
        (tmp_path / "models" / "a.py").write_text(text)
        digests.append(gpu_check.code()["code"])
    assert digests[0] != digests[1]
    assert gpu_check.code()["revision"] == "unknown"


# ---- steps that do not end well


@pytest.mark.parametrize("together", [False, True])
def test_a_dead_step_loses_itself_alone(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], together: bool
) -> None:
    """It is named, with what it had found, and the others run, whether beside it or after it."""
    hangs = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); sys.stdout.close(); "
    texts = {
        "good": WRITES + "print('it runs')",
        "fails": WRITES + "raise SystemExit('no such luck')",
        "dies": WRITES + "import os; os.kill(os.getpid(), 11)",
        "hangs": f"{hangs}{WRITES}time.sleep(1000)",
        "last": WRITES,
    }
    over = gpu_check.Running.over

    def late(running: Any) -> bool:
        """The time of the one that hangs is up when it has written what it finds."""
        if running.name == "hangs" and running.found.exists() and running.found.stat().st_size:
            running.limit_s = 0.0
        return bool(over(running))

    monkeypatch.setattr(gpu_check.Running, "over", late)
    made = {name: step(gpu_check, tmp_path, name, text, together=together) for name, text in texts.items()}
    lacks = gpu_check.Step(9, 1, together, "", "-m last {json}", within="no-such-tool --quiet")
    monkeypatch.setattr(gpu_check, "STEPS", {**made, "lacks": lacks})
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.1)
    monkeypatch.setattr(gpu_check, "no_device", lambda: None)
    status, ends, outcomes = check(gpu_check, tmp_path / "out", "--only", *texts, "lacks", device="cuda")
    assert status == 1
    assert outcomes == {
        "good": "passed",
        "fails": "exit status 1",
        "dies": "died of SIGSEGV",
        "hangs": "not done after 0 s",
        "last": "passed",
        "lacks": "exit status 1",
    }
    assert all(ends[name]["found"] == {"part": 1} for name in texts)
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "it runs" in log
    assert "no such luck" in log
    assert "no-such-tool" in log
    said = capfd.readouterr().out.partition("=== summary")[2]
    assert re.search(r"dies +\d+\.\d died of SIGSEGV", said)


def test_what_would_not_fit_is_named_and_not_begun(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = gpu_check.Step(900, 500, False, "", "-m long")
    monkeypatch.setattr(gpu_check, "STEPS", {"long": long, "short": step(gpu_check, tmp_path, "short", WRITES)})
    status, _, outcomes = check(gpu_check, tmp_path / "out", "--only", "long", "short", "--limit-s", "400")
    assert status == 1
    assert outcomes["short"] == "passed"
    assert re.fullmatch(r"left out: 39\d s are left for it", outcomes["long"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_loses_the_steps_at_hand_alone(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "good.py").write_text("")
    pid = tmp_path / "pid"
    out = tmp_path / "out"
    (tmp_path / "hangs.py").write_text(
        f"import os, time; open({str(pid)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(99)"
    )
    driver = "import sys, gpu_check as g; "
    driver += "g.STEPS = {name: g.Step(60, 1, False, '', '-m ' + name) for name in ('good', 'hangs')}; "
    driver += "sys.exit(g.main(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([CI, str(tmp_path)])}
    command = [sys.executable, "-c", driver, "--only", "good", "hangs", "--device", "cpu", "--out", str(out)]
    running = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    until(lambda: pid.exists() and pid.read_text().endswith(" "))
    running.send_signal(number)
    if number == signal.SIGKILL:  # nobody ends what it has started
        running.wait(100)
        os.kill(int(pid.read_text()), signal.SIGKILL)
    running.communicate(timeout=100)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    ends = {line["step"]: line["outcome"] for line in lines if "outcome" in line}
    assert ends["good"] == "passed"
    if number == signal.SIGTERM:
        assert running.returncode == 128 + signal.SIGTERM
        assert ends["all"] == "stopped by SIGTERM"
        assert ends["hangs"].startswith("not done after")
        assert json.loads((out / "results.json").read_text()) == lines
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


@NO_GPU
def test_a_machine_without_a_gpu_is_no_success(tmp_path: Path) -> None:
    command = [sys.executable, f"{CI}/gpu_check.py", "--out", str(tmp_path / "out")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert found.returncode == 1
    assert not list(tmp_path.iterdir())
    assert f"torch {torch.__version__}" in found.stdout
    assert "finds no CUDA device on this machine" in found.stdout


def test_a_figure_beyond_its_limit_fails_its_step(gpu_check: Any, tmp_path: Path) -> None:
    say = importlib.import_module("gpu_steps").Say(tmp_path, "any")
    say.expect("good", 1.0, 1.0)
    with say.part("some"):
        raise ValueError("no such luck")
    assert say.lost == 1
    for value in (1.1, float("nan")):
        say.expect("bad", value, 1.0)
    assert say.lost == 3
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line.get("short", line.get("failed")) for line in lines] == [
        "good 1, at most 1 expected",
        "ValueError: no such luck",
        "WRONG: bad 1.1, at most 1 expected",
        "WRONG: bad nan, at most 1 expected",
    ]


# ---- wheels


def wheel(folder: Path, name: str, text: str = "", file: str | None = None) -> None:
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr(file or f"{name.partition('-')[0]}.py", text)


def test_packages_come_out_of_a_folder_of_wheels(gpu_check: Any, tmp_path: Path) -> None:
    from wheels import unpack

    wheel(tmp_path, "any_rope-1.0-py3-none-any.whl", "WORDS = 'from a wheel'")
    wheel(tmp_path, "any_rope-1.0-cp27-cp27m-win32.whl", "raise SystemExit")
    wheel(tmp_path, "torch-1.0-py3-none-any.whl", "raise SystemExit")
    (tmp_path / "into").mkdir()
    found = unpack(tmp_path, tmp_path / "into")
    assert found["any-rope"] == "1.0"
    assert found["torch"].startswith("this machine's own")
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["any_rope.py"]


def test_what_a_machine_lacks_comes_out_of_wheels(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """NCCL's stands beside torch's, for those who put it first themselves; what nothing brings is named."""
    (tmp_path / "wheels").mkdir()
    library = "nvidia/nccl/lib/libnccl.so.2"
    wheel(tmp_path / "wheels", "nvidia_nccl_cu13-2.30.7-py3-none-any.whl", "13", library)
    wheel(tmp_path / "wheels", "any_rope-1.0-py3-none-any.whl", "print('imported')")
    text = "import any_rope, os; print(open(os.environ['GPU_CHECK_NCCL']).read(), os.environ['GPU_CHECK_NCCL'])"
    monkeypatch.setattr(gpu_check, "STEPS", {"one": step(gpu_check, tmp_path, "one", text)})
    monkeypatch.setattr(gpu_check, "NEEDED", ("any_rope", "no_rope"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    status, *_ = check(gpu_check, tmp_path / "out", "--only", "one", "--wheels", str(tmp_path / "wheels"))
    log = (tmp_path / "out" / "log.txt").read_text()
    assert status == 0
    assert "imported\n13 /" in log
    assert f"/nvidia-nccl-cu13/{library}\n" in log
    assert "has no no_rope: make gpu-wheels" in capfd.readouterr().out


def test_folders_that_cannot_be_used_say_why(gpu_check: Any, tmp_path: Path) -> None:
    def said() -> str:
        with pytest.raises(SystemExit) as caught:
            check(gpu_check, tmp_path / "out", "--only", "machine", "--wheels", str(tmp_path))
        return str(caught.value)

    assert "there is no wheel in it" in said()
    wheel(tmp_path, "tree-1.0-cp27-cp27m-win32.whl")
    assert "not for this Python and system: tree-1.0-cp27-cp27m-win32.whl" in said()
    for version in ("1.0", "1.1"):
        wheel(tmp_path, f"tree-{version}-py3-none-any.whl")
    assert "both tree-1.0-py3-none-any.whl and tree-1.1-py3-none-any.whl; leave one of them there" in said()


def test_code_of_other_gpus_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two fatbins, eight bytes apart: payloads go, headers and the machine code of Hopper stay."""
    monkeypatch.syspath_prepend(CI)
    wheels = importlib.import_module("wheels")

    def entry(kind: int, architecture: int, payload: bytes) -> bytes:
        header = struct.pack(wheels.ENTRY_HEADER, kind, 0, 32, len(payload)).ljust(wheels.ARCHITECTURE_AT, b"h")
        return header + struct.pack("<I", architecture) + payload

    def fatbin(*entries: bytes) -> bytes:
        body = b"".join(entries)
        return struct.pack(wheels.FATBIN_HEADER, wheels.FATBIN, 1, 16, len(body)) + body

    ptx = 1
    elf = wheels.ELF

    def pair(fill: Callable[[bytes], bytes]) -> bytes:
        one = fatbin(entry(elf, 80, fill(b"a" * 8)), entry(elf, 90, b"b" * 8), entry(ptx, 90, fill(b"c" * 8)))
        return b"before!!" + one + bytes(8) + fatbin(entry(elf, 100, fill(b"d" * 16)))

    data = bytearray(pair(lambda payload: payload))
    wheels._clear(data, 8, len(data) - 8, keep=wheels.SM_90)
    assert bytes(data) == pair(lambda payload: bytes(len(payload)))
    sys.modules.pop("wheels")


# ---- the plugin


TESTS = """
import time, pytest
pytestmark = pytest.mark.gpu
@pytest.mark.timeout(9)
def test_passes(): print("so many")
def test_fails(): assert 1 + 1 == 3, "no such sum"
@pytest.mark.skip(reason="for no reason")
def test_skips(): pass
def test_hangs(): time.sleep(1000)
"""


def started(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    """pytest with the plugin and the project's settings, as a machine has them that has pytest alone."""
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command += ["-p", "gpu_tests", "-m", "gpu", "-q", "--tb=no", "-rN", "--gpu-json", str(tmp_path / "out.json"), *more]
    own = {"PYTHONPATH": CI, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
    with (tmp_path / "log").open("w") as log:
        return subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **own}, stdout=log, stderr=log, text=True)


def test_failures_are_there_before_the_end(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_others.py").write_text("import no_such_package\n")  # has no such test, so that nobody reads it
    (tmp_path / "test_lacks.py").write_text("import no_such_package  # mark.gpu\n")
    running = started(tmp_path, str(tmp_path), "--continue-on-collection-errors")
    out = tmp_path / "out.json"
    until(lambda: out.exists() and "test_hangs" in str(json.loads(out.read_text())["running"]))
    running.kill()
    running.wait()
    found = json.loads(out.read_text())
    said = (tmp_path / "log").read_text()
    (passes,) = found["passed"]
    assert passes.endswith("test_some.py::test_passes")
    assert found["said"] == {passes: "so many\n"}
    lacks, fails = found["failed"]
    assert lacks.endswith("test_lacks.py")
    assert "no_such_package" in found["failed"][lacks]
    assert fails.endswith("test_some.py::test_fails")
    assert "no such sum" in found["failed"][fails]
    assert f"FAILED {fails}" in said
    assert "no such sum" in said
    assert f"FAILED {lacks}" in said
    assert [reason for name, reason in found["skipped"].items()] == ["Skipped: for no reason"]


def test_a_run_without_a_test_that_passed_is_no_success(tmp_path: Path) -> None:
    skips = "@pytest.mark.skip(reason='for no reason')\ndef test_skips(): ..."
    for text, more, why in (
        ("def test_passes(): ...", (), None),
        (skips, (), "no test has run: Skipped: for no reason"),
        ("", (), "no test has run"),
        ("def test_passes(): ...", ("--collect-only",), None),
    ):
        (tmp_path / "test_some.py").write_text("import pytest\npytestmark = pytest.mark.gpu\n" + text)
        status = started(tmp_path, str(tmp_path), *more).wait(100)
        found = json.loads((tmp_path / "out.json").read_text())
        assert (status, found.get("why")) == (why is not None, why)
    assert found["collected"] == 1
    assert found["passed"] == []


def test_every_marked_test_is_in_a_file_that_is_read(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.syspath_prepend(CI)
    from gpu_tests import marked

    collected = request.session.items
    if len({item.path for item in collected}) < 50:
        pytest.skip("only a whole test run collects every file")
    names = {item.path for item in collected if item.get_closest_marker("gpu")}
    assert len(names) > 5
    assert all(map(marked, names))
    assert not marked(ROOT / "tests" / "params" / "test_layout.py")
