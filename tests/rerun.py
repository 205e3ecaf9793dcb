"""Run a part of the tests. Repeat its failed tests once, alone, and report those that then pass as flaky.

    python -m tests.rerun tests/stack [options of pytest]

A machine that stands still for seconds may fail a test, which must not cost the whole run. The run passes if every
failed test passes when it is repeated. It fails without a repetition if tests did not run, because a worker crashed or
a module could not be imported. JUnit files are written below .local/junit.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from triton_transformers.cli import call

# With more failures, the change is broken, and repeating them would take long.
MAX_REPEATED = 20
# With more flaky tests, the machine is not the only cause.
MAX_FLAKY = 2
JUNIT = Path(".local/junit")


class Recorder:
    """Plugin of pytest that records what became of the tests, and writes it to a file at the end."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.chosen: set[str] = set()
        self.ended: set[str] = set()
        self.passed: set[str] = set()
        self.failed: dict[str, tuple[str, str]] = {}  # test -> (cause, reason)
        self.not_imported: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.chosen |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.chosen |= set(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.not_imported.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ended.add(report.nodeid)
        if report.failed:
            self.failed.setdefault(report.nodeid, cause_and_reason(report))
        elif report.passed and report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        record = {
            "not_run": sorted(self.not_imported | self.chosen - self.ended),
            "passed": sorted(self.passed - self.failed.keys()),
            "failed": self.failed,
        }
        self.file.write_text(json.dumps(record))


def cause_and_reason(report: pytest.TestReport) -> tuple[str, str]:
    """Return what identifies the cause of a failure, and its first line. Tests share the cause of a failed fixture."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = (crash.message if crash else report.longreprtext).strip() or "without a message"
    cause = f"{crash.path}:{crash.lineno}: {message}" if crash and report.when == "setup" else report.nodeid
    return cause, message.splitlines()[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="write what became of the tests to this file")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers report to the process that started them
        config.pluginmanager.register(Recorder(config.getoption("record")))


def run(name: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run pytest. Return its exit code and, if it came to the end of its tests, the record."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        own = ["-p", "tests.rerun", "-p", "tests.costs", f"--record={record}", f"--junitxml={JUNIT / name}.xml"]
        code = call([sys.executable, "-m", "pytest", *own, *arguments], dict(os.environ))
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return code, {"not_run": [], "passed": [], "failed": {}}
        return code, json.loads(record.read_text())


def main(part: str, *options: str) -> int:
    code, first = run(Path(part).name, part, *options)
    failed, not_run = first["failed"], first["not_run"]
    causes = {cause for cause, _ in failed.values()}
    if not_run:  # with exit code 0, too, if a worker crashed between two modules
        print(f"{len(not_run)} tests or modules did not run, such as {not_run[0]}: failed tests are not repeated")
        return code or 1
    if code != pytest.ExitCode.TESTS_FAILED:
        return code
    if not failed or len(causes) > MAX_REPEATED:
        print(f"{len(causes)} failures: failed tests are repeated if there are 1 to {MAX_REPEATED}")
        return code
    print(f"repeating the failed tests alone: {len(failed)}", flush=True)
    repeated, second = run(f"{Path(part).name}-repeated", *failed, *options, "--numprocesses=0")
    flaky = sorted(failed.keys() & set(second["passed"]))
    for test in flaky:
        print(f"flaky: {test}: {failed[test][1]}")
    if repeated or len(flaky) < len(failed):
        return repeated or code
    if len(causes) > MAX_FLAKY:
        print(f"{len(causes)} failures were flaky, and a run may have {MAX_FLAKY}: repair them at their causes")
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
