"""A small client of Prometheus' HTTP API: queries, and the values of a label."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from triton_transformers.http import opener

# The series of the gateway's APIs, and not of its page, its trials, its health and its metrics.
API_ROUTES = 'route!~"/|/health|/metrics|/page.*|/reports/.*|/try/.*|other"'


class PrometheusError(Exception):
    """An error that Prometheus answered, or the reason why it did not answer."""


@dataclass(frozen=True)
class Series:
    labels: dict[str, str]
    times: list[float]
    values: list[float]


class Prometheus:
    def __init__(self, url: str, timeout: float = 30) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout

    def at(self, expr: str, time: float) -> list[Series]:
        """Return the series' values at one time."""
        answer = self.call("query", query=expr, time=time)
        if answer["resultType"] == "scalar":
            return [_series({}, [answer["result"]])]
        return [_series(series["metric"], [series["value"]]) for series in answer["result"]]

    def over(self, expr: str, start: float, end: float, step: float) -> list[Series]:
        """Return the series' values at each step from start to end."""
        answer = self.call("query_range", query=expr, start=start, end=end, step=step)
        return [_series(series["metric"], series["values"]) for series in answer["result"]]

    def label_values(self, label: str, selector: str, start: float, end: float) -> list[str]:
        """Return the label's values among the series of the selector between start and end."""
        values: list[str] = self.call(f"label/{label}/values", **{"match[]": selector}, start=start, end=end)
        return values

    def firing_alerts(self) -> list[tuple[str, str]]:
        """Return the name and the summary of each alert that fires."""
        firing = [alert for alert in self.call("alerts")["alerts"] if alert["state"] == "firing"]
        return [(alert["labels"]["alertname"], alert["annotations"].get("summary", "")) for alert in firing]

    def call(self, path: str, **parameters: object) -> Any:
        # All of these endpoints take GET, and the one for label values takes nothing else.
        request = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with opener.open(request, timeout=self.timeout) as response:
                return json.loads(response.read())["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"Prometheus refuses {parameters.get('query', path)}: {_why(error)}") from None
        except (OSError, http.client.HTTPException) as error:
            raise PrometheusError(f"{self.url} does not answer: {getattr(error, 'reason', error)}") from None
        except (ValueError, KeyError, TypeError):
            raise PrometheusError(f"{self.url} is not a Prometheus: it did not answer {path} as one does") from None


def _why(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (ValueError, KeyError, TypeError):
        return str(error)


def _series(labels: dict[str, str], points: list[Any]) -> Series:
    return Series(labels, [float(time) for time, _ in points], [float(value) for _, value in points])
