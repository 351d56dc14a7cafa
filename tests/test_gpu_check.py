"""`make gpu-check` on machines that lack something, where tests fail or hang, and when it is ended early."""

from __future__ import annotations

import importlib
import json
import os
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

ROOT = Path(__file__).resolve().parent.parent
CI = str(ROOT / ".ci")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The module, on a machine that is taken to have a GPU; results go to `tmp_path`."""
    monkeypatch.syspath_prepend(CI)
    module = importlib.import_module("gpu_check")
    monkeypatch.setattr(module, "machine", lambda env: None)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "TESTS", tmp_path / "gpu_tests.json")
    yield module
    for name in ("gpu_check", "wheels"):
        sys.modules.pop(name, None)


def script(tmp_path: Path, name: str, text: str) -> str:
    """A module that `python -m` finds, next to the results."""
    (tmp_path / f"{name}.py").write_text(text)
    return name


# ---- what is missing


@NO_GPU
def test_a_machine_without_a_gpu_is_no_success() -> None:
    found = subprocess.run([sys.executable, f"{CI}/gpu_check.py"], capture_output=True, text=True, timeout=100)
    assert found.returncode == 1
    assert f"torch {torch.__version__}" in found.stdout and "finds no CUDA device on this machine" in found.stdout


def test_what_is_missing_is_named_and_the_rest_runs(
    gpu_check: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    good = gpu_check.Step(("torch",), (script(tmp_path, "good", "print('it runs')"),))
    poor = gpu_check.Step(("torch", "no_tree", "no_rope"), ("good",))
    monkeypatch.setattr(gpu_check, "STEPS", {"tests": poor, "bench": good})
    assert gpu_check.main([]) == 1
    said = capfd.readouterr().out
    assert f"tests: not run: {sys.executable} has no no_tree, no_rope; give a folder of wheels" in said
    assert "it runs" in said
    monkeypatch.setattr(gpu_check, "STEPS", {"tests": poor, "bench": poor})
    assert gpu_check.main([]) == 1
    said = capfd.readouterr().out
    assert "nothing has run" in said and "it runs" not in said
    monkeypatch.setattr(gpu_check, "STEPS", {"bench": good})
    assert gpu_check.main(["bench", "--sections", "order"]) == 0
    assert "python -m good --budget-s 555 --sections order" in capfd.readouterr().out


def wheel(folder: Path, name: str, text: str = "") -> None:
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr(f"{name.partition('-')[0]}.py", text)


def test_packages_come_out_of_a_folder_of_wheels(gpu_check: Any, tmp_path: Path) -> None:
    from wheels import unpack  # type: ignore[import-not-found]

    wheel(tmp_path, "any_rope-1.0-py3-none-any.whl", "WORDS = 'from a wheel'")
    wheel(tmp_path, "any_rope-1.0-cp27-cp27m-win32.whl", "raise SystemExit")
    wheel(tmp_path, "torch-1.0-py3-none-any.whl", "raise SystemExit")
    (tmp_path / "into").mkdir()
    found = unpack(tmp_path, tmp_path / "into")
    assert found["any-rope"] == "1.0" and found["torch"].startswith("this machine's own")
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["any_rope.py"]


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


def test_steps_import_from_the_wheels(gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    wheel(tmp_path / "wheels", "any_rope-1.0-py3-none-any.whl", "print('imported')")
    monkeypatch.setattr(gpu_check, "STEPS", {"bench": gpu_check.Step(("any_rope",), ("any_rope",))})
    path = list(sys.path)
    try:
        assert gpu_check.main(["--wheels", str(tmp_path / "wheels")]) == 0
    finally:
        sys.path[:] = path
    assert gpu_check.main([]) == 1


# ---- what ends early


def test_a_step_that_fails_or_hangs_does_not_stop_the_other(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_check, "TESTS_S", 0.5)
    hangs = gpu_check.Step((), (script(tmp_path, "hangs", "import time; time.sleep(1000)"),))
    fails = gpu_check.Step((), (script(tmp_path, "fails", "raise SystemExit(3)"),))
    monkeypatch.setattr(gpu_check, "STEPS", {"tests": hangs, "bench": fails})
    begun = time.monotonic()
    assert gpu_check.main([]) == 1
    assert time.monotonic() - begun < 60
    assert "failed: tests (not done after 0 s); bench (exit status 3)" in capfd.readouterr().out


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_signal_ends_what_was_started(tmp_path: Path) -> None:
    script(
        tmp_path,
        "hangs",
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(99)",
    )
    driver = "import sys, gpu_check as g; g.machine = lambda env: None; g.STEPS = {'bench': g.Step((), ('hangs',))}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([CI, str(tmp_path)])}
    command = [sys.executable, "-c", f"{driver}; sys.exit(g.main([]))"]
    check = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text() != "")
    check.send_signal(signal.SIGTERM)
    said, _ = check.communicate(timeout=60)
    assert check.returncode == 128 + signal.SIGTERM and "stopped by SIGTERM" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


TESTS = """
import time, pytest
pytestmark = pytest.mark.gpu
def test_passes(): pass
def test_fails(): assert 1 + 1 == 3, "no such sum"
@pytest.mark.skip(reason="for no reason")
def test_skips(): pass
def test_hangs(): time.sleep(1000)
"""


def started(tmp_path: Path, *files: str, **env: str) -> subprocess.Popen[str]:
    """pytest with the plugin and the project's settings, as a machine has them that has pytest alone."""
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command += [
        "-p",
        "gpu_tests",
        "-m",
        "gpu",
        "-q",
        "--tb=no",
        "-rN",
        "--gpu-json",
        str(tmp_path / "out.json"),
        *files,
    ]
    own = {"PYTHONPATH": CI, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
    with (tmp_path / "log").open("w") as log:
        return subprocess.Popen(
            command, cwd=tmp_path, env={**os.environ, **own, **env}, stdout=log, stderr=log, text=True
        )


def test_failures_are_there_before_the_end(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_others.py").write_text("import no_such_package\n")  # has no such test, so that nobody reads it
    (tmp_path / "test_lacks.py").write_text("import no_such_package  # mark.gpu\n")
    running = started(tmp_path, str(tmp_path), "--continue-on-collection-errors", GPU_CHECK_MACHINE='{"torch": "9"}')
    out = tmp_path / "out.json"
    until(lambda: out.exists() and "test_hangs" in str(json.loads(out.read_text())["running"]))
    running.kill()
    running.wait()
    found, said = json.loads(out.read_text()), (tmp_path / "log").read_text()
    assert found["ended"] == "killed" and found["passed"] == 1 and found["machine"] == {"torch": "9"}
    lacks, fails = found["failed"]
    assert lacks.endswith("test_lacks.py") and "no_such_package" in found["failed"][lacks]
    assert fails.endswith("test_some.py::test_fails") and "no such sum" in found["failed"][fails]
    assert f"FAILED {fails}" in said and "no such sum" in said and f"FAILED {lacks}" in said
    assert [reason for name, reason in found["skipped"].items()] == ["Skipped: for no reason"]


def test_the_end_is_told(gpu_check: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_some.py").write_text(
        TESTS.replace("1 + 1 == 3", "1 + 1 == 2").replace("time.sleep(1000)", "pass")
    )
    assert started(tmp_path, str(tmp_path)).wait(60) == 0
    os.replace(tmp_path / "out.json", tmp_path / "gpu_tests.json")
    assert gpu_check.told(None) is None
    assert "tests: 3 passed, 0 failed, 1 skipped" in capfd.readouterr().out
    found = json.loads((tmp_path / "gpu_tests.json").read_text())
    assert found["ended"] == "with status 0" and found["running"] is None
    (tmp_path / "gpu_tests.json").write_text(json.dumps({**found, "passed": 0}))
    assert gpu_check.told(None) == "no test has run"
    (tmp_path / "gpu_tests.json").write_text(json.dumps({**found, "running": "test_x"}))
    assert gpu_check.told("not done after 9 s") == "not done after 9 s, in test_x"
    (tmp_path / "gpu_tests.json").unlink()
    assert gpu_check.told(None) == "no results"


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
