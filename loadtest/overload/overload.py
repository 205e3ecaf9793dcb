"""make loadtest OVERLOAD=3: send several times what the server can answer, and report how it keeps answering.

Users in a closed loop measure the capacity. Then requests arrive in an open loop at a multiple of it, through the
gateway, which refuses those beyond GATEWAY_IN_FLIGHT. At the end, single requests show when the server has recovered.
"""

from __future__ import annotations

import http.client
import math
import os
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import gevent
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.compare.compare import Comparison, progress_bar
from loadtest.load.arrivals import GIVEN_UP, Sample, arrived_within
from loadtest.load.examples import ROUTES, gateway_request
from loadtest.load.locust_users import TLS
from loadtest.load.users import Users
from loadtest.load.workload import POOL_SPAWN_RATE
from loadtest.measure import verdicts
from loadtest.measure.statistics import CLIENT_LIMIT, Results
from loadtest.measure.verdicts import EXIT_CODES, PROVEN, Cause, Code, busy_machine, judge
from loadtest.reports import report
from loadtest.server.machine import OtherPrograms
from loadtest.server.switching import Capacity
from monitoring.drawing.charts import PALETTES, Chart, Palette, images, write_charts
from triton_transformers.cli import out
from triton_transformers.files import complete_folder, write_atomically, write_json
from triton_transformers.pages import page
from triton_transformers.settings import Settings, UserError
from triton_transformers.tensors import Tensor

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
# A load generator that used fewer cores does not need one of its own.
OWN_CPU_FROM = 0.5
# The share of the 95th percentile from which on the gateway's queue explains it.
QUEUE_FROM = 0.5
# The opener of triton_transformers.http has a context from before gevent replaced `ssl`: over TLS, one request through
# it would hold up all users.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=TLS))


# A second of the overload, or of the time until the last response: how many requests ended, and how.
Second = dict[str, float | None]


# The single requests after the overload: seconds since its end, and milliseconds (None if it failed).
Singles = list[tuple[float, float | None]]


def figures(samples: Sequence[Sample], seconds: float, target_ms: float) -> Results:
    """Return the numbers of a window of this length, from all samples until the last response."""
    arrived = arrived_within(samples, seconds)
    accepted = [sample.latency_ms for sample in arrived if not sample.error]
    refusals = [sample for sample in arrived if sample.is_refused]
    refused = [sample.latency_ms for sample in refusals]
    sent = [sample for sample in arrived if sample.error != GIVEN_UP]
    answered = [sample.latency_ms for sample in samples if 0 <= sample.at < seconds and not sample.error]
    return {
        "arrived_rps": len(arrived) / seconds,
        "sent_rps": len(sent) / seconds,
        **percentiles("late", [sample.late_ms for sample in sent]),
        "answered_rps": len(answered) / seconds,
        "goodput_rps": sum(latency <= target_ms for latency in answered) / seconds,
        "refused_share": len(refused) / len(arrived) if arrived else 0.0,
        **percentiles("refused", refused),
        **percentiles("refused_since_sent", [sample.latency_ms - sample.late_ms for sample in refusals]),
        **percentiles("accepted", accepted),
        "arrived": len(arrived),
        "accepted": len(accepted),
        "accepted_within_target": sum(latency <= target_ms for latency in accepted),
        "refused": len(refused),
        "given_up": len(arrived) - len(sent),
        "failed": len(sent) - len(accepted) - len(refused),
    }


def percentiles(name: str, milliseconds: Sequence[float]) -> dict[str, float | None]:
    p50, p95 = np.percentile(milliseconds, (50, 95)).tolist() if milliseconds else (None, None)
    return {f"{name}_p50_ms": p50, f"{name}_p95_ms": p95}


