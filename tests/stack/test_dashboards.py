"""Every panel of every dashboard on the real Prometheus during a comparison: its numbers are those of the results.

Prometheus scrapes recorded samples for GPUs and NeuronCores, because the test machines have none.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from markupsafe import escape

from loadtest.report import charts_only
from scripts.common.files import write_atomically
from scripts.common.prometheus import Prometheus
from scripts.common.settings import MODES, ROOT
from scripts.dashboards.definitions.panels import MODE_COLOURS
from scripts.dashboards.render.evaluate import Evaluator, Range
from tests.support import promql
from tests.support.dashboards import ALL, PANELS
from tests.support.embedding import embed
from tests.support.stacks import bring_up

RECORDED = Path(__file__).with_name("recorded")
STAND_IN = ROOT / "tests/docker/stand-ins/grafana/grafana_stand_in.py"
SHORT = {"ROUNDS": 2, "WINDOW": 7, "WARMUP": 4, "USERS": 16}
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
# Queries that return series only after failures. Another query of the same panel always returns some.
ONLY_AFTER_FAILURES = {("Failures/s by reason", "{{model}}: {{reason}}")}


def recorded_names() -> set[str]:
    text = "".join(path.read_text() for path in RECORDED.iterdir())
    return set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))


@pytest.fixture(scope="module")
def recorded():
    """Serve the recorded samples; return the addresses."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (RECORDED / Path(self.path).name).read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [
        {
            "labels": {"job": path.stem, "__metrics_path__": f"/{path.name}"},
            "targets": [f"127.0.0.1:{server.server_port}"],
        }
        for path in sorted(RECORDED.iterdir())
    ]
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def grafana_home(tmp_path_factory):
    home = tmp_path_factory.mktemp("grafana")
    (home / "bin").mkdir()
    binary = home / "bin/grafana"
    binary.write_text(f'#!/bin/sh\nexec python3 "{STAND_IN}" "$@"\n')
    binary.chmod(0o755)
    return home


@pytest.fixture(scope="module")
def stack(new_stack, grafana_home):
    stack = new_stack()
    stack.environment["GRAFANA_HOME"] = str(grafana_home)
    return bring_up(stack)


@pytest.fixture(scope="module")
def prometheus(stack):
    return Prometheus(stack.prometheus)


def now(prometheus: Prometheus, expr: str, at: float | None = None) -> float:
    (series,) = prometheus.at(expr, at or time.time())
    return series.values[-1]


@pytest.fixture(scope="module")
def run(stack, prometheus, recorded):
    """Run a comparison; return what every panel showed in its last window, and the results."""
    began = time.time()
    process = stack.start_make("loadtest", **SHORT)
    stack.wait(lambda: prometheus.at("loadtest_window", time.time()), "a window", 60)
    targets = stack.folder / "state/prometheus/targets.json"  # `make` does not write it again
    write_atomically(targets, json.dumps(json.loads(targets.read_text()) + recorded))
    stack.wait(lambda: prometheus.at('loadtest_window{mode="none", round="2"}', time.time()), "the last window", 180)
    time.sleep(3)
    shown = {}
    for name, dashboard in ALL.items():
        evaluator = Evaluator(prometheus, dashboard, Range(began, time.time()))
        shown |= {(name, panel["id"]): evaluator.lines(panel) for panel in dashboard["panels"]}
        shown[name] = evaluator.regions()
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    return shown, stack.results()


@pytest.mark.parametrize("name", ALL)
def test_every_query_has_finite_numbers(run, name):
    shown, _ = run
    for panel in ALL[name]["panels"]:
        lines = shown[name, panel["id"]]
        for target in panel["targets"]:
            if (panel["title"], target["legendFormat"]) in ONLY_AFTER_FAILURES:
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
    shown, _ = run
    assert {colour for colour, _, _ in shown[name]} == set(MODE_COLOURS.values())
    assert all(end - start <= SHORT["WINDOW"] + 2 for _, start, end in shown[name] if end > start)


