"""A soak without a stack: the statistic, the verdicts, the clients' bookkeeping, and the report."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import psutil
import pytest
from scipy import stats

from gateway.triton.inference import rpc_error
from loadtest.drills import __main__ as drill_command
from loadtest.drills.clients import GATEWAY, GRPC, HTTP, Clients, ManyClients, Pace, refusal, steady_load
from loadtest.drills.soak import soaking
from loadtest.drills.soak.report import causes, cells, headline, number, results_of, write
from loadtest.drills.soak.series import (
    BY_DESIGN,
    DESCRIPTORS,
    ENDED,
    ERROR_RATE,
    FALLS,
    FLAT,
    LATENCY,
    MEMORY,
    MIB,
    RISES,
    SAMPLE_S,
    SHORT,
    Series,
    Verdict,
    student_t,
    trend,
    verdict,
)
from loadtest.drills.soak.soaking import Soak, Watch, name_of, usage_of
from loadtest.measure.verdicts import Code, judge
from tests.support.awaitables import answered
from triton_transformers.load import FAILED, LOST, RIGHT, TEXTS, WRONG, KnownVectors, Outcome, RefusedError, outcome
from triton_transformers.settings import Settings, UserError

SEEDS = range(100)
# Thirty minutes, of which twenty are judged.
SAMPLES = int(1800 / SAMPLE_S)
PACE = Pace(clients=6, wait=(0.0, 0.001), seed=1)


def wandering(chance: np.random.Generator, persistence: float) -> np.ndarray:
    """Return noise with a spread of 1, each value of which keeps this share of the one before. 1: a random walk."""
    steps = chance.normal(size=SAMPLES + 500)
    values = np.zeros(len(steps))
    for i in range(1, len(steps)):
        values[i] = persistence * values[i - 1] + steps[i]
    return values[500:] * math.sqrt(1 - persistence**2 or 1)


def judged(values: np.ndarray, kind=MEMORY, process: str = "gateway", series: int = 28) -> Verdict:
    """Judge a series as one of this many, which share the rate of errors."""
    return verdict(Series(kind, process, list(map(float, values))), ERROR_RATE / series)


def staircase(chance: np.random.Generator, steps: int) -> np.ndarray:
    return 20 * np.sum([np.arange(SAMPLES) > at for at in chance.uniform(0, SAMPLES, steps)], axis=0)


LEAK_IN_NOISE = np.linspace(0, 60, SAMPLES)


@pytest.mark.parametrize(
    ("series", "kind", "expected"),
    [
        *((lambda chance, p=p: 5 * wandering(chance, p), MEMORY, FLAT) for p in (0, 0.5, 0.8, 0.9, 0.95, 0.99, 1)),
        *((lambda chance, n=n: staircase(chance, n), MEMORY, FLAT) for n in (1, 2, 3)),  # an allocator's
        *((lambda chance, p=p: LEAK_IN_NOISE + wandering(chance, p), MEMORY, RISES) for p in (0, 0.5, 0.8)),
        # A descriptor stays open every half a minute, at random.
        (lambda chance: chance.poisson(SAMPLE_S / 30, SAMPLES).cumsum(), DESCRIPTORS, RISES),
    ],
)
def test_verdict_is_right_in_95_of_100_seeds(series: Callable, kind, expected: str) -> None:
    verdicts = [judged(500 + series(np.random.default_rng(seed)), kind) for seed in SEEDS]
    right = [one.outcome == expected if expected == RISES else not one.fails for one in verdicts]
    assert sum(right) >= 95


def test_quantile_of_student_is_that_of_scipy() -> None:
    for probability in (0.95, 0.975, 0.999, 0.9995):
        assert student_t(probability, 21) == pytest.approx(stats.t.ppf(probability, 21), rel=1e-3)


@pytest.mark.parametrize("persistence", [0, 0.9, 0.99, 1])
def test_interval_covers_zero_in_19_of_20_cases(persistence: float) -> None:
    intervals = [trend(wandering(np.random.default_rng(seed), persistence), 0.05) for seed in SEEDS]
    assert sum(one.low <= 0 <= one.high for one in intervals) >= 90


def test_slope_is_per_hour_and_in_the_units_of_the_series() -> None:
    series = Series(MEMORY, "gateway")
    for i in range(SAMPLES):
        series.add((100 + i) * MIB)
    result = verdict(series, 0.05)
    assert result.outcome == RISES
    assert result.slope.slope == pytest.approx(3600 / SAMPLE_S)
    assert (result.start, result.end) == (pytest.approx(224.5), pytest.approx(454.5))


@pytest.mark.parametrize(
    ("values", "kind", "process", "expected"),
    [
        (np.full(SAMPLES, 3.1), MEMORY, "gateway", FLAT),
        (np.linspace(0.3, 0.9, SAMPLES), MEMORY, "gateway", FLAT),  # less than an arena of Python
        (np.linspace(10, 20, SAMPLES), MEMORY, "prometheus", BY_DESIGN),
        (np.linspace(10, 20, SAMPLES), DESCRIPTORS, "prometheus", RISES),
        (np.linspace(20, 10, SAMPLES), MEMORY, "gateway", FALLS),
        (np.linspace(100, 105, SAMPLES), LATENCY, "", FLAT),
        (np.linspace(100, 150, SAMPLES), LATENCY, "", RISES),
        (np.r_[np.linspace(0, 50, SAMPLES // 3), np.full(2 * SAMPLES // 3, 50.0)], MEMORY, "gateway", FLAT),  # warm-up
        (np.linspace(10, 1000, 100), MEMORY, "gateway", SHORT),
        (np.r_[np.full(SAMPLES - 1, 10.0), math.nan], MEMORY, "gateway", ENDED),
        (np.full(SAMPLES, math.nan), LATENCY, "", SHORT),
        (np.array([]), MEMORY, "gateway", SHORT),
    ],
)
def test_series_gets_its_verdict(values: np.ndarray, kind, process: str, expected: str) -> None:
    result = judged(values, kind, process)
    assert (result.outcome, result.fails) == (expected, expected in (RISES, FALLS, ENDED))


# --- processes ------------------------------------------------------------------------------------------------------


def test_growth_of_a_process_is_seen() -> None:
    """Let a process take 64 MiB, ten descriptors and one thread more."""
    code = """if True:
        import os, sys, threading
        print("started", flush=True)
        sys.stdin.readline()
        block = b"x" * (64 << 20)
        pipes = [os.pipe() for _ in range(5)]
        threading.Thread(target=sys.stdin.readline).start()
        print("grown", flush=True)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout.readline() == "started\n"  # an interpreter that starts has files open of its own
        before = usage_of(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "grown\n"
        after = usage_of(child.pid)
        child.communicate("\n")
    assert after.memory - before.memory > 60 * MIB
    assert after.descriptors - before.descriptors >= 10
    assert after.threads - before.threads == 1
    with pytest.raises(OSError, match=r"ended|No such process|No such file"):
        usage_of(child.pid)


def test_soak_stops_with_its_clients(monkeypatch) -> None:
    monkeypatch.setattr(soaking, "SAMPLE_S", 0.01)
    run = Soak(SimpleNamespace(processes=lambda: [psutil.Process()]))
    run.sample_for(3600, SimpleNamespace(problems=["the clients stopped: KeyError()"]))
    assert run.seconds == 0


def test_process_that_ends_is_a_problem_and_is_named_in_the_progress() -> None:
    with subprocess.Popen([sys.executable, "-m", "http.server", "0"], stdout=-3, stderr=-3) as child:
        processes = [psutil.Process(), psutil.Process(child.pid)]
        while not processes[1].cmdline():  # empty until the kernel has started the program
            time.sleep(0.01)
        run = Soak(SimpleNamespace(processes=lambda: processes))
        run.sample([Outcome(GATEWAY, 0, 0.1, RIGHT)])
        clients = SimpleNamespace(outcomes=[], refusals=[])
        assert re.search(r"; p95 100 ms, memory \d+ MiB$", run.progress(60, clients))
        child.kill()
        child.wait()
        run.sample([])
    assert re.search(r"; no right answer, memory \d+ MiB; ended: server$", run.progress(60, clients))
    assert run.watch.problems == [f"server (process {child.pid}) ended during the soak"]


def test_processes_that_end_while_they_are_listed_are_skipped() -> None:
    with subprocess.Popen(["true"]) as child:
        ended = psutil.Process(child.pid)
    ending = SimpleNamespace(pid=child.pid, cmdline=list)
    assert len(Watch(lambda: [ended, ending, psutil.Process()]).names) == 1


def test_shared_memory_counts_after_its_process_has_ended(tmp_path) -> None:
    code = (
        "import mmap, sys; file = open(sys.argv[1], 'r+b'); m = mmap.mmap(file.fileno(), 0); print(flush=True); input()"
    )
    path = f"/dev/shm/{tmp_path.parent.name}-{os.getpid()}"
    with open(path, "wb") as file:
        file.write(bytes(MIB))
    try:
        with subprocess.Popen([sys.executable, "-c", code, path], stdin=-1, stdout=-1, text=True) as child:
            child.stdout.readline()
            watch = Watch(lambda: [psutil.Process(child.pid)])
            assert watch.shared_memory() == MIB
            child.communicate("\n")
        assert watch.shared_memory() == MIB
    finally:
        os.unlink(path)
    assert watch.shared_memory() == 0


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("/a/tritonserver --model-repository=/b", "tritonserver"),
        ("/a/triton_python_backend_stub /models/tokenizer/1/model.py region 64", "tokenizer"),
        ("python3 -m gateway", "gateway"),
        ("/venv/bin/python -m supervisor.supervisord -c /a/supervisord.conf", "supervisord"),
        ("python3 -m serving.watchdog 7", "watchdog"),
        ("bash images/triton/serve.sh", "serve.sh"),
        ("/usr/bin/prometheus --config.file=/a", "prometheus"),
    ],
)
def test_process_is_named_for_its_program(line: str, name: str) -> None:
    assert name_of(line.split()) == name