def recovery(
    ask: Callable[[], float | None], limit_ms: float, clock: Callable[[], float]
) -> tuple[float | None, Singles]:
    """Send single requests until several in a row are fast, or until that takes too long.

    `ask` returns the latency of one request in milliseconds, or None if it failed. Return the seconds until a request
    was fast, and the ones after it too (None if that took too long), and all requests.
    """
    start = clock()
    requests: Singles = []
    since, fast = 0.0, 0
    while fast < LONE_IN_A_ROW:
        began = clock() - start
        if began > MAXIMUM_RECOVERY_S:
            return None, requests
        latency = ask()
        requests.append((began, latency))
        is_fast = latency is not None and latency <= limit_ms
        since, fast = (began if not fast else since, fast + 1) if is_fast else (began, 0)
        if latency is None:
            gevent.sleep(0.02)
    return since, requests


def timeline(samples: Sequence[Sample], target_ms: float) -> list[Second]:
    """Return what became of the requests in each second: when they were answered or refused."""
    last = max((sample.at for sample in samples), default=0.0)
    seconds = []
    for number in range(math.floor(last) + 1):
        ended = [sample for sample in samples if number <= sample.at < number + 1]
        latencies = [sample.latency_ms for sample in ended if not sample.error]
        refused = sum(sample.is_refused for sample in ended)
        in_time = sum(latency <= target_ms for latency in latencies)
        seconds.append(
            {
                "second": number,
                "in_time": in_time,
                "late": len(latencies) - in_time,
                "refused": refused,
                "failed": len(ended) - len(latencies) - refused,
                **percentiles("accepted", latencies),
            }
        )
    return seconds


class Overload:
    """The measurement. `closed` measures the capacity, and `open` has the users that exceed it."""

    def __init__(self, settings: Settings) -> None:
        self.factor = settings.overload or 1.0
        self.seconds = settings.window or WINDOW_S
        self.target_ms = settings.p95 or TARGET_MS
        self.settings = settings.replace(PROTOCOL="openai", RATE="")
        self.others = OtherPrograms.from_environment()
        self.in_flight = self.settings.gateway_in_flight
        self.closed = Comparison(self.settings)
        pool = str(self.in_flight + SPARE_USERS)
        self.open = Comparison(self.settings.replace(RATE="1", USERS=pool, WAIT="", SPAWN_RATE=""))

    def run(self) -> Results:
        """Measure, and return the content of results.json."""
        _ = self.closed.plan, self.closed.job, self.open.job, self.closed.workers  # an invalid setting fails first
        with self.closed.alone_on_the_server("overload"), progress_bar(3) as (show, _):
            self.closed.cores = Capacity.from_server(self.settings).cores
            show("one request at a time", 0)
            lone = [self.ask() for _ in range(LONE_REQUESTS)]
            if None in lone:
                raise UserError("the gateway does not answer every request: see `make status` and `make logs`")
            lone_p50, lone_p95 = np.percentile([latency for latency in lone if latency], (50, 95)).tolist()
            with self.closed.users(lambda label: show(label, 1)) as users:
                show("measuring the capacity", 1)
                capacity, capacity_cores, capacity_others = self.capacity(users)
            with self.open.users(lambda label: show(label, 2)) as users:
                show(f"sending {self.factor:g} times as much", 2)
                overload, cores, others = self.overload(users, capacity * self.factor, AS_FAST * lone_p95)
        results = self.closed.identity() | {
            "settings": {
                "factor": self.factor,
                "users": self.closed.workload.users,
                "window_s": self.seconds,
                "target_ms": self.target_ms,
                "in_flight": self.in_flight,
                "workers": self.closed.workers,
                "triton_cpus": self.settings.triton_cpus,
                "loadtest_cpus": self.settings.loadtest_cpus,
            },
            "command": report.command(self.settings),
            "engines": {},
            "lone_p50_ms": lone_p50,
            "as_fast_ms": AS_FAST * lone_p95,
            "capacity_rps": capacity,
            "scheduled_rps": capacity * self.factor,
            **overload,
            "goodput_ratio": overload["goodput_rps"] / capacity,
            "client_cores": max(cores, capacity_cores),
            "other_cores": max((known for known in (others, capacity_others) if known is not None), default=None),
        }
        results["verdict"] = judge(causes(results), results["goodput_ratio"])
        return results | {"advice": advice(results)}

    def capacity(self, users: Users) -> tuple[float, float, float | None]:
        """Return the answers per second to the users of a closed loop, and the cores that were used meanwhile.

        The first are those of the load generator's busiest process, the second those of other programs.
        """
        count = self.closed.workload.users
        self.start(users, count, self.closed.workload.spawn_rate or count)
        cores, others = self.window(users)
        answered = [sample for sample in users.close_window() if sample.at < self.seconds and not sample.error]
        if not answered:
            raise UserError("no request was answered: `make logs` shows what the gateway and the server do")
        return len(answered) / self.seconds, cores, others

    def overload(self, users: Users, rate: float, limit_ms: float) -> tuple[Results, float, float | None]:
        """Return the numbers at this rate and of the recovery, and the cores as capacity() does."""
        self.start(users, self.open.workload.users, POOL_SPAWN_RATE)
        users.set_rate(rate)
        users.resume()
        cores, others = self.window(users)
        single = gevent.spawn(recovery, self.ask, limit_ms, time.monotonic)
        users.pause()
        samples, (recovered_s, singles) = users.close_window(), single.get()
        results = figures(samples, self.seconds, self.target_ms) | {
            "recovered_s": recovered_s,
            "single_requests": singles,
            "timeline": timeline(samples, self.target_ms),
        }
        return results, cores, others

    def start(self, users: Users, count: int, spawn_rate: float) -> None:
        users.start(count, spawn_rate)
        while users.running < count:
            users.check()
            gevent.sleep(0.05)

    def window(self, users: Users) -> tuple[float, float | None]:
        """Let a window begin after the warm-up and pass; return the cores as capacity() does."""
        gevent.sleep(self.closed.plan.warmup_s)
        users.open_window()
        self.others.open()
        gevent.sleep(self.seconds)
        return users.cores, self.others.cores()

    def ask(self) -> float | None:
        """Send one request on a connection of its own; return its latency in milliseconds, or None if it failed."""
        job = self.closed.job
        body = gateway_request(job.model, job.kind, [Tensor(*tensor) for tensor in job.requests[0]])
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {job.key or 'none'}"}
        request = urllib.request.Request(job.url + ROUTES[job.kind].path, body, headers)
        start = time.perf_counter()
        try:
            with opener.open(request, timeout=job.timeout_s) as response:
                response.read()
            return (time.perf_counter() - start) * 1000
        except (OSError, http.client.HTTPException):  # also a status that is no success
            return None


