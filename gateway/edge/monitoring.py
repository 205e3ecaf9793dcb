"""Read recent figures from Prometheus, and look for Grafana, Locust and the newest reports."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from triton_transformers.files import Measurement, comparison_lock
from triton_transformers.http import answers
from triton_transformers.prometheus import API_ROUTES, Prometheus, PrometheusError
from triton_transformers.settings import Settings

LIMIT_S = 1.0
PERIOD_S = 60  # of each rate and mean
# Program -> the path that answers if it runs.
PAGES = {"Grafana": "/api/health", "Prometheus": "/-/ready", "Locust": "/"}
# The last part of a report's address -> what the page calls it, and its file in the folder REPORTS.
REPORTS = {
    "latest": ("Newest comparison", "latest/report.html"),
    "latest-overload": ("Newest overload", "latest-overload/report.html"),
    "latest-tune": ("Newest search", "latest-tune/tune.html"),
}


def _rate(counter: str, labels: str = "") -> str:
    return f"sum by (model) (rate({counter}{labels}[{PERIOD_S}s]))"


def _first_of(own: str, tritons: str) -> str:
    """Prefer the backend's own counter: Triton's times of a request that streams end before its first token."""
    return f"({_rate(own)} or {_rate(tritons)})"


# Figure -> PromQL. Triton counts a failed request to an ensemble twice (docs/monitoring.md): keep failures apart.
QUERIES = {
    "successes": _rate("nv_inference_request_success"),
    "failures": _rate("nv_inference_request_failure", '{reason!="CANCELED"}'),
    "seconds": _first_of("transformers_request_microseconds_total", "nv_inference_request_duration_us") + " / 1e6",
    "timed": _first_of("transformers_requests_total", "nv_inference_request_success"),
    "batch": f"{_rate('nv_inference_count')} / ({_rate('nv_inference_exec_count')} > 0)",
    "tokens": _rate("transformers_generated_tokens_total"),
    "together": f"{_rate('transformers_generated_tokens_total')} / ({_rate('transformers_runs_total')} > 0)",
    "engine": "max by (model, engine, precision) (transformers_engine == 1)",
    "answers": f"sum by (code) (rate(gateway_requests_total{{{API_ROUTES}}}[{PERIOD_S}s]))",
    "p95": f"histogram_quantile(0.95, sum by (le) (rate(gateway_request_seconds_bucket{{{API_ROUTES}}}[{PERIOD_S}s])))",
    "in_flight": "sum(gateway_in_flight)",
}
# One request for all of them. The label `figure` names each.
QUERY = "\nor ".join(f'label_replace({promql}, "figure", "{figure}", "", "")' for figure, promql in QUERIES.items())


@dataclass(frozen=True)
class RecentFigures:
    """The values of the last minute, per second where they are rates. What had no traffic has no value."""

    models: dict[str, dict[str, float]] = field(default_factory=dict)  # model -> figure -> value
    engines: dict[str, str] = field(default_factory=dict)  # model -> engine and precision
    answers: dict[str, float] = field(default_factory=dict)  # status code -> answers of the gateway's API
    totals: dict[str, float] = field(default_factory=dict)  # p95, in_flight

    @classmethod
    def read(cls, prometheus: Prometheus) -> RecentFigures:
        """Ask Prometheus. Raise PrometheusError if it does not answer."""
        models: dict[str, dict[str, float]] = defaultdict(dict)
        figures = cls(models)
        for series in prometheus.at(QUERY, time.time()):
            labels, value = series.labels, series.values[0]
            figure, model = labels["figure"], labels.get("model", "")
            if value != value:  # no number: histogram_quantile without traffic
                continue
            if figure == "engine":
                figures.engines[model] = f"{labels['engine']} {labels['precision']}"
            elif figure == "answers":
                figures.answers[labels["code"]] = value
            elif model:
                models[model][figure] = value
            else:
                figures.totals[figure] = value
        return figures


class Monitoring:
    """Reads from these programs in threads, so that the requests of the API do not wait."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # One thread for each question. A question that still waits, such as for a slow name server, is not asked again.
        self._threads = ThreadPoolExecutor(len(PAGES) + 1)
        self._asked: dict[str, asyncio.Future[Any]] = {}

    async def read(self, host: str) -> tuple[RecentFigures | None, list[tuple[str, str]]]:
        """Return the figures, None if Prometheus does not answer within a second, and the pages to link.

        The links lead somewhere from a browser that reached the gateway by this host name.
        """
        if not self._settings:
            return None, []
        figures, *answered = await asyncio.gather(
            self._ask("figures", self._figures), *(self._ask(name, partial(self._answers, name)) for name in PAGES)
        )
        links = [(title, f"/reports/{name}") for name, (title, _) in REPORTS.items() if self.report(name)]
        if is_loopback(host) or not self._settings.bind_address.is_loopback:
            programs = [name for name, is_there in zip(PAGES, answered, strict=True) if is_there]
            links = [(name, f"http://{host}:{self._settings.value(_port(name))}/") for name in programs] + links
        return figures, links

    async def _ask(self, question: str, read: Callable[[], Any]) -> Any:
        """Return the answer of `read`, or None if it takes too long."""
        answer = self._asked.get(question)
        if answer is None or answer.done():
            answer = self._asked[question] = asyncio.get_running_loop().run_in_executor(self._threads, read)
        try:
            return await asyncio.wait_for(asyncio.shield(answer), LIMIT_S)
        except TimeoutError:
            return None

    def report(self, name: str) -> Path | None:
        """Return the file of the report, or None if there is none."""
        path = self._settings.reports / REPORTS[name][1] if self._settings else None
        return path if path and path.is_file() else None

    def measurement(self) -> Measurement | None:
        """Return the comparison, the search or the overload that runs against this server."""
        return Measurement.read(comparison_lock(self._settings)) if self._settings else None

    def _figures(self) -> RecentFigures | None:
        try:
            return RecentFigures.read(Prometheus(self._url("Prometheus"), LIMIT_S))
        except PrometheusError:
            return None

    def _answers(self, name: str) -> bool:
        return answers(self._url(name) + PAGES[name], LIMIT_S)

    def _url(self, name: str) -> str:
        # Compose sets PROMETHEUS_URL and its like: in a container the settings are the host's ports, for links.
        return os.environ.get(f"{name.upper()}_URL") or self._settings.url(_port(name))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _port(name: str) -> str:
    return f"{name.upper()}_PORT"
