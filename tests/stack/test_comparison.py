"""Short runs of `make loadtest` on the real server: its files, what it restores, and its errors."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import psutil
import pytest

from scripts.common.settings import MODES, ROOT
from tests.support.embedding import embed
from tests.support.stacks import SHORT, bring_up

TWO_WORKERS = {"WORKERS": 2}


@pytest.fixture(scope="module")
def stack(new_stack):
    return bring_up(new_stack())


@dataclass
class Finished:
    """A comparison that has ended. Tests share it, while later ones write other reports."""

    code: int
    output: str
    folder: Path
    connections: list[int] = field(default_factory=list)  # of each worker with Triton, in a window

    @cached_property
    def results(self) -> dict:
        return json.loads((self.folder / "results.json").read_text())

    @cached_property
    def requests(self) -> list[dict[str, str]]:
        with (self.folder / "requests.csv").open() as file:
            return list(csv.DictReader(file))


def newest_report(stack) -> Path:
    return (stack.folder / "reports/latest").resolve()


def loadtest(stack, **settings) -> subprocess.CompletedProcess[str]:
    return stack.make("loadtest", **(SHORT | settings))


def running(stack, **settings) -> tuple[subprocess.Popen[str], list[str]]:
    """Start a comparison in the background; return it with the lines that it prints."""
    process = stack.start_make("loadtest", **(SHORT | {"ROUNDS": 20} | settings))
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")), daemon=True)
    reader.start()
    return process, lines


def workers(stack) -> list[psutil.Process]:
    """Return this stack's living Locust workers."""
    ours = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("REPORTS") == stack.environment["REPORTS"]
            if (
                is_ours
                and process.cmdline()[-1] == "loadtest.crowd.worker"
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                ours.append(process)
        except (psutil.Error, IndexError):
            continue
    return ours


def measured_windows(lines: list[str]) -> int:
    return sum(bool(re.match(rf" *\d+  ({'|'.join(MODES)}) ", line)) for line in lines)


def wait_for_the_first_switch(stack) -> None:
    stack.wait(lambda: "dynamic_batching" not in stack.triton.config("encoder"), "the first switch", 60)


def connections(process: psutil.Process, port: str) -> int:
    return sum(c.raddr and c.raddr.port == int(port) for c in process.net_connections("tcp"))


@pytest.fixture(scope="module")
def compared(stack) -> Finished:
    """Kill a comparison after its first switch, then run one of all modes; return the second."""
    process, _ = running(stack, WARMUP=30, WORKERS=2)
    wait_for_the_first_switch(stack)
    assert len(workers(stack)) == 2
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    stack.wait(lambda: not workers(stack), "the workers to end with their master", 1)
    assert "dynamic_batching" not in stack.triton.config("encoder")
    # Two rounds have a wide interval, whose lower bound MIN_RATIO is compared with.
    done = loadtest(stack, MODES=" ".join(MODES), MIN_RATIO=0.01)
    return Finished(done.returncode, done.stdout + done.stderr, newest_report(stack))


@pytest.fixture(scope="module", autouse=True)
def original(stack) -> dict[str, dict]:
    """Return the configurations before the first comparison."""
    return configurations(stack)


@pytest.fixture(autouse=True)
def unchanged(stack, original):
    """Check after every test that the configurations are restored and no worker is left."""
    yield
    assert configurations(stack) == original
    assert workers(stack) == []


def configurations(stack) -> dict[str, dict]:
    return {name: stack.triton.config(name) for name in ("tokenizer", "encoder", "embedding")}


def test_killed_comparison_is_undone_by_the_next(compared):
    assert compared.code == 0, compared.output
    assert "an earlier comparison was killed: restored" in compared.output


def test_comparison_writes_report_and_results(compared, stack):
    assert compared.code == 0, compared.output
    results = compared.results
    assert results["system"] == "embedding"
    verdict = results["verdict"]
    assert verdict["batched"] is True
    assert verdict["client_bound"] is False
    low, high = verdict["ci95"]
    assert low <= verdict["throughput_ratio"] <= high
    assert verdict["baseline"] in ("none", "instances")
    assert verdict["ratios"][verdict["baseline"]]["throughput_ratio"] == verdict["throughput_ratio"]
    assert results["left_out"] == {}
    assert [w["mode"] for w in results["windows"]] == [*MODES, *reversed(MODES)]
    for mode in MODES:
        figures = results["modes"][mode]
        assert figures["failures"] == 0
        assert 0 < figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"]
        assert figures["queue_ms"] >= 0 < figures["compute_ms"]
        assert 0 < figures["cpu"] < 1
        if mode == "dynamic":
            assert figures["mean_batch"] > 1.5
        else:
            assert figures["mean_batch"] == pytest.approx(1, abs=0.01)
    assert stack.environment["TRITON_ADMIN_KEY"] not in (compared.folder / "results.json").read_text()
    check_request_counts(compared)
    assert {row["mode"] for row in compared.requests} == set(MODES)
    assert newest_report(stack).parent == compared.folder.parent
    names = {file.name for file in compared.folder.iterdir()}
    assert names == {
        "report.html", "results.json", "requests.csv", "throughput.png", "latency.png", "batches.png", "time.png"
    }  # fmt: skip
    for word in ("requests/s", "dynamic / this mode", "without batching", "report.html", "make down"):
        assert word in compared.output


def test_results_have_the_cores_of_the_server(compared):
    """TRITON_CPUS is not set, so the server's cores are those of this process."""
    assert compared.results["triton"]["cores"] == len(os.sched_getaffinity(0))


def check_request_counts(run: Finished) -> None:
    """Compare the file of requests and Triton's counters with the results."""
    windows, users = run.results["windows"], run.results["settings"]["users"]
    assert len(run.requests) == sum(window["requests"] for window in windows)
    # Triton also counts the requests that arrive while its counters are read.
    for window in windows:
        assert window["answered_by_triton"] == pytest.approx(window["requests"], rel=0.3, abs=4 * users)


@pytest.fixture(scope="module")
def published(stack) -> Finished:
    """Run the published workload over gRPC with workers."""
    users = {"USERS": 40, "SPAWN_RATE": 40}
    process, lines = running(stack, WORKLOAD="published", PROTOCOL="grpc", WORKERS=2, ROUNDS=2, **users)
    stack.wait(lambda: measured_windows(lines), "a window", 90)
    shares = [connections(worker, stack.environment["TRITON_GRPC_PORT"]) for worker in workers(stack)]
    return Finished(process.wait(timeout=120), "".join(lines), newest_report(stack), shares)


def test_workers_share_the_users(published):
    assert published.code == 0, published.output
    assert published.connections == [20, 20]  # every user of Locust has its own connection
    results = published.results
    assert results["settings"]["protocol"] == "grpc"
    assert results["settings"]["workers"] == 2
    assert results["verdict"]["batched"] is True
    assert results["verdict"]["client_bound"] is False
    assert results["modes"]["none"]["mean_batch"] == pytest.approx(1, abs=0.01)
    assert results["modes"]["none"]["failures"] == results["modes"]["dynamic"]["failures"] == 0
    check_request_counts(published)
    assert "WORKERS=2" in results["command"]


def test_published_workload_limits_batches(published):
    results = published.results
    assert results["settings"]["max_batch"] == 8
    assert results["settings"]["wait"] == [0.1, 0.4]
    sizes = {int(size) for size in results["modes"]["dynamic"]["models"]["encoder"]["batches"]}
    assert 1 < max(sizes) <= 8


@pytest.fixture(scope="module")
def disturbed(stack) -> Finished:
    """Send two texts per request while nothing may be batched, then kill a worker."""
    stop = threading.Event()

    def send_traffic():
        while not stop.is_set():
            embed(stack, "two", "texts")

    traffic = threading.Thread(target=send_traffic)
    traffic.start()
    try:
        process, lines = running(stack, WORKERS=2)
        stack.wait(lambda: measured_windows(lines), "a window", 90)
        shares = [connections(worker, stack.environment["TRITON_HTTP_PORT"]) for worker in workers(stack)]
        stack.wait(lambda: measured_windows(lines) == 2, "a whole round", 90)
        workers(stack)[0].kill()
        return Finished(process.wait(timeout=60), "".join(lines), newest_report(stack), shares)
    finally:
        stop.set()
        traffic.join()


def test_killed_worker_ends_the_run_and_keeps_its_windows(disturbed):
    assert disturbed.code != 0
    assert disturbed.connections == [8, 8]
    reason = r"stopped early: worker \d of 2 was killed by SIGKILL; what was measured until then is kept"
    assert re.search(reason, disturbed.output)
    assert "Traceback" not in disturbed.output
    assert "SIGKILL" in disturbed.results["stopped"]
    assert len(disturbed.results["windows"]) >= 2


def test_foreign_traffic_is_noticed(disturbed):
    assert disturbed.code != 0
    assert "something else was using the server" in disturbed.output


def test_missing_batching_fails_with_the_cause(stack):
    done = loadtest(stack, USERS=1, WINDOW=1, MIN_RATIO=50)
    assert done.returncode != 0
    assert "not proven: with dynamic batching on, 'encoder' ran only 1.00 texts per execution" in done.stderr
    assert "use more USERS" in done.stderr
    assert "below MIN_RATIO=50" in done.stderr
    assert "below MIN_RATIO=50" in (stack.folder / "reports/latest/report.html").read_text()
    assert stack.results()["verdict"]["batched"] is False


@pytest.mark.parametrize(
    ("number", "settings"), [(signal.SIGINT, {"MODES": "instances dynamic"}), (signal.SIGTERM, TWO_WORKERS)]
)
def test_interrupt_restores_the_server_and_keeps_windows(stack, number, settings):
    process, lines = running(stack, **settings)
    stack.wait(lambda: measured_windows(lines) == 2, "a whole round", 90)
    os.killpg(process.pid, number)
    time.sleep(1)
    os.killpg(process.pid, number)  # again, while the configuration is being restored
    process.wait(timeout=60)
    text = "".join(lines)
    assert process.returncode != 0
    assert "restoring the server's configuration" in text
    assert "report.html" in text
    assert "Traceback" not in text
    assert stack.results()["stopped"] == "interrupted"


def test_early_interrupt_is_quiet(stack):
    process, lines = running(stack, WARMUP=30)
    wait_for_the_first_switch(stack)
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=60)
    text = "".join(lines)
    assert "interrupted" in text
    assert "Traceback" not in text


