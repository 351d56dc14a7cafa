"""A pytest plugin for `make gpu-check`: what has failed is printed and written when it fails, not in the end.

    python -m pytest -p gpu_tests -m gpu --gpu-json tests.json

Whoever kills pytest finds the results until then in the JSON, and the test that ran. Files without such tests are not
imported: some need packages that a GPU machine may lack. So may pytest-timeout be, whose settings are then accepted and
do nothing; the budget of the section stays.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MARK = "mark.gpu"
LINES = 40
"""Of a failure, from its end, on the screen; all of it is in the JSON."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-json", type=Path, help="where results go")
    if _no_timeouts():  # strict configuration refuses settings of nobody
        parser.addini("timeout", "of pytest-timeout, which is missing")
        parser.addini("timeout_method", "of pytest-timeout, which is missing")


def pytest_configure(config: pytest.Config) -> None:
    if _no_timeouts():
        config.addinivalue_line("markers", "timeout: of pytest-timeout, which is missing")
    if config.getoption("--gpu-json"):
        config.pluginmanager.register(Results(config))


def _no_timeouts() -> bool:
    return importlib.util.find_spec("pytest_timeout") is None or "PYTEST_DISABLE_PLUGIN_AUTOLOAD" in os.environ


def marked(file: Path) -> bool:
    """Whether a test of `file` may be marked: there, or by what it imports from another file of tests."""
    text = file.read_text()
    helpers = (ROOT / f"{name.replace('.', '/')}.py" for name in re.findall(r"^from (tests[\w.]*) import", text, re.M))
    return MARK in text or any(MARK in helper.read_text() for helper in helpers if helper.exists())


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and not marked(collection_path) else None


class Results:
    """Of every test how it ended; of failures the text, of others what they printed."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.path = config, config.getoption("--gpu-json")
        self.found: dict[str, Any] = {"running": None, "passed": [], "said": {}, "failed": {}, "skipped": {}}
        self.write()

    def write(self) -> None:
        """Replaces the JSON in one go."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.found, indent=1) + "\n")
        os.replace(new, self.path)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.found["collected"] = len(session.items)

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
            self.found["passed"].append(report.nodeid)
            self.found["said"] |= {report.nodeid: report.capstdout} if report.capstdout else {}
        self.write()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A run in which no test passed is no success, but where tests were only to be collected."""
        only_collected = self.config.getoption("collectonly") and self.found["collected"]
        nothing = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if nothing and not self.found["passed"] and not only_collected:
            session.exitstatus = 1
            reason = next(iter(self.found["skipped"].values()), None)
            self.found["why"] = "no test has run" + (f": {reason}" if reason else "")
        self.found["running"] = None
        self.write()


def _reason(report: pytest.TestReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
