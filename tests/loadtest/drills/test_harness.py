"""The bookkeeping of the drills: what counts as failed, wrong or lost, when the stack recovered, and what holds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest

from loadtest.drills import harness
from loadtest.drills.__main__ import chosen, markdown, report, write
from loadtest.drills.clients import GATEWAY, HTTP
from loadtest.drills.crashes import SERVER
from loadtest.drills.drill_stack import BrokenError, NotRunError
from loadtest.drills.harness import DRILLS, Bound, Drill, Result, counted, recovery_s
from loadtest.server.machine import OtherPrograms
from triton_transformers.load import FAILED, LOST, RIGHT, WRONG, Outcome
from triton_transformers.settings import UserError

BOUND = Bound(gateway=1, direct=2)
GOOD = Result("a", "a fault", BOUND, requests=10, failed_gateway=1, failed_direct=2, recovery_s=10.0)


def outcomes(*kinds: str, route: str = HTTP, first_at: float = 0.0) -> list[Outcome]:
    """Return an outcome per second."""
    return [Outcome(route, first_at + i, 0.1, kind, "" if kind == RIGHT else "why") for i, kind in enumerate(kinds)]


def test_requests_are_counted_by_route_and_kind() -> None:
    all_of_them = outcomes(RIGHT, FAILED, WRONG, LOST) + outcomes(RIGHT, FAILED, FAILED, route=GATEWAY)
    figures = counted(all_of_them)
    assert figures.pop("errors") == {f"{HTTP}: why": 3, f"{GATEWAY}: why": 2}
    assert figures == {
        "requests": 7,
        "failed_gateway": 2,
        "failed_direct": 1,
        "wrong": 1,
        "lost": 1,
        "slowest_s": 0.1,
    }


@pytest.mark.parametrize(
    ("kinds", "whole_at", "seconds"),
    [
        ((RIGHT, RIGHT, RIGHT, RIGHT), 101.5, 1.5),
        ((RIGHT, FAILED, RIGHT, FAILED), 101.5, 3),  # a request fails after the stack answered again
        ((FAILED, RIGHT, RIGHT, RIGHT), 99.0, 0),  # it was whole before the fault ended
        ((RIGHT,), math.inf, math.inf),
    ],
)
def test_recovery_ends_when_the_stack_is_whole_and_no_later_request_fails(
    kinds: tuple[str, ...], whole_at: float, seconds: float
) -> None:
    assert recovery_s(outcomes(*kinds, first_at=100), fault_at=100, whole_at=whole_at) == seconds


@pytest.mark.parametrize(
    ("change", "held"),
    [
        ({}, True),
        ({"failed_gateway": 2}, False),
        ({"failed_direct": 3}, False),
        ({"wrong": 1}, False),
        ({"lost": 1}, False),
        ({"recovery_s": 10.1}, False),
        ({"recovery_s": math.inf}, False),
        ({"problem": "`make up` accepted it"}, False),
        ({"requests": 0}, False),
        ({"not_run": "only root may do that"}, False),
    ],
)
def test_drill_holds_within_its_bound(change: dict, held: bool) -> None:
    result = replace(GOOD, **change)
    assert result.held is held
    assert result.broken is (not held and "not_run" not in change)


def test_report_has_every_figure(tmp_path) -> None:
    results = [GOOD, replace(GOOD, recovery_s=math.inf), replace(GOOD, not_run="only root may do that")]
    folder = write(results, tmp_path)
    table = (folder / "drill.md").read_text()
    assert table == markdown(results)
    assert "| a | a fault | 10 | 1 / 2 | 0 | 0 | 10.0 s | 1 / 2, 10 s | yes |" in table
    assert "| none | 1 / 2, 10 s | NO |" in table
    assert "| 1 / 2, 10 s | not run: only root may do that |" in table
    content = json.loads((folder / "drill.json").read_text())
    assert [drill["held"] for drill in content["drills"]] == [True, False, False]
    assert content["drills"][1]["recovery_s"] is None


def test_every_drill_is_stated_and_bounded() -> None:
    assert len(DRILLS) > 40
    assert all(drill.done and drill.bound.recovery_s <= 10 for drill in DRILLS.values())
    assert chosen(["prometheus-killed"])[0].bound == Bound(0, 0, 10)
    with pytest.raises(UserError, match="no drill nothing; make drill LIST=1 lists them"):
        chosen(["prometheus-killed", "nothing"])


class FakeStack:
    """A stack with a clock of its own, which is whole again two seconds after a drill."""

    clients, known = None, None

    def __init__(self) -> None:
        self.now = 100.0
        self.fault_at: float | None = None
        self.settled = True
        self.seconds_per_reload = 5.0
        self.reloads = 0

    def reload_s(self) -> float:
        self.reloads += 1
        return self.seconds_per_reload

    def listen(self) -> None:
        pass

    def said(self) -> str:
        return "port 1 cannot be opened"

    def settle(self) -> None:
        if not self.settled:
            raise BrokenError("`make up` failed")

    def is_whole(self) -> bool:
        return True

    def other_programs(self) -> OtherPrograms:
        return OtherPrograms(lambda: 0.0)

    def until(self, condition: Callable[[], bool], description: str, seconds: float) -> None:
        self.now += 2
        assert condition()


class FakeLoad:
    """A load with one failed request, one second after the beginning of the drill's function."""

    problems: tuple[str, ...] = ()

    def __init__(self, clients: None, known: None) -> None:
        self.outcomes = [Outcome(HTTP, 101 + harness.BEFORE_S, 0.1, FAILED, "why")]

    def __enter__(self) -> FakeLoad:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStack]:
    stack = FakeStack()

    def sleep(seconds: float) -> None:
        stack.now += seconds

    monkeypatch.setattr(harness.time, "monotonic", lambda: stack.now)
    monkeypatch.setattr(harness.time, "sleep", sleep)
    monkeypatch.setattr(harness, "steady_load", FakeLoad)
    yield stack
    monkeypatch.undo()


