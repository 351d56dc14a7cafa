"""`make gpu-check` on machines that lack something, where sections fail, die or hang, and when it is ended early."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import forked

ROOT = Path(__file__).resolve().parent.parent
CI = str(ROOT / ".ci")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")
MACHINE = {"torch": "9", "cuda": "13.0", "gpus": ["H100"]}


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The module, on a machine that is taken to have a GPU; results go to `tmp_path`, whose modules are found."""
    monkeypatch.syspath_prepend(CI)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module = importlib.import_module("gpu_check")
    monkeypatch.setattr(module, "machine", lambda env: MACHINE)
    monkeypatch.setattr(module, "OUT", ROOT / "gpu.json")
    monkeypatch.setattr(module, "GRACE_S", 1.0)
    yield module
    for name in ("gpu_check", "wheels"):
        sys.modules.pop(name, None)


WRITES = "import json, sys; json.dump({'part': sys.argv[1:]}, open(sys.argv[1], 'w')); "
"""What a section does that finds something before it ends as it does."""


def section(gpu_check: Any, tmp_path: Path, name: str, text: str, seconds: float = 60, *needs: str) -> Any:
    """A section that runs `text`, given the files of its results and of all."""
    (tmp_path / f"{name}.py").write_text(text)
    return gpu_check.Section(seconds, f"{name} {{json}} {{kept}}", needs)


