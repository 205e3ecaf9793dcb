"""Locust's web page against the running stack: `make locust`. The users are those of the comparison."""

from __future__ import annotations

from locust import events

from loadtest.users import Job, Traffic, user_class
from loadtest.workload import Workload
from scripts.settings import Settings

_settings = Settings.load()
_job = Job.of(_settings, Workload.of(_settings))
Client = user_class(_job)


@events.init.add_listener
def give_traffic(environment, **_) -> None:
    environment.traffic = Traffic(_job)