def run(stack: FakeStack, function: Callable[[FakeStack], None]) -> Result:
    return harness.result(Drill("a", "a fault", BOUND, function), stack)


def test_recovery_counts_from_the_end_of_the_drill_unless_it_marks_another_moment(stack: FakeStack) -> None:
    result = run(stack, lambda stack: harness.time.sleep(5))
    assert (result.recovery_s, result.failed_direct, result.held) == (2, 1, True)


@pytest.mark.parametrize(
    ("declared", "fault_s", "reload_s", "bound", "held"),
    [
        (SERVER, 8.0, 5.0, Bound(4, 160, 10.0, True), True),  # nothing is measured
        (SERVER, 11.0, 2.0, Bound(4, 160, 10.0, True), False),  # the machine is fast, and the recovery was slow
        (SERVER, 11.0, 5.0, Bound(4, 240, 15.0, True), True),
        (SERVER, 14.0, 5.0, Bound(4, 240, 15.0, True), False),
        (SERVER, 24.0, 10.0, Bound(84, 400, 25.0, True), False),
        (SERVER, 22.0, 10.0, Bound(84, 400, 25.0, True), True),
        (BOUND, 30.0, 5.0, BOUND, False),  # without loads, nothing is measured
    ],
)
def test_bound_of_a_recovery_with_loads_follows_the_measured_reload(
    stack: FakeStack, declared: Bound, fault_s: float, reload_s: float, bound: Bound, held: bool
) -> None:
    stack.seconds_per_reload = reload_s

    def fault(stack: FakeStack) -> None:
        stack.fault_at = stack.now
        stack.now += fault_s

    result = harness.result(Drill("a", "a fault", declared, fault), stack)
    assert (result.recovery_s, result.bound, result.held) == (fault_s + 2, bound, held)
    assert result.reload_s == (None if fault_s == 8 or declared is BOUND else reload_s)
    assert stack.reloads == (result.reload_s is not None)
    assert result.as_json()["bound"]["recovery_s"] == bound.recovery_s


def test_drill_whose_load_stopped_does_not_hold(stack: FakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLoad, "problems", ("the clients stopped: KeyError()",))
    result = run(stack, lambda stack: None)
    assert (result.problem, result.held) == ("the clients stopped: KeyError()", False)
    stack.settled = False
    result = run(stack, lambda stack: pytest.fail("it began on a broken stack"))
    assert "was not whole before: `make up` failed" in result.problem


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (BrokenError("refused too late"), "problem"),
        (psutil.NoSuchProcess(1), "problem"),
        (NotRunError("only root may do that"), "not_run"),
    ],
)
def test_error_of_a_drill_is_in_its_result(stack: FakeStack, error: Exception, field: str) -> None:
    def fail(stack: FakeStack) -> None:
        raise error

    result = run(stack, fail)
    assert str(error) in getattr(result, field)
    assert not result.held


@pytest.mark.parametrize(("says", "held"), [((), True), (("cannot be",), True), (("cannot be", "in .env"), False)])
def test_drill_holds_only_if_its_message_was_printed(stack: FakeStack, says: tuple[str, ...], held: bool) -> None:
    one = harness.result(Drill("a", "a fault", BOUND, lambda stack: None, says), stack)
    assert (one.held, "in .env" in one.problem) == (held, not held)


def test_broken_bound_on_a_busy_machine_says_so(capsys):
    for cores, said in ((0.0, False), (64.0, True)):
        report(replace(GOOD, failed_gateway=99, other_cores=cores))
        assert ("before the fault, other programs used 64.0 cores" in " ".join(capsys.readouterr().out.split())) == said
