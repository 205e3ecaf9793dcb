"""Locust's web page against the running stack: `make locust`. The users are those of the comparison."""

from __future__ import annotations

import time

import gevent
from locust import events
from locust.env import Environment

from loadtest.crowd.base import Meter
from loadtest.examples import Examples
from loadtest.telemetry import Metrics
from loadtest.users import Job, Traffic, user_class
from loadtest.workload import Workload
from scripts.common.settings import Settings

MODE = "as configured"  # as the recording rules say it
EVERY_S = 0.5

_settings = Settings.load()
_workload = Workload.of(_settings)
_job = Job.of(_settings, _workload, Examples.of(_settings, _workload.texts))
Client = user_class(_job)


@events.init.add_listener
def prepare(environment: Environment, **_) -> None:
    environment.traffic = Traffic(_job)
    gevent.spawn(tell_prometheus, environment)


def tell_prometheus(environment: Environment) -> None:
    """What the comparison tells of its windows, all the time; of no run."""
    metrics = Metrics("", _job.model, modes=[MODE])
    meter = Meter(environment)
    with metrics.served(str(_settings.bind_address()), _settings.port("LOADTEST_METRICS_PORT")):
        while True:
            gevent.sleep(EVERY_S)
            users = environment.runner.user_count if environment.runner else 0
            metrics.users(users)
            metrics.cores(meter.cores())
            metrics.count(MODE, meter.samples, time.perf_counter() - meter.opened if users else 0.0)
            meter.open()