def test_killed_server_ends_the_run_and_keeps_its_windows(stack):
    process, lines = running(stack, MODES="instances dynamic")
    stack.wait(lambda: measured_windows(lines) == 2, "a whole round", 90)
    stack.server().send_signal(signal.SIGKILL)
    assert process.wait(timeout=120) != 0
    text = "".join(lines)
    assert "stopped early" in text
    assert "Traceback" not in text
    assert len(stack.results()["windows"]) == 2
    stack.wait(lambda: stack.triton.live(), "the restarted server")
    stack.make("up")


def test_second_comparison_is_refused(stack):
    process, lines = running(stack, WARMUP=30, WORKERS=2)
    try:
        wait_for_the_first_switch(stack)
        done = loadtest(stack)
        assert done.returncode != 0
        assert "another comparison is running against this stack" in done.stderr
        # Nor do other settings restart the server.
        done = stack.make("up", PROMETHEUS_RETENTION="8d")
        assert done.returncode != 0
        assert "a comparison is running against this stack, which other settings would restart" in done.stderr
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=60)
    # An early interrupt with workers is as quiet as one without.
    text = "".join(lines)
    assert "interrupted" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"SYSTEM": "nothing"}, "no system 'nothing'"),
        ({"WORKERS": 17}, "WORKERS=17: must be at most USERS, which is 16"),
        ({"LOADTEST_CPUS": "99"}, "LOADTEST_CPUS=99"),
        ({"MAX_BATCH": 1}, "nothing here can batch"),
        ({"MAX_BATCH": 128}, "MAX_BATCH=128: 'embedding' takes 64"),
    ],
)
def test_wrong_setting_is_one_sentence(stack, settings, message):
    done = loadtest(stack, **settings)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_key_is_one_sentence(stack):
    environment = stack.variables(**SHORT, TRITON_ADMIN_KEY="not-the-key")
    done = subprocess.run(
        [sys.executable, "-m", "loadtest"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "TRITON_ADMIN_KEY is not the one the server was started with" in done.stderr


def test_locust_page_drives_the_load(stack):
    process = stack.start_make("locust", USERS=4)
    try:
        url = f"http://127.0.0.1:{stack.environment['LOCUST_PORT']}"

        def curl(*arguments: str) -> str:
            return subprocess.run(["curl", "-s", *arguments], capture_output=True, text=True, timeout=20).stdout

        stack.wait(lambda: "Locust" in curl(url), "Locust's page", 60)
        curl("-X", "POST", f"{url}/swarm", "-d", "user_count=4", "-d", "spawn_rate=4")
        stack.wait(lambda: '"num_requests":' in curl(f"{url}/stats/requests"), "statistics", 30)
        stack.wait(lambda: counted_requests(curl(f"{url}/stats/requests")) > 20, "requests", 30)
        metrics = curl(f"http://127.0.0.1:{stack.environment['LOADTEST_METRICS_PORT']}/metrics")
        counter = r'loadtest_requests_total\{mode="as configured",outcome="ok",run="",system="embedding"\} (\S+)'
        assert float(re.search(counter, metrics)[1]) > 10
        assert 'loadtest_users{run="",system="embedding"} 4.0' in metrics
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=30)


def counted_requests(text: str) -> int:
    """Return the number of requests in Locust's statistics."""
    return next((s["num_requests"] for s in json.loads(text)["stats"] if s["name"] == "embedding"), 0)
