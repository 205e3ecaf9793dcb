"""Simulate a day of requests for many autoscalers at once, in steps of a second.

Within a second every replica is in the steady state of its rate. Above its capacity the rest waits and is carried on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.autoscaling.horizontal_autoscaler import (
    SYNC_S,
    Behavior,
    HorizontalAutoscaler,
    for_average_value,
    for_utilization,
    for_value,
)
from bench.autoscaling.steady_replica import EDGES, SHARES, Table, bins, percentile

DAY_S, HOUR_S = 86400, 3600
MINIMUM, MAXIMUM = 2, 60
CPU, QUEUE, IN_FLIGHT, ROOT, RATE = "CPU", "queue / compute", "in flight", "root of in flight", "requests/s"


@dataclass(frozen=True)
class Pipeline:
    """The age of a metric when the autoscaler reads it, and the time over which it is averaged."""

    delay_s: int
    window_s: int


# metrics-server reads the kubelet every 15 s, and the kubelet updates its own values about every 10 s.
# Our rules average over 30 s, Prometheus scrapes every 5 s, and evaluates the rules every 5 s.
PIPELINES = {CPU: Pipeline(15, 15), **dict.fromkeys((QUEUE, IN_FLIGHT, ROOT, RATE), Pipeline(5, 30))}
KEPT_S = 64  # seconds of metrics that are remembered


@dataclass(frozen=True)
class Scaler:
    """An autoscaler's metric, its target, and its behavior."""

    signal: str
    target: float
    behavior: Behavior = Behavior()  # noqa: RUF009, it is frozen


@dataclass(frozen=True)
class Outcome:
    """A day with one autoscaler."""

    scaler: Scaler
    replica_hours: float
    p95_s: float
    worst_hour_p95_s: float
    latencies: np.ndarray  # of all requests, by bin
    replicas: np.ndarray  # at the start of each minute

    def within(self, target_s: float) -> float:
        """Return the share of requests within the target."""
        return float(self.latencies[: int(bins(np.array([target_s]))[0]) + 1].sum() / self.latencies.sum())


def arrivals(peak: float, seed: int) -> np.ndarray:
    """Return the rate of requests in each second of a day: a low night, two peaks, slow noise, and ten bursts."""
    stream = np.random.default_rng(seed)
    seconds = np.arange(DAY_S)
    hours = seconds / HOUR_S
    daytime = np.exp(-(((hours - 11) / 3.2) ** 2)) + 0.85 * np.exp(-(((hours - 19.5) / 2.3) ** 2))
    rates = peak * (0.12 + 0.88 * daytime / daytime.max())
    # Noise of 10 %, with a memory of ten minutes.
    steps = stream.normal(0, 0.1035 * math.sqrt(2 / 600), DAY_S)
    noise, level = np.empty(DAY_S), 0.0
    for second, step in enumerate(steps):
        level += step - level / 600
        noise[second] = level
    rates *= np.exp(noise)
    for start in stream.uniform(0, DAY_S, 10):
        rise, height, length = stream.uniform(20, 120), stream.uniform(0.2, 0.8), stream.uniform(120, 900)
        rates *= 1 + height * np.clip(np.minimum((seconds - start) / rise, (start + length - seconds) / rise), 0, 1)
    return rates