# --- clients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (answered(RefusedError("400 wrong type", 400)), RIGHT),
        (answered(RefusedError("404 no such model", 404)), RIGHT),
        (answered(RefusedError("500 crashed", 500)), FAILED),
        (answered(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "wrong type")), RIGHT),
        (answered(rpc_error(grpc.StatusCode.INTERNAL, "crashed")), FAILED),
        (answered(ConnectionResetError("reset")), FAILED),
        (answered({"data": []}), WRONG),
    ],
)
def test_bad_request_must_be_refused_as_one(answer: Awaitable, kind: str) -> None:
    assert asyncio.run(outcome(HTTP, refusal(answer))).kind == kind


KNOWN = KnownVectors(np.eye(len(TEXTS)))


class FakeClients(Clients):
    """Clients whose gateway is right, whose HTTP route gives the answers in the wrong order, whose gRPC route fails."""

    def __init__(self) -> None:
        def right(texts: list[str]) -> np.ndarray:
            return np.eye(len(TEXTS))[[TEXTS.index(text) for text in texts]]

        self.routes: dict[str, Callable[[list[str]], Awaitable]] = {
            GATEWAY: lambda texts: answered(right(texts)),
            HTTP: lambda texts: answered(np.roll(right(texts), 1, axis=1)),
            GRPC: lambda texts: answered(rpc_error(grpc.StatusCode.UNAVAILABLE, "gone")),
        }

    def bad_requests(self, route: str) -> list[Callable[[], Awaitable]]:
        return [lambda: answered(RefusedError("400", 400))]

    async def aclose(self) -> None:
        pass