def check(gpu_check: Any, tmp_path: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the sections of the JSON."""
    out = tmp_path / "gpu.json"
    status = gpu_check.main([*argv, "--out", str(out)])
    return status, json.loads(out.read_text())["sections"] if out.exists() else {}


# ---- order and budgets


def test_the_plan_has_what_tells_most_first_and_ends_in_forty_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["make", "-s", "-C", str(ROOT), "gpu-check", f"PYTHON={sys.executable}", "ARGS=--plan"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[1] for line in lines[:5]] == ["readme", "kernels", "delays", "graphs", "ranks"]
    seconds = [int(line.split()[2]) for line in lines]
    until = [int(line.split("until")[1].split()[0]) for line in lines]
    assert until == [sum(seconds[: n + 1]) for n in range(len(lines))]
    assert until[-1] <= 2400 and until[2] < 570  # the first three in a command of ten minutes
    assert all("python -m pytest" in line or "python -m train bench --section" in line for line in lines)


def test_sections_name_what_there_is(gpu_check: Any) -> None:
    """Tests marked gpu, some for each, or a section of the bench; all of these are there."""
    from train.bench.cuda.command import SECTIONS, Gpu
    from train.command_line import cli

    commands = {name: shlex.split(each.command) for name, each in gpu_check.SECTIONS.items()}
    benches = [cli(Gpu, words[2:], prog="bench").section for words in commands.values() if words[0] == "train"]
    assert sorted(benches) == sorted(SECTIONS)
    which = {name: words[words.index("{json}") + 1 :] for name, words in commands.items() if words[0] == "pytest"}
    assert which.pop("tests") == ["tests", "--gpu-kept", "{kept}"]
    files = {word for words in which.values() for word in words if word.startswith("tests/")}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--collect-only", "-p", "no:cacheprovider", *files]
    status, said = forked.run(command, env=os.environ, cwd=ROOT)
    found = [line for line in said.splitlines() if "::test_" in line]
    assert status == 0 and len(found) > 50, said
    for name, words in which.items():
        keys = words[words.index("-k") + 1].split(" or ") if "-k" in words else [""]
        prefixes = tuple(word for word in words if word.startswith("tests/"))
        assert any(test.startswith(prefixes) and key in test for test in found for key in keys), name


def test_a_dead_section_loses_no_earlier_result(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is named, with what it had found, and the next one begins, with the time that others have left."""
    monkeypatch.setattr(
        gpu_check,
        "SECTIONS",
        {
            "good": section(gpu_check, tmp_path, "good", WRITES + "print('it runs')"),
            "fails": section(gpu_check, tmp_path, "fails", WRITES + "raise SystemExit('no such luck')"),
            "dies": section(gpu_check, tmp_path, "dies", WRITES + "import os; os.kill(os.getpid(), 11)"),
            "hangs": section(
                gpu_check, tmp_path, "hangs", WRITES + "import time; sys.stdout.close(); time.sleep(1000)"
            ),
            "last": section(gpu_check, tmp_path, "last", WRITES),
        },
    )
    limits, run = [], gpu_check.run

    def noted(name: str, each: Any, env: Any, limit_s: float, *rest: Any) -> None:
        limits.append(limit_s)
        run(name, each, env, 4.0 if name == "hangs" else limit_s, *rest)

    monkeypatch.setattr(gpu_check, "run", noted)
    status, sections = check(gpu_check, tmp_path)
    said = capfd.readouterr().out
    assert status == 1 and "it runs" in said
    outcomes = {name: each["outcome"] for name, each in sections.items()}
    assert outcomes == {
        "good": "passed",
        "fails": "exit status 1",
        "dies": "died of SIGSEGV",
        "hangs": "not done after 4 s",
        "last": "passed",
    }
    for name, each in sections.items():
        assert each["found"]["part"][1] == str(tmp_path / "gpu.json") and 0 <= each["seconds"] < 60
        assert ("last lines" in each) == (each["outcome"] != "passed")
        assert each["command"].startswith(f"python -m {name} ") and each["date"]
        assert f"gpu-check: {name}: {each['outcome']}, " in said and f"gpu-check: {name:12} {each['outcome']}" in said
    assert sections["fails"]["last lines"] == ["no such luck"] and "no such luck" in said
    assert limits[0] == 60 and all(a + 30 < b <= a + 60 for a, b in itertools.pairwise(limits[:4]))
    heading = json.loads((tmp_path / "gpu.json").read_text())
    assert heading["machine"] == MACHINE and len(heading["code"]) == 12 and heading["revision"]


def test_a_second_command_goes_on_where_the_first_one_ended(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sections = {
        "one": section(gpu_check, tmp_path, "one", WRITES + "print('one runs')"),
        "fails": section(gpu_check, tmp_path, "fails", "print('fails runs'); raise SystemExit(3)"),
        "long": section(gpu_check, tmp_path, "long", "print('long runs')", 500),
        "short": section(gpu_check, tmp_path, "short", "print('short runs')"),
    }
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)

    def runs() -> list[str]:
        return [name for name in sections if f"{name} runs" in said]

    status, found = check(gpu_check, tmp_path, "--limit-s", "400")
    said = capfd.readouterr().out
    assert status == 1 and runs() == ["one", "fails", "short"] and "long" not in found
    assert re.search(r"long: not run: it may take 500 s, \d+ are left; the same command goes on here", said)
    status, found = check(gpu_check, tmp_path)
    said = capfd.readouterr().out
    assert status == 1 and runs() == ["long"] and "one: passed, earlier" in said
    assert [each["outcome"] for each in found.values()] == ["passed", "exit status 3", "passed", "passed"]
    assert check(gpu_check, tmp_path, "--only", "one", "long")[0] == 0
    said = capfd.readouterr().out
    assert runs() == ["one", "long"]
    for number in (1, 2):  # of other code nothing is kept, and nothing is lost
        monkeypatch.setattr(gpu_check, "code", lambda number=number: {"revision": "x", "code": number})
        assert list(check(gpu_check, tmp_path, "--only", "one")[1]) == ["one"]
    before = [json.loads((tmp_path / f"gpu.{number}.json").read_text()) for number in (1, 2)]
    assert [len(each["sections"]) for each in before] == [4, 1] and before[1]["code"] == 1


def test_edited_code_is_other_code(gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_check.code() == gpu_check.code()
    (tmp_path / "models").mkdir()
    (tmp_path / "README.md").write_text("")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    digests = []
    for text in ("x = 1", "x = 2"):
        (tmp_path / "models" / "a.py").write_text(text)
        digests.append(gpu_check.code()["code"])
    assert digests[0] != digests[1] and gpu_check.code()["revision"] == "unknown"


# ---- what is missing


@NO_GPU
def test_a_machine_without_a_gpu_is_no_success(tmp_path: Path) -> None:
    command = [sys.executable, f"{CI}/gpu_check.py", "--out", str(tmp_path / "gpu.json")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert found.returncode == 1 and not list(tmp_path.iterdir())
    assert f"torch {torch.__version__}" in found.stdout and "finds no CUDA device on this machine" in found.stdout


def test_what_is_missing_is_named_and_the_rest_runs(
    gpu_check: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = section(gpu_check, tmp_path, "good", "print('it runs')", 60, "torch")
    poor = good._replace(needs=("torch", "no_tree", "no_rope"))
    monkeypatch.setattr(gpu_check, "SECTIONS", {"poor": poor, "good": good})
    status, found = check(gpu_check, tmp_path)
    said = capfd.readouterr().out
    assert status == 1 and list(found) == ["good"] and "it runs" in said
    assert f"poor: not run: {sys.executable} has no no_tree, no_rope; WHEELS=DIR" in said


def wheel(folder: Path, name: str, text: str = "", file: str | None = None) -> None:
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr(file or f"{name.partition('-')[0]}.py", text)


def test_packages_come_out_of_a_folder_of_wheels(gpu_check: Any, tmp_path: Path) -> None:
    from wheels import unpack  # type: ignore[import-not-found]

    wheel(tmp_path, "any_rope-1.0-py3-none-any.whl", "WORDS = 'from a wheel'")
    wheel(tmp_path, "any_rope-1.0-cp27-cp27m-win32.whl", "raise SystemExit")
    wheel(tmp_path, "torch-1.0-py3-none-any.whl", "raise SystemExit")
    (tmp_path / "into").mkdir()
    found = unpack(tmp_path, tmp_path / "into")
    assert found["any-rope"] == "1.0" and found["torch"].startswith("this machine's own")
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["any_rope.py"]


def test_an_nccl_out_of_a_wheel_stands_beside_torchs(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The one for torch's CUDA, for sections that put it first themselves; it is on no path."""
    (tmp_path / "wheels").mkdir()
    library = "nvidia/nccl/lib/libnccl.so.2"
    for cuda in (12, 13):
        wheel(tmp_path / "wheels", f"nvidia_nccl_cu{cuda}-2.31.2-py3-none-any.whl", str(cuda), library)
    text = "import os; print(open(os.environ['GPU_CHECK_NCCL']).read(), os.environ['GPU_CHECK_NCCL'])"
    monkeypatch.setattr(gpu_check, "SECTIONS", {"one": section(gpu_check, tmp_path, "one", text)})
    path = list(sys.path)
    try:
        assert check(gpu_check, tmp_path, "--wheels", str(tmp_path / "wheels"))[0] == 0
    finally:
        sys.path[:] = path
    said = capfd.readouterr().out
    assert "\n13 /" in said and f"/nvidia-nccl-cu13/{library}\n" in said


def test_folders_that_cannot_be_used_say_why(gpu_check: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--wheels", str(tmp_path)]) == 1
    assert "there is no wheel in it" in capfd.readouterr().out
    wheel(tmp_path, "tree-1.0-cp27-cp27m-win32.whl")
    assert gpu_check.main(["--wheels", str(tmp_path)]) == 1
    assert "not for this Python and system: tree-1.0-cp27-cp27m-win32.whl" in capfd.readouterr().out
    for version in ("1.0", "1.1"):
        wheel(tmp_path, f"tree-{version}-py3-none-any.whl")
    assert gpu_check.main(["--wheels", str(tmp_path)]) == 1
    words = "both tree-1.0-py3-none-any.whl and tree-1.1-py3-none-any.whl; leave one of them there"
    assert words in capfd.readouterr().out


def test_sections_import_from_the_wheels(gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    wheel(tmp_path / "wheels", "any_rope-1.0-py3-none-any.whl", "print('imported')")
    monkeypatch.setattr(gpu_check, "SECTIONS", {"rope": gpu_check.Section(60, "any_rope", ("any_rope",))})
    path = list(sys.path)
    try:
        assert check(gpu_check, tmp_path, "--wheels", str(tmp_path / "wheels"))[0] == 0
    finally:
        sys.path[:] = path
    assert check(gpu_check, tmp_path, "--only", "rope")[0] == 1


# ---- what ends early


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_loses_the_section_at_hand_alone(tmp_path: Path, number: signal.Signals) -> None:
    """And of that what it had not found yet; the next command begins with it."""
    (tmp_path / "good.py").write_text("")
    pid, out = tmp_path / "pid", tmp_path / "gpu.json"
    (tmp_path / "hangs.py").write_text(
        f"import os, time; {WRITES}open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    )
    driver = "import sys, gpu_check as g; g.machine = lambda env: {'gpus': ['x']}; "
    driver += "g.SECTIONS = {name: g.Section(60, name + ' {json} {kept}', ()) for name in ('good', 'hangs')}; "
    driver += "sys.exit(g.main(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([CI, str(tmp_path)])}
    command = [sys.executable, "-c", driver, "--out", str(out)]
    running = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    until(lambda: out.exists() and bool(json.loads(out.read_text())["sections"].get("hangs", {}).get("found")))
    until(lambda: pid.exists() and pid.read_text() != "")
    running.send_signal(number)
    if number == signal.SIGKILL:  # nobody ends what it has started
        running.wait(60)
        os.kill(int(pid.read_text()), signal.SIGKILL)
    said, _ = running.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert running.returncode == 128 + signal.SIGTERM and "stopped by SIGTERM" in said
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
    good, hangs = json.loads(out.read_text())["sections"].values()
    assert good["outcome"] == "passed" and hangs["outcome"] == "cut short" and hangs["found"]["part"]
    (tmp_path / "hangs.py").write_text("print('it runs')")
    again = subprocess.run(command, env=env, capture_output=True, text=True)
    assert again.returncode == 0 and "good: passed, earlier" in again.stdout and "it runs" in again.stdout


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
    found, said = json.loads(out.read_text()), (tmp_path / "log").read_text()
    (passes,) = found["passed"]
    assert passes.endswith("test_some.py::test_passes") and found["said"] == {passes: "so many\n"}
    lacks, fails = found["failed"]
    assert lacks.endswith("test_lacks.py") and "no_such_package" in found["failed"][lacks]
    assert fails.endswith("test_some.py::test_fails") and "no such sum" in found["failed"][fails]
    assert f"FAILED {fails}" in said and "no such sum" in said and f"FAILED {lacks}" in said
    assert [reason for name, reason in found["skipped"].items()] == ["Skipped: for no reason"]


def test_tests_with_a_result_do_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    out, kept = tmp_path / "out.json", tmp_path / "kept.json"

    def again(found: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        kept.write_text(json.dumps({"sections": {"one": {"found": found}, "order": {"found": {"same": True}}}}))
        return started(tmp_path, str(tmp_path), "--gpu-kept", str(kept)).wait(60), json.loads(out.read_text())

    name = "test_some.py::test_"
    ran = {"failed": {f"{name}fails": "text"}, "skipped": {f"{name}skips": "why"}}
    status, found = again({"passed": [f"{name}hangs"], **ran})
    assert status == 0 and found["passed"] == [f"{name}passes"] and not found["failed"] and found["running"] is None
    status, found = again({"passed": [f"{name}hangs", f"{name}passes"], **ran})
    assert status == 0 and found["passed"] == [] and "why" not in found
    ran = {"passed": [f"{name}{test}" for test in ("hangs", "passes", "fails")]}
    status, found = again(ran)
    assert status == 1 and found["why"] == "no test has run: Skipped: for no reason"
    status, found = again({"passed": [f"{name}hangs"]})
    assert status == 1 and found["why"] == f"1 failed, the first is {name}fails"
    (tmp_path / "test_some.py").write_text("# mark.gpu")
    status, found = again({})
    assert status == 1 and found["why"] == "no test has run"


def test_the_running_test_and_the_reason_are_named(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import json, sys; json.dump({}, open(sys.argv[1], 'w')); sys.exit(1)"
    found = {"running": "test_x", "why": "no NCCL"}
    sections = {"one": section(gpu_check, tmp_path, "one", text.replace("{}", repr(found)))}
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    assert check(gpu_check, tmp_path)[1]["one"]["outcome"] == "exit status 1, in test_x: no NCCL"


def test_every_marked_test_is_in_a_file_that_is_read(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.syspath_prepend(CI)
    from gpu_tests import marked  # type: ignore[import-not-found]

    collected = request.session.items
    if len({item.path for item in collected}) < 50:
        pytest.skip("only a whole test run collects every file")
    names = {item.path for item in collected if item.get_closest_marker("gpu")}
    assert len(names) > 5 and all(map(marked, names))
    assert not marked(ROOT / "tests" / "params" / "test_layout.py")
