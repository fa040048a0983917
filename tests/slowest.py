"""At the end of a run: the files of tests that took longest, so that a run that gets slower says where."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

SHOWN = 10


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the reports of all of xdist's processes come to the one that started them
        config.pluginmanager.register(Slowest(), "slowest")


class Slowest:
    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if len(self.seconds) > SHOWN:
            terminalreporter.write_sep("=", f"the {SHOWN} slowest of {len(self.seconds)} files")
            for file, seconds in self.seconds.most_common(SHOWN):
                terminalreporter.write_line(f"{seconds:6.1f} s of {sum(self.seconds.values()):.0f} s  {file}")