KINDS = {(GATEWAY, RIGHT), (HTTP, WRONG), (GRPC, FAILED)}


def test_loads_send_good_and_bad_requests_on_every_route_and_check_each_text() -> None:
    with steady_load(FakeClients, KNOWN) as load, ManyClients(PACE, FakeClients, KNOWN) as clients:
        while not (clients.refusals and len(clients.outcomes) > 100 and len(load.outcomes) >= 6):
            time.sleep(0.01)
    assert {(one.route, one.kind) for one in (*clients.outcomes, *load.outcomes)} == KINDS
    assert {(one.route, one.kind) for one in load.outcomes} == KINDS
    assert {one.kind for one in clients.refusals} == {RIGHT}


def test_steady_load_lets_few_requests_wait_on_a_slow_route(monkeypatch) -> None:
    monkeypatch.setattr("loadtest.drills.clients.MAXIMUM_WAITING", 2)
    begun, is_over = [], threading.Event()

    class SlowClients(FakeClients):
        def __init__(self) -> None:
            super().__init__()
            self.routes[HTTP] = self.slowly

        async def slowly(self, texts: list[str]) -> None:
            begun.append(texts)
            while not is_over.is_set():
                await asyncio.sleep(0.01)
            raise RefusedError("503", 503)

    with steady_load(SlowClients, KNOWN) as load:
        end = time.monotonic() + 60
        while [one.route for one in load.outcomes].count(GATEWAY) < 5:
            assert time.monotonic() < end, "the other routes wait too"
            time.sleep(0.01)
        waiting = len(begun)
        is_over.set()
    assert waiting == 2


# --- the report -----------------------------------------------------------------------------------------------------


def results(*series: Series, outcomes: tuple[Outcome, ...] = (), refusals: tuple[Outcome, ...] = (), **changes) -> dict:
    good = Outcome(GATEWAY, 0, 0.1, RIGHT)
    clients = SimpleNamespace(outcomes=[good, *outcomes], refusals=list(refusals))
    content = results_of(PACE, 30, clients, series, 1800, datetime(2026, 1, 2, tzinfo=UTC))
    content |= {"problems": [], "stopped": ""} | changes
    return content | {"verdict": judge(causes(content))}


def series_of(values: np.ndarray, kind=MEMORY, process: str = "gateway") -> Series:
    return Series(kind, process, list(map(float, values)))


