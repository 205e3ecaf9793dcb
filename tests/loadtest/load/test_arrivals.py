"""The open loop, on a server in this process that stalls on demand; it stands in for Triton."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import gevent
import gevent.event
import numpy as np
import pytest
from gevent.server import StreamServer
from locust.env import Environment
from tritonclient.grpc import service_pb2

from loadtest.load import locust_users
from loadtest.load.arrivals import (
    CONSTANT,
    GIVEN_UP,
    POISSON,
    Arrivals,
    Sample,
    arrived_within,
    is_overloaded,
    unanswered,
)
from loadtest.load.locust_users import Job
from loadtest.load.telemetry import Metrics
from loadtest.load.users import Meter, Users
from loadtest.load.worker_users import WorkerUsers
from loadtest.measure.windows import Experiment, Plan, Window
from loadtest.server.machine import OtherPrograms
from triton_transformers.settings import MODES
from triton_transformers.tensors import Tensor

JOB = Job("http", "", "m", [[Tensor("input_text", "BYTES", [1, 1], b"")]], (0.0, 0.0), 1, rate=200, arrivals=CONSTANT)


RESPONSE = b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: 2\r\nContent-Length: 8\r\n\r\n{}tensor"


class StandIn:
    """A server that answers while `serving` is set, after `seconds`."""

    def __init__(self) -> None:
        self.serving = gevent.event.Event()
        self.serving.set()
        self.seconds = 0.0
        self.server = StreamServer(("127.0.0.1", 0), self.answer)
        self.server.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, connection, address) -> None:
        with connection, connection.makefile("rb") as requests:
            while headers := b"".join(iter(requests.readline, b"\r\n")) if requests.peek(1) else b"":
                requests.read(int(re.search(rb"(?i)content-length: (\d+)\r", headers)[1]))
                self.serving.wait()
                gevent.sleep(self.seconds)
                connection.sendall(RESPONSE)

    def stall(self, seconds: float) -> None:
        self.serving.clear()
        gevent.sleep(seconds)
        self.serving.set()


@pytest.fixture
def server():
    stand_in = StandIn()
    yield stand_in
    stand_in.serving.set()
    stand_in.server.stop()


@pytest.fixture
def clock(monkeypatch):
    """Return the clock of the arrivals: a test sets `now`."""
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr("loadtest.load.arrivals.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


@contextmanager
def started(users, count: int):
    with users, gevent.Timeout(60):
        users.start(count, count)
        while users.running < count:
            gevent.sleep(0.01)
        users.resume()
        yield users


def latencies(samples: list[Sample]) -> list[float]:
    return [sample.latency_ms / 1000 for sample in samples]


def times(clock: SimpleNamespace, kind: str, seed: int, count: int, rate: float = 20_000.0) -> np.ndarray:
    """Return the first times of arrival."""
    arrivals = Arrivals(rate, kind, random.Random(seed))
    arrivals.open()
    clock.now += 2 * count / rate
    arrivals.close()
    return np.array(arrivals.queue)[:count]


def test_poisson_arrivals_have_independent_exponential_gaps_of_the_rate(clock):
    arrivals = times(clock, POISSON, 1, 5000)
    gaps = np.sort(np.diff(arrivals))
    assert gaps.mean() == pytest.approx(1 / 20_000, rel=0.05)
    # Kolmogorov and Smirnov: at most 1 % of all exponential samples deviate more.
    deviation = np.abs(1 - np.exp(-gaps * 20_000) - np.arange(0.5, len(gaps)) / len(gaps)).max()
    assert deviation < 1.63 / math.sqrt(len(gaps))
    # The variance of the number of arrivals per interval equals their mean, as in a Poisson process.
    counts, _ = np.histogram(arrivals, np.arange(arrivals[0], arrivals[-1], 10 / 20_000))
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.2)


def test_constant_arrivals_have_equal_gaps_and_random_ones_those_of_their_seed(clock):
    assert np.diff(times(clock, CONSTANT, 1, 100)) == pytest.approx(1 / 20_000, rel=1e-3)
    first, again, other = (np.diff(times(clock, POISSON, seed, 50)) for seed in (1, 1, 2))
    assert first == pytest.approx(again, abs=1e-8)
    assert first != pytest.approx(other, abs=1e-8)


def arrive(arrivals: Arrivals, clock: SimpleNamespace) -> float:
    """Let one request arrive, and return when."""
    arrivals.open()
    clock.now += 1 / arrivals.rate
    arrivals.close()
    return clock.now


def test_arrival_goes_to_the_user_that_was_free_last_and_is_kept_if_that_stops(clock):
    arrivals = Arrivals(1.0, CONSTANT, random.Random(1))
    first, second, third = (gevent.spawn(arrivals.wait) for _ in range(3))
    gevent.sleep(0)
    arrival = arrive(arrivals, clock)
    gevent.sleep(0)
    assert (first.ready(), second.ready(), third.value) == (False, False, arrival)
    second.kill(block=False)
    arrival = arrive(arrivals, clock)  # to the second, which is about to stop
    first.join(1)
    assert (first.value, list(arrivals.queue), arrivals.free) == (arrival, [], [])
    waiting = gevent.spawn(arrivals.wait)
    gevent.sleep(0)
    waiting.kill()
    arrival = arrive(arrivals, clock)
    assert list(arrivals.queue) == [arrival]


@contextmanager
def requests_of_the_rate(users: Users, rate: float, begin: Callable[[], None], end: Callable[[], None]):
    """Assert that the window gets the requests of this rate, which arrive from `begin` to `end`, and no others."""
    before = time.perf_counter()
    begin()
    begun = time.perf_counter()
    yield
    ending = time.perf_counter()
    end()
    ended = time.perf_counter()
    gevent.sleep(0.2)  # in which no more requests arrive
    users.pause()
    assert (ending - begun) * rate - 1.5 < len(users.samples) < (ended - before) * rate + 1.5


@pytest.mark.parametrize("pool", [200, 4])
def test_stall_delays_every_request_that_arrives_meanwhile(server, pool, monkeypatch):
    """A closed loop of four users would have four slow requests."""
    monkeypatch.setattr(locust_users, "PATIENCE_S", 60)
    with started(Users(replace(JOB, url=server.url)), pool) as users:
        users.open_window()
        while len(users.samples) < 20:
            gevent.sleep(0.01)
        begun = time.perf_counter() - users.meter.opened
        server.stall(0.5)
        ended = time.perf_counter() - users.meter.opened
        gevent.sleep(0.2)
        users.pause()
        samples = users.close_window()
    assert not any(sample.error for sample in samples)
    assert len([sample for sample in samples if sample.at < begun]) >= 20
    stalled = [sample for sample in samples if begun + 0.02 < sample.arrived < ended - 0.02]
    assert len(stalled) == pytest.approx((ended - begun - 0.04) * JOB.rate, abs=4)
    assert all(sample.at > ended for sample in stalled)
    assert max(latencies(stalled)) > 0.45
    # Each of four users waits for a response, and the other requests wait for these users; 200 users send on.
    sent = sum(sample.arrived + sample.late_ms / 1000 < ended for sample in stalled)
    assert (sent <= 4) == (pool == 4)


def test_pause_waits_for_every_request_that_has_arrived(server):
    with started(Users(replace(JOB, url=server.url)), 4) as users:
        users.open_window()
        stall = gevent.spawn(server.stall, 0.3)
        gevent.sleep(0.2)
        users.pause()
        assert stall.ready()
        assert users.traffic.gate.in_flight == len(users.traffic.gate.queue) == 0
        samples = list(users.close_window())
        assert len(samples) >= 35
        users.open_window()
        gevent.sleep(0.1)
        assert users.close_window() == []


def test_resume_begins_anew_without_a_burst(server):
    with started(Users(replace(JOB, url=server.url)), 50) as users:
        gevent.sleep(0.1)
        users.pause()
        gevent.sleep(0.3)
        users.open_window()
        with requests_of_the_rate(users, JOB.rate, users.resume, users.pause):
            gevent.sleep(0.5)
        samples = users.close_window()
    assert all(sample.arrived >= 0 for sample in samples)


def test_new_rate_holds_at_once_in_an_open_loop(server):
    with started(Users(replace(JOB, url=server.url, rate=0.1)), 50) as users:
        users.open_window()
        with requests_of_the_rate(users, 100, lambda: users.set_rate(100), lambda: users.set_rate(0.1)):
            gevent.sleep(0.5)
    with pytest.raises(TypeError, match="no rate"), Users(replace(JOB, rate=0.0)) as users:
        users.set_rate(1)


def samples_of(rate: float, capacity: float, latency: float, seconds: float, seed: int = 1) -> list[Sample]:
    """Return the samples since a window opened of a server that answers `capacity` requests per second in turn."""
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, int(rate * (seconds + 3)))) - 3
    free, samples = -3.0, []
    for arrival in arrivals:
        free = max(free, arrival) + 1 / capacity
        samples.append(Sample(free + latency, (free + latency - arrival) * 1000, ""))
    return [sample for sample in samples if sample.at >= 0 and sample.arrived < seconds]


@pytest.mark.parametrize(
    ("rate", "capacity", "latency", "overloaded"),
    [
        (200, 400, 0.01, False),
        (200, 230, 0.1, False),
        (2, 1000, 5.0, False),
        (200, 170, 0.01, True),
        (20, 2, 1.0, True),
    ],
)
def test_overload_shows_in_the_growth_of_unanswered_requests(rate, capacity, latency, overloaded):
    verdicts = [is_overloaded(samples_of(rate, capacity, latency, 10, seed), 10) for seed in range(20)]
    assert sum(verdicts) == (20 if overloaded else 0)


def test_unanswered_requests_are_those_in_flight_at_a_moment():
    samples = [Sample(0.5, 600, ""), Sample(0.6, 100, ""), Sample(2.5, 1000, "")]
    assert [unanswered(samples, moment) for moment in (0.0, 0.55, 1.0, 2.0)] == [1, 1, 0, 1]
    assert arrived_within(samples, 1.0) == [samples[1]]


@pytest.mark.slow
def test_workers_keep_the_rate_together(server):
    with started(WorkerUsers(replace(JOB, url=server.url), 2, lambda _: None), 20) as users:
        for rate in (200, 100):
            users.set_rate(rate)
            users.open_window()
            gevent.sleep(0.5)
            users.pause()
            samples = arrived_within(users.close_window(), 0.5)
            assert not any(sample.error for sample in samples)
            assert len(samples) == pytest.approx(rate / 2, abs=4)
            users.resume()


def test_workers_have_streams_of_their_own_and_their_constant_arrivals_alternate(clock):
    gates = [locust_users.Traffic(JOB, worker, 2).gate for worker in range(2)]
    for gate in gates:
        gate.open()
        gate.clock.kill()
    assert [gate.next for gate in gates] == pytest.approx([10.005, 10.01])
    assert gates[0].stream.random() != gates[1].stream.random()


def test_arrivals_that_are_late_when_the_users_pause_are_sent(clock):
    """On a busy machine the clock runs late. Requests that it dropped would be those of the worst moments."""
    arrivals = Arrivals(100, "constant", random.Random(1))
    arrivals.open()
    clock.now += 0.205
    arrivals.close()
    assert len(arrivals.queue) == arrivals.in_flight == 20


# --- the windows of a comparison --------------------------------------------------------------------------------------


NO_OTHERS = OtherPrograms.from_environment({})


def measured_window(job: Job, plan: Plan, metrics: Metrics, others: OtherPrograms = NO_OTHERS) -> Window:
    triton = SimpleNamespace(statistics=dict)
    switch = SimpleNamespace(counted=dict, to=lambda mode: None, in_force=lambda: True)
    with Users(job) as users, gevent.Timeout(60):
        experiment = Experiment(plan, MODES, {}, users, triton, switch, metrics, others, lambda *_: None)
        return experiment.window(1, "none")


def test_window_has_every_request_that_arrived_in_it(server, monkeypatch):
    monkeypatch.setattr(locust_users, "PATIENCE_S", 60)
    plan = Plan("m", 2, 0.5, 0.2, 20, None, rate=JOB.rate)
    metrics = Metrics("", "m", ["none"])
    server.seconds = 0.1
    window = measured_window(replace(JOB, url=server.url), plan, metrics)
    seconds = window.end - window.start
    assert len(window.samples) == pytest.approx(seconds * JOB.rate, abs=3)
    assert all(window.start <= sample.arrived < window.end for sample in window.samples)
    assert any(sample.at > window.end for sample in window.samples)  # those of the last 0.1 s
    loop = window.open_loop
    assert loop.unanswered_at_end == sum(sample.at >= window.end for sample in window.samples)
    # Throughput counts the responses of the window's time, as Prometheus does.
    assert loop.answered == len(window.samples) + loop.unanswered_at_start - loop.unanswered_at_end
    labels = {"run": "", "system": "m", "mode": "none"}
    counted = metrics.registry.get_sample_value("loadtest_requests_total", labels | {"outcome": "ok"})
    assert counted == loop.answered


def test_window_of_an_overloaded_server_ends_in_bounded_time_and_loses_nothing(server, monkeypatch):
    """Let the server answer 40 requests per second of 200; users give up those that wait for half a second."""
    monkeypatch.setattr(locust_users, "PATIENCE_S", 0.5)
    plan = Plan("m", 2, 1.0, 0.0, 4, None, rate=JOB.rate)
    server.seconds = 0.1
    window = measured_window(replace(JOB, url=server.url), plan, Metrics("", "m", ["none"]))
    assert window.open_loop.overloaded
    assert window.open_loop.answered < 0.4 * len(window.samples)
    assert len(window.samples) == pytest.approx((window.end - window.start) * JOB.rate, abs=5)
    given_up = [sample for sample in window.samples if sample.error]
    assert {sample.error for sample in given_up} == {GIVEN_UP}
    assert all(latency > 0.5 for latency in latencies(given_up))
    # After the window, the four users send for half a second; to send all requests would take them four seconds.
    assert sum(sample.at >= window.end and not sample.error for sample in window.samples) < 60


def test_window_goes_on_until_a_response_lies_in_it(server):
    """A busy machine answers late, and takes long to list its processes."""
    plan = Plan("m", 2, 0.1, 0.0, 1, None)
    server.seconds = 0.6
    others = OtherPrograms(lambda: time.sleep(0.2))
    window = measured_window(replace(JOB, url=server.url, rate=0), plan, Metrics("", "m", ["none"]), others)
    assert window.samples


@pytest.mark.parametrize(
    ("changes", "length", "requests", "announced"),
    [
        ({}, None, 1000, "at least 4 s, each after 3 s"),
        ({"generates": True, "users": 8}, None, 16, "at least 10 s, each after at least 3 s"),
        ({"window_s": 1200.0}, 1200, 1000, "1200 s, each after 3 s"),
        ({"rate": 30.0}, 1000 / 30, 1000, "33.3 s, each after 3 s"),
        ({"rate": 1000.0}, 4, 1000, "4 s, each after 3 s"),
        ({"rate": 2.0}, 60, 1000, "60 s, each after 3 s"),
        ({"rate": 200.0, "generates": True}, 10, 2, "10 s, each after 3 s"),
        ({"rate": 200.0, "window_s": 2.0}, 2, 1000, "2 s, each after 3 s"),
    ],
)
def test_plan_sets_the_length_of_a_window_and_announces_it(changes, length, requests, announced):
    fields = {"system": "m", "rounds": 2, "window_s": None, "warmup_s": 3, "users": 1, "spawn_rate": None}
    plan = Plan(**fields | changes)
    assert (plan.length_s, plan.window_requests) == (length, requests)
    text = plan.announcement(["none", "instances", "dynamic"])
    assert text == f"measuring none, instances, dynamic in 2 rounds: 6 windows of {announced} of warm-up"


def test_latency_over_grpc_counts_from_the_arrival():
    """The stub of gRPC is replaced, because gevent's gRPC would need a process of its own."""
    traffic = locust_users.Traffic(replace(JOB, protocol="grpc"))
    environment, response = Environment(), service_pb2.ModelInferResponse(raw_output_contents=[b"tensor"])
    meter = Meter(environment)
    user = type("Client", (locust_users.GrpcTritonUser,), {"host": "", "traffic": traffic, "abstract": False})(
        environment
    )
    since = time.perf_counter() - 0.5
    for answer in (response, service_pb2.ModelInferResponse()):
        user.stub = SimpleNamespace(ModelInfer=lambda request, timeout, answer=answer: answer)
        user.infer(traffic.requests[0], since)
    assert [sample.error for sample in meter.samples] == ["", locust_users.NO_TENSOR]
    assert all(500 <= sample.latency_ms < 60_000 for sample in meter.samples)