def advice(results: Results) -> str:
    """Return why answers come after the target, and the setting that mends it; nothing if 95 % of them come in time.

    If the numbers are doubtful, they prove no cause, and the remedy of the verdict comes first.
    """
    target_ms, in_flight = results["settings"]["target_ms"], results["settings"]["in_flight"]
    answered, p95 = results["answered_rps"], results["accepted_p95_ms"]
    if results["verdict"]["word"] != PROVEN or p95 is None or p95 <= target_ms:
        return ""
    if results["lone_p50_ms"] > target_ms:
        return (
            f"Even one request alone takes {results['lone_p50_ms']:.0f} ms. Set a higher P95, or let `make tune` look "
            "for a faster configuration."
        )
    queue_s = in_flight / answered
    if not results["refused"] or 1000 * queue_s < QUEUE_FROM * p95:
        return (
            f"The gateway's queue does not explain that: {in_flight} requests in flight at {answered:.0f} answers per "
            f"second take {queue_s:.1f} s. `make loadtest TRACE=1` shows where the slowest requests spend their time."
        )
    return (
        f"The gateway admits {in_flight} requests at once, which at {answered:.0f} answers per second are a queue of "
        f"{queue_s:.1f} s, so that 95 % of the answers come within {p95:.0f} ms. The time shrinks with the queue: set "
        f"GATEWAY_IN_FLIGHT={max(1, math.floor(in_flight * target_ms / p95))} for {target_ms:g} ms."
    )


