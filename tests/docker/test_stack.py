"""The composed stack: start, requests, comparison, crashes, and what its containers may not do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import warnings

import pytest

from tests.docker.conftest import docker
from tests.support.embedding import embed
from tests.support.stacks import SHORT, bring_up
from triton_transformers.settings import ROOT

pytestmark = pytest.mark.timeout(1800)
SERVICES = ("triton-cpu", "gateway", "prometheus", "grafana")
TRACING = ("traces", "jaeger")
CRASH = "Signal (11) received"


@pytest.fixture(autouse=True)
def up(stack):
    """Start again what the test before broke."""
    if not stack.healthy(*SERVICES) or {state for state, _ in stack.triton.index().values()} != {"READY"}:
        bring_up(stack)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


def grafana(stack) -> str:
    return f"http://127.0.0.1:{stack.environment['GRAFANA_PORT']}"


def embed_through_gateway(stack, text: str) -> list[float]:
    return stack.post("/v1/embeddings", model="embedding", input=text)["data"][0]["embedding"]


def test_second_up_prints_the_addresses_and_restarts_nothing(stack):
    before = {service: stack.inspect(service)["State"]["StartedAt"] for service in SERVICES}
    done = stack.make("up")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.index(stack.gateway) < done.stdout.index(stack.http)
    assert "loopback only: set API_KEYS and GATEWAY_BIND to open it" in done.stdout
    for url in (stack.http, stack.prometheus, grafana(stack)):
        assert url in done.stdout
    assert "runtime     docker" in done.stdout
    assert "embedding: in place" in done.stdout
    assert {service: stack.inspect(service)["State"]["StartedAt"] for service in SERVICES} == before


def test_status_smoke_and_logs_work_without_showing_the_admin_key(stack):
    status = stack.make("status")
    assert status.returncode == 0
    for word in ("gateway", "triton", "prometheus", "grafana", "running", "encoder", "tokenizer", "embedding", "ready"):
        assert word in status.stdout
    smoke = stack.make("smoke")
    assert smoke.stdout.split() == ["ok", "embedding"]
    logs = stack.make("logs").stdout
    assert "Started HTTPService" in logs
    assert stack.environment["TRITON_ADMIN_KEY"] not in status.stdout + smoke.stdout + logs


def test_key_restarts_the_gateway_alone_and_is_in_no_log(stack):
    triton = stack.container("triton-cpu")
    done = stack.make("up", API_KEYS=stack.client_key)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "settings changed (API_KEYS): restarting the gateway" in done.stdout
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(f"{stack.gateway}/v1/models")
    assert len(embed_through_gateway(stack, "a text")) == 384
    assert stack.client_key not in done.stdout + stack.make("logs").stdout
    bring_up(stack)
    assert '"embedding"' in get(f"{stack.gateway}/v1/models")
    assert stack.container("triton-cpu") == triton


def test_exporter_writes_files_of_the_user(stack):
    model = stack.folder / "models/encoder/1/model.onnx"
    assert (model.stat().st_uid, model.stat().st_gid) == (os.getuid(), os.getgid())
    assert not list((stack.folder / "models").glob(".assembling-*"))


def test_measurements_are_kept_in_a_volume(stack):
    (line,) = [line for line in stack.make("status").stdout.splitlines() if line.startswith("encoder ")]
    engine, precision = line.split()[2:4]
    assert engine in ("onnxruntime", "openvino")
    newest = "cat $(ls -t /engines/encoder-1{}-????????????.json | head -n 1)"
    kept, cost = (json.loads(stack.inside("triton-cpu", "sh", "-c", newest.format(end))) for end in ("", "-cost"))
    assert kept["engine"] in (engine, f"{engine}-{precision}")
    assert (cost["key"]["engine"], cost["key"]["precision"]) == (engine, precision)
    assert ("volume", "/engines") in {(m["Type"], m["Destination"]) for m in stack.inspect("triton-cpu")["Mounts"]}


@pytest.mark.parametrize("service", SERVICES)
def test_container_has_least_privilege(stack, service):
    """Look from inside: tests/docs/test_security.py checks the file."""
    assert stack.inspect(service)["HostConfig"]["Memory"] > 0
    assert stack.inside(service, "id", "-u") != "0"
    status = stack.inside(service, "cat", "/proc/self/status")
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    for folder in ("/", "/etc", "/opt"):
        refused = subprocess.run(
            ["docker", "exec", stack.container(service), "touch", f"{folder}/x"], capture_output=True
        )
        assert refused.returncode != 0


def test_triton_mounts_the_models_read_only(stack):
    (models,) = [m for m in stack.inspect("triton-cpu")["Mounts"] if m["Destination"] == "/models"]
    assert models["RW"] is False


def test_nothing_listens_beyond_loopback(stack):
    for service in SERVICES:
        for bindings in stack.inspect(service)["NetworkSettings"]["Ports"].values():
            assert {binding["HostIp"] for binding in bindings or []} <= {"127.0.0.1"}


def test_prometheus_scrapes_the_servers_and_has_the_rules(stack):
    def up() -> set[str]:
        result = json.loads(get(f"{stack.prometheus}/api/v1/query?query=up%3D%3D1"))["data"]["result"]
        return {target["metric"]["instance"] for target in result}

    stack.wait(lambda: up() >= {"triton:8002", "gateway:8004"}, "Prometheus scrapes Triton and the gateway")
    groups = json.loads(get(f"{stack.prometheus}/api/v1/rules"))["data"]["groups"]
    assert {group["name"] for group in groups} >= {"mode", "comparison", "serving"}


def test_grafana_has_its_data_source_and_dashboards(stack):
    """The stand-in for a Grafana that cannot be pulled shows only that the files reach their places."""
    uids = {dashboard["uid"] for dashboard in json.loads(get(f"{grafana(stack)}/api/search"))}
    assert uids >= {"triton-throughput", "triton-batching", "triton-hardware"}
    image = stack.inspect("grafana")["Config"]
    if "stand-in" in image["Labels"].get("org.opencontainers.image.description", ""):
        assert "url: http://prometheus:9090" in get(f"{grafana(stack)}/api/datasources")
    assert json.loads(get(f"{grafana(stack)}/api/health"))["database"] == "ok"


def test_comparison_with_workers_through_the_gateway_writes_a_report_of_the_user(stack):
    done = stack.make("loadtest", **SHORT, WORKERS=2, PROTOCOL="openai")
    results = stack.results_of(done.returncode, done.stdout + done.stderr)
    assert (results["settings"]["workers"], results["settings"]["protocol"]) == (2, "openai")
    stack.wait(lambda: not stack.inspect("loadtest-worker")["State"]["Running"], "the workers end")
    assert (results["runtime"], results["triton"]["image"]) == ("docker", stack.image("cpu-pypi"))
    assert results["modes"]["none"]["mean_batch"] == pytest.approx(1, abs=0.01)
    # The container of the load test sees what the stack's containers use.
    assert all(window["other_cores"] is not None for window in results["windows"])
    report = (stack.folder / "reports/latest/report.html").resolve()
    assert report.stat().st_uid == os.getuid()
    # The path that it prints is the host's.
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("report  ")]
    assert os.path.abspath(line.split()[1]) == str(report)
    for word in ("requests/s", "dynamic batching", "make down"):
        assert word in done.stdout
    # Prometheus scraped the load generator, and the load generator queried Prometheus.
    page = report.read_text()
    assert "Largest mean batch" in page
    assert "Nothing measured yet" not in page


@pytest.fixture
def traced(stack):
    """Return the stack while it traces."""
    done = stack.make("up", TRACE=1)
    assert done.returncode == 0, done.stdout + done.stderr
    jaeger = f"http://127.0.0.1:{stack.environment['JAEGER_PORT']}"
    assert f"traces      {stack.folder}/state/traces\n" in done.stdout
    assert f"Jaeger      {jaeger}\n" in done.stdout
    yield stack
    bring_up(stack)
    running = docker("ps", "--filter", stack.label, "--format", '{{.Label "com.docker.compose.service"}}').split()
    assert not {*TRACING} & {*running}


def compare_without_a_crash(traced) -> subprocess.CompletedProcess[str]:
    """Run a comparison. Repeat it if Triton crashed or stopped answering: TRITON-FAULTS.md#tracing."""
    for _ in range(3):
        crashes = traced.log.count(CRASH)
        try:
            # A standstill while Triton traces may last longer than a window of a second.
            done = traced.make("loadtest", timeout=900, TRACE=1, **(SHORT | {"WINDOW": 3}))
            if traced.log.count(CRASH) == crashes:
                return done
            warnings.warn("Triton crashed while it traced: comparing again", stacklevel=2)
        except subprocess.TimeoutExpired:
            warnings.warn("Triton stopped answering while it traced: comparing again", stacklevel=2)
            docker("rm", "--force", traced.container("loadtest"))
            docker("restart", "--time", "0", traced.container("triton-cpu"))
        assert traced.make("up", TRACE=1).returncode == 0  # waits until the models are back
    raise AssertionError(f"Triton failed in each traced comparison:\n{traced.log[-5000:]}")


