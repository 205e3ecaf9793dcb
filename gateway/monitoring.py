"""Look for the programs beside the gateway (Prometheus and its figures, Grafana, Locust) and for the newest reports."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gateway.last_minute import Figures
from triton_transformers.http import answers
from triton_transformers.prometheus import Prometheus, PrometheusError
from triton_transformers.settings import Settings

LIMIT_S = 1.0
# Program -> the path that answers if it runs.
PAGES = {"Grafana": "/api/health", "Prometheus": "/-/ready", "Locust": "/"}
# The last part of a report's address -> what the page calls it, and its file in the folder REPORTS.
REPORTS = {
    "latest": ("Latest report", "latest/report.html"),
    "latest-tune": ("Latest search", "latest-tune/tune.html"),
}


@dataclass(frozen=True)
class Link:
    """A page to go to."""

    name: str
    url: str


@dataclass(frozen=True)
class Observed:
    """The answers that came in time. If Prometheus did not answer, there are no figures."""

    figures: Figures | None
    pages: frozenset[str] = frozenset()  # the programs whose page answers
    reports: frozenset[str] = frozenset()  # those that exist


class Monitoring:
    """Reads from these programs in threads, so that the requests of the API do not wait."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # One thread for each question. A question that still waits, such as for a slow name server, is not asked again.
        self._threads = ThreadPoolExecutor(len(PAGES) + 1)
        self._asked: dict[str, asyncio.Future[Any]] = {}

    async def read(self) -> Observed:
        """Return what answers within a second."""
        if not self._settings:
            return Observed(None)
        figures, *pages = await asyncio.gather(
            self._ask("figures", self._figures), *(self._ask(name, partial(self._answers, name)) for name in PAGES)
        )
        reports = frozenset(name for name in REPORTS if self.report(name))
        return Observed(
            figures, frozenset(name for name, answered in zip(PAGES, pages, strict=True) if answered), reports
        )

    async def _ask(self, question: str, read: Callable[[], Any]) -> Any:
        """Return the answer of `read`, or None if it takes too long."""
        answer = self._asked.get(question)
        if answer is None or answer.done():
            answer = self._asked[question] = asyncio.get_running_loop().run_in_executor(self._threads, read)
        try:
            return await asyncio.wait_for(asyncio.shield(answer), LIMIT_S)
        except TimeoutError:
            return None

    def links(self, observed: Observed, host: str) -> list[Link]:
        """Return the links that lead somewhere from a browser that reached the gateway by this host name."""
        links = [Link(REPORTS[name][0], f"/reports/{name}") for name in REPORTS if name in observed.reports]
        if observed.pages and (is_loopback(host) or not self._settings.bind_address.is_loopback):
            pages = [name for name in PAGES if name in observed.pages]
            links = [Link(name, f"http://{host}:{self._settings.value(_port(name))}/") for name in pages] + links
        return links

    def report(self, name: str) -> Path | None:
        """Return the file of the report, or None if there is none."""
        path = self._settings.reports / REPORTS[name][1] if self._settings else None
        return path if path and path.is_file() else None

    def _figures(self) -> Figures | None:
        try:
            return Figures.read(Prometheus(self._url("Prometheus"), LIMIT_S))
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