def causes(results: Results) -> list[Cause]:
    """Return what speaks against the numbers."""
    cores, busy = results["client_cores"], busy_machine(results["other_cores"], results["host"]["cores"])
    found = [busy] if busy else []
    if not results["answered_rps"]:
        found.append(Cause(Code.NO_ANSWER))
    if failed := results["failed"]:
        found.append(Cause(Code.FAILED_REQUESTS, failed=failed, file="`make logs`"))
    if cores >= CLIENT_LIMIT:
        found.append(Cause(Code.LOCUST_BOUND, effect="it may have been late"))
    if (late := results["late_p95_ms"]) is not None and late > LATE_MS:
        if cores >= OWN_CPU_FROM:
            remedy = "Give it a CPU of its own (LOADTEST_CPUS and TRITON_CPUS)."
        else:
            remedy = "Keep a CPU free of Triton (TRITON_CPUS): it waited for those that the server used."
        found.append(Cause(Code.SENT_LATE, late=late, remedy=remedy))
    arrived, scheduled = results["arrived_rps"], results["scheduled_rps"]
    if arrived < ARRIVED_FROM * scheduled:
        found.append(Cause(Code.FEW_ARRIVALS, arrived=arrived, scheduled=scheduled))
    if results["given_up"]:
        found.append(Cause(Code.NOT_SENT, requests=results["given_up"]))
    return found


def rows(results: Results) -> list[tuple[str, str]]:
    """Return the lines of the table: a label and a value."""

    def number(key: str, form: str) -> str:
        return "-" if results[key] is None else format(results[key], form)

    return [
        ("capacity, answers per second", number("capacity_rps", ".1f")),
        ("arrivals, requests per second", number("arrived_rps", ".1f")),
        ("  sent", number("sent_rps", ".1f")),
        ("  sent late by, p50 / p95 ms", f"{number('late_p50_ms', '.1f')} / {number('late_p95_ms', '.1f')}"),
        (f"goodput, answers within {results['settings']['target_ms']:g} ms per second", number("goodput_rps", ".1f")),
        ("  of the capacity", number("goodput_ratio", ".2f")),
        ("all answers per second", number("answered_rps", ".1f")),
        ("  p50 / p95 ms", f"{number('accepted_p50_ms', '.0f')} / {number('accepted_p95_ms', '.0f')}"),
        ("refused with 429", number("refused_share", ".1%")),
        ("  p50 / p95 ms", f"{number('refused_p50_ms', '.0f')} / {number('refused_p95_ms', '.0f')}"),
        (
            "  since it was sent",
            f"{number('refused_since_sent_p50_ms', '.0f')} / {number('refused_since_sent_p95_ms', '.0f')}",
        ),
        ("failed otherwise", number("failed", "d")),
        ("not sent", number("given_up", "d")),
        ("one request alone, p50 ms", number("lone_p50_ms", ".1f")),
        ("seconds until as fast again", number("recovered_s", ".1f")),
        ("load generator, cores", number("client_cores", ".2f")),
        ("other programs, cores", number("other_cores", ".2f")),
    ]


def sentence(results: Results) -> str:
    """Return the headline: the verdict and its cause, what was measured, and what to do if that is not proven."""
    return verdicts.sentence(results["verdict"], measured(results))


def measured(results: Results) -> str:
    """Return first how many requests were answered within the target, as a sentence with a small letter."""
    in_time, late = results["goodput_rps"], results["answered_rps"] - results["goodput_rps"]
    shown = f"{in_time:.0f}" if in_time >= 0.5 or not in_time else f"{in_time:.1f}"
    return (
        f"{shown if in_time else 'none'} of the {results['arrived_rps']:.0f} requests of {results['system']} that "
        f"arrive per second, {results['settings']['factor']:g} times the capacity, "
        f"{'is' if shown == '1' or not in_time else 'are'} answered within {results['settings']['target_ms']:g} ms: a "
        f"goodput of {results['goodput_ratio']:.2f} times the capacity. {late:.0f} per second are answered later, and "
        f"the gateway refuses {results['refused_share']:.0%}."
    )


