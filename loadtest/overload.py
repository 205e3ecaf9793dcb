"""make loadtest OVERLOAD=3: send several times what the server can answer, and report how it keeps answering.

Users in a closed loop measure the capacity. Then requests arrive in an open loop at a multiple of it, through the
gateway, which refuses those beyond GATEWAY_IN_FLIGHT. At the end, single requests show when the server has recovered.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

import gevent
import numpy as np
from rich.table import Table

from loadtest import report
from loadtest.arrivals import GIVEN_UP, arrived_within
from loadtest.compare import Comparison, progress_bar
from loadtest.crowd.crowd import Crowd
from loadtest.encoding import ROUTES
from loadtest.examples import Tensor
from loadtest.instances import Capacity
from loadtest.sample import Sample
from loadtest.statistics import CLIENT_LIMIT, Results
from loadtest.users import LIGHT, GatewayUser, Job
from loadtest.workload import POOL_SPAWN_RATE
from scripts.common.cli import err, out
from scripts.common.figures import PALETTES
from scripts.common.files import complete_folder, write_json
from scripts.common.pages import page
from scripts.common.settings import Settings, UserError

LATEST = "latest-overload"
WINDOW_S = 20.0
# The 95th percentile that answers are compared with, unless P95 is set.
TARGET_MS = 1000.0
# Users beside those whose requests the gateway admits: their requests are refused within milliseconds.
SPARE_USERS = 256
# The number of single requests before the load. After it, LONE_IN_A_ROW of them must be about as fast.
LONE_REQUESTS, LONE_IN_A_ROW = 30, 5
AS_FAST = 1.5
MAXIMUM_RECOVERY_S = 60.0
# Requests that were sent later than this make the numbers doubtful: a refusal should come within 100 ms.
LATE_MS = 20.0
# The share of the scheduled requests that must arrive. Among a thousand, chance alone does not withhold a tenth.
ARRIVED_FROM = 0.9
REFUSED = "429 "  # how GatewayUser begins the error


def figures(samples: Sequence[Sample], seconds: float, target_ms: float) -> Results:
    """Return the numbers of a window of this length, from all samples until the last response."""
    arrived = arrived_within(samples, seconds)
    accepted = [sample.latency_ms for sample in arrived if not sample.error]
    refusals = [sample for sample in arrived if sample.error.startswith(REFUSED)]
    refused = [sample.latency_ms for sample in refusals]
    sent = [sample for sample in arrived if sample.error != GIVEN_UP]
    answered = [sample.latency_ms for sample in samples if 0 <= sample.at < seconds and not sample.error]
    return {
        "arrived_rps": len(arrived) / seconds,
        "sent_rps": len(sent) / seconds,
        **percentiles("late", [sample.late_ms for sample in sent]),
        "goodput_rps": len(answered) / seconds,
        "goodput_within_target_rps": sum(latency <= target_ms for latency in answered) / seconds,
        "refused_share": len(refused) / len(arrived) if arrived else 0.0,
        **percentiles("refused", refused),
        **percentiles("refused_since_sent", [sample.latency_ms - sample.late_ms for sample in refusals]),
        **percentiles("accepted", accepted),
        "arrived": len(arrived),
        "accepted": len(accepted),
        "refused": len(refused),
        "given_up": len(arrived) - len(sent),
        "failed": len(sent) - len(accepted) - len(refused),
    }


def percentiles(name: str, milliseconds: Sequence[float]) -> dict[str, float | None]:
    p50, p95 = np.percentile(milliseconds, (50, 95)).tolist() if milliseconds else (None, None)
    return {f"{name}_p50_ms": p50, f"{name}_p95_ms": p95}


def recovery(ask: Callable[[], float | None], limit_ms: float, clock: Callable[[], float]) -> float | None:
    """Return the seconds until a single request is fast, and the ones after it too; None if that takes too long.

    `ask` returns the latency of one request in milliseconds, or None if it failed.
    """
    start = clock()
    since, fast = start, 0
    while fast < LONE_IN_A_ROW:
        began = clock()
        if began - start > MAXIMUM_RECOVERY_S:
            return None
        latency = ask()
        is_fast = latency is not None and latency <= limit_ms
        since, fast = (began if not fast else since, fast + 1) if is_fast else (began, 0)
        if latency is None:
            gevent.sleep(0.02)
    return since - start


class LightComparison(Comparison):
    """A comparison whose users take little CPU time, so that the server has it."""

    @cached_property
    def job(self) -> Job:
        return replace(super().job, protocol=LIGHT)


class Overload:
    """The measurement. `closed` measures the capacity, and `open` has the crowd that exceeds it."""

    def __init__(self, settings: Settings) -> None:
        self.factor = settings.number("OVERLOAD")
        self.seconds = settings.number("WINDOW") if settings["WINDOW"] else WINDOW_S
        self.target_ms = settings.number("P95") if settings["P95"] else TARGET_MS
        self.settings = settings.replace(PROTOCOL="openai", RATE="")
        self.in_flight = self.settings.integer("GATEWAY_IN_FLIGHT")
        self.closed = LightComparison(self.settings)
        pool = str(self.in_flight + SPARE_USERS)
        self.open = LightComparison(self.settings.replace(RATE="1", USERS=pool, WAIT="", SPAWN_RATE=""))

    def run(self) -> Results:
        """Measure, and return the content of results.json."""
        if self.settings["TLS_CERT"]:
            raise UserError("OVERLOAD sends its single requests over plain HTTP: clear TLS_CERT and TLS_KEY")
        _ = self.closed.plan, self.closed.job, self.open.job, self.closed.workers  # an invalid setting fails first
        with self.closed.alone_on_the_server(), progress_bar(3) as (show, _):
            self.closed.cores = Capacity.from_server(self.settings).cores
            show("one request at a time", 0)
            lone = [self.ask() for _ in range(LONE_REQUESTS)]
            if None in lone:
                raise UserError("the gateway does not answer every request: see `make status` and `make logs`")
            lone_p50, lone_p95 = np.percentile([latency for latency in lone if latency], (50, 95)).tolist()
            with self.closed.crowd(lambda label: show(label, 1)) as crowd:
                show("measuring the capacity", 1)
                capacity, capacity_cores = self.capacity(crowd)
            with self.open.crowd(lambda label: show(label, 2)) as crowd:
                show(f"sending {self.factor:g} times as much", 2)
                overload, cores, recovered_s = self.overload(crowd, capacity * self.factor, AS_FAST * lone_p95)
        results = self.closed.identity() | {
            "settings": {
                "factor": self.factor,
                "users": self.closed.workload.users,
                "window_s": self.seconds,
                "target_ms": self.target_ms,
                "in_flight": self.in_flight,
                "workers": self.closed.workers,
                "triton_cpus": self.settings["TRITON_CPUS"],
                "loadtest_cpus": self.settings["LOADTEST_CPUS"],
            },
            "command": report.command(self.settings),
            "engines": {},
            "lone_p50_ms": lone_p50,
            "capacity_rps": capacity,
            "scheduled_rps": capacity * self.factor,
            **overload,
            "goodput_ratio": overload["goodput_rps"] / capacity,
            "recovered_s": recovered_s,
            "client_cores": max(cores, capacity_cores),
        }
        return results | {"complaints": complaints(results)}

    def capacity(self, crowd: Crowd) -> tuple[float, float]:
        """Return the answers per second to the users of a closed loop, and the cores that the busiest process used."""
        users = self.closed.workload.users
        crowd.start(users, self.closed.workload.spawn_rate or users)
        self.wait_for(crowd, users)
        gevent.sleep(self.closed.plan.warmup_s)
        crowd.open_window()
        gevent.sleep(self.seconds)
        cores = crowd.cores
        answered = [sample for sample in crowd.close_window() if sample.at < self.seconds and not sample.error]
        if not answered:
            raise UserError("no request was answered: `make logs` shows what the gateway and the server do")
        return len(answered) / self.seconds, cores

    def overload(self, crowd: Crowd, rate: float, limit_ms: float) -> tuple[Results, float, float | None]:
        """Return the numbers at this rate, the cores of the busiest process, and the seconds until recovery."""
        users = self.open.workload.users
        crowd.start(users, POOL_SPAWN_RATE)
        self.wait_for(crowd, users)
        crowd.set_rate(rate)
        crowd.resume()
        gevent.sleep(self.closed.plan.warmup_s)
        crowd.open_window()
        gevent.sleep(self.seconds)
        cores = crowd.cores
        single = gevent.spawn(recovery, self.ask, limit_ms, time.monotonic)
        crowd.pause()
        return figures(crowd.close_window(), self.seconds, self.target_ms), cores, single.get()

    def wait_for(self, crowd: Crowd, users: int) -> None:
        while crowd.running < users:
            crowd.check()
            gevent.sleep(0.05)

    def ask(self) -> float | None:
        """Send one request on a connection of its own; return its latency in milliseconds, or None if it failed."""
        job = self.closed.job
        body = GatewayUser.encode(job, [Tensor(*tensor) for tensor in job.requests[0]])
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {job.key or 'none'}"}
        start = time.perf_counter()
        connection = http.client.HTTPConnection(urlsplit(job.url).netloc, timeout=job.timeout_s)
        try:
            connection.request("POST", ROUTES[job.kind].path, body, headers)
            response = connection.getresponse()
            response.read()
            return (time.perf_counter() - start) * 1000 if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def complaints(results: Results) -> list[str]:
    """Return what makes the numbers doubtful."""
    doubts = []
    if results["client_cores"] >= CLIENT_LIMIT:
        doubts.append(
            f"the load generator used {results['client_cores']:.2f} of the 1 core that a process can use, so it may "
            "have been late: set WORKERS, or a CPU of its own (LOADTEST_CPUS and TRITON_CPUS)"
        )
    if (late := results["late_p95_ms"]) is not None and late > LATE_MS:
        doubts.append(
            f"the load generator sent one of twenty requests more than {late:.0f} ms after its arrival, and the "
            "latencies count that: give it a CPU of its own (LOADTEST_CPUS and TRITON_CPUS)"
        )
    if results["arrived_rps"] < ARRIVED_FROM * results["scheduled_rps"]:
        doubts.append(
            f"only {results['arrived_rps']:.0f} of {results['scheduled_rps']:.0f} requests per second arrived in the "
            "window: set a longer WINDOW"
        )
    if results["given_up"]:
        doubts.append(
            f"{results['given_up']} requests were not sent, because all users of the load generator were waiting"
        )
    return doubts


def rows(results: Results) -> list[tuple[str, str]]:
    """Return the lines of the table: a label and a value."""

    def number(key: str, form: str) -> str:
        return "-" if results[key] is None else format(results[key], form)

    return [
        ("capacity, answers per second", number("capacity_rps", ".1f")),
        ("arrivals, requests per second", number("arrived_rps", ".1f")),
        ("  sent", number("sent_rps", ".1f")),
        ("  sent late by, p50 / p95 ms", f"{number('late_p50_ms', '.1f')} / {number('late_p95_ms', '.1f')}"),
        ("goodput, answers per second", number("goodput_rps", ".1f")),
        ("  of the capacity", number("goodput_ratio", ".2f")),
        (f"  within {results['settings']['target_ms']:g} ms", number("goodput_within_target_rps", ".1f")),
        ("answered, p50 / p95 ms", f"{number('accepted_p50_ms', '.0f')} / {number('accepted_p95_ms', '.0f')}"),
        ("refused with 429", number("refused_share", ".1%")),
        ("refusal, p50 / p95 ms", f"{number('refused_p50_ms', '.0f')} / {number('refused_p95_ms', '.0f')}"),
        (
            "  since it was sent",
            f"{number('refused_since_sent_p50_ms', '.0f')} / {number('refused_since_sent_p95_ms', '.0f')}",
        ),
        ("failed otherwise", number("failed", "d")),
        ("not sent", number("given_up", "d")),
        ("one request alone, p50 ms", number("lone_p50_ms", ".1f")),
        ("seconds until as fast again", number("recovered_s", ".1f")),
        ("load generator, cores", number("client_cores", ".2f")),
    ]


def sentence(results: Results) -> str:
    return (
        f"At {results['settings']['factor']:g} times its capacity, the server answers {results['goodput_rps']:.0f} "
        f"requests of {results['system']} per second, {results['goodput_ratio']:.2f} times its capacity; the gateway "
        f"refuses {results['refused_share']:.0%}."
    )


def write(results: Results, reports: Path) -> Path:
    """Write reports/<UTC time>-<system>-overload/ in full or not at all."""
    target = reports / f"{results['run']}-{results['system']}-overload"
    with complete_folder(target, LATEST) as work:
        write_json(results, work / "results.json")
        content = page(
            "loadtest",
            "overload.html.j2",
            results=results,
            rows=rows(results),
            sentence=sentence(results),
            palettes=PALETTES,
        )
        (work / "report.html").write_text(content, encoding="utf-8")
    return target


def main() -> int:
    settings = Settings.load()
    results = Overload(settings).run()
    folder = os.path.relpath(write(results, settings.path("REPORTS")))
    table = Table(box=None, show_header=False, pad_edge=False)
    for label, value in rows(results):
        table.add_row(label, value)
    out.print(table)
    out.print(f"\n[bold]{sentence(results)}[/]\n\nreport  {folder}/report.html  (numbers: {folder}/results.json)")
    for complaint in results["complaints"]:
        err.print(f"[yellow]doubtful:[/] {complaint}")
    return 0
