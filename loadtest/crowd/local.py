"""The crowd without WORKERS: all users run in this process."""

from __future__ import annotations

from locust.env import Environment

from loadtest.crowd.crowd import Crowd, Meter
from loadtest.sample import Sample
from loadtest.users import Job, Traffic, user_class


class LocalCrowd(Crowd):
    def __init__(self, job: Job) -> None:
        self.traffic = Traffic(job)
        environment = Environment(user_classes=[user_class(self.traffic)])
        self.meter = Meter(environment)
        self.runner = environment.create_local_runner()

    @property
    def cores(self) -> float:
        return self.meter.cores()

    def start(self, users: int, rate: float) -> None:
        self.runner.start(users, spawn_rate=rate)

    def check(self) -> None:
        """Do nothing: there is no other process that could stop."""

    def pause(self) -> None:
        self.traffic.pause()

    def resume(self) -> None:
        self.traffic.resume()

    def set_rate(self, rate: float, pattern: int = 0) -> None:
        self.traffic.set_rate(rate, pattern)

    def open_window(self) -> None:
        self.meter.open()

    def close_window(self) -> list[Sample]:
        return self.meter.samples

    def stop(self) -> None:
        self.traffic.gate.close()
        self.runner.quit()