def write(results: Results, reports: Path) -> Path:
    """Write reports/<UTC time>-<system>-overload/, and point the link to the newest at it if it is complete."""
    target = reports / f"{results['run']}-{results['system']}-overload"
    with complete_folder(target, LATEST) as work:
        write_json(results, work / "results.json")
        charts = {"overload": Chart(partial(draw_overload, results), (9.6, 5.4), (4.0, 5.4))}
        write_charts(charts, work)
        content = page(
            "loadtest",
            "overload/overload.html.j2",
            results=results,
            rows=rows(results),
            sentence=sentence(results),
            also=verdicts.also(results["verdict"]),
            palettes=PALETTES,
            images=images(charts),
        )
        write_atomically(work / "report.html", content)
    return target


def print_result(results: Results, console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for label, value in rows(results):
        table.add_row(label, value)
    console.print(table)
    console.print(f"\n[bold]{escape(sentence(results))}[/]")
    for line in [*verdicts.also(results["verdict"]), *filter(None, [results["advice"]])]:
        console.print(escape(line))


def main() -> int:
    settings = Settings.load()
    results = Overload(settings).run()
    print_result(results, out)  # before the report, which a full disk prevents
    folder = os.path.relpath(write(results, settings.reports))
    out.print(f"\nreport  {folder}/report.html  (numbers: {folder}/results.json)")
    return EXIT_CODES[results["verdict"]["word"]]


# --- the figure: latency, refusals and recovery over time -------------------------------------------------------------


def draw_overload(results: Results, figure: Figure, palette: Palette) -> None:
    """Draw latency above, and what became of the requests below, from the overload until the server has recovered."""
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    draw_latency(results, above, palette)
    draw_requests(results, below, palette)
    for axes in (above, below):
        axes.axvspan(0, results["settings"]["window_s"], color=palette.ink, alpha=0.06, linewidth=0)
        if axes.get_legend_handles_labels()[0]:
            columns = 5 if figure.get_figwidth() > 6 else 2
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, ncols=columns)
    below.set_xlabel("seconds; shaded: the overload")


def draw_latency(results: Results, axes: Axes, palette: Palette) -> None:
    window_s, seconds = results["settings"]["window_s"], results["timeline"]
    for key, label, style in (("accepted_p95_ms", "answers, p95", "-"), ("accepted_p50_ms", "p50", "--")):
        points = [(second["second"] + 0.5, second[key]) for second in seconds if second[key] is not None]
        axes.plot(*zip(*points, strict=True) if points else ([], []), style, color=palette.dynamic, label=label)
    single = [(window_s + at, latency) for at, latency in results["single_requests"] if latency is not None]
    axes.plot(
        *zip(*single, strict=True) if single else ([], []), "o", color=palette.instances, markersize=3,
        label="single requests",
    )  # fmt: skip
    axes.axhline(results["settings"]["target_ms"], color=palette.ink, linewidth=0.9, linestyle=":", label="target")
    axes.axhline(
        results["as_fast_ms"], color=palette.instances, linewidth=0.9, linestyle=":", label="as fast as before"
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_ylabel("milliseconds")


def draw_requests(results: Results, axes: Axes, palette: Palette) -> None:
    kinds = {
        "in_time": ("answered in time", palette.dynamic),
        "late": ("answered late", palette.none),
        "refused": ("refused", palette.quiet),
        "failed": ("failed or not sent", palette.ink),
    }
    kinds = {key: kind for key, kind in kinds.items() if any(second[key] for second in results["timeline"])}
    middles = [second["second"] + 0.5 for second in results["timeline"]]
    below = [0.0] * len(middles)
    for key, (label, colour) in kinds.items():
        heights = [second[key] for second in results["timeline"]]
        axes.bar(middles, heights, 1.0, below, color=colour, label=label, linewidth=0)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_ylabel("requests/s")
