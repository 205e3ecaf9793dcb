"""Simulate one replica at a constant rate of requests, for every share of its capacity."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

# Rows of the table: shares of the capacity. Above the last one, a replica counts as saturated.
SHARES = np.arange(0.0, 0.985, 0.01)
REQUESTS = 30_000  # in each row
# Bins of latencies, in seconds: each is 2 % wider than the one before.
EDGES = np.geomspace(1e-3, 3600, 763)


@dataclass(frozen=True)
class Replica:
    """A server that takes all waiting requests at once, up to a limit: `fixed_s`, and `each_s` per request of a batch.

    It has one core, and an execution uses all of it.
    """

    fixed_s: float
    each_s: float
    largest_batch: int

    def seconds(self, batch: float) -> float:
        return self.fixed_s + self.each_s * batch

    @property
    def capacity(self) -> float:
        """Return the requests per second of full batches."""
        return self.largest_batch / self.seconds(self.largest_batch)


@dataclass(frozen=True)
class Steady:
    """Means over time, and the latencies of all requests in seconds."""

    waiting: float  # requests in the queue
    computing: float  # requests in an execution
    busy: float  # share of the core
    latencies: np.ndarray


def simulate_steady(replica: Replica, rate: float, stream: np.random.Generator, requests: int = REQUESTS) -> Steady:
    """Let requests arrive at random, at this rate per second."""
    arrivals = np.cumsum(stream.exponential(1 / rate, requests))
    queue = arrivals.tolist()
    starts, ends, busy = np.empty(requests), np.empty(requests), 0.0
    free, first = 0.0, 0
    while first < requests:
        start = max(free, queue[first])
        last = min(bisect_right(queue, start, first), first + replica.largest_batch)
        seconds = replica.seconds(last - first)
        free = start + seconds
        busy += seconds
        starts[first:last], ends[first:last] = start, free
        first = last
    waiting, computing = (starts - arrivals).sum(), (ends - starts).sum()
    return Steady(float(waiting) / free, float(computing) / free, busy / free, ends - arrivals)


@dataclass(frozen=True)
class Table:
    """Steady states by row of SHARES. `latencies` holds the share of requests in each bin of EDGES."""

    capacity: float
    waiting: np.ndarray
    computing: np.ndarray
    busy: np.ndarray
    latencies: np.ndarray

    def row(self, rate: np.ndarray) -> np.ndarray:
        """Return the row of each rate per replica."""
        return np.minimum(np.rint(rate / self.capacity / SHARES[1]).astype(int), len(SHARES) - 1)


def bins(latencies: np.ndarray) -> np.ndarray:
    return np.clip(np.searchsorted(EDGES, latencies), 0, len(EDGES) - 1)


def percentile(histogram: np.ndarray, share: float) -> float:
    """Return the upper edge of the bin that holds this share of a histogram."""
    cumulative = np.cumsum(histogram)
    return float(EDGES[np.searchsorted(cumulative, share * cumulative[-1])])


def tabulate(replica: Replica, seed: int = 1) -> Table:
    states = [simulate_steady(replica, share * replica.capacity, np.random.default_rng(seed)) for share in SHARES[1:]]
    histograms = [np.bincount(bins(state.latencies), minlength=len(EDGES)) / REQUESTS for state in states]
    return Table(
        replica.capacity,
        np.array([0.0, *(state.waiting for state in states)]),
        np.array([0.0, *(state.computing for state in states)]),
        np.array([0.0, *(state.busy for state in states)]),
        np.stack([histograms[0], *histograms]),
    )
