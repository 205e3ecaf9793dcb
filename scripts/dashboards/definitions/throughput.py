"""How much the server does, why, and what it costs: while it is simply used, and while a comparison runs."""

from __future__ import annotations

from scripts.dashboards.definitions.panels import Query, by_mode, lines, locust, new_dashboard, number, variable

WHICH = '{model=~"$model", mode=~"$mode"}'
NO_COMPARISON = "No load test (make loadtest, make locust)"


def mean(series: str, by: str = "model, mode", where: str = "", runs: str = "avg") -> str:
    """A recorded series over the time between two points of the graph; `runs`: how several runs are put together."""
    which = WHICH[:-1] + (f", {where}" if where else "") + "}"
    return f"{runs} by ({by}) (avg_over_time({series}{which}[$__rate_interval]))"


def total(series: str, by: str = "model, mode") -> str:
    return mean(series, by, runs="sum")


def part(title: str, description: str, parts: str):
    seconds = mean("model_part:request_seconds:mean", "model, mode, part", f'part=~"{parts}"')
    return lines(title, description, "s", Query(f"sum by (model, mode) ({seconds})", "{{model}}, {{mode}}"), width=8)


def latency(quantile: float) -> Query:
    buckets = 'sum by (le, mode) (rate(loadtest_request_duration_seconds_bucket{mode=~"$mode"}[$__rate_interval]))'
    answered = 'sum by (mode) (rate(loadtest_request_duration_seconds_count{mode=~"$mode"}[$__rate_interval])) > 0'
    return Query(
        f"histogram_quantile({quantile}, {buckets}) and on (mode) ({answered})", f"p{quantile * 100:.0f}, {{{{mode}}}}"
    )


def throughput():
    padding = total("model:padding_tokens:rate")
    mean_hardware = (
        'avg by (hardware, mode) (avg_over_time(hardware:utilization:ratio{mode=~"$mode"}[$__rate_interval]))'
    )
    panels = [
        number(
            "Requests/s",
            "Of the model that answers the most: an ensemble, or the busiest of its steps.",
            "reqps",
            Query(f"max(sum by (model) (model:requests:rate{WHICH}))", "requests/s", instant=True),
            decimals=1,
        ),
        number(
            "Largest mean batch",
            "Inferences an execution, of the model that batches the most.",
            "none",
            Query(f"max(model:batch_size:mean{WHICH})", "batch", instant=True),
            decimals=1,
        ),
        number(
            "Longest wait",
            "Mean time in the queue, of the model in which requests wait the longest.",
            "s",
            Query(f'max(model_part:request_seconds:mean{{part="queue", {WHICH[1:]})', "wait", instant=True),
        ),
        number(
            "Failures/s",
            "Of all models; cancelled requests too.",
            "reqps",
            Query(f"sum(model_reason:failures:rate{WHICH})", "failures/s", instant=True),
            bad_from=0.001,
        ),
        number(
            "Pending",
            "Requests that wait to be computed, of all models.",
            "none",
            Query(f"sum(model:pending_requests:sum{WHICH})", "pending", instant=True),
        ),
        number(
            "Alerts firing",
            "Which ones, Prometheus says on its page Alerts; what to do, docs/alerts.md.",
            "none",
            Query('count(ALERTS{alertstate="firing"}) or vector(0)', "alerts", instant=True),
            bad_from=1,
        ),
        lines(
            "Requests/s",
            "Answered requests, sound or not. An ensemble and its steps each count every request.",
            "reqps",
            Query(mean("model:requests:rate"), "{{model}}, {{mode}}"),
        ),
        lines(
            "Mean batch size",
            "Inferences an execution. An ensemble itself does not batch: its steps do.",
            "none",
            Query(
                f"{total('model:inferences:rate')} / ({total('model:executions:rate')} > 0)",
                "{{model}}, {{mode}}",
            ),
        ),
        part(
            "Waiting, a request",
            "Mean time in the queue of a model before it is computed.",
            "queue",
        ),
        part(
            "Computing, a request",
            "Mean time in the model itself. A request in a batch is computed for as long as its batch.",
            "compute infer",
        ),
        part(
            "Input and output, a request",
            "Mean time of taking a request's input and of handing over its output.",
            "compute (in|out)put",
        ),
        lines(
            "Queue share",
            "The part of a request's time that it waits. Near 100 %: more load than the model can take.",
            "percentunit",
            Query(mean("model:queue_share:ratio"), "{{model}}, {{mode}}"),
            most=1,
        ),
        lines(
            "Failures/s by reason",
            "As Triton says it: REJECTED waited too long, CANCELED by who asked, BACKEND and OTHER in the model.",
            "reqps",
            Query(f"sum(avg_over_time(model_reason:failures:rate{WHICH}[$__rate_interval]))", "all"),
            Query(
                f"{total('model_reason:failures:rate', 'model, reason')} > 0",
                "{{model}}: {{reason}}",
            ),
        ),
        lines(
            "Pending requests",
            "Requests that wait to be computed.",
            "none",
            Query(
                f"max by (model, mode) (max_over_time(model:pending_requests:sum{WHICH}[$__rate_interval]))",
                "{{model}}, {{mode}}",
            ),
        ),
        lines(
            "Latency seen by Locust",
            "In measured windows of a comparison.",
            "s",
            latency(0.5),
            latency(0.95),
            latency(0.99),
            no_value=NO_COMPARISON,
        ),
        lines(
            "Tokens/s",
            "Tokens of texts: cut by the tokenizer, computed by the encoder.",
            "short",
            Query(mean("model:tokens:rate"), "{{model}}, {{mode}}"),
        ),
        lines(
            "Padding share",
            "The part of what was computed that is not text, but fills rows up to one length.",
            "percentunit",
            Query(
                f"{padding} / ({total('model:tokens:rate')} + {padding} > 0)",
                "{{model}}, {{mode}}",
            ),
        ),
        lines(
            "Texts cut off/s",
            "Texts longer than the tokenizer's max_length. What is beyond it, the model never sees.",
            "none",
            Query(
                'sum by (model) (rate(transformers_truncated_texts_total{model=~"$model"}[$__rate_interval]))',
                "{{model}}",
            ),
            width=6,
        ),
        by_mode(
            lines(
                "Hardware in use",
                "Of all CPUs of the machine, and of all GPUs or NeuronCores where there are any: the part in use.",
                "percentunit",
                Query(mean_hardware, "{{hardware}}, {{mode}}"),
                width=6,
                most=1,
            )
        ),
        *locust("", NO_COMPARISON),
    ]
    return new_dashboard(
        "triton-throughput",
        "Triton: throughput",
        "What each model answers, in which batches, where a request's time goes, and what fails.",
        "now-15m",
        panels,
        [
            variable("model", "Model", "label_values(model:requests:rate, model)"),
            variable("mode", "Mode", "label_values(model:requests:rate, mode)"),
        ],
    )