def test_traces_are_in_the_report_and_in_jaeger(traced):
    done = compare_without_a_crash(traced)
    slowest = traced.results_of(done.returncode, done.stdout + done.stderr)["slowest"]
    assert slowest["traced"] >= len(slowest["requests"]) == 10
    steps = {"queue", "transfer", "tokenize", "wait", "pack", "run", "scatter", "rest"}
    assert any({step["name"] for step in request["steps"]} == steps for request in slowest["requests"])
    assert "<h2>The slowest requests</h2>" in (traced.folder / "reports/latest/report.html").read_text()
    spans = (traced.folder / "state/traces/spans.jsonl").stat()
    assert (spans.st_uid, spans.st_mode & 0o777) == (os.getuid(), 0o600)

    page = f"http://127.0.0.1:{traced.environment['JAEGER_PORT']}/"
    assert get(page)
    if "stand-in" in traced.inspect("jaeger")["Config"]["Labels"].get("org.opencontainers.image.description", ""):
        shown = {request["trace"] for request in slowest["requests"]}
        # The receiver drops messages only if Jaeger is slow.
        traced.wait(lambda: shown & {*json.loads(get(page))}, "Jaeger has traces of the report")

    status = traced.make("status").stdout
    for service in TRACING:
        assert f"{service} " in status
        traced.wait(lambda service=service: traced.healthy(service), f"{service} is healthy")
        for bindings in traced.inspect(service)["NetworkSettings"]["Ports"].values():
            assert {binding["HostIp"] for binding in bindings or []} <= {"127.0.0.1"}


