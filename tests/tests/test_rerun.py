"""Failed tests run once more, and the run passes only if all tests passed at the first or the second time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from triton_transformers.settings import ROOT

HEAD = """
import os
import signal
from pathlib import Path

import pytest


def fail_once(name):
    marker = Path(__file__).with_name(f"{name}-has-failed")
    if not marker.exists():
        marker.touch()
        raise AssertionError(f"{name} stood still")
"""
PASSES = "def test_passes(): pass"
ONCE = "def test_{0}(): fail_once('{0}')"
# Each test of a module whose fixture failed has the same error.
FIXTURE = """
@pytest.fixture(scope="module")
def server(): fail_once("the server")

@pytest.mark.parametrize("number", range(30))
def test_served(server, number): pass
"""
CRASH = """
def test_crashes():
    if not Path(__file__).with_name("has-crashed").exists():
        Path(__file__).with_name("has-crashed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

def test_after_the_crash(): pass
"""
DEAR = """
import time

@pytest.fixture
def server():
    time.sleep(0.3)

def test_waits(server):
    time.sleep(0.2)
"""
SKIPPED_THEN = """
def test_skipped_then():
    fail_once("it")
    pytest.skip("no browser")
"""
WORKERS = ("--numprocesses=2", "--max-worker-restart=0", "--dist=loadfile")


@pytest.fixture
def part(tmp_path):
    """Return a function that runs a part of the tests with these modules, and returns its exit code and its output."""

    def run(*modules: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
        (tmp_path / "part").mkdir()
        (tmp_path / "pytest.ini").touch()
        for number, module in enumerate(modules):
            (tmp_path / f"part/test_{number}.py").write_text(f"{HEAD}\n{module}\n")
        command = [sys.executable, "-m", "tests.rerun", "part", *options]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("options", [(), WORKERS])
def test_tests_that_pass_when_repeated_are_reported_as_flaky(part, tmp_path, options):
    """The tests behind a fixture that failed have one cause, so that these are two flaky failures."""
    code, printed = part(PASSES, ONCE.format("it"), FIXTURE, options=options)
    assert code == 0, printed
    assert "\nflaky: part/test_1.py::test_it: AssertionError: it stood still\n" in printed
    assert printed.count("\nflaky: part/test_2.py::test_served[") == 30
    assert {path.name for path in (tmp_path / ".local/junit").iterdir()} == {"part.xml", "part-repeated.xml"}


def test_test_that_fails_twice_fails_the_run(part):
    code, printed = part(ONCE.format("it"), "def test_fails(): assert False")
    assert code == 1
    assert "\nflaky: part/test_0.py::test_it: " in printed and "flaky: part/test_1.py" not in printed


def test_third_flaky_test_fails_the_run(part):
    code, printed = part("\n".join(ONCE.format(name) for name in ("a", "b", "c")))
    assert code == 1
    assert printed.count("\nflaky: ") == 3
    assert "3 failures were flaky, and a run may have 2: repair them at their causes" in printed


def test_test_that_is_skipped_when_repeated_fails_the_run(part):
    code, printed = part(SKIPPED_THEN)
    assert (code, "flaky: " in printed) == (1, False), printed


@pytest.mark.parametrize(
    ("modules", "options", "code", "message"),
    [
        ([CRASH, PASSES], WORKERS, 1, "1 tests or modules did not run, such as part/test_0.py::test_after_the_crash"),
        ([PASSES, "import nothing_of_this_name"], WORKERS, 1, "did not run, such as part/test_1.py: failed tests are"),
        ([ONCE.format("it"), PASSES], ("--exitfirst",), 1, "did not run, such as part/test_1.py::test_passes: failed"),
        (["\n".join(ONCE.format(f"t{number}") for number in range(21))], (), 1, "21 failures: failed tests are"),
        ([PASSES], (), 0, "1 passed"),
        ([ONCE.format("it"), "def test_ctrl_c(): raise KeyboardInterrupt"], (), 2, "KeyboardInterrupt"),
    ],
)
def test_complete_interrupted_or_broken_run_is_not_repeated(part, modules, options, code, message):
    returned, printed = part(*modules, options=options)
    assert (returned, "flaky: " in printed, "repeating" in printed) == (code, False, False), printed
    assert message in printed


def test_interrupted_repetition_fails_the_run(part):
    code, printed = part("def test_stops():\n    fail_once('it')\n    raise KeyboardInterrupt")
    assert (code, "flaky: " in printed) == (2, False), printed


@pytest.mark.parametrize("options", [(), WORKERS])
def test_what_took_longest_is_printed_and_in_the_junit_file(part, tmp_path, options):
    code, printed = part(DEAR, PASSES, options=options)
    assert code == 0, printed
    _, _, lines = printed.partition("what took longest")
    test = "part/test_0.py::test_waits"
    assert [line.split("  ")[-1] for line in lines.splitlines()[1:3]] == [f"fixture server, {test}", test]
    junit = (tmp_path / ".local/junit/part.xml").read_text()
    assert '<property name="seconds of the fixture server" value="0.' in junit
