"""Short searches of `make tune` on the real server: what they find, restore and keep. They start from bad settings."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading

import pytest

from tests.support.embedding import embed
from tests.support.stacks import COMMAND_S, FollowedMake, bring_up
from triton_transformers.settings import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
# A machine that needs a longer search is too busy for these tests.
LONGEST = 8  # minutes
GOAL = {"RATE": 30}  # a measurement takes less time than with P95
SHORT = {"PYTHONPATH": ROOT / "tests/support/short_searches"}


@pytest.fixture(scope="module")
def stack(new_stack):
    """Start a server whose configuration is bad: the encoder batches nothing, in two processes of two threads."""
    stack = new_stack()
    path = stack.folder / "models/encoder/config.pbtxt"
    text = path.read_text().replace("max_batch_size: 64", "max_batch_size: 1")
    path.write_text(text.replace("count: 1", "count: 2").replace('string_value: "0"', 'string_value: "2"'))
    ensemble = stack.folder / "models/embedding/config.pbtxt"
    ensemble.write_text(ensemble.read_text().replace("max_batch_size: 64", "max_batch_size: 1"))
    return bring_up(stack)


@pytest.fixture(scope="module", autouse=True)
def original(stack) -> dict[str, dict]:
    return stack.configurations()


@pytest.fixture(autouse=True)
def unchanged(stack, original):
    """Check after every test that the configurations are restored."""
    yield
    assert stack.configurations() == original


def result(stack) -> dict:
    return json.loads((stack.folder / "reports/latest-tune/tune.json").read_text())


def running(stack, **settings) -> tuple[FollowedMake, list[str]]:
    return stack.follow_make("tune", **GOAL, **SHORT, **settings)


def tune(stack, minutes: int, **settings) -> subprocess.CompletedProcess[str]:
    """Search with the smallest budget that works on this machine."""
    done = stack.make("tune", timeout=COMMAND_S + 60 * minutes, MINUTES=minutes, **SHORT, **settings)
    needed = re.search(r"[Ss]et (?:RESUME=1 )?MINUTES=(\d+)", done.stdout + done.stderr)
    if not needed:
        word = result(stack)["verdict"]["word"]
        assert f"{word.capitalize()}: " in done.stdout
        assert (done.returncode == 0) == (word == "proven"), done.stdout + done.stderr
        return done
    minutes = max(int(needed[1]), minutes + 1)
    if minutes > LONGEST:
        pytest.skip(f"a search would take {minutes} minutes on this machine")
    last = tune(stack, minutes, **settings)
    return subprocess.CompletedProcess(last.args, last.returncode, last.stdout, done.stderr + last.stderr)


def wait_for_a_candidate(stack, process: FollowedMake, original) -> None:
    process.wait_until(lambda: stack.configurations() != original, "a candidate on the server")


def test_killed_search_is_undone_and_resumed_without_failed_requests(stack, original):
    process, _ = running(stack)
    wait_for_a_candidate(stack, process, original)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(COMMAND_S)
    assert stack.configurations() != original
    failures, answered, stop = [], [], threading.Event()

    def bystander():
        while not stop.wait(0.2):
            try:
                answered.append(embed(stack, "a bystander"))
            except Exception as error:
                failures.append(error)

    thread = threading.Thread(target=bystander)
    thread.start()
    try:
        done = tune(stack, 1, RESUME=1, **GOAL)
    finally:
        stop.set()
        thread.join()
    assert "an earlier comparison or search was killed: restored" in done.stderr
    assert failures == []
    assert len(answered) > 10
    tuned = result(stack)
    assert tuned["resumed"]
    assert tuned["goal"] == {"rate": 30.0}
    assert len(tuned["original"]["values"]) >= 3
    assert tuned["arms"]
    assert all(value > 0 for arm in tuned["arms"] for value in arm["values"])
    assert re.search(r"encoder: instances \d x \d threads", done.stdout)
    if tuned["verdict"]["word"] == "proven":
        assert tuned["confirmation"]["ci95"][0] > 1
        assert "+++ encoder/configs/cpu.pbtxt" in done.stdout


def test_interrupt_restores_the_server_and_prints_the_best_so_far(stack, original):
    process, lines = running(stack)
    wait_for_a_candidate(stack, process, original)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(COMMAND_S) != 0
    text = "".join(lines)
    assert "restoring the server's configuration" in text
    assert "tune.html" in text
    assert "Traceback" not in text
    assert result(stack)["stopped"] == "interrupted"


@pytest.mark.slowest
def test_highest_rate_within_a_limit(stack):
    done = tune(stack, 1, P95=1000)
    tuned = result(stack)
    assert tuned["goal"] == {"p95_ms": 1000.0}
    assert re.search(r"^ +\d+:\d\d  as configured: [\d.,]+ requests/s$", done.stderr, re.MULTILINE)
    assert all(value > 1 for value in tuned["original"]["values"])
    assert tuned["arms"]
    assert all(arm["values"] or arm["reason"] for arm in tuned["arms"])
    assert re.search(r"candidate +requests/s +ratio", done.stdout)


def test_too_little_time_is_refused(stack):
    done = stack.make("tune", P95=100, MINUTES=1)
    assert done.returncode != 0
    assert "set MINUTES=3 or more" in done.stderr
    assert "Traceback" not in done.stderr