def test_every_queried_metric_exists_and_is_documented(run, prometheus):
    queried = set().union(*(promql.metrics(rule["expr"]) for rule in promql.rules()))
    for dashboard in ALL.values():
        queries = [target for panel in dashboard["panels"] for target in panel["targets"]]
        queries += dashboard["annotations"]["list"]
        queried |= set().union(*(promql.metrics(query["expr"]) for query in queries))
    # Prometheus creates this series for firing alerts.
    queried -= {"ALERTS"}
    existing = set(prometheus.label_values("__name__", '{__name__!=""}', time.time() - 300, time.time()))
    assert queried - existing == set()
    documented = set(re.findall(r"^\| `([\w:]+)", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    ours = {
        name for name in existing if name.startswith(("loadtest_", "transformers_", "nv_", "model", "run", "stack"))
    }
    ours = {re.sub(r"_(bucket|sum|count)$", "", n) if n.startswith("loadtest_request_d") else n for n in ours}
    assert {re.sub(r"_bucket$|(?<=seconds)_count$", "", name) for name in queried} - {"up"} <= documented
    assert ours - documented == set()


def test_every_rule_is_evaluated(run, stack):
    with urllib.request.urlopen(f"{stack.prometheus}/api/v1/rules", timeout=10) as response:
        groups = json.loads(response.read())["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(promql.rules())
    assert [rule for rule in rules if rule["health"] != "ok"] == []


def total(results: dict, mode: str, key: str) -> float:
    return sum(window[key] for window in results["windows"] if window["mode"] == mode)


@pytest.mark.parametrize("mode", MODES)
def test_load_generator_series_equal_the_results(run, prometheus, mode):
    _, results = run
    labels = f'run="{results["run"]}", mode="{mode}"'
    counted = now(prometheus, f'max_over_time(loadtest_requests_total{{{labels}, outcome="ok"}}[5m])')
    assert counted == total(results, mode, "requests") - total(results, mode, "failures")
    measured = now(prometheus, f"max_over_time(loadtest_measured_seconds_total{{{labels}}}[5m])")
    assert measured == pytest.approx(total(results, mode, "end") - total(results, mode, "start"), rel=0.001)
    recorded = now(prometheus, f"last_over_time(run_mode:throughput:mean{{{labels}}}[5m])")
    assert recorded == pytest.approx(counted / measured, rel=0.01)
    buckets = f"max by (le) (max_over_time(loadtest_request_duration_seconds_bucket{{{labels}}}[5m]))"
    for quantile in (50, 95, 99):
        seen = now(prometheus, f"histogram_quantile({quantile / 100}, {buckets})") * 1000
        assert seen == pytest.approx(results["modes"][mode][f"p{quantile}_ms"], rel=0.125)  # a bucket's width


def test_recorded_ratio_equals_the_results(run, prometheus):
    _, results = run
    rates = {
        mode: total(results, mode, "requests") / (total(results, mode, "end") - total(results, mode, "start"))
        for mode in MODES
    }
    seen = now(prometheus, f'last_over_time(run:throughput:ratio{{run="{results["run"]}"}}[5m])')
    assert seen == pytest.approx(rates["dynamic"] / max(rates["none"], rates["instances"]), rel=0.02)


@pytest.mark.parametrize("mode", MODES)
def test_triton_series_agree_with_locust_and_counters(run, prometheus, mode):
    _, results = run
    seen = {"requests": 0.0, "inferences": 0.0, "executions": 0.0}
    windows = [window for window in results["windows"] if window["mode"] == mode]
    for window in windows:
        for series in seen:
            model = "embedding" if series == "requests" else results["model"]
            expr = f'avg_over_time(model:{series}:rate{{model="{model}", mode="{mode}"}}[{SHORT["WINDOW"]}s])'
            seen[series] += SHORT["WINDOW"] * now(prometheus, expr, window["began_at"] + SHORT["WINDOW"])
    # On a busy machine a scrape comes late, and a window of two seconds has few of them.
    assert seen["requests"] == pytest.approx(total(results, mode, "requests"), rel=0.15)
    batch = results["modes"][mode]["mean_batch"]
    assert seen["inferences"] / seen["executions"] == pytest.approx(batch, rel=0.15)


def test_backends_count_texts_tokens_and_padding(run, stack, prometheus):
    def counts() -> dict[str, float]:
        text = urllib.request.urlopen(f"http://127.0.0.1:{stack.environment['TRITON_METRICS_PORT']}/metrics", timeout=5)
        samples = re.findall(r'^(\w+)\{model="(\w+)".*\} (\S+)$', text.read().decode(), re.MULTILINE)
        return {f"{model} {name}": float(value) for name, model, value in samples if "failure" not in name}

    before = counts()
    assert before["tokenizer transformers_texts_total"] == before["tokenizer nv_inference_count"]
    embed(stack, "one two three", "one two three four five six seven", "many " * 400)
    texts = "tokenizer transformers_texts_total"
    stack.wait(lambda: counts()[texts] == before[texts] + 3, "the texts in the counters", 5)
    time.sleep(1)
    after = counts()
    added = {name: value - before[name] for name, value in after.items()}
    assert added["tokenizer transformers_texts_total"] == 3
    assert added["tokenizer transformers_truncated_texts_total"] == 1
    tokens = added["tokenizer transformers_tokens_total"]
    assert tokens == added["encoder transformers_tokens_total"] == 5 + 9 + 256
    # The tokenizer pads three rows to the longest; the encoder removes that padding.
    assert added["tokenizer transformers_padding_tokens_total"] == 3 * 256 - tokens
    assert added["encoder transformers_padding_tokens_total"] < 10
    assert added["encoder transformers_runs_total"] >= 2
    assert after["encoder transformers_dynamic_batching"] == 1
    assert after["encoder transformers_max_batch_size"] == 64
    used, limit = after["encoder transformers_memory_used_bytes"], after["encoder transformers_memory_limit_bytes"]
    assert 2**28 < used < limit


def without_batching(config: dict) -> dict:
    return {key: value for key, value in config.items() if key != "dynamic_batching"}


def test_batching_gauge_follows_the_configuration(run, stack):
    def batching() -> str:
        text = urllib.request.urlopen(f"http://127.0.0.1:{stack.environment['TRITON_METRICS_PORT']}/metrics", timeout=5)
        return re.search(r'transformers_dynamic_batching\{model="encoder".*\} (\d)', text.read().decode())[1]

    config = stack.triton.config("encoder")
    stack.triton.load("encoder", without_batching(config))
    stack.wait(lambda: batching() == "0", "off", 5)
    stack.triton.load("encoder", config)
    stack.wait(lambda: batching() == "1", "on", 5)


def test_replaced_process_ends_without_a_crash(run, stack):
    """A Python process that destroys its metrics crashes, and its answers do not show it."""
    kernel = subprocess.run(["dmesg"], capture_output=True, text=True)
    if kernel.returncode:
        pytest.skip("this user may not read the kernel's log")
    before = stack.stub("encoder").pid
    config = stack.triton.config("encoder")
    stack.triton.load("encoder", without_batching(config))
    stack.wait(lambda: not psutil.pid_exists(before), "the end of the replaced process", 40)
    stack.triton.load("encoder", config)
    log = subprocess.run(["dmesg"], capture_output=True, text=True).stdout
    assert not re.search(rf"\[{before}\]: segfault", log)


def test_report_contains_the_dashboard(run, stack):
    page = (stack.folder / "reports/latest/report.html").read_text()
    assert "Recorded by Prometheus" in page
    assert "Nothing measured yet" not in page
    for panel in charts_only(ALL["dashboards/batching"])["panels"]:
        assert f"<h3>{escape(panel['title'])}</h3>" in page


def test_make_dashboards_draws_one_page(run, stack):
    done = stack.make("dashboards", RANGE="3m")
    assert done.returncode == 0, done.stderr
    page = (stack.folder / "reports/dashboards.html").read_text()
    assert "reports/dashboards.html" in done.stdout
    for name in ("dashboards/throughput", "dashboards/batching", "hardware/cpu/hardware"):
        for panel in ALL[name]["panels"]:
            assert f"<h3>{escape(panel['title'])}</h3>" in page
    sources = re.findall(r'(?:src|srcset)="([^"]{0,40})', page)
    assert sources
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "nan" not in re.sub(r"data:[^\"]*", "", page).lower().split()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"RANGE": "long"}, "RANGE=long: must be a length of time above 0"),
        ({"UNTIL": "noon"}, "UNTIL=noon: must be a time such as"),
        ({"UNTIL": "2001-01-01"}, "Prometheus has no samples from 2000-12-31 23:45:00 to"),
        ({"PROMETHEUS_PORT": "9"}, "no Prometheus answers on http://127.0.0.1:9. Start the stack: `make up`"),
    ],
)
def test_make_dashboards_explains_errors(stack, settings, message):
    done = stack.make("dashboards", **settings)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_taken_metrics_port_is_reported_before_any_change(stack, recorded):
    port = recorded[0]["targets"][0].partition(":")[2]
    done = stack.make("loadtest", **SHORT, LOADTEST_METRICS_PORT=port)
    assert done.returncode != 0
    assert f"port {port} cannot be opened" in done.stderr
    assert "LOADTEST_METRICS_PORT" in done.stderr


def test_grafana_is_provisioned(stack, grafana_home):
    url = f"http://127.0.0.1:{stack.environment['GRAFANA_PORT']}"
    assert url in stack.make("status").stdout
    with urllib.request.urlopen(f"{url}/api/search", timeout=5) as response:
        dashboards = json.loads(response.read())
    assert {dashboard["uid"] for dashboard in dashboards} == {"triton-throughput", "triton-batching", "triton-hardware"}
    assert len(dashboards) == 3
    with urllib.request.urlopen(f"{url}/api/datasources", timeout=5) as response:
        assert f"url: {stack.prometheus}" in response.read().decode()


def test_wrong_grafana_home_stops_nothing(stack, tmp_path):
    done = stack.make("up", GRAFANA_HOME=tmp_path)
    assert done.returncode != 0
    assert f"GRAFANA_HOME={tmp_path}: there is neither bin/grafana nor bin/grafana-server in it" in done.stderr
    assert stack.server().is_running()


def test_healthy_stack_fires_no_alert(run, prometheus):
    """Neither the comparison nor the recorded samples may fire one."""
    assert prometheus.at('ALERTS{alertstate="firing"}', time.time()) == []
