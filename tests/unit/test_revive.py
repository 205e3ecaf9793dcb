"""When revive.py reloads a model, seen from its polls of the server's Python processes."""

import importlib.util
import sys

import pytest

from scripts.common.settings import ROOT

spec = importlib.util.spec_from_file_location("revive", ROOT / "images/triton/revive.py")
revive = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = revive  # dataclasses look it up
spec.loader.exec_module(revive)


class StandIn:
    """A Triton whose model "m" needs two processes."""

    def __init__(self):
        self.required = 2
        self.reloads = 0

    def required_processes(self, model):
        return self.required

    def reload(self, model):
        self.reloads += 1


@pytest.fixture
def triton():
    return StandIn()


@pytest.fixture
def reloads(triton, monkeypatch):
    """Return a function that polls these sets of pids one after the other, and returns the number of reloads so far."""
    monkeypatch.setattr(revive, "log", lambda message: None)
    watch = revive.Watch(triton)

    def run(*polls):
        for pids in polls:
            watch.poll({pid: "m" for pid in pids})
        return triton.reloads

    return run


def test_crashed_process_causes_one_reload(reloads):
    assert reloads({1, 2}, {1}, {1}) == 0
    assert reloads({1}) == 1
    assert reloads({1, 3}, {3, 4}, {3, 4}) == 1


def test_crash_of_all_processes_causes_a_reload(reloads):
    assert reloads({1, 2}, set(), set(), set()) == 1


def test_load_in_flight_postpones_the_reload_of_a_crashed_model(reloads):
    """Process 3 completes the configuration, 4 and 5 are the new instances."""
    assert reloads({1, 2}, set(), {3}, {3}, {3}, {3}, {4}, {4, 5}, {4, 5}) == 0


def test_load_that_began_with_the_crash_postpones_the_reload(reloads):
    """Process 3 is there when the loss is noticed."""
    assert reloads({1, 2}, {3}, {3}, {3}, {3}, {3}, {4}, {4, 5}, {4, 5}) == 0


def test_failed_load_ends_the_postponement(reloads):
    assert reloads({1, 2}, {1}, {1, 3}, {1, 3}) == 0
    assert reloads({1}, {1}, {1}) == 1


def test_crash_of_a_new_process_causes_a_reload(reloads):
    assert reloads({1, 2}, set(), {3}, {4, 5}, {5}, {5}, {5}) == 1


def test_replaced_processes_cause_no_reload(reloads):
    assert reloads({1, 2}, {1, 2, 3}, {1, 2, 4, 5}, {2, 4, 5}, {4, 5}, {4, 5}, {4, 5}) == 0


def test_unload_causes_no_reload(reloads, triton):
    assert reloads({1, 2}, {1}) == 0
    triton.required = 0
    assert reloads(set(), set(), set(), set()) == 0