LEVEL = series_of(np.full(SAMPLES, 40.0))
LEAK = series_of(np.linspace(40, 90, SAMPLES), process="encoder")
BRIEF = series_of(np.full(3, 40.0))
LATE_ANSWER = Outcome(GATEWAY, 0, 30, LOST, "none")


@pytest.mark.parametrize(
    ("content", "beginning", "codes"),
    [
        (results(LEVEL), "Proven: in 30 minutes, 6 clients sent 1 requests and 0 bad ones, and every series is", []),
        (results(LEVEL, LEAK), "Not proven: not flat: memory of encoder. In 30 minutes", [Code.NOT_FLAT]),
        (results(BRIEF), "Not proven: the soak is too short to judge a slope. In 30 minutes", [Code.TOO_SHORT]),
        (results(LEVEL, outcomes=(LATE_ANSWER,)), "Not proven: of 2 good requests 1 lost", [Code.WRONG_ANSWERS]),
        (
            results(LEVEL, refusals=(Outcome(HTTP, 0, 1, FAILED, "500"), Outcome(HTTP, 0, 1, RIGHT))),
            "Not proven: of 2 bad requests 1 failed",
            [Code.WRONG_ANSWERS],
        ),
        (results(LEVEL, problems=["gateway ended"]), "Not proven: gateway ended. In 30 minutes", [Code.PROBLEM]),
        (
            results(BRIEF, stopped="after 1 minute"),
            "Not proven: stopped early: after 1",
            [Code.STOPPED, Code.TOO_SHORT],
        ),
    ],
)
def test_soak_is_proven_unless_something_speaks_against_it(content: dict, beginning: str, codes: list[Code]) -> None:
    assert [Code[cause["code"]] for cause in content["verdict"]["causes"]] == codes
    assert headline(content).startswith(beginning)


def test_wrong_answers_are_counted_with_their_messages() -> None:
    (cause,) = causes(results(LEVEL, outcomes=(Outcome(HTTP, 0, 1, WRONG, "another"), LATE_ANSWER)))
    assert cause.fields["numbers"] == "1 wrong, 1 lost"
    assert cause.fields["messages"] == "1 x Triton's HTTP: another; 1 x gateway: none"


def test_soak_that_took_no_sample_and_sent_no_request_is_reported(tmp_path) -> None:
    content = results(*(Series(kind, "gateway") for kind in (MEMORY, DESCRIPTORS)), Series(LATENCY))
    assert cells(content["series"][0]) == ["memory of gateway", "", "", "", "", SHORT]
    content["requests"]["good"]["requests"] = 0
    assert [cause.code for cause in causes(content)] == [Code.NOTHING_SENT, Code.TOO_SHORT]
    assert Path(write(content, tmp_path)).exists()


def test_row_shows_rounded_values_slope_and_verdict() -> None:
    assert cells(results(LEAK)["series"][0])[:4] == ["memory of encoder", "57.3 MiB", "89.4 MiB", "100"]
    assert cells(results(BRIEF)["series"][0]) == ["memory of gateway", "40 MiB", "40 MiB", "", "", SHORT]
    values = (0, -0.0001, 1.2345, 123.4, -0.0, 1234.4)
    assert list(map(number, values)) == ["0", "-0.0001", "1.23", "123", "0", "1,234"]


def test_report_has_every_sample_and_verdict(tmp_path) -> None:
    latency = series_of(np.r_[math.nan, np.full(SAMPLES - 1, 80.0)], LATENCY, "")
    path = write(results(LEVEL, LEAK, latency), tmp_path)
    written = json.loads(Path(path).read_text())
    assert [one["outcome"] for one in written["series"]] == [FLAT, RISES, FLAT]
    assert written["series"][2]["values"] == [None] + [80] * (SAMPLES - 1)
    assert written["good_by_route"] == {GATEWAY: 1}
    assert written["command"] == "make drill SOAK=30 USERS=6 WAIT=0,0.001 SEED=1"
    assert headline(written) == (
        "Not proven: not flat: memory of encoder. In 30 minutes, 6 clients sent 1 requests and 0 bad ones. A longer "
        "SOAK shows if that goes on."
    )
    assert (tmp_path / "latest-soak/soak.json").resolve() == Path(path).resolve()


def test_soak_and_drills_are_not_run_at_once(monkeypatch) -> None:
    settings = Settings.load().replace(SOAK="1")
    monkeypatch.setattr(drill_command.Settings, "load", lambda: settings)
    monkeypatch.setattr(sys, "argv", ["drills", "gateway-killed"])
    with pytest.raises(UserError, match="DRILL and SOAK are both set"):
        drill_command.main()
