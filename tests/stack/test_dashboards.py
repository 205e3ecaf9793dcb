"""Every panel of every dashboard on the real Prometheus during a comparison: its numbers are those of the results.

A comparison of a system that generates text runs before, so that the panels for such systems have numbers too.
Prometheus scrapes recorded samples for GPUs and NeuronCores, because the test machines have none.
"""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from markupsafe import escape

from loadtest.measure.statistics import COUNTER_SKEW
from loadtest.reports.report import charts_only
from monitoring.drawing.charts import MODE_COLOURS
from monitoring.drawing.evaluate import BATCHING, Evaluator, Range, load, rows
from tests.support import promql
from tests.support.checkpoints import language
from tests.support.dashboards import ALL, PANELS, panels_of
from tests.support.embedding import embed
from tests.support.generation import settled
from tests.support.http_servers import script
from tests.support.stacks import COMMAND_S, TestStack
from triton_transformers.files import write_atomically
from triton_transformers.prometheus import Prometheus
from triton_transformers.settings import MODES, ROOT

RECORDED = Path(__file__).with_name("recorded")
# The recorded series lag by seconds: without a warm-up, a window begins with those of the mode before.
SHORT = {"ROUNDS": 3, "WINDOW": 5, "WARMUP": 4, "USERS": 16}
# A window without a length lasts until enough texts are answered.
GENERATING = {"SYSTEM": "story", "ROUNDS": 3, "WARMUP": 1}
# Panels with at least one query for hardware that the test machines lack.
NEEDS_HARDWARE = {
    "GPUs in use",
    "Memory of the GPUs",
    "Power",
    "Energy per request",
    "NeuronCores in use",
    "Memory of the Neuron runtime",
    "Latency of an execution",
    "Executions/s",
    "Errors of the hardware/s",
}
# Queries that return series only after failures, in a container with a limit, or after the end of a comparison.
SELDOM = {
    ("Verdict", "{{word}}"),
    ("Proven ratio", "ratio"),
    ("Failures/s by reason", "{{model}}: {{reason}}"),
    ("Memory of Triton and its models", "in the container"),
    ("Memory of Triton and its models", "limit"),
}


def recorded_names() -> set[str]:
    text = "".join(path.read_text() for path in RECORDED.iterdir())
    return set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))


@pytest.fixture(scope="module")
def recorded():
    """Serve the recorded samples; return the addresses."""
    paths = sorted(RECORDED.iterdir())
    kind = {"Content-Type": "text/plain; version=0.0.4"}
    with script({f"/{path.name}": (200, kind, path.read_bytes()) for path in paths}) as server:
        address = server.url.removeprefix("http://")
        yield [
            {"labels": {"job": path.stem, "__metrics_path__": f"/{path.name}"}, "targets": [address]} for path in paths
        ]


@pytest.fixture(scope="module")
def served(stack, tmp_path_factory) -> TestStack:
    source = language.save_mistral(tmp_path_factory.mktemp("story"), context=4096)
    stack.assemble({"SYSTEMS": "story", "SOURCE": source, "TASK": "text-generation"})
    return stack.serve("story")


@pytest.fixture(scope="module")
def prometheus(served):
    return Prometheus(served.prometheus)


def value(prometheus: Prometheus, expr: str, at: float) -> float:
    (series,) = prometheus.at(expr, at)
    return series.values[-1]


def use_gateway(served: TestStack) -> None:
    """Embed a text and stream one through the gateway."""
    served.post("/v1/embeddings", model="embedding", input="a text")
    body = json.dumps({"model": "story", "prompt": "once", "stream": True}).encode()
    headers = {"Authorization": f"Bearer {served.client_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{served.gateway}/v1/completions", body, headers)) as response:
        assert response.read()


@pytest.fixture(scope="module")
def generated(served) -> dict:
    """Compare the generating system one at a time and together; return when that began, the output and the results."""
    began, before = time.time(), served.triton.config("story_stream")
    use_gateway(served)
    done = served.make("loadtest", **GENERATING)
    use_gateway(served)  # a rate needs a counter that grows after its first scrape
    assert served.triton.config("story_stream") == before
    output = done.stdout + done.stderr
    results = served.results_of(done.returncode, output)
    return {"began": began, "ended": time.time(), "output": output, "results": results}


@dataclass
class Run:
    """A comparison that has ended: what every panel showed in its last window, and its results."""

    shown: dict
    results: dict
    ended: float


