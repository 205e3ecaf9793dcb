"""The dashboard of everyday use: how much the server answers, in which batches, and where the time goes."""

from __future__ import annotations

from triton_transformers.dashboards.definitions.panels import (
    Query,
    by_mode,
    lines,
    locust,
    names,
    new_dashboard,
    number,
    variable,
)
from triton_transformers.prometheus import API_ROUTES

WHICH = '{model=~"$model", mode=~"$mode"}'
NO_CLIENT = "No request through the gateway"
NO_COMPARISON = "No load test (make loadtest, make locust)"


def mean(series: str, by: str = "model, mode", where: str = "", runs: str = "avg") -> str:
    """Return the mean of a recorded series between two points of the graph; `runs` aggregates several runs."""
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


def gateway_latency(quantile: float, histogram: str, name: str) -> Query:
    """Return a quantile of a histogram of the gateway, for each route that answered."""
    api = f"{{{API_ROUTES}}}[$__rate_interval]"
    buckets = f"sum by (le, route) (rate({histogram}_bucket{api}))"
    answered = f"sum by (route) (rate({histogram}_count{api})) > 0"
    return Query(f"histogram_quantile({quantile}, {buckets}) and on (route) ({answered})", f"{name}, {{{{route}}}}")


def generated(
    title: str,
    description: str,
    unit: str,
    query: str,
    maximum: float | None = None,
    no_value: str = "No generated text",
):
    """Show a figure of the models that generate text."""
    legend = "{{model}}, {{mode}}"
    return lines(title, description, unit, Query(query, legend), width=6, maximum=maximum, no_value=no_value)


def gateway():
    """Show what clients of the gateway see, in two rows."""
    yield lines(
        "Gateway: requests/s",
        "Answers by status code. 429: more requests at once than GATEWAY_IN_FLIGHT.",
        "reqps",
        Query(f"sum by (code) (rate(gateway_requests_total{{{API_ROUTES}}}[$__rate_interval]))", "{{code}}"),
        width=8,
        no_value=NO_CLIENT,
    )
    yield lines(
        "Gateway: latency",
        "From a request's arrival to the last byte of its answer.",
        "s",
        *(gateway_latency(q, "gateway_request_seconds", f"p{q * 100:.0f}") for q in (0.5, 0.95, 0.99)),
        width=8,
        no_value=NO_CLIENT,
    )
    yield lines(
        "Gateway: requests in flight",
        "Requests that the gateway works on, at most GATEWAY_IN_FLIGHT.",
        "none",
        Query("max(max_over_time(gateway_in_flight[$__rate_interval]))", "in flight"),
        width=8,
        no_value="The gateway does not run",
    )
    yield lines(
        "Gateway: time to first token",
        "From a request's arrival to the first piece of its stream.",
        "s",
        *(gateway_latency(q, "gateway_first_token_seconds", f"p{q * 100:.0f}") for q in (0.5, 0.95)),
        no_value="No stream",
    )
    yield lines(
        "Gateway: tokens/s",
        "Tokens of prompts and texts, and generated ones, as the answers count them (usage).",
        "short",
        Query("sum by (kind) (rate(gateway_tokens_total[$__rate_interval]))", "{{kind}}"),
        no_value=NO_CLIENT,
    )


