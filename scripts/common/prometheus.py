"""A small client for what is asked of Prometheus' HTTP API: queries, and the values of a label."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

from scripts.common.http import opener


class PrometheusError(Exception):
    """What Prometheus answered, or why it did not."""


@dataclass(frozen=True)
class Series:
    labels: dict[str, str]
    times: list[float]
    values: list[float]


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def at(self, expr: str, time: float) -> list[Series]:
        """The values at a point of time."""
        found = self._call("query", query=expr, time=time)
        if found["resultType"] == "scalar":
            return [_series({}, [found["result"]])]
        return [_series(each["metric"], [each["value"]]) for each in found["result"]]

    def over(self, expr: str, start: float, end: float, step: float) -> list[Series]:
        """The values at each step from start to end."""
        found = self._call("query_range", query=expr, start=start, end=end, step=step)
        return [_series(each["metric"], each["values"]) for each in found["result"]]

    def label_values(self, label: str, selector: str, start: float, end: float) -> list[str]:
        return self._call(f"label/{label}/values", **{"match[]": selector}, start=start, end=end)

    def _call(self, path: str, **parameters: object):
        # Without a body: all of these may be asked with GET, and values of labels only so.
        request = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with opener.open(request, timeout=30) as response:
                return json.loads(response.read())["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"Prometheus refuses {parameters.get('query', path)}: {_why(error)}") from None
        except (OSError, http.client.HTTPException) as error:
            raise PrometheusError(f"{self.url} does not answer: {getattr(error, 'reason', error)}") from None
        except (ValueError, KeyError, TypeError):
            raise PrometheusError(f"{self.url} is not a Prometheus: it answered {path} with something else") from None


def _why(error: urllib.error.HTTPError) -> str:
    try:
        return json.loads(error.read())["error"]
    except (ValueError, KeyError, TypeError):
        return str(error)


def _series(labels: dict[str, str], points: list) -> Series:
    return Series(labels, [float(time) for time, _ in points], [float(value) for _, value in points])