@pytest.fixture(scope="module")
def run(served, prometheus, recorded, generated) -> Run:
    process, lines = served.follow_make("loadtest", **SHORT)
    process.wait_until(lambda: prometheus.at("loadtest_window", time.time()), "a window")
    targets = served.folder / "state/prometheus/targets.json"  # `make` does not write it again
    write_atomically(targets, json.dumps(json.loads(targets.read_text()) + recorded))
    results = served.results_of(process.wait(COMMAND_S), "".join(lines))
    ended = time.time()
    moment = last_moment_of(prometheus, results["windows"][-1])
    shown = {}
    for name, dashboard in ALL.items():
        evaluator = Evaluator(prometheus, dashboard, Range(generated["began"], moment))
        shown |= {(name, panel["id"]): evaluator.lines(panel) for panel in panels_of(dashboard)}
        shown[name] = evaluator.regions()
    return Run(shown, results, ended)


def last_moment_of(prometheus: Prometheus, window: dict) -> float:
    """Return the last second of the window for which Prometheus, which may be late, has a rate."""
    expr = f'model:requests:rate{{mode="{window["mode"]}", model="embedding"}} and on () loadtest_window'
    (series,) = prometheus.over(expr, window["began_at"], end_of(window), 1)
    return series.times[-1]


def end_of(window: dict) -> float:
    return window["began_at"] + window["end"] - window["start"]


@pytest.mark.parametrize("name", ALL)
def test_every_query_has_finite_numbers(run, name):
    for panel in panels_of(ALL[name]):
        lines = run.shown[name, panel["id"]]
        for target in panel["targets"]:
            if (panel["title"], target["legendFormat"]) in SELDOM:
                continue
            pattern = re.escape(re.sub(r"{{\w+}}", "@", target["legendFormat"])).replace("@", ".+")
            matching = [line for line in lines if re.fullmatch(pattern, line.name)]
            assert matching, f"{panel['title']}: {target['expr']}"
        for line in lines:
            assert line.series.values, panel["title"]
            assert all(map(math.isfinite, line.series.values)), f"{panel['title']}: {line}"


@pytest.mark.parametrize("panel", PANELS)
def test_only_hardware_panels_use_recorded_samples(panel):
    queried = set().union(*(promql.metrics(target["expr"]) for target in panel["targets"]))
    assert bool(queried & recorded_names()) == (panel["title"] in NEEDS_HARDWARE)


@pytest.mark.parametrize("name", ALL)
def test_windows_have_the_colour_of_their_mode(run, name):
    regions = run.shown[name]
    assert {colour for colour, _, _ in regions} == set(MODE_COLOURS.values())
    # Prometheus may scrape late.
    longest = max(window["end"] - window["start"] for window in run.results["windows"]) + 10
    assert all(end - start <= longest for _, start, end in regions if end > start)


def test_every_queried_metric_exists_and_is_documented(run, prometheus):
    queried = set().union(*(promql.metrics(rule["expr"]) for rule in promql.rules()))
    for dashboard in ALL.values():
        queries = [target for panel in panels_of(dashboard) for target in panel["targets"]]
        queries += dashboard["annotations"]["list"]
        queried |= set().union(*(promql.metrics(query["expr"]) for query in queries))
    # Prometheus creates the first series for firing alerts. This stack has no certificate, and on a busy
    # machine no comparison is proven.
    queried -= {"ALERTS", "gateway_certificate_expiry_timestamp_seconds", "loadtest_proven_ratio"}
    existing = set(prometheus.label_values("__name__", '{__name__!=""}', time.time() - 300, time.time()))
    assert queried - existing == set()
    documented = set(re.findall(r"^\| `([\w:]+)", (ROOT / "docs/monitoring.md").read_text(), re.MULTILINE))
    prefixes = ("gateway_", "loadtest_", "transformers_", "nv_", "model", "run", "stack")
    ours = {name for name in existing if name.startswith(prefixes)}
    ours = {re.sub(r"(?<=seconds)_(bucket|sum|count)$", "", name) for name in ours}
    assert {re.sub(r"_bucket$|(?<=seconds)_count$", "", name) for name in queried} - {"up"} <= documented
    assert ours - documented == set()


