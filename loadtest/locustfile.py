"""The users of the comparison, under Locust's own web page: `make locust` has Locust load this file."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gevent
from locust import events
from locust.env import Environment

from loadtest.load.examples import Examples
from loadtest.load.locust_users import Job, Traffic, user_class
from loadtest.load.telemetry import Metrics
from loadtest.load.users import Meter
from loadtest.load.workload import Workload
from triton_transformers.settings import Settings

MODE = "as configured"  # the recording rules use the same name
EVERY_S = 0.5

settings = Settings.load()
workload = Workload.from_settings(settings)
examples = Examples.from_server(settings, workload.corpus.texts)
job = Job.from_settings(settings, workload, examples)
traffic = Traffic(job)
Client = user_class(traffic)


@events.init.add_listener
def start(environment: Environment, **_: Any) -> None:
    gevent.spawn(report_metrics, environment)
    # Python raises KeyboardInterrupt in whichever user happens to run, which can lose it. Locust handles SIGTERM in a
    # greenlet of its own.
    gevent.signal_handler(signal.SIGINT, os.kill, os.getpid(), signal.SIGTERM)


@events.spawning_complete.add_listener
def open_gate(**_: Any) -> None:
    """With RATE, let requests arrive once there are users to send them."""
    traffic.gate.open()


@events.test_stop.add_listener
def close_arrivals(**_: Any) -> None:
    if job.rate:
        traffic.gate.close()


def report_metrics(environment: Environment) -> None:
    """Report to Prometheus all the time what a comparison reports of its windows. The label `run` is empty."""
    metrics = Metrics("", job.model, modes=[MODE])
    meter = Meter(environment)
    with metrics.served(str(settings.bind_address), settings.loadtest_metrics_port):
        while True:
            gevent.sleep(EVERY_S)
            users = environment.runner.user_count if environment.runner else 0
            metrics.users(users)
            metrics.cores(meter.cores())
            metrics.count(MODE, meter.samples, time.perf_counter() - meter.opened if users else 0.0)
            meter.open()
