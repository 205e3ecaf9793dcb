"""The client of one window, in a process of its own: Locust's users in a closed loop.

Run python -m bench.peers.load with the fields of Load as JSON. It prints those of Window.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from triton_transformers.settings import ROOT, UserError


@dataclass(frozen=True)
class Load:
    url: str
    form: str
    clients: int
    warmup_s: float
    window_s: float


@dataclass(frozen=True)
class Window:
    """The measurements of one window. `cores` is the number of cores that the clients themselves kept busy."""

    rate: float
    p50_ms: float
    p95_ms: float
    failures: int
    first_failure: str
    cores: float


def measure(load: Load, cpus: str) -> Window:
    """Run the clients on these CPUs."""
    command = ["taskset", "-c", cpus, sys.executable, "-m", "bench.peers.load", json.dumps(asdict(load))]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the client failed: {done.stderr.strip().rpartition(chr(10))[2]}")
    return Window(**json.loads(done.stdout))


def run(load: Load) -> Window:
    # The import of Locust replaces Python's sockets and threads, so only this process imports it.
    import gevent
    import numpy as np
    from locust import FastHttpUser, task
    from locust.env import Environment

    from bench.peers.request_forms import FORMS
    from loadtest.crowd.crowd import Meter
    from triton_transformers.corpus import MIXED

    form = FORMS[load.form]
    requests = [(form.body(text), form.headers(text)) for text in MIXED.texts]
    numbers = itertools.count()

    class Client(FastHttpUser):
        host = load.url
        choose: Callable

        def on_start(self) -> None:
            self.choose = random.Random(next(numbers)).choice  # the same texts for every server

        @task
        def embed(self) -> None:
            body, headers = self.choose(requests)
            with self.client.post(form.path, data=body, headers=headers, catch_response=True) as response:
                if response.status_code == 200 and not response.content:
                    response.failure("the response is empty")

    environment = Environment(user_classes=[Client])
    meter = Meter(environment)
    runner = environment.create_local_runner()
    runner.start(load.clients, spawn_rate=load.clients)
    gevent.sleep(load.warmup_s)
    meter.open()
    gevent.sleep(load.window_s)
    samples, cores = meter.take(), meter.cores()
    runner.quit()
    latencies = [sample.latency_ms for sample in samples if not sample.error]
    failures = [sample.error for sample in samples if sample.error]
    p50, p95 = np.percentile(latencies, (50, 95)).tolist() if latencies else (0.0, 0.0)
    return Window(len(latencies) / load.window_s, p50, p95, len(failures), "".join(failures[:1]), cores)


if __name__ == "__main__":
    print(json.dumps(asdict(run(Load(**json.loads(sys.argv[1]))))))