def test_dashboards_are_drawn_as_one_page(stack):
    done = stack.make("dashboards", RANGE="10m")
    assert done.returncode == 0, done.stdout + done.stderr
    page = stack.folder / "reports/dashboards.html"
    assert page.stat().st_uid == os.getuid()
    for title in ("Triton: throughput", "Triton: batching comparison", "Triton: hardware"):
        assert title in page.read_text()


def test_running_comparison_refuses_another_and_an_interrupt_restores_the_server(stack):
    before = stack.triton.config("encoder")
    process, lines = stack.follow_make("loadtest", **(SHORT | {"ROUNDS": 200}))
    try:
        process.wait_until(lambda: sum("none " in line for line in lines) >= 2, "a round and the next window")
        second = stack.make("loadtest", **SHORT, WORKERS=2)
        assert second.returncode != 0
        assert "another comparison or search is running against this stack" in second.stderr
    finally:
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(timeout=600)
    assert code != 0
    text = "".join(lines)
    assert "report.html" in text
    assert "Traceback" not in text
    assert stack.triton.config("encoder") == before


def test_crashed_servers_are_restarted(stack):
    programs = {"triton-cpu": "bin/[t]ritonserver", "gateway": "[g]ateway"}
    restarts = {service: stack.inspect(service)["RestartCount"] for service in programs}
    for service, program in programs.items():
        stack.kill_inside(service, program)

    def restarted(service: str) -> bool:
        return stack.inspect(service)["RestartCount"] > restarts[service] and stack.healthy(service)

    stack.wait(lambda: all(map(restarted, programs)), "healthy again, after another start")
    assert embed(stack, "are you there?").shape == (1, 384)
    assert len(embed_through_gateway(stack, "are you there?")) == 384
    lines = [line for line in stack.make("status").stdout.splitlines() if line.startswith(("triton ", "gateway "))]
    assert all(int(line.split()[-1]) > 0 for line in lines)
    assert len(lines) == 2


def test_up_restarts_a_server_that_docker_killed(stack):
    """Docker does not restart a container that `docker kill` ended."""
    docker("kill", stack.container("triton-cpu"))
    assert stack.make("status").returncode != 0
    assert stack.make("up").returncode == 0
    assert embed(stack, "are you there?").shape == (1, 384)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"PROFILE": "cuda"}, "this Docker engine has no NVIDIA runtime"),
        ({"DOCKER_HOST": "unix:///nowhere.sock"}, "the Docker engine does not answer"),
    ],
)
def test_missing_requirement_is_one_sentence(stack, settings, message):
    done = stack.make("up", **settings)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_down_keeps_the_volumes(stack):
    assert stack.make("down").stdout == "stopped\n"
    assert stack.make("down").stdout == "not running\n"
    assert stack.make("status").stdout == "not running (RUNTIME=docker): `make up` starts it\n"
    logs = stack.make("logs").stdout
    assert logs == (
        "no logs: the stack is not running, and Docker keeps no logs of containers that `make down` removed\n"
    )
    assert docker("ps", "--all", "--quiet", "--filter", stack.label) == ""
    volumes = docker("volume", "ls", "--quiet", "--filter", stack.label).split()
    assert {name.rpartition("_")[2] for name in volumes} == {"engines", "grafana", "prometheus"}


def test_clean_leaves_nothing(stack):
    """Run what `make clean` runs before it removes the virtual environment, which these tests need."""
    command = [sys.executable, "-m", "scripts.stack", "clean"]
    done = subprocess.run(
        command, cwd=ROOT, env=stack.variables(), check=True, capture_output=True, text=True, timeout=1500
    )
    assert "removed the containers, volumes and images of the stack, and the assembled models\n" in done.stdout
    assert docker("ps", "--all", "--quiet", "--filter", stack.label) == ""
    assert docker("volume", "ls", "--quiet", "--filter", stack.label) == ""
    assert docker("image", "ls", "--quiet", "--filter", stack.image_label) == ""
    assert list((stack.folder / "models").rglob("*.onnx")) == []
