"""python -m loadtest.load.worker: one of the processes that run the users of a comparison with WORKERS.

It connects to LOADTEST_MASTER (host:port), carries out the orders of the master (worker_users.py), and ends with it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import gevent
import greenlet
from gevent.queue import Empty, Queue
from locust.env import Environment

from loadtest.load.locust_users import Job, Traffic, user_class
from loadtest.load.users import Meter
from loadtest.server.machine import pin
from triton_transformers.cli import run
from triton_transformers.settings import UserError

# Message types, besides Locust's own.
ORDER, ANSWER, SAMPLES = "order", "answer", "samples"
# The orders that a worker carries out itself.
OWN = ("prepare", "open_window", "close_window")
SEND_EVERY_S = 0.25
# A master answers a heartbeat every second, later on a busy machine. Locust's own timeout is a minute, in which the
# users would go on.
MASTER_LOST_S = 20.0


class Worker:
    traffic: Traffic
    sender: gevent.Greenlet

    def __init__(self, host: str, port: int) -> None:
        self.environment = Environment()
        self.meter = Meter(self.environment)
        self.orders: Queue[dict[str, Any]] = Queue()
        self.environment.events.heartbeat_received.add_listener(self._on_heartbeat)
        try:
            self.runner = self.environment.create_worker_runner(host, port)
        except ConnectionError:
            raise UserError(f"LOADTEST_MASTER={host}:{port}: no comparison listens there; start it first") from None
        self._on_heartbeat()
        self.runner.register_message(ORDER, lambda msg, **_: self.orders.put(msg.data))

    def serve(self) -> None:
        """Carry out orders until the master quits: methods of this class, or of the traffic."""
        self._answer(None)  # announces that this worker now receives orders
        while order := self._next():
            name = order["order"]
            try:
                self._answer({"result": getattr(self if name in OWN else self.traffic, name)(*order["arguments"])})
            except UserError as error:
                self._answer({"error": str(error)})

    def prepare(self, job: dict[str, Any], workers: list[str]) -> None:
        """Take the job, and this worker's share of it."""
        self.traffic = Traffic(Job(**job), workers.index(self.runner.client_id), len(workers))
        self.environment.user_classes = [user_class(self.traffic)]

    def open_window(self) -> None:
        self.meter.open()
        self.sender = gevent.spawn(self._send_samples)

    def close_window(self) -> dict[str, Any]:
        self.sender.kill()
        return self._share()

    def leave(self) -> None:
        self.environment.events.quitting.fire(environment=self.environment)  # notifies the master
        self.runner.quit()
        self.runner.client.close(linger=500)

    def _next(self) -> dict[str, Any] | None:
        while len(self.runner.greenlet):  # the master's "quit" ends them all
            if time.monotonic() - self.last_heartbeat > MASTER_LOST_S:
                raise UserError(f"the comparison stopped answering, {MASTER_LOST_S:.0f} s ago")
            with suppress(Empty):
                order: dict[str, Any] = self.orders.get(timeout=0.2)
                return order
        return None

    def _answer(self, data: Any) -> None:
        self.runner.send_message(ANSWER, data)

    def _send_samples(self) -> None:
        while True:
            gevent.sleep(SEND_EVERY_S)
            self.runner.send_message(SAMPLES, self._share())

    def _share(self) -> dict[str, Any]:
        """Return the window's samples since the last call, and the cores used in the whole window."""
        return {"samples": self.meter.take(), "cores": self.meter.cores()}

    def _on_heartbeat(self, **_: Any) -> None:
        self.last_heartbeat = time.monotonic()


def address(name: str) -> tuple[str, int]:
    """Return host and port from an environment variable."""
    value = os.environ.get(name, "")
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{name}={value}: must be host:port, as in 127.0.0.1:5557")
    return host, int(port)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        gevent.signal_handler(number, gevent.kill, greenlet.getcurrent(), KeyboardInterrupt)
    pin(os.environ.get("LOADTEST_CPUS", ""))
    worker = Worker(*address("LOADTEST_MASTER"))
    try:
        worker.serve()
    finally:
        worker.leave()


if __name__ == "__main__":
    run(main)
