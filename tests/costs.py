"""Plugin of pytest: print the tests and fixtures that took longest, with their wall time and CPU time.

The CPU time is that of pytest's own process and of the programs that it waited for. Servers that `make up` started are
none of them. The JUnit file has the times of all.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from time import monotonic  # tests replace that of the module
from typing import Any

import pytest

SHOWN = 20
LEAST_S = 0.1
PREFIX = "seconds of "  # of the properties of a test's report

Step = Generator[None, Any, Any]


def cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def timed(item: pytest.Item, name: str) -> Step:
    """Add the time of a hook to the properties of the test that it is for."""
    wall, cpu = monotonic(), cpu_s()
    try:
        return (yield)
    finally:
        took = monotonic() - wall
        if took > LEAST_S:
            item.user_properties.append((PREFIX + name, f"{took:.1f} {cpu_s() - cpu:.1f}"))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Step:
    return (yield from timed(request._pyfuncitem, f"the fixture {fixturedef.argname}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Step:
    return (yield from timed(item, "the test"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Step:
    return (yield from timed(item, "what follows the test"))


class Costs:
    """Collects the reports of all workers, and prints the largest times at the end."""

    def __init__(self) -> None:
        self.all: list[tuple[float, float, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":  # has the properties of the other reports, too
            for name, seconds in report.user_properties:
                if name.startswith(PREFIX):
                    wall, cpu = map(float, str(seconds).split())
                    step = name.removeprefix(PREFIX).removeprefix("the ")
                    what = report.nodeid if step == "test" else f"{step}, {report.nodeid}"
                    self.all.append((wall, cpu, what))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.all:
            terminalreporter.section(f"what took longest (wall s, CPU s; {len(self.all)} over {LEAST_S} s)")
        for wall, cpu, what in sorted(self.all, reverse=True)[:SHOWN]:
            terminalreporter.write_line(f"{wall:8.1f} {cpu:7.1f}  {what}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs())
