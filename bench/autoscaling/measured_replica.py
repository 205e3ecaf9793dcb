"""Measure one replica: the CPU time of an execution by the number of its requests."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np
import psutil

from bench.autoscaling.steady_replica import Replica
from bench.comparisons import two_cpus
from bench.gateway_overhead import Site, only_successes, p95, total
from bench.light_clients import Load, measure
from bench.server import command, environment, folder, server
from triton_transformers.cli import err
from triton_transformers.settings import UserError
from triton_transformers.triton import metrics_page

CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128)
ROUNDS = 3
WARMUP_S, WINDOW_S = 1.0, 4.0
LARGEST_BATCH = 64  # the encoder's max_batch_size


@dataclass(frozen=True)
class Point:
    """One closed loop of clients: medians over the rounds."""

    clients: int
    rate: float
    batch: float
    p95_ms: float
    execution_s: float  # CPU time of the whole server for one execution of the encoder


@dataclass(frozen=True)
class Measurement:
    points: list[Point]
    start_s: float  # until the server has loaded its models

    @property
    def replica(self) -> Replica:
        """Return the line through the points that has the smallest relative error.

        CPU time stands for time, because one core computes everything, and other programs of this machine do not
        change it.
        """
        batches = np.array([point.batch for point in self.points])
        seconds = np.array([point.execution_s for point in self.points])
        design = np.stack([1 / seconds, batches / seconds], axis=1)
        fixed, each = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)[0]
        return Replica(float(fixed), float(each), LARGEST_BATCH)

    @property
    def largest_error(self) -> float:
        """Return the largest relative difference of a point from the line."""
        return max(abs(self.replica.seconds(point.batch) / point.execution_s - 1) for point in self.points)


def measure_replica() -> Measurement:
    """Measure the system `embedding` on one core, and its clients on another."""
    server_cpu, client_cpu = two_cpus()
    with folder() as work:
        variables = environment(work, SYSTEMS="embedding", TRITON_CPUS=str(server_cpu))
        command("models", variables)
        began = time.monotonic()
        with server(variables):
            start_s = time.monotonic() - began
            site = Site.from_variables(variables)
            with on_cpu(client_cpu):
                windows = [
                    window(site, clients, int(variables["TRITON_HTTP_PORT"]))
                    for number in range(ROUNDS)
                    for clients in CLIENTS[:: 1 if number % 2 else -1]
                ]
    points = [median([point for point in windows if point.clients == clients]) for clients in CLIENTS]
    return Measurement(points, start_s)


@contextlib.contextmanager
def on_cpu(cpu: int) -> Iterator[None]:
    """Run this process, and those that it starts, on one CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def window(site: Site, clients: int, port: int) -> Point:
    """Measure one window. The counters cover its warm-up too, in which the same clients send."""
    with err.status(f"one replica on one core, {clients} clients"):
        server_process = listener(port)
        before, cpu = metrics_page(site.triton_metrics), cpu_seconds(server_process)
        done = only_successes(measure(Load(site.triton, "triton", clients, WARMUP_S, WINDOW_S)))
        used, after = cpu_seconds(server_process) - cpu, metrics_page(site.triton_metrics)

    def growth(counter: str) -> float:
        series = f'{counter}{{model="encoder"'
        return total(after, series) - total(before, series)

    executions = growth("nv_inference_exec_count")
    return Point(clients, done.rate, growth("nv_inference_count") / executions, p95(done.accepted), used / executions)


def listener(port: int) -> psutil.Process:
    for connection in psutil.net_connections("tcp"):
        address = connection.laddr
        if connection.status == psutil.CONN_LISTEN and address and address.port == port and connection.pid:
            return psutil.Process(connection.pid)
    raise UserError(f"no process listens on port {port}: the server of this benchmark ended, see its messages above")


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process and its descendants, which are the models' Python processes."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(used.user + used.system for used in times)


def median(points: list[Point]) -> Point:
    columns = zip(*(astuple(point) for point in points), strict=True)
    return Point(*(statistics.median(values) for values in columns))
