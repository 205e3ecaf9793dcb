"""The dashboard of everyday use: how much the server answers, in which batches, and where the time goes."""

from __future__ import annotations

from functools import partial
from typing import Any

from monitoring.definitions import panels
from monitoring.definitions.panels import OF_STEPS, Query, names, new_dashboard, number, row, variable
from triton_transformers.prometheus import API_ROUTES

WHICH = '{model=~"$model", mode=~"$mode"}'
BOTH = "{{model}}, {{mode}}"
lines = partial(panels.lines, width=8)
of_gateway = partial(lines, no_value="No request through the gateway")
generated = partial(lines, width=6, no_value="No generated text")
of_load_test = partial(lines, no_value="No load test (make loadtest, make locust)")


def mean(series: str, by: str = "model, mode", where: str = "", runs: str = "avg") -> str:
    """Return the mean of a recorded series between two points of the graph; `runs` aggregates several runs."""
    which = WHICH[:-1] + (f", {where}" if where else "") + "}"
    return f"{runs} by ({by}) (avg_over_time({series}{which}[$__rate_interval]) {OF_STEPS})"


def total(series: str, by: str = "model, mode") -> str:
    return mean(series, by, runs="sum")


def part(title: str, description: str, parts: str) -> Any:
    seconds = mean("model_part:request_seconds:mean", "model, mode, part", f"part{parts}")
    return lines(title, description, "s", Query(f"sum by (model, mode) ({seconds})", BOTH))


def latency(quantile: float, histogram: str, which: str, by: str) -> Query:
    """Return a quantile of a histogram, for each value of a label that has answers."""
    buckets = f"sum by (le, {by}) (rate({histogram}_bucket{{{which}}}[$__rate_interval]))"
    answered = f"sum by ({by}) (rate({histogram}_count{{{which}}}[$__rate_interval])) > 0"
    return Query(
        f"histogram_quantile({quantile}, {buckets}) and on ({by}) ({answered})", f"p{quantile * 100:.0f}, {{{{{by}}}}}"
    )


def gateway_latency(histogram: str, *quantiles: float) -> list[Query]:
    return [latency(quantile, histogram, API_ROUTES, "route") for quantile in quantiles]


def throughput() -> Any:
    return new_dashboard(
        "triton-throughput",
        "Triton: throughput",
        "What each model answers, in which batches, where a request's time goes, and what fails.",
        "now-15m",
        [
            *row("Overview", overview()),
            *row("Gateway", gateway()),
            *row("Batching", batching()),
            # Only some stacks generate text, and a load test ends.
            *row("Generation", generation(), collapsed=True),
            *row("Load test", load_test(), collapsed=True),
        ],
        [
            variable("model", "Model", "label_values(model:requests:rate, model)"),
            variable("mode", "Mode", "label_values(model:requests:rate, mode)"),
        ],
    )


# fmt: off
def overview() -> list[Any]:
    """Show what to look at first, on one screen."""
    utilization = 'avg_over_time(hardware:utilization:ratio{mode=~"$mode"}[$__rate_interval])'
    return [
        number("Requests/s", "Of the model that answers most: an ensemble, or the busiest of its steps.", "none",
            Query(f"max(sum by (model) (model:requests:rate{WHICH}))", "requests/s", instant=True), decimals=1),
        number("Largest mean batch",
            "Inferences per execution, or texts per step of a model that generates; of the model that batches most.",
            "none",
            Query(f"max(model:texts_per_step:mean{WHICH} or model:batch_size:mean{WHICH})", "batch", instant=True),
            decimals=1),
        number("Longest wait", "Mean time in the queue, of the model with the longest queue.", "s",
            Query(f'max(model_part:request_seconds:mean{{part="queue", {WHICH[1:]})', "wait", instant=True)),
        number("Failures/s", "Of all models, cancelled requests included.", "none",
            Query(f"sum(model_reason:failures:rate{WHICH})", "failures/s", instant=True), bad_from=0.001),
        number("Pending", "Requests in the queues of all models.", "none",
            Query(f"sum(model:pending_requests:sum{WHICH})", "pending", instant=True)),
        number("Alerts firing", "Prometheus lists them on its page Alerts; docs/monitoring.md has remedies.", "none",
            Query('count(ALERTS{alertstate="firing"}) or vector(0)', "alerts", instant=True), bad_from=1),
        names("Engines",
            "What computes each model, in which precision. For ONNX models on a CPU, TRITON_ENGINE chooses.",
            Query('max by (model, engine, precision) (transformers_engine{model=~"$model"}) > 0',
                  "{{model}}: {{engine}} {{precision}}", instant=True), no_value="No model reports its engine"),
        lines("Requests/s by model",
            "Answered requests, failures included. Those to an ensemble are counted by its steps.",
            "suffix:requests/s", Query(mean("model:requests:rate"), BOTH)),
        lines("Failures/s by reason",
            "Triton's reasons: REJECTED (waited too long), CANCELED (by the client), BACKEND and OTHER (in the model).",
            "suffix:requests/s",
            Query(f"sum(avg_over_time(model_reason:failures:rate{WHICH}[$__rate_interval]))", "all"),
            Query(f"{total('model_reason:failures:rate', 'model, reason')} > 0", "{{model}}: {{reason}}")),
        lines("Hardware in use",
            "Share of all CPUs of the machine in use, and of all GPUs or NeuronCores if it has any.", "percentunit",
            Query(f"avg by (hardware, mode) ({utilization})", "{{hardware}}, {{mode}}"), maximum=1, modes="CPU, "),
    ]


