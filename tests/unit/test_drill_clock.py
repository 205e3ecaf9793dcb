"""The clock that a drill sets back, with a clock of the test's own in place of the machine's."""

from __future__ import annotations

import io
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from drills import clock, clock_holder
from drills.clock_holder import NS
from drills.drill_stack import NotRunError
from drills.harness import DRILLS


class Clocks:
    """Time since boot, which the test moves, and a wall clock that can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.booted, self.offset = 5 * NS, 1_000_000 * NS
        monkeypatch.setattr(time, "clock_gettime_ns", self.get)
        monkeypatch.setattr(time, "clock_settime_ns", self.set)

    def get(self, number: int) -> int:
        return self.booted + (self.offset if number == time.CLOCK_REALTIME else 0)

    def set(self, number: int, value: int) -> None:
        assert number == time.CLOCK_REALTIME
        self.offset = value - self.booted


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, OSError])
def test_clock_is_restored_with_the_time_that_has_passed(clocks: Clocks, error: type[BaseException] | None) -> None:
    before = clocks.offset
    try:
        with clock_holder.set_back(90):
            assert clocks.offset == before - 90 * NS
            clocks.booted += 7 * NS
            if error:
                raise error
    except (KeyboardInterrupt, OSError):
        assert error
    assert clocks.offset == before


def test_holder_ignores_signals_and_restores_when_its_input_ends(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ignored, offsets, before = [], [], clocks.offset
    monkeypatch.setattr(signal, "signal", lambda number, action: ignored.append((number, action)))
    monkeypatch.setattr(clock_holder.select, "select", lambda *waited: offsets.append((clocks.offset, waited[3])))
    monkeypatch.setattr(sys, "argv", ["clock_holder", "90", "30"])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    clock_holder.main()
    assert offsets == [(before - 90 * NS, 30.0)]
    assert clocks.offset == before
    assert capsys.readouterr().out == "set back\n"
    assert {number for number, _ in ignored} == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class Holder:
    """A holder that prints a line, or nothing, and may be killed before it restores the clock."""

    def __init__(self, clocks: Clocks, line: bytes, killed: bool) -> None:
        self.clocks, self.killed = clocks, killed
        self.before = clocks.offset
        self.stdout = SimpleNamespace(readline=lambda: line)
        self.stdin = SimpleNamespace(close=self.close)
        if line:
            clocks.offset -= 90 * NS

    def close(self) -> None:
        if not self.killed:
            self.clocks.offset = self.before

    def wait(self) -> None:
        pass

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("killed", [False, True])
def test_clock_is_restored_also_if_the_holder_was_killed(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    before = clocks.offset
    monkeypatch.setattr(clock.subprocess, "Popen", lambda *_, **__: Holder(clocks, b"set back\n", killed))
    with clock.clock_set_back_by(90):
        assert clocks.offset == before - 90 * NS
        clocks.booted += 5 * NS
    assert clocks.offset == before


def test_drill_is_not_run_where_the_clock_cannot_be_set(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock.subprocess, "Popen", lambda *_, **__: Holder(clocks, b"", killed=True))
    with pytest.raises(NotRunError, match="only root may set the clock"), clock.clock_set_back_by(90):
        pytest.fail("it went on")


def test_drill_ends_its_comparison_where_the_clock_cannot_be_set(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    comparison = SimpleNamespace(end=lambda number, _timeout: ended.append(number))
    monkeypatch.setattr(clock, "batcher_of", lambda _stack: "")
    monkeypatch.setattr(clock, "started_comparison", lambda _stack: comparison)
    monkeypatch.setattr(clock.subprocess, "Popen", lambda *_, **__: Holder(clocks, b"", killed=True))
    with pytest.raises(NotRunError):
        DRILLS["clock-set-back"].run(SimpleNamespace())
    assert ended == [signal.SIGINT]
