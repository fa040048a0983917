"""`pytest --retry`: a test that fails is run once more, alone, when all others have ended. CI uses it.

    unsteady     failed, then passed alone: the run passes, and the test is named at the end. Each such name is a bug
    failed       failed both times: the run fails
    many fail    more than MOST tests failed: that is no unsteadiness, and nothing is run again

Errors in set-up and tear-down, tests over which a worker of xdist died, and timeouts count as failures. Each second run
is a fresh pytest process, so it has none of the first run's modules, fixtures and processes, and the machine to itself.
The summary at the end counts an unsteady test as passed, in pytest's own form.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

MOST = 20  # failed tests that are run again
SECONDS = 300.0  # for one of them
SECONDS_IN_ALL = 900.0
PASSED = {"tests": "1", "failures": "0", "errors": "0", "skipped": "0"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--retry", action="store_true", help="run tests that failed once more by themselves")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--retry") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Retry(config), "retry")


class Retry:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.unsteady: dict[str, list[pytest.TestReport]] = {}
        self.again: dict[str, str] = {}
        """What the second run printed, of each test that failed in it too."""

    @pytest.hookimpl(wrapper=True, trylast=True)  # inside the reporter's wrapper, which then prints the summary
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        result = yield  # xdist ends its workers
        stopped_early = session.shouldfail or session.shouldstop
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and not stopped_early:
            if self.retry(self.config.pluginmanager.get_plugin("terminalreporter")):
                session.exitstatus = pytest.ExitCode.OK
        return result

    def retry(self, reporter: Any) -> bool:
        """Run again what failed, and count as passed what then passes; true where nothing failed twice."""
        stats = reporter.stats
        failures: dict[str, list[pytest.TestReport]] = {}
        for report in [*stats.get("failed", ()), *stats.get("error", ())]:
            if not isinstance(report, pytest.TestReport):
                return False  # a file that cannot be collected: some of its tests have not run at all
            failures.setdefault(report.nodeid, []).append(report)
        reporter.ensure_newline()
        if len(failures) > MOST:
            reporter.write_line(f"{len(failures)} tests failed, more than {MOST}: none is run again")
            return False
        end = time.monotonic() + SECONDS_IN_ALL
        for test, reports in failures.items():
            passed, output = alone(test, self.config.rootpath, min(SECONDS, end - time.monotonic()))
            reporter.write_line(f"run again by itself: {test} {'passed' if passed else 'FAILED'}")
            if not passed:
                self.again[test] = output
                continue
            self.unsteady[test] = reports
            for outcome in ("failed", "error"):
                stats[outcome] = [report for report in stats.get(outcome, ()) if report.nodeid != test]
            if all(report.nodeid != test for report in stats.setdefault("passed", [])):
                location, keywords = reports[0].location, reports[0].keywords
                stats["passed"].append(pytest.TestReport(test, location, keywords, "passed", None, "call"))
        for outcome in ("failed", "error"):
            if not stats.get(outcome):
                stats.pop(outcome, None)
        return not self.again

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around the reporter's own, whose list of failures comes before ours
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None, Any, Any]:
        result = yield
        for test, output in self.again.items():
            terminalreporter.write_sep("=", f"second run of {test}")
            terminalreporter.write_line(output)
        for test, reports in self.unsteady.items():
            terminalreporter.write_sep("=", f"first run of {test}")
            for report in reports:
                report.toterminal(terminalreporter._tw)
        if self.unsteady:
            terminalreporter.write_sep("=", f"UNSTEADY TESTS: {len(self.unsteady)}")
            terminalreporter.write_line(
                "Each failed, and passed when it was run again by itself. Each is a bug to mend:"
            )
            for test in self.unsteady:
                terminalreporter.write_line(f"UNSTEADY {test}")
        return result


def alone(test: str, root: Path, seconds: float) -> tuple[bool, str]:
    """Whether `test` passes in a pytest process of its own within `seconds`, and what that process printed. A test that
    is skipped has not passed."""
    if seconds <= 0:
        return False, f"not run again: other tests' second runs took {SECONDS_IN_ALL:.0f} s"
    with tempfile.TemporaryDirectory() as folder:
        results, printed = Path(folder, "results.xml"), Path(folder, "printed")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", f"--junit-xml={results}", test]
        if "xdist" in sys.modules:
            command.append("-n0")
        with printed.open("w") as file:
            process = subprocess.Popen(command, cwd=root, stdout=file, stderr=file, start_new_session=True)
            try:
                process.wait(seconds)
                note = ""
            except subprocess.TimeoutExpired:
                note = f"\nended after {seconds:.0f} s"
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)  # and what it may have left behind
                except ProcessLookupError:
                    pass
                process.wait()
        output = printed.read_text(errors="replace") + note
        if process.returncode != 0:
            return False, output
        (suite,) = ElementTree.parse(results).getroot().iter("testsuite")
        return all(suite.get(count) == wanted for count, wanted in PASSED.items()), output