def gateway() -> list[Any]:
    """Show what clients of the gateway see."""
    return [
        of_gateway("Responses/s",
            "Responses by status code. 429: more requests at once than GATEWAY_IN_FLIGHT.", "suffix:responses/s",
            Query(f"sum by (code) (rate(gateway_requests_total{{{API_ROUTES}}}[$__rate_interval]))", "{{code}}")),
        of_gateway("Response time", "From a request's arrival to the last byte of its response.", "s",
            *gateway_latency("gateway_request_seconds", 0.5, 0.95, 0.99)),
        of_gateway("Requests in flight",
            "Requests that the gateway works on, at most GATEWAY_IN_FLIGHT.", "suffix:requests",
            Query("max(max_over_time(gateway_in_flight[$__rate_interval]))", "in flight"),
            no_value="The gateway does not run"),
        of_gateway("Time to the first piece of a stream", "From a request's arrival.", "s",
            *gateway_latency("gateway_first_token_seconds", 0.5, 0.95), width=12, no_value="No stream"),
        of_gateway("Tokens/s in usage",
            "Tokens of prompts and texts, and generated ones, as the responses count them (usage).", "suffix:tokens/s",
            Query("sum by (kind) (rate(gateway_tokens_total[$__rate_interval]))", "{{kind}}"), width=12),
    ]


def batching() -> list[Any]:
    padding = total("model:padding_tokens:rate")
    return [
        lines("Mean batch size", "Inferences per execution.", "suffix:per batch",
            Query(f"{total('model:inferences:rate')} / ({total('model:executions:rate')} > 0)", BOTH)),
        part("Queue time per request", "Mean time in a model's queue.", '="queue"'),
        part("Compute time per request", "Mean time in a model after its queue, with its batch.", '!="queue"'),
        lines("Queue share",
            "Share of a request's time that it spends in the queue. Near 100 % the model is overloaded.",
            "percentunit", Query(mean("model:queue_share:ratio"), BOTH), maximum=1),
        lines("Pending requests", "Requests in the queue.", "suffix:requests",
            Query(f"max by (model, mode) (max_over_time(model:pending_requests:sum{WHICH}[$__rate_interval]))", BOTH)),
        lines("Tokens/s",
            "Tokens of texts, as tokenizers produce and encoders compute them, and of prompts.", "suffix:tokens/s",
            Query(mean("model:tokens:rate"), BOTH)),
        lines("Padding share", "Share of the computed tokens that only fill rows up to one length.", "percentunit",
            Query(f"{padding} / ({total('model:tokens:rate')} + {padding} > 0)", BOTH), width=12),
        lines("Truncated texts/s", "Texts longer than the model's max_length. The model does not see the rest.",
            "suffix:texts/s",
            Query('sum by (model) (rate(transformers_truncated_texts_total{model=~"$model"}[$__rate_interval]))',
                  "{{model}}"), width=12),
    ]


def generation() -> list[Any]:
    return [
        generated("Generated tokens/s", "Tokens that models add to prompts, for all texts together.",
            "suffix:tokens/s", Query(mean("model:generated_tokens:rate"), BOTH)),
        generated("Texts per step", "Tokens that one step of the model generates: one for each text that runs.",
            "suffix:texts", Query(mean("model:texts_per_step:mean"), BOTH)),
        generated("Running texts", "Texts that are being continued, at most max_batch.", "suffix:texts",
            Query(mean("model:running_texts:sum"), BOTH)),
        generated("Waiting texts",
            "Texts that wait until a running one has ended. From max_waiting on, requests get a 503.", "suffix:texts",
            Query(f"max by (model, mode) (max_over_time(model:waiting_texts:sum{WHICH}[$__rate_interval]))", BOTH)),
        generated("Time to first token",
            "Mean time from a request's arrival to its first token, of texts that ended.", "s",
            Query(mean("model:first_token_seconds:mean"), BOTH)),
        generated("Time per output token", "Mean time between two tokens of a text, of texts that ended.", "s",
            Query(mean("model:output_token_seconds:mean"), BOTH)),
        generated("Cache in use",
            "Share of the cache for keys and values that running texts use. Near 100 %, texts wait for memory.",
            "percentunit", Query(mean("model:cache_usage:ratio"), BOTH), maximum=1),
        generated("Prefix-cache hits",
            "Tokens of prompts per second that need no computing, because an earlier prompt began in the same way. "
            "OpenVINO GenAI has them too, but only vLLM counts them.", "suffix:tokens/s",
            Query(mean("model:prefix_cached_tokens:rate"), BOTH), no_value="No model on vLLM"),
    ]


def load_test() -> list[Any]:
    """Show the load generator: what its users see, and whether it is the limit itself."""
    return [
        of_load_test("Latency seen by Locust", "95th percentile in the measured windows of a comparison.", "s",
            latency(0.95, "loadtest_request_duration_seconds", 'mode=~"$mode"', "mode"), modes="p95, "),
        of_load_test("Users",
            "Locust's users. Without RATE, each waits for its response before it sends the next request.",
            "suffix:users", Query("max(loadtest_users)", "users")),
        of_load_test("Locust's own core",
            "Share of a core that Locust's busiest process uses. From 90 % on, the figures measure Locust itself.",
            "percentunit", Query("max(loadtest_cpu_cores)", "busiest process"), maximum=1),
    ]
