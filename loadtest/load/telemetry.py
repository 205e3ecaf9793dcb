"""The load generator's metrics for Prometheus, while it runs. docs/monitoring.md lists every name.

They count requests, seconds and latencies of measured windows only. So requests divided by seconds is the throughput
of all windows together, whenever Prometheus scrapes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, start_http_server
from prometheus_client.metrics_core import Metric

from loadtest.load.arrivals import Sample

# From 1 ms to a minute, six per octave: a percentile is off by at most an eighth.
BUCKETS = [0.001 * 2 ** (n / 6) for n in range(97)]
# How long the metrics stay after the run. Prometheus scrapes every second, so it gets the last values. If it scraped
# before and is late, on a busy machine, they stay until the second scrape: between two, it evaluates its rules.
LAST_SCRAPE_S, LATE_SCRAPE_S = 1.5, 20.0
LAST_SCRAPES = 2
OUTCOMES = ("ok", "failed")


class CountingRegistry(CollectorRegistry):
    """Counts how often Prometheus began to scrape."""

    scrapes = 0

    def collect(self) -> Iterable[Metric]:
        self.scrapes += 1
        return super().collect()


class Metrics:
    """The metrics of one run; the label `run` distinguishes it from other runs on the same Prometheus."""

    def __init__(self, run: str, system: str, modes: Sequence[str]) -> None:
        disable_created_metrics()
        self.registry = CountingRegistry()
        self.labels = {"run": run, "system": system}
        self.counted = False  # whether Prometheus has to scrape once more at the end
        self._users = self._metric(Gauge, "users", "Users that have started")
        self._cores = self._metric(Gauge, "cpu_cores", "CPU seconds per second of Locust's busiest process")
        self._mode = self._metric(Gauge, "mode", "1 for the mode that the server is in", "mode")
        self._window = self._metric(Gauge, "window", "1 while a window is measured", "mode", "round")
        self._seconds = self._metric(Counter, "measured_seconds", "Seconds measured", "mode")
        self._requests = self._metric(Counter, "requests", "Requests answered while measured", "mode", "outcome")
        self._verdict = self._metric(Gauge, "verdict", "1 for the word of the verdict, at the end of the run", "word")
        self._ratio = self._metric(Gauge, "proven_ratio", "The ratio of a verdict that is proven", "headline")
        self._latency = self._metric(
            Histogram,
            "request_duration_seconds",
            "Time to a successful response while measured",
            "mode",
            buckets=BUCKETS,
        )
        self.users(0)
        self.cores(0.0)
        # Create all series at zero, so that Prometheus sees them rise from there.
        for mode in modes:
            self._seconds.labels(**self.labels, mode=mode)
            self._latency.labels(**self.labels, mode=mode)
            for outcome in OUTCOMES:
                self._requests.labels(**self.labels, mode=mode, outcome=outcome)

    def users(self, users: int) -> None:
        self._users.labels(**self.labels).set(users)

    def cores(self, cores: float) -> None:
        self._cores.labels(**self.labels).set(cores)

    def mode(self, mode: str) -> None:
        self._mode.clear()
        self._mode.labels(**self.labels, mode=mode).set(1)

    @contextlib.contextmanager
    def window(self, mode: str, number: int) -> Iterator[Callable[[list[Sample], float], None]]:
        """Mark a window as being measured.

        The caller repeatedly calls the yielded function, with all samples of the window so far and its length so far.
        A sample from after that length waits for the next call: a process may open its window a moment earlier.
        """
        self._window.labels(**self.labels, mode=mode, round=number).set(1)
        seen, until = 0, 0.0
        early: list[Sample] = []

        def update(samples: list[Sample], elapsed: float) -> None:
            nonlocal seen, until, early
            new = early + samples[seen:]
            early = [sample for sample in new if sample.at >= elapsed]
            self.count(mode, [sample for sample in new if sample.at < elapsed], elapsed - until)
            seen, until = len(samples), elapsed

        try:
            yield update
        finally:
            self._window.clear()

    def verdict(self, verdict: dict[str, Any]) -> None:
        """Show the verdict of the run until the end of served()."""
        self._verdict.labels(**self.labels, word=verdict["word"]).set(1)
        if verdict["large"] is not None:
            self._ratio.labels(**self.labels, headline=verdict["headline"]).set(verdict["large"])

    def count(self, mode: str, samples: Sequence[Sample], seconds: float) -> None:
        self.counted = True
        self._seconds.labels(**self.labels, mode=mode).inc(seconds)
        latency = self._latency.labels(**self.labels, mode=mode)
        succeeded = [sample for sample in samples if not sample.error]
        for sample in succeeded:
            latency.observe(sample.latency_ms / 1000)
        self._requests.labels(**self.labels, mode=mode, outcome="ok").inc(len(succeeded))
        self._requests.labels(**self.labels, mode=mode, outcome="failed").inc(len(samples) - len(succeeded))

    @contextlib.contextmanager
    def served(self, address: str, port: int) -> Iterator[None]:
        server, thread = start_http_server(port, address, self.registry)
        try:
            yield
        finally:
            if self.counted:
                self._wait_for_the_last_scrapes()
            server.shutdown()
            server.server_close()
            thread.join()

    def _wait_for_the_last_scrapes(self) -> None:
        began, before = time.monotonic(), self.registry.scrapes
        limit = LATE_SCRAPE_S if before else LAST_SCRAPE_S
        while (elapsed := time.monotonic() - began) < limit:
            if elapsed >= LAST_SCRAPE_S and self.registry.scrapes >= before + LAST_SCRAPES:
                break
            time.sleep(0.1)

    def _metric(self, kind: type, name: str, description: str, *labels: str, **options: Any) -> Any:
        return kind(f"loadtest_{name}", description, [*self.labels, *labels], registry=self.registry, **options)
