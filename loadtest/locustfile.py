"""Locust's web page against the running stack: `make locust`. The users are those of the comparison."""

from __future__ import annotations

from locust import events

from loadtest.users import USERS, target, traffic, user_class
from loadtest.workload import Workload
from scripts.settings import Settings

_settings = Settings.load()
_protocol = _settings.choice("PROTOCOL", tuple(USERS))
Client = user_class(_protocol, target(_settings, _protocol))


@events.init.add_listener
def give_traffic(environment, **_) -> None:
    workload = Workload.of(_settings)
    environment.traffic = traffic(_protocol, _settings["SYSTEM"], workload, _settings.integer("SEED"))
