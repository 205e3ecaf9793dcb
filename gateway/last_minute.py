"""Read the figures of the served models that Prometheus recorded in the last minute."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

from triton_transformers.prometheus import API_ROUTES, Prometheus


def _rate(counter: str, labels: str = "") -> str:
    return f"sum by (model) (rate({counter}{labels}[1m]))"


def _first_of(own: str, tritons: str) -> str:
    """Prefer the backend's own counter: Triton's times of a request that streams end before its first token."""
    return f"({_rate(own)} or {_rate(tritons)})"


# Figure -> PromQL. Triton counts a failed request to an ensemble twice (docs/metrics.md), so failures are kept apart.
QUERIES = {
    "successes": _rate("nv_inference_request_success"),
    "failures": _rate("nv_inference_request_failure", '{reason!="CANCELED"}'),
    "seconds": _first_of("transformers_request_microseconds_total", "nv_inference_request_duration_us") + " / 1e6",
    "timed": _first_of("transformers_requests_total", "nv_inference_request_success"),
    "batch": f"{_rate('nv_inference_count')} / ({_rate('nv_inference_exec_count')} > 0)",
    "tokens": _rate("transformers_generated_tokens_total"),
    "together": f"{_rate('transformers_generated_tokens_total')} / ({_rate('transformers_runs_total')} > 0)",
    "engine": "max by (model, engine, precision) (transformers_engine == 1)",
    "answers": f"sum by (code) (rate(gateway_requests_total{{{API_ROUTES}}}[1m]))",
    "p95": f"histogram_quantile(0.95, sum by (le) (rate(gateway_request_seconds_bucket{{{API_ROUTES}}}[1m])))",
    "in_flight": "sum(gateway_in_flight)",
}
# One request for all of them. The label `figure` names each.
QUERY = "\nor ".join(f'label_replace({promql}, "figure", "{figure}", "", "")' for figure, promql in QUERIES.items())


@dataclass(frozen=True)
class Figures:
    """The values of the last minute, per second where they are rates. What had no traffic has no value."""

    models: dict[str, dict[str, float]] = field(default_factory=dict)  # model -> figure -> value
    engines: dict[str, str] = field(default_factory=dict)  # model -> engine and precision
    answers: dict[str, float] = field(default_factory=dict)  # status code -> answers of the gateway's API
    totals: dict[str, float] = field(default_factory=dict)  # p95, in_flight

    @classmethod
    def read(cls, prometheus: Prometheus) -> Figures:
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
