"""The command around a search: what it reads, and when."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from loadtest.compare import compare
from loadtest.load.arrivals import Sample
from loadtest.tune import table, tuning
from loadtest.tune.goal import Goal
from loadtest.tune.knobs import Candidate, all_knobs
from loadtest.tune.running_server import Answers, RunningServer
from loadtest.tune.search import (
    BETTER,
    NOT_COMPARED,
    NOT_CONFIRMED,
    NOTHING_BETTER,
    TOO_BUSY,
    Arm,
    Budget,
    BudgetSpent,
    CandidateFailed,
)
from loadtest.tune.tuning import Tuning
from triton_transformers.settings import Settings, UserError
from triton_transformers.tensors import Tensor
from triton_transformers.triton import Triton, TritonError

CONFIG = {"name": "spam", "max_batch_size": 64, "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}]}


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings.load().replace(SYSTEM="spam", P95="100", REPORTS=str(tmp_path))


def test_configurations_are_read_after_a_killed_search_is_undone(settings, monkeypatch):
    served = {"spam": CONFIG | {"max_batch_size": 1}}

    def restore(triton, folder):
        served["spam"] = CONFIG
        return ["spam"]

    def metadata(triton):
        raise TritonError("the end of this test")

    monkeypatch.setattr(compare, "composing", lambda triton, system: dict(served))
    monkeypatch.setattr(compare, "restore_after_kill", restore)
    monkeypatch.setattr(Triton, "metadata", metadata)
    search = Tuning(settings)
    with pytest.raises(TritonError, match="the end of this test"):
        search.run()
    assert search.configs == {"spam": CONFIG}


def test_pace_of_users_is_refused_in_a_search_for_p95(settings):
    with pytest.raises(UserError, match="clear WAIT and SPAWN_RATE"):
        Goal.from_settings(settings.replace(WAIT="0.1", SPAWN_RATE="5"))


@pytest.mark.parametrize(
    ("targets", "timed", "what"),
    [
        ({"p95_ms": 1000}, 800, "1000 ms for a whole text of at most 32 tokens"),
        ({"first_token_ms": 200}, 300, "200 ms for its first token"),
        # The first token misses its target by a half, and so does the text.
        ({"p95_ms": 1000, "first_token_ms": 200}, 1500, "1000 ms for a whole text of at most 32 tokens and 200 ms for"),
    ],
)
def test_target_names_what_it_times(targets, timed, what):
    assert Goal(**targets).timed_ms(800, 300) == timed
    assert table.goal({"goal": targets, "new_tokens": 32}).startswith(f"with a p95 of at most {what}")
    at_rate = table.goal({"goal": {"rate": 5}, "new_tokens": 32})
    assert at_rate == "at 5 requests/s for a whole text of at most 32 tokens"


def test_target_for_the_first_token_needs_streams(settings):
    chosen = settings.replace(P95="", P95_FIRST_TOKEN="200", MINUTES="20")
    with pytest.raises(UserError, match="only PROTOCOL=openai has"):
        Goal.from_settings(chosen)
    assert Goal.from_settings(chosen.replace(PROTOCOL="openai")) == Goal(first_token_ms=200)
    with pytest.raises(UserError, match=r"^set either P95, .* or RATE"):
        Goal.from_settings(chosen.replace(PROTOCOL="openai", RATE="5"))


@pytest.fixture
def server(monkeypatch) -> RunningServer:
    """Return a server that always runs the candidate that it measures, at 12 ms."""
    in_force = SimpleNamespace(in_force=lambda: True)
    server = RunningServer(
        Goal(p95_ms=1), None, in_force, *[None] * 5, random=random.Random(1), budget=Budget(1e6), others=None
    )
    server.present, server.answers = Candidate(), SimpleNamespace(seconds=2.0)
    monkeypatch.setattr(server, "try_rate", lambda rate, limit, warm_up: 12.0)
    monkeypatch.setattr(server, "wait_for_server", lambda: None)
    return server


def test_target_that_is_never_met_is_an_error(server):
    with pytest.raises(UserError, match=r"P95=1: .* at 0\.2 requests per second, its p95 is 12 ms\. Set a higher P95"):
        server.measure(Candidate(), None, 0)


@pytest.mark.parametrize(("goal", "smallest"), [({"P95": "100"}, 3), ({"P95": "", "RATE": "30"}, 2)])
def test_time_that_is_too_short_on_any_machine_is_refused_at_once(settings, goal, smallest):
    settings = settings.replace(**goal)
    with pytest.raises(UserError, match=rf"MINUTES=1: .* set MINUTES={smallest} or more"):
        Goal.from_settings(settings.replace(MINUTES="1"))
    Goal.from_settings(settings.replace(MINUTES=str(smallest)))


def test_try_ends_when_only_the_time_for_the_end_is_left(server):
    server.budget = Budget(0)
    with pytest.raises(BudgetSpent):
        RunningServer.try_rate(server, 10, 100, 0)
    with pytest.raises(BudgetSpent):
        server.load(Candidate())


@pytest.mark.parametrize(
    ("goal", "p95"),
    [
        (Goal(p95_ms=100), 40),
        (Goal(first_token_ms=100), 10),
        (Goal(p95_ms=100, first_token_ms=20), 50),
        (Goal(p95_ms=30), math.inf),
        (Goal(first_token_ms=9), math.inf),
        (Goal(rate=5), 40),
    ],
)
def test_try_times_what_the_goal_names(server, goal, p95):
    samples = [Sample(at, 40.0, "", first_token_ms=10.0) for at in np.arange(0.05, 1, 0.001)]
    nothing = dict.fromkeys(("set_rate", "resume", "open_window", "check", "pause"), lambda *_: None)
    server.users = SimpleNamespace(**nothing, samples=samples, close_window=lambda: samples, cores=0.1)
    server.others = SimpleNamespace(open=lambda: None, cores=lambda: 0.0)
    server.goal = goal
    limit = goal.target_ms or 1000
    assert RunningServer.try_rate(server, 1000, limit, 0, minimum_s=1.0) == pytest.approx(p95)


def test_slow_server_gets_no_more_requests_at_first_than_it_answers_one_by_one(server, monkeypatch):
    tries = []

    def try_rate(rate, limit, warm_up):
        tries.append((rate, limit))
        return 900.0 if rate < 0.4 else math.inf

    monkeypatch.setattr(server, "try_rate", try_rate)
    server.goal = Goal(p95_ms=1000)
    assert 0.37 < server.measure(Candidate(), None, 0).value < 0.43
    assert tries[0][0] == pytest.approx(0.5, rel=0.06)  # a request takes 2 s alone
    assert max(rate for rate, _ in tries[1:]) < 0.5


def test_candidate_far_below_the_best_is_measured_in_part(server, monkeypatch):
    monkeypatch.setattr(server, "try_rate", lambda rate, limit, warm_up: 0.5 if rate < 100 else math.inf)
    assert server.measure(Candidate(), 400, 0, in_full=False)[::2] == (260, True)
    value, _, is_bound = server.measure(Candidate(), 400, 0)
    assert 95 < value < 105
    assert not is_bound


def test_measurement_of_another_configuration_does_not_count(server):
    server.goal = Goal(rate=10)
    assert server.measure(Candidate(), None, 0).value == 12
    server.switch.in_force = lambda: False
    with pytest.raises(CandidateFailed, match="another client loaded a model"):
        server.measure(Candidate(), None, 0)
    assert server.present is None


def test_system_that_refuses_its_examples_is_an_error():
    with pytest.raises(UserError, match=r"'spam' refuses an example request: .*refused"):
        Answers("http://127.0.0.1:9", "spam", [[Tensor("x", "FP32", [1], np.zeros(1, np.float32).tobytes())]])


@pytest.mark.parametrize(
    ("outcome", "notes"), [(BETTER, ["requests of more than 16 texts will be refused"]), (NOT_CONFIRMED, [])]
)
def test_smaller_batches_are_noted_only_with_a_winner(settings, outcome, notes):
    search = Tuning(settings)
    search.subject.__dict__ |= {"configs": {"spam": CONFIG}, "examples": SimpleNamespace(noun="texts")}
    search.knobs = all_knobs({"spam": CONFIG}, 2, {})
    batches = next(knob for knob in search.knobs if knob.name == "max_batch_size")
    search.search = SimpleNamespace(
        best=Arm(Candidate().with_value(batches, 16)), outcome=outcome, disturbed=[], uncounted=0
    )
    assert search.notes() == notes


def test_rate_that_the_server_does_not_keep_up_with_is_noted(settings, server):
    search = Tuning(settings.replace(P95="", RATE="200"))
    search.subject.__dict__ |= {"configs": {"spam": CONFIG}}
    search.knobs, search.server = [], server
    search.search = SimpleNamespace(outcome=NOT_CONFIRMED, disturbed=[], uncounted=0)
    for kept_up, noted in (([True, True, False], False), ([True, False], True)):
        server.kept_up = {Candidate(): kept_up}
        assert any("does not keep up with 200 requests/s" in note for note in search.notes()) == noted


def test_time_that_is_too_short_on_this_machine_is_refused_before_anything_is_measured(settings, server):
    """A text takes 2 s alone, so that each try lasts 30 s: the right number is named at once."""
    server.others = SimpleNamespace(opened=0.0, cores=lambda: 1e6)
    printed = []
    search = Tuning(settings.replace(MINUTES="10"))
    search.server, search.subject.cores = server, 2
    search.budget.loaded(4.0)
    with pytest.raises(UserError, match=r"MINUTES=10: .* takes 2000 ms here, .* 4 s: set MINUTES=24$"):
        search._look_at_the_machine(printed.append)
    assert printed[0].startswith("[yellow]doubtful:[/] now, other programs used 1000000.0")
    for enough in ({"MINUTES": "24"}, {"RESUME": "1"}):
        search.settings = settings.replace(**enough)
        search._look_at_the_machine(printed.append)
    server.answers.seconds = 0.005
    search._look_at_the_machine(printed.append)


QUIET = {"stopped": "", "reason": "", "other_cores": [0.0], "client_bound": False, "outcome": BETTER}


@pytest.mark.parametrize(
    ("fields", "codes"),
    [
        ({}, []),
        ({"stopped": "interrupted"}, ["STOPPED"]),
        ({"other_cores": [1e6, None]}, ["OTHER_PROGRAMS"]),
        ({"client_bound": True}, ["LOCUST_BOUND"]),
        ({"outcome": NOT_CONFIRMED}, ["NOT_CONFIRMED"]),
        ({"outcome": NOT_CONFIRMED, "reason": "no memory"}, ["WINNER_FAILED", "NOT_CONFIRMED"]),
        ({"outcome": NOTHING_BETTER, "other_cores": [1e6]}, ["OTHER_PROGRAMS", "NOTHING_BETTER"]),
        ({"outcome": TOO_BUSY}, ["REPEATS_DISAGREE"]),
        ({"outcome": NOT_COMPARED}, ["TIME_OVER"]),
    ],
)
def test_search_is_judged(settings, fields, codes):
    search = Tuning(settings)
    fields = QUIET | fields
    search.stopped = fields["stopped"]
    winner = SimpleNamespace(reason=fields["reason"], ratio=1.5, ci95=(1.4, 1.6))
    search.search = SimpleNamespace(
        outcome=fields["outcome"],
        confirmed=winner,
        original=Arm(Candidate(), values=[1.0] * 3),
        differences=lambda arm: [math.log(1.4), math.log(1.5), math.log(1.6)],
    )
    search.server = SimpleNamespace(**fields)
    verdict = search.verdict()
    assert [cause["code"] for cause in verdict["causes"]] == codes
    assert verdict["large"] == (None if codes else 1.5)


def test_search_that_took_too_long_names_the_minutes_to_go_on_with(settings):
    search = Tuning(settings)
    search.search = SimpleNamespace(
        outcome=NOT_COMPARED, confirmed=None, original=Arm(Candidate(), values=[1.0, 1.0, 1.0])
    )
    search.server = SimpleNamespace(**QUIET)
    for seconds in (60, 30, 30):
        search.budget.spend(seconds)
    # Twelve measurements of 30 s and the report, with a fifth to spare.
    assert search.verdict()["remedy"].startswith("Set RESUME=1 MINUTES=8,")


def test_result_survives_a_configuration_that_cannot_be_read(settings, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "spam/config.pbtxt")

    monkeypatch.setattr(tuning, "winner_files", refuse)
    search = Tuning(settings)
    search.subject.__dict__["configs"] = {"spam": CONFIG}
    files, diff, obstacles = search.files({"spam": {"max_batch_size": 16}})
    assert (files, diff) == ({}, "")
    assert "Permission denied" in obstacles[0]
