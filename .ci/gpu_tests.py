"""A pytest plugin for `make gpu-check`: what has failed is printed and written when it fails, not in the end.

    python -m pytest -p gpu_tests -m gpu --gpu-json tests.json

Whoever kills pytest finds the results until then in the JSON, and the test that ran. Files without such tests are not
imported: some need packages that a GPU machine may lack. So may pytest-timeout be, whose settings are then accepted and
do nothing; the time limit of the whole check stays.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MARK = "mark.gpu"
LINES = 40
"""Of a failure, from its end, on the screen; all of it is in the JSON."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-json", type=Path, help="where results go")
    absent = importlib.util.find_spec("pytest_timeout") is None or "PYTEST_DISABLE_PLUGIN_AUTOLOAD" in os.environ
    if absent:  # strict configuration refuses settings of nobody
        parser.addini("timeout", "of pytest-timeout, which is missing")
        parser.addini("timeout_method", "of pytest-timeout, which is missing")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu-json"):
        config.pluginmanager.register(Results(config))


def marked(file: Path) -> bool:
    """Whether a test of `file` may be marked: there, or by what it imports from another file of tests."""
    text = file.read_text()
    helpers = (ROOT / f"{name.replace('.', '/')}.py" for name in re.findall(r"^from (tests[\w.]*) import", text, re.M))
    return MARK in text or any(MARK in helper.read_text() for helper in helpers if helper.exists())


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and not marked(collection_path) else None


class Results:
    """Of every test how it ended; of failures the text."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.path, self.begun = config, config.getoption("--gpu-json"), time.monotonic()
        self.found: dict[str, Any] = {
            "command": shlex.join(["pytest", *map(str, config.invocation_params.args)]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": json.loads(os.environ.get("GPU_CHECK_MACHINE", "{}")),
            "ended": "killed",  # until it has ended otherwise
            "seconds": 0.0,
            "running": None,
            "passed": 0,
            "failed": {},
            "skipped": {},
        }
        self.write()

    def write(self) -> None:
        """Replaces the JSON in one go."""
        self.found["seconds"] = round(time.monotonic() - self.begun, 1)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.found, indent=1) + "\n")
        os.replace(new, self.path)

    def fail(self, name: str, text: str) -> None:
        self.found["failed"][name] = text
        self.write()
        reporter: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(f"FAILED {name}", red=True)
        for line in text.splitlines()[-LINES:]:
            reporter.write_line(f"    {line}")
        reporter.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.found["running"] = nodeid
        self.write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.fail(report.nodeid, report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.fail(report.nodeid, report.longreprtext)
        elif report.skipped:
            self.found["skipped"][report.nodeid] = str(getattr(report, "wasxfail", "") or _reason(report))
        elif report.when == "call":
            self.found["passed"] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.found |= {"ended": f"with status {int(exitstatus)}", "running": None}
        self.write()


def _reason(report: pytest.TestReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
