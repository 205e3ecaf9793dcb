"""One comparison: dynamic batching against none. The figures are those of its report, as far as it has come."""

from __future__ import annotations

from scripts.dashboards.definitions.panels import Query, bars, by_mode, lines, locust, new_dashboard, number, variable

NO_RUN = "Nothing measured yet (make loadtest)"


# Without a run Grafana fills in nothing, which series without the label would have too.
RUN = 'run="$run", run!=""'


def so_far(series: str, by: str = "mode") -> str:
    """A count since the run began. Every run counts from zero, so its largest value is the whole."""
    return f"sum by ({by}) (max_over_time({series}{{{RUN}}}[$__range]))"


def percentile(quantile: float) -> Query:
    buckets = so_far("loadtest_request_duration_seconds_bucket", by="le, mode")
    return Query(
        f"histogram_quantile({quantile}, {buckets}) and on (mode)"
        f" ({so_far('loadtest_request_duration_seconds_count')} > 0)",
        f"p{quantile * 100:.0f}, {{{{mode}}}}",
        instant=True,
    )


def throughput(mode: str) -> Query:
    return Query(f'last_over_time(run_mode:throughput:mean{{{RUN}, mode="{mode}"}}[$__range])', mode, instant=True)


def measured(series: str, which: str = RUN) -> str:
    """A recorded series in the measured windows alone: not while warming up, nor between."""
    return f"({series}{{{which}}} and on (run, mode) loadtest_window)[$__range:1s]"


def over_windows(series: str) -> str:
    return f"sum by (model, mode) (sum_over_time({measured(series)}))"


def mean_seconds(title: str, description: str, parts: str):
    series = measured("model_part:request_seconds:mean", f"{RUN}, part{parts}")
    query = f"sum by (model, mode) (avg by (model, mode, part) (avg_over_time({series})))"
    return by_mode(bars(title, description, "s", Query(query, "{{model}}, {{mode}}", instant=True), no_value=NO_RUN))


def batching():
    panels = [
        number(
            "Dynamic batching serves",
            "Requests/s with dynamic batching divided by those without, of all windows measured so far. "
            "How certain that is, the report says.",
            "suffix: ×",
            Query(f"last_over_time(run:throughput:ratio{{{RUN}}}[$__range])", "ratio", instant=True),
            width=8,
            height=6,
            decimals=2,
            no_value=NO_RUN,
        ),
        by_mode(
            number(
                "Requests/s",
                "Sound answers a second, as Locust counts them in measured windows.",
                "reqps",
                throughput("none"),
                throughput("dynamic"),
                width=8,
                height=6,
                decimals=1,
                no_value=NO_RUN,
            )
        ),
        by_mode(
            bars(
                "Latency seen by Locust",
                "Of all sound answers in measured windows.",
                "s",
                percentile(0.5),
                percentile(0.95),
                percentile(0.99),
                height=6,
                no_value=NO_RUN,
            )
        ),
        by_mode(
            lines(
                "Requests/s",
                "Sound answers a second in measured windows. Between them the server is switched and warmed up.",
                "reqps",
                Query(
                    # Both stand still between windows, so the quotient is that of the windows alone.
                    f'sum by (mode) (rate(loadtest_requests_total{{{RUN}, outcome="ok"}}[$__rate_interval]))'
                    f" / (sum by (mode) (rate(loadtest_measured_seconds_total{{{RUN}}}[$__rate_interval])) > 0.1)",
                    "{{mode}}",
                ),
                no_value=NO_RUN,
            )
        ),
        by_mode(
            lines(
                "Largest mean batch",
                "Inferences an execution, of the model that batches the most; warm-up included.",
                "none",
                Query(f"max by (mode) (model:batch_size:mean{{{RUN}}})", "{{mode}}"),
                no_value=NO_RUN,
            )
        ),
        by_mode(
            bars(
                "Mean batch size",
                "Inferences an execution over the whole run. An ensemble itself does not batch: its steps do.",
                "none",
                Query(
                    f"{over_windows('model:inferences:rate')} / ({over_windows('model:executions:rate')} > 0)",
                    "{{model}}, {{mode}}",
                    instant=True,
                ),
                decimals=1,
                no_value=NO_RUN,
            )
        ),
        mean_seconds(
            "Waiting, a request",
            "Mean time in a model's queue. Of an ensemble, its steps' queues are where requests wait.",
            '="queue"',
        ),
        mean_seconds(
            "Computing, a request",
            "Mean time in a model once out of its queue, with its batch. An ensemble's holds its steps' waiting.",
            '!="queue"',
        ),
        by_mode(
            lines(
                "Largest queue share",
                "The part of a request's time that it waits, of the model in which that is most.",
                "percentunit",
                Query(f"max by (mode) (model:queue_share:ratio{{{RUN}}})", "{{mode}}"),
                width=6,
                most=1,
                no_value=NO_RUN,
            )
        ),
        by_mode(
            lines(
                "Hardware in use",
                "Of all CPUs of the machine, and of all GPUs or NeuronCores where there are any: the part in use.",
                "percentunit",
                Query(f"avg by (hardware, mode) (hardware:utilization:ratio{{{RUN}}})", "{{hardware}}, {{mode}}"),
                width=6,
                most=1,
                no_value=NO_RUN,
            )
        ),
        number(
            "Failed requests",
            "Answers in measured windows that were not sound. One is enough for the comparison not to count.",
            "none",
            Query(
                f'sum(max_over_time(loadtest_requests_total{{{RUN}, outcome="failed"}}[$__range]))',
                "failed",
                instant=True,
            ),
            height=8,
            bad_from=1,
            no_value=NO_RUN,
        ),
        *locust(f"{{{RUN}}}", NO_RUN, width=4),
    ]
    return new_dashboard(
        "triton-batching",
        "Triton: batching comparison",
        "Dynamic batching against none, on the same running server: what make loadtest measures, while it measures.",
        "now-30m",
        panels,
        [variable("run", "Comparison", "label_values(loadtest_measured_seconds_total, run)", newest=True)],
    )