def throughput():
    padding = total("model:padding_tokens:rate")
    mean_hardware = (
        'avg by (hardware, mode) (avg_over_time(hardware:utilization:ratio{mode=~"$mode"}[$__rate_interval]))'
    )
    panels = [
        number(
            "Requests/s",
            "Of the model that answers most: an ensemble, or the busiest of its steps.",
            "reqps",
            Query(f"max(sum by (model) (model:requests:rate{WHICH}))", "requests/s", instant=True),
            decimals=1,
        ),
        number(
            "Largest mean batch",
            "Inferences per execution, or texts per step of a model that generates; of the model that batches most.",
            "none",
            Query(f"max(model:texts_per_step:mean{WHICH} or model:batch_size:mean{WHICH})", "batch", instant=True),
            decimals=1,
        ),
        number(
            "Longest wait",
            "Mean time in the queue, of the model with the longest queue.",
            "s",
            Query(f'max(model_part:request_seconds:mean{{part="queue", {WHICH[1:]})', "wait", instant=True),
        ),
        number(
            "Failures/s",
            "Of all models, cancelled requests included.",
            "reqps",
            Query(f"sum(model_reason:failures:rate{WHICH})", "failures/s", instant=True),
            bad_from=0.001,
        ),
        number(
            "Pending",
            "Requests in the queues of all models.",
            "none",
            Query(f"sum(model:pending_requests:sum{WHICH})", "pending", instant=True),
        ),
        number(
            "Alerts firing",
            "Prometheus lists them on its page Alerts; docs/alerts.md has the remedies.",
            "none",
            Query('count(ALERTS{alertstate="firing"}) or vector(0)', "alerts", instant=True),
            bad_from=1,
        ),
        names(
            "Engines",
            "What computes each model, in which precision. For ONNX models on a CPU, TRITON_ENGINE chooses.",
            Query(
                'max by (model, engine, precision) (transformers_engine{model=~"$model"}) > 0',
                "{{model}}: {{engine}} {{precision}}",
                instant=True,
            ),
            no_value="No model reports its engine",
        ),
        lines(
            "Requests/s",
            "Answered requests, failures included. An ensemble and its steps each count every request.",
            "reqps",
            Query(mean("model:requests:rate"), "{{model}}, {{mode}}"),
        ),
        lines(
            "Mean batch size",
            "Inferences per execution. An ensemble does not batch; its steps do.",
            "none",
            Query(
                f"{total('model:inferences:rate')} / ({total('model:executions:rate')} > 0)",
                "{{model}}, {{mode}}",
            ),
        ),
        part(
            "Queue time per request",
            "Mean time that a request spends in the queue of a model.",
            "queue",
        ),
        part(
            "Compute time per request",
            "Mean time in the model itself. A request in a batch takes as long as its batch.",
            "compute infer",
        ),
        part(
            "Input and output time per request",
            "Mean time of reading a request's input and writing its output.",
            "compute (in|out)put",
        ),
        lines(
            "Queue share",
            "Share of a request's time that it spends in the queue. Near 100 % the model is overloaded.",
            "percentunit",
            Query(mean("model:queue_share:ratio"), "{{model}}, {{mode}}"),
            maximum=1,
        ),
        lines(
            "Failures/s by reason",
            "Triton's reasons: REJECTED (waited too long), CANCELED (by the client), BACKEND and OTHER (in the model).",
            "reqps",
            Query(f"sum(avg_over_time(model_reason:failures:rate{WHICH}[$__rate_interval]))", "all"),
            Query(
                f"{total('model_reason:failures:rate', 'model, reason')} > 0",
                "{{model}}: {{reason}}",
            ),
        ),
        lines(
            "Pending requests",
            "Requests in the queue.",
            "none",
            Query(
                f"max by (model, mode) (max_over_time(model:pending_requests:sum{WHICH}[$__rate_interval]))",
                "{{model}}, {{mode}}",
            ),
        ),
        lines(
            "Latency seen by Locust",
            "Latency in the measured windows of a comparison.",
            "s",
            latency(0.5),
            latency(0.95),
            latency(0.99),
            no_value=NO_COMPARISON,
        ),
        *gateway(),
        lines(
            "Tokens/s",
            "Tokens of texts, as tokenizers produce and encoders compute them, and of prompts.",
            "short",
            Query(mean("model:tokens:rate"), "{{model}}, {{mode}}"),
        ),
        lines(
            "Padding share",
            "Share of the computed tokens that only fill rows up to one length.",
            "percentunit",
            Query(
                f"{padding} / ({total('model:tokens:rate')} + {padding} > 0)",
                "{{model}}, {{mode}}",
            ),
        ),
        generated(
            "Generated tokens/s",
            "Tokens that models add to prompts, for all texts together.",
            "short",
            mean("model:generated_tokens:rate"),
        ),
        generated(
            "Texts per step",
            "Tokens that one step of the model generates: one for each text that runs.",
            "none",
            mean("model:texts_per_step:mean"),
        ),
        generated(
            "Running texts",
            "Texts that are being continued, at most max_batch.",
            "none",
            mean("model:running_texts:sum"),
        ),
        generated(
            "Waiting texts",
            "Texts that wait until a running one has ended. From max_waiting on, requests get a 503.",
            "none",
            f"max by (model, mode) (max_over_time(model:waiting_texts:sum{WHICH}[$__rate_interval]))",
        ),
        generated(
            "Time to first token",
            "Mean time from a request's arrival to its first token, of texts that ended.",
            "s",
            mean("model:first_token_seconds:mean"),
        ),
        generated(
            "Time per output token",
            "Mean time between two tokens of a text, of texts that ended.",
            "s",
            mean("model:output_token_seconds:mean"),
        ),
        generated(
            "Cache in use",
            "Share of the cache for keys and values that running texts use. Near 100 %, texts wait for memory.",
            "percentunit",
            mean("model:cache_usage:ratio"),
            maximum=1,
        ),
        generated(
            "Prefix-cache hits",
            "Tokens of prompts per second that need no computing, because an earlier prompt began in the same way. "
            "OpenVINO GenAI has them too, but only vLLM counts them.",
            "short",
            mean("model:prefix_cached_tokens:rate"),
            no_value="No model on vLLM",
        ),
        lines(
            "Truncated texts/s",
            "Texts longer than the model's max_length. The model does not see the rest.",
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
                "Share of all CPUs of the machine in use, and of all GPUs or NeuronCores if it has any.",
                "percentunit",
                Query(mean_hardware, "{{hardware}}, {{mode}}"),
                width=6,
                maximum=1,
            ),
            prefix="CPU, ",
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