def simulate(table: Table, scalers: Sequence[Scaler], rates: np.ndarray, start_s: float) -> list[Outcome]:
    """Return the day of each autoscaler. A new replica serves `start_s` seconds after the decision."""
    count, slots, columns = len(scalers), np.arange(MAXIMUM), np.arange(len(scalers))
    first = min(max(math.ceil(rates[0] / table.capacity * 1.5), MINIMUM), MAXIMUM)
    autoscalers = [HorizontalAutoscaler(scaler.behavior, MINIMUM, MAXIMUM, first) for scaler in scalers]
    required = np.full(count, first)
    ready_at = np.zeros((count, MAXIMUM))
    backlog = np.zeros((count, MAXIMUM))
    # Sums since the start, in each second: waiting, computing, busy cores, answers, ready replicas.
    sums = np.zeros((KEPT_S, 5, count))
    seconds_used = np.zeros(count)
    visits = np.zeros((count, len(SHARES)))  # requests of the hour by row of the table
    late = np.zeros((count, len(EDGES)))  # requests of the hour to a saturated replica, by latency
    whole_day = np.zeros((count, len(EDGES)))
    worst = np.zeros(count)
    history = np.zeros((count, math.ceil(len(rates) / 60)))
    full = table.waiting[-1] + table.computing[-1]
    for second, rate in enumerate(rates):
        ready = (slots < required[:, None]) & (ready_at <= second)
        serving = ready.sum(axis=1)
        rate_per_replica = rate / serving
        # One replica with a backlog makes all replicas of its autoscaler count as saturated.
        row = np.where(backlog.any(axis=1), len(SHARES) - 1, table.row(rate_per_replica))
        carried = np.zeros(count)
        if (rate_per_replica > table.capacity).any() or backlog.any():
            delayed = (backlog > 0) & ready
            at, slot = np.nonzero(delayed)
            waits = (backlog[at, slot] + full) / table.capacity
            np.add.at(late, (at, bins(waits)), rate_per_replica[at])
            np.add.at(visits, (columns, row), rate - rate_per_replica * delayed.sum(axis=1))
            backlog = np.maximum(backlog + (rate_per_replica - table.capacity)[:, None] * ready, 0) * ready
            # Counters count a request when it is answered. While a queue grows, they lag behind it.
            carried = backlog.sum(axis=1) * np.minimum(1, table.capacity / rate_per_replica)
        else:
            visits[columns, row] += rate
        now = np.stack(
            [
                table.waiting[row] * serving + carried,
                table.computing[row] * serving,
                table.busy[row] * serving,
                np.minimum(rate_per_replica, table.capacity) * serving,
                serving,
            ]
        )
        sums[second % KEPT_S] = sums[(second - 1) % KEPT_S] + now
        seconds_used += required
        if second % 60 == 0:
            history[:, second // 60] = required
        if second % SYNC_S == 0 and second >= KEPT_S:
            sync(second, autoscalers, scalers, sums, required, ready_at, start_s, serving)
        if second % HOUR_S == HOUR_S - 1 or second == len(rates) - 1:
            hour = visits @ table.latencies + late
            worst = np.maximum(worst, [percentile(histogram, 0.95) for histogram in hour])
            whole_day += hour
            visits[:], late[:] = 0, 0
    return [
        Outcome(
            scaler,
            float(seconds_used[i] / HOUR_S),
            percentile(whole_day[i], 0.95),
            float(worst[i]),
            whole_day[i],
            history[i],
        )
        for i, scaler in enumerate(scalers)
    ]


def sync(
    second: int,
    autoscalers: Sequence[HorizontalAutoscaler],
    scalers: Sequence[Scaler],
    sums: np.ndarray,
    required: np.ndarray,
    ready_at: np.ndarray,
    start_s: float,
    serving: np.ndarray,
) -> None:
    """Let each autoscaler read its metric and decide. `required` and `ready_at` change in place."""
    growth = {
        signal: sums[(second - pipe.delay_s) % KEPT_S] - sums[(second - pipe.delay_s - pipe.window_s) % KEPT_S]
        for signal, pipe in PIPELINES.items()
    }
    for i, (scaler, autoscaler) in enumerate(zip(scalers, autoscalers, strict=True)):
        replicas, now_serving = int(required[i]), int(serving[i])
        pipe, target, tolerance = PIPELINES[scaler.signal], scaler.target, scaler.behavior.tolerance
        waiting, computing, cores, answered, ready = growth[scaler.signal][:, i]
        if scaler.signal == CPU:
            measured = int((ready_at[i, :replicas] <= second - pipe.delay_s - pipe.window_s).sum())
            proposed = for_utilization(cores / ready, target, tolerance, replicas, measured)
        elif scaler.signal == QUEUE:
            proposed = for_value(waiting / computing, target, tolerance, replicas, now_serving)
        elif scaler.signal == ROOT:
            value = math.cbrt((waiting + computing) / ready)
            proposed = for_value(value, math.cbrt(target), tolerance, replicas, now_serving)
        else:
            total = waiting + computing if scaler.signal == IN_FLIGHT else answered
            proposed = for_average_value(total / pipe.window_s, target, tolerance, replicas)
        decided = autoscaler.decide(second, replicas, proposed)
        if decided > replicas:
            ready_at[i, replicas:decided] = second + start_s
        required[i] = decided
