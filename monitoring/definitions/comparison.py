"""The dashboard of one comparison, while it runs and afterwards: dynamic batching beside the other modes."""

from __future__ import annotations

from functools import partial
from typing import Any

from monitoring.definitions import panels
from monitoring.definitions.panels import OF_STEPS, Query, new_dashboard, variable

NO_RUN = "Nothing measured yet (make loadtest)"
NO_VERDICT = "No verdict yet"
# Most panels have one series for each mode, in its colour.
lines, number, bars = (partial(kind, no_value=NO_RUN, modes="") for kind in (panels.lines, panels.number, panels.bars))
# Without a run Grafana fills in an empty name, which would match series without the label.
RUN = 'run="$run", run!=""'


def so_far(series: str, by: str = "mode") -> str:
    """Return a count since the run began. Every run counts from zero, so its maximum is the total."""
    return f"sum by ({by}) (max_over_time({series}{{{RUN}}}[$__range]))"


def percentile(quantile: float) -> Query:
    buckets = so_far("loadtest_request_duration_seconds_bucket", by="le, mode")
    return Query(
        f"histogram_quantile({quantile}, {buckets}) and on (mode)"
        f" ({so_far('loadtest_request_duration_seconds_count')} > 0)",
        f"p{quantile * 100:.0f}, {{{{mode}}}}",
        instant=True,
    )


def measured(series: str, which: str = RUN, every: str = "$__range") -> str:
    """Return a recorded series in the measured windows only, without warm-up and switching."""
    return f"({series}{{{which}}} and on (run, mode) loadtest_window)[{every}:1s]"


def in_windows(series: str) -> str:
    """Return a recorded series in measured windows, for each point of a graph."""
    return measured(series, every="$__rate_interval")


def over_windows(series: str) -> str:
    return f"sum by (model, mode) (sum_over_time({measured(series)}) {OF_STEPS})"


def mean_seconds(title: str, description: str, parts: str) -> Any:
    series = measured("model_part:request_seconds:mean", f"{RUN}, part{parts}")
    query = f"sum by (model, mode) (avg by (model, mode, part) (avg_over_time({series}) {OF_STEPS}))"
    return bars(title, description, "s", Query(query, "{{model}}, {{mode}}", instant=True), width=6)


def batching() -> Any:
    return new_dashboard(
        "triton-batching",
        "Triton: batching comparison",
        "Dynamic batching beside the modes without it on the same running server, while make loadtest measures them.",
        "now-30m",
        all_panels(),
        [variable("run", "Comparison", "label_values(loadtest_measured_seconds_total, run)", newest=True)],
    )


# fmt: off
def all_panels() -> list[Any]:
    return [
        panels.names("Verdict",
            "Whether the report says proven, doubtful or not proven: at the end of the comparison.",
            Query(f"last_over_time(loadtest_verdict{{{RUN}}}[$__range])", "{{word}}", instant=True),
            width=6, height=6, no_value=NO_VERDICT),
        panels.number("Proven ratio",
            "The report's ratio: throughput with dynamic batching divided by that of the best other mode, or in an "
            "open loop the other way around, of p95. Shown only if the verdict is proven.", "suffix:×",
            Query(f"last_over_time(loadtest_proven_ratio{{{RUN}}}[$__range])", "ratio", instant=True),
            width=6, height=6, decimals=2, no_value="Nothing proven"),
        number("Requests/s", "Successful answers per second, as Locust counts them in measured windows.", "none",
            Query(f"last_over_time(run_mode:throughput:mean{{{RUN}}}[$__range])", "{{mode}}", instant=True),
            width=8, height=6, decimals=1),
        panels.number("Failed requests",
            "Failed answers in measured windows. A single one makes the comparison not proven.", "none",
            Query(f'sum(max_over_time(loadtest_requests_total{{{RUN}, outcome="failed"}}[$__range]))', "failed",
                  instant=True), height=6, bad_from=1, no_value=NO_RUN),
        bars("Latency seen by Locust", "Latency of all successful answers in measured windows.", "s",
            *map(percentile, (0.5, 0.95, 0.99)), width=6),
        bars("Mean batch size", "Inferences per execution over the whole run.", "none",
            Query(f"{over_windows('model:inferences:rate')} / ({over_windows('model:executions:rate')} > 0)",
                  "{{model}}, {{mode}}", instant=True), width=6, decimals=1),
        mean_seconds("Queue time per request", "Mean time in a model's queue.", '="queue"'),
        mean_seconds("Compute time per request", "Mean time in a model after its queue, with its batch.", '!="queue"'),
        lines("Requests/s over time",
            "Successful answers per second in measured windows. The gaps are for switching and warming up.",
            "suffix:requests/s",
            # Both stand still between windows, so the quotient is that of the windows alone.
            Query(f'sum by (mode) (rate(loadtest_requests_total{{{RUN}, outcome="ok"}}[$__rate_interval]))'
                  f" / (sum by (mode) (rate(loadtest_measured_seconds_total{{{RUN}}}[$__rate_interval])) > 0.1)",
                  "{{mode}}")),
        lines("Largest mean batch",
            "Inferences per execution in measured windows, or texts per step of a model that generates; of the "
            "model that batches most.", "suffix:per batch",
            # The rates reach three seconds back: outside windows they still hold the mode before.
            Query(f"max by (mode) (avg_over_time({in_windows('model:texts_per_step:mean')})"
                  f" or avg_over_time({in_windows('model:batch_size:mean')}))", "{{mode}}")),
        lines("Largest queue share",
            "Share of a request's time in the queue, of the model with the largest share.", "percentunit",
            Query(f"max by (mode) (model:queue_share:ratio{{{RUN}}})", "{{mode}}"), maximum=1),
        lines("Hardware in use",
            "Share of all CPUs of the machine in use, and of all GPUs or NeuronCores if it has any.", "percentunit",
            Query(f"avg by (hardware, mode) (hardware:utilization:ratio{{{RUN}}})", "{{hardware}}, {{mode}}"),
            maximum=1, modes="CPU, "),
    ]