def test_every_rule_is_evaluated(run, served):
    with urllib.request.urlopen(f"{served.prometheus}/api/v1/rules", timeout=120) as response:
        groups = json.loads(response.read())["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(promql.rules())
    assert [rule for rule in rules if rule["health"] != "ok"] == []


def total(results: dict, mode: str, key: str) -> float:
    return sum(window[key] for window in results["windows"] if window["mode"] == mode)


@pytest.mark.parametrize("mode", MODES)
def test_load_generator_series_equal_the_results(run, prometheus, mode):
    results = run.results

    def seen(expr: str) -> float:
        return value(prometheus, expr, run.ended)

    labels = f'run="{results["run"]}", mode="{mode}"'
    counted = seen(f'max_over_time(loadtest_requests_total{{{labels}, outcome="ok"}}[5m])')
    assert counted == total(results, mode, "requests") - total(results, mode, "failures")
    measured = seen(f"max_over_time(loadtest_measured_seconds_total{{{labels}}}[5m])")
    assert measured == pytest.approx(total(results, mode, "end") - total(results, mode, "start"), rel=0.001)
    recorded = seen(f"last_over_time(run_mode:throughput:mean{{{labels}}}[5m])")
    assert recorded == pytest.approx(counted / measured, rel=0.01)
    buckets = f"max by (le) (max_over_time(loadtest_request_duration_seconds_bucket{{{labels}}}[5m]))"
    for quantile in (50, 95, 99):
        milliseconds = seen(f"histogram_quantile({quantile / 100}, {buckets})") * 1000
        assert milliseconds == pytest.approx(results["modes"][mode][f"p{quantile}_ms"], rel=0.125)  # a bucket's width


def test_dashboard_gets_the_verdict_of_the_results(run, prometheus):
    verdict, which = run.results["verdict"], f'{{run="{run.results["run"]}"}}[5m]'
    (word,) = prometheus.at(f"last_over_time(loadtest_verdict{which})", run.ended)
    assert word.labels["word"] == verdict["word"]
    ratios = prometheus.at(f"last_over_time(loadtest_proven_ratio{which})", run.ended)
    assert [ratio.values[-1] for ratio in ratios] == [verdict["large"]] * (verdict["word"] == "proven")


@pytest.mark.parametrize("mode", MODES)
def test_triton_series_agree_with_locust_and_counters(run, prometheus, mode):
    """Compare what Triton counted between the scrapes inside a window, and around it, however late they were."""
    users, model = SHORT["USERS"], run.results["model"]
    inferences, executions, modes = 0.0, 0.0, set()
    for window in (window for window in run.results["windows"] if window["mode"] == mode):
        inside, around = increases(prometheus, 'nv_inference_request_success{model="embedding"}', window)
        assert inside - users <= window["requests"] <= around + users
        inferences += increases(prometheus, f'nv_inference_count{{model="{model}"}}', window)[0]
        executions += increases(prometheus, f'nv_inference_exec_count{{model="{model}"}}', window)[0]
        series = prometheus.over("model:requests:rate", window["began_at"], end_of(window) - 1, 1)
        modes |= {one.labels["mode"] for one in series}
    if mode == "dynamic":
        assert inferences > executions
    else:  # Triton updates its counters one after the other
        assert inferences == pytest.approx(executions, abs=4 * COUNTER_SKEW)
    assert inferences > 0
    # All series have the window's mode, except in seconds for which Prometheus was late.
    assert mode in modes <= {mode, "as configured"}


def increases(prometheus: Prometheus, counter: str, window: dict) -> tuple[float, float]:
    """Return by how much the counter grew between two scrapes inside the window, and between two around it.

    A scrape may get its values up to a second after its time.
    """
    begin, end = window["began_at"], end_of(window)
    answer = prometheus.call("query", query=f"{counter}[{math.ceil(end - begin) + 60}s]", time=end + 30)
    (series,) = answer["result"]
    samples = [(float(time), float(count)) for time, count in series["values"]]
    inside = [count for time, count in samples if begin <= time <= end - 1]
    before = [count for time, count in samples if time <= begin - 1]
    after = [count for time, count in samples if time >= end]
    return inside[-1] - inside[0] if inside else 0, after[0] - before[-1]


def test_generating_system_is_compared_one_at_a_time_and_together(generated):
    results, output = generated["results"], generated["output"]
    assert "each instance of 'story_stream' would hold the model's weights again" in results["left_out"]["instances"]
    assert results["settings"]["users"] == 8
    one, together = (results["modes"][mode] for mode in ("none", "dynamic"))
    assert (one["failures"], together["failures"]) == (0, 0)
    # A step that reads a part of a long prompt generates nothing.
    assert 0.8 < one["tokens_per_step"] <= 1.0
    assert together["tokens_per_step"] > 1.5  # of 8 users, who on a busy machine send late
    for figures in (one, together):
        # No text ends before its 32 tokens unless the model draws its end token.
        assert 0 < figures["tokens_per_second"] <= 32 * 1.3 * figures["throughput_rps"]
        assert 0 < figures["output_token_ms"] < figures["p50_ms"]
    # Alone, each text waits for those of the seven other users.
    assert one["first_token_ms"] > together["first_token_ms"] > 0
    for word in ("tokens/s", "one at a time", "together", "time to first token", "time per output token"):
        assert word in " ".join(output.split())
    assert "openvino-genai" in results["engines"]["story_stream"]


@pytest.mark.parametrize("mode", ["none", "dynamic"])
def test_series_of_generated_text_agree_with_the_results(generated, prometheus, mode):
    """Compare with what the backend counted between the scrapes, however late they were."""
    results, ended = generated["results"], generated["ended"]
    tokens = 'transformers_generated_tokens_total{model="story_stream"}'
    windows = [window for window in results["windows"] if window["mode"] == mode]
    inside = sum(increases(prometheus, tokens, window)[0] for window in windows)
    at_all = value(prometheus, f"max_over_time({tokens}[10m])", ended)
    assert inside <= results["modes"][mode]["generated_tokens"] <= at_all

    def extreme(function: str, series: str) -> float:
        labels = f'model="story_stream", mode="{mode}", run="{results["run"]}"'
        return value(prometheus, f"{function}_over_time({series}{{{labels}}}[10m])", ended)

    for series in ("generated_tokens:rate", "first_token_seconds:mean", "output_token_seconds:mean"):
        assert extreme("max", f"model:{series}") > 0
    if mode == "none":
        assert extreme("min", "model:texts_per_step:mean") <= 1.05
        assert extreme("min", "model:running_texts:sum") <= 1
        assert extreme("max", "model:waiting_texts:sum") > 3
    else:
        assert extreme("max", "model:texts_per_step:mean") > 2
        assert extreme("max", "model:running_texts:sum") > 1


def test_backends_count_texts_tokens_and_padding(run, served):
    def counts() -> dict[str, float]:
        samples = re.findall(r'^(\w+)\{model="(\w+)".*\} (\S+)$', served.metrics(), re.MULTILINE)
        return {f"{model} {name}": float(value) for name, model, value in samples if "failure" not in name}

    def all_reported() -> dict[str, float] | None:
        now = counts()
        return now if now["encoder transformers_texts_total"] == now["encoder nv_inference_count"] else None

    served.wait(all_reported, "the texts of the comparison in the counters")
    settled(served, "encoder")
    before = counts()
    lines = ["one two three", "one two three four five six seven", "many " * 400]
    embed(served, *lines)
    texts = {"name": "input_text", "shape": [3, 1], "datatype": "BYTES", "data": lines}
    served.triton.infer("tokenizer", {"inputs": [texts]})
    models, tokens = ("tokenizer", "encoder"), 5 + 9 + 256

    def all_counted() -> dict[str, float] | None:
        now, name = counts(), "transformers_tokens_total"
        return now if all(now[f"{model} {name}"] == before[f"{model} {name}"] + tokens for model in models) else None

    served.wait(all_counted, "the tokens in the counters")
    for model in models:
        settled(served, model)
    after = counts()
    added = {name: value - before[name] for name, value in after.items()}
    for model in models:
        assert added[f"{model} transformers_texts_total"] == 3
        assert added[f"{model} transformers_truncated_texts_total"] == 1
        assert added[f"{model} transformers_tokens_total"] == tokens
    # The tokenizer pads three rows to the longest; the encoder packs them.
    assert added["tokenizer transformers_padding_tokens_total"] == 3 * 256 - tokens
    assert added["encoder transformers_padding_tokens_total"] < 10
    assert added["encoder transformers_runs_total"] >= 2
    assert after["encoder transformers_dynamic_batching"] == 1
    assert after["encoder transformers_max_batch_size"] == 64
    used, limit = after["encoder transformers_memory_used_bytes"], after["encoder transformers_memory_limit_bytes"]
    assert 2**28 < used < limit


def test_memory_is_that_of_the_servers_own_processes(served, prometheus):
    server = served.server()

    def shown_and_own() -> tuple[float, int] | None:
        own = sum(own_memory(process) for process in (server, *server.children(recursive=True)))
        shown = [series.values[-1] for series in prometheus.at("stack:process_memory:bytes", time.time())]
        return (shown[0], own) if shown and abs(shown[0] - own) < 0.2 * own else None

    served.wait(shown_and_own, "the own memory of tritonserver and its processes in Prometheus")


def own_memory(process: psutil.Process) -> int:
    memory = process.memory_info()
    return memory.rss - memory.shared


def test_batching_gauge_follows_the_configuration(run, served):
    """A Python process that destroys its metrics when another replaces it crashes, and its answers do not show it."""

    def batching() -> str:
        return re.search(r'transformers_dynamic_batching\{model="encoder".*\} (\d)', served.metrics())[1]

    before, config = served.stub("encoder").pid, served.triton.config("encoder")
    served.triton.load("encoder", {key: value for key, value in config.items() if key != "dynamic_batching"})
    served.wait(lambda: batching() == "0" and not psutil.pid_exists(before), "off, and the end of the former process")
    served.triton.load("encoder", config)
    served.wait(lambda: batching() == "1", "on")
    kernel = subprocess.run(["dmesg"], capture_output=True, text=True)  # empty if this user may not read it
    assert not re.search(rf"\[{before}\]: segfault", kernel.stdout)


def test_report_contains_the_dashboard(run, served):
    page = (served.folder / "reports/latest/report.html").read_text()
    assert "Recorded by Prometheus" in page
    assert "Nothing measured yet" not in page
    for panel in charts_only(load(BATCHING), {})["panels"]:
        assert f"<h4>{escape(panel['title'])}</h4>" in page


def test_make_dashboards_draws_one_page(run, served):
    done = served.make("dashboards", RANGE="3m")
    assert done.returncode == 0, done.stderr
    page = (served.folder / "reports/dashboards.html").read_text()
    assert "reports/dashboards.html" in done.stdout
    left_out = "".join(re.findall(r"Left out\.([^<]*)<", page))
    for name in ("dashboards/throughput", "dashboards/batching", "hardware/cpu/hardware"):
        for title, panels in rows(ALL[name]):
            for panel in panels:
                name_left_out = f"the row {title}" if f"the row {title}" in page else escape(panel["title"])
                assert f"<h4>{escape(panel['title'])}</h4>" in page or name_left_out in left_out
    sources = re.findall(r'(?:src|srcset)="([^"]{0,40})', page)
    assert sources
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "nan" not in re.sub(r"data:[^\"]*", "", page).lower().split()


def test_make_dashboards_explains_errors(served):
    for settings, message in (
        ({"RANGE": "long"}, "RANGE=long: must be a length of time above 0"),
        ({"UNTIL": "2001-01-01"}, "Prometheus has no samples from 2000-12-31 23:45:00 to"),
        ({"PROMETHEUS_PORT": "9"}, "no Prometheus answers on http://127.0.0.1:9. Start the stack: `make up`"),
    ):
        done = served.make("dashboards", **settings)
        assert done.returncode != 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_taken_metrics_port_is_reported_before_any_change(served, recorded):
    port = recorded[0]["targets"][0].partition(":")[2]
    done = served.make("loadtest", **SHORT, LOADTEST_METRICS_PORT=port)
    assert done.returncode != 0
    assert f"port {port} cannot be opened" in done.stderr
    assert "LOADTEST_METRICS_PORT" in done.stderr


def test_grafana_is_provisioned(served, grafana_home):
    url = f"http://127.0.0.1:{served.environment['GRAFANA_PORT']}"
    assert url in served.make("status").stdout
    with urllib.request.urlopen(f"{url}/api/search", timeout=120) as response:
        dashboards = json.loads(response.read())
    assert {dashboard["uid"] for dashboard in dashboards} == {"triton-throughput", "triton-batching", "triton-hardware"}
    assert len(dashboards) == 3
    with urllib.request.urlopen(f"{url}/api/datasources", timeout=120) as response:
        assert f"url: {served.prometheus}" in response.read().decode()


def test_healthy_stack_fires_no_alert(run, prometheus):
    """Neither the comparison nor the recorded samples may fire one."""
    assert prometheus.at('ALERTS{alertstate="firing"}', time.time()) == []


def test_gateway_page_has_the_figures_of_the_running_stack(served):
    def text_with_figures() -> str:
        for _ in range(3):
            served.post("/v1/embeddings", model="embedding", input=["a text", "another"])
        key = base64.b64encode(f"anybody:{served.client_key}".encode()).decode()
        page = urllib.request.urlopen(
            urllib.request.Request(served.gateway, headers={"Authorization": f"Basic {key}"}), timeout=120
        )
        text = " ".join(re.sub("<[^>]*>", " ", page.read().decode()).split())
        # Prometheus has read the counters of Triton and of the gateway twice.
        measured = (
            r"95 % answered within last 60 s [\d.]+ ms.* mean latency last 60 s [\d.]+ ms.* "
            r"encoder packed_onnx, .*, up to 64 [\d.]+ "
        )
        return text if re.search(measured, text) else ""

    text = served.wait(text_with_figures, "the page's figures")
    assert "does not answer" not in text
    assert "encoder packed_onnx, onnxruntime f32" in text
