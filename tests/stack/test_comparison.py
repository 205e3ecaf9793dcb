"""Short runs of `make loadtest` on the real server: its files, what it restores, and its errors."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import pytest

from tests.support.embedding import embed
from tests.support.stacks import COMMAND_S, SHORT, FollowedMake, bring_up
from triton_transformers.settings import MODES

TWO_WORKERS = {"WORKERS": 2}
# Requests per second of an open loop.
RATE = 2
# A warm-up that ends after the test.
ENDLESS = {"WARMUP": 600}


@pytest.fixture(scope="module")
def stack(new_stack):
    """Start a server that a test kills, and that no other test may disturb."""
    stack = new_stack()
    stack.environment["API_KEYS"] = stack.client_key
    return bring_up(stack)


@dataclass
class Finished:
    """A comparison that has ended. Tests share it, while later ones write other reports."""

    code: int
    output: str
    folder: Path

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


def running(stack, **settings) -> tuple[FollowedMake, list[str]]:
    """Start a comparison in the background; return it with the lines that it prints."""
    return stack.follow_make("loadtest", **(SHORT | {"ROUNDS": 20} | settings))


def workers(stack) -> list[psutil.Process]:
    """Return this stack's living Locust workers."""
    ours = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("REPORTS") == stack.environment["REPORTS"]
            if is_ours and process.cmdline()[-1] == "loadtest.load.worker" and process.status() != psutil.STATUS_ZOMBIE:
                ours.append(process)
        except (psutil.Error, IndexError):
            continue
    return ours


def measured_windows(lines: list[str]) -> int:
    return sum(bool(re.match(rf" *\d+  ({'|'.join(MODES)}) ", line)) for line in lines)


def batched_rows(line: str) -> float:
    """Return about how many more rows than executions a window without batching had; 0 for any other line."""
    window = re.match(r" *\d+  none +([\d.]+) +[\d.]+ +([\d.]+)", line)
    return float(window[1]) * SHORT["WINDOW"] * (float(window[2]) - 1) if window else 0


def wait_for_connections(stack, process: FollowedMake, protocol: str, *shares: int) -> None:
    """Wait until each worker has this many connections with Triton: one for each of its users."""
    port = int(stack.environment[f"TRITON_{protocol}_PORT"])

    def connections(worker: psutil.Process) -> int:
        try:
            return sum(c.raddr and c.raddr.port == port for c in worker.net_connections("tcp"))
        except psutil.Error:
            return 0

    process.wait_until(lambda: [connections(worker) for worker in workers(stack)] == [*shares], "all connections")


@pytest.fixture(scope="module")
def compared(stack) -> Finished:
    """Kill a comparison after its first switch, then run one of all modes; return the second."""
    process, _ = running(stack, **ENDLESS, **TWO_WORKERS, PROTOCOL="grpc", USERS=20)
    wait_for_connections(stack, process, "GRPC", 10, 10)
    assert "dynamic_batching" not in stack.triton.config("encoder")
    for worker in workers(stack):
        worker.suspend()  # so that it cannot notice by itself that it gets no answers any more
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(COMMAND_S)
    stack.wait(lambda: not workers(stack), "the workers to end with their master")
    assert "dynamic_batching" not in stack.triton.config("encoder")
    # Short rounds have a wide interval, whose lower bound MIN_RATIO is compared with.
    done = loadtest(stack, MODES=" ".join(MODES), MIN_RATIO=1e-9)
    return Finished(done.returncode, done.stdout + done.stderr, newest_report(stack))


@pytest.fixture(scope="module", autouse=True)
def original(stack) -> dict[str, dict]:
    """Return the configurations before the first comparison."""
    return stack.configurations()


@pytest.fixture(autouse=True)
def unchanged(stack, original):
    """Check after every test that the configurations are restored and no worker is left."""
    yield
    assert stack.configurations() == original
    assert workers(stack) == []


def test_comparison_restores_after_a_killed_one_and_writes_its_report(compared, stack):
    results = stack.results_of(compared.code, compared.output)
    assert "an earlier comparison or search was killed: restored" in compared.output
    assert results["system"] == "embedding"
    verdict = results["verdict"]
    assert verdict["client_bound"] is False
    low, high = verdict["ci95"]
    assert low <= verdict["throughput_ratio"] <= high
    assert verdict["baseline"] in ("none", "instances")
    assert verdict["ratios"][verdict["baseline"]]["throughput_ratio"] == verdict["throughput_ratio"]
    assert results["left_out"] == {}
    assert results["triton"]["cores"] == len(os.sched_getaffinity(0))  # TRITON_CPUS is not set
    assert [w["mode"] for w in results["windows"]] == [*MODES, *reversed(MODES), "none", "dynamic", "instances"]
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
    for word in ("requests/s", "dynamic / this mode", "dynamic batching off", "report.html", "make down"):
        assert word in compared.output


def check_request_counts(run: Finished) -> None:
    """Compare the file of requests and Triton's counters with the results."""
    windows, users = run.results["windows"], run.results["settings"]["users"]
    assert len(run.requests) == sum(window["requests"] for window in windows)
    for window in windows:
        # Triton also counts the requests that it answers while its counters are read. The run fails if it counts more.
        assert window["answered_by_triton"] >= window["requests"] - 2 * users


def test_workers_share_the_users_of_the_published_workload(stack):
    users = {"USERS": 40, "SPAWN_RATE": 40}
    done = loadtest(stack, WORKLOAD="published", PROTOCOL="grpc", **TWO_WORKERS, **users)
    published = Finished(done.returncode, done.stdout + done.stderr, newest_report(stack))
    results = stack.results_of(published.code, published.output)
    assert results["settings"]["protocol"] == "grpc"
    assert results["settings"]["workers"] == 2
    assert results["verdict"]["client_bound"] is False
    assert results["modes"]["none"]["mean_batch"] == pytest.approx(1, abs=0.01)
    assert results["modes"]["none"]["failures"] == results["modes"]["dynamic"]["failures"] == 0
    check_request_counts(published)
    assert "WORKERS=2" in results["command"]
    assert results["settings"]["max_batch"] == 8
    assert results["settings"]["wait"] == [0.1, 0.4]
    sizes = {int(size) for size in results["modes"]["dynamic"]["models"]["encoder"]["batches"]}
    assert 1 < max(sizes) <= 8


@pytest.fixture
def disturbed(stack) -> Finished:
    """Send many texts per request while nothing may be batched, then kill a worker."""
    stop = threading.Event()

    def send_traffic():
        while not stop.is_set():
            embed(stack, *["many texts"] * 32)

    traffic = threading.Thread(target=send_traffic)
    process, lines = running(stack, **TWO_WORKERS)
    try:
        traffic.start()
        process.wait_until(lambda: measured_windows(lines) >= 2, "a whole round")
        # On a busy machine, few of these requests are in a window.
        process.wait_until(lambda: max(map(batched_rows, lines)) > 6, "a window with one of these requests")
        workers(stack)[0].kill()
        return Finished(process.wait(COMMAND_S), "".join(lines), newest_report(stack))
    finally:
        stop.set()
        traffic.join()
        if process.poll() is None:  # the next comparison would be refused
            os.killpg(process.pid, signal.SIGKILL)


def test_killed_worker_ends_the_run_and_foreign_traffic_is_noticed(disturbed):
    assert disturbed.code != 0
    reason = r"stopped early: worker \d of 2 was killed by SIGKILL; what was measured until then is kept"
    assert re.search(reason, disturbed.output)
    assert "Traceback" not in disturbed.output
    assert "SIGKILL" in disturbed.results["stopped"]
    assert len(disturbed.results["windows"]) >= 2
    assert "something else was using the server" in disturbed.output


def test_open_loop_compares_the_latency_at_a_rate(stack):
    """Send far less than a slow machine answers, through the gateway, from workers whose arrivals add to the rate."""
    done = loadtest(stack, RATE=RATE, ARRIVALS="constant", WINDOW=3, USERS=64, **TWO_WORKERS, PROTOCOL="openai")
    results = stack.results()
    codes = {cause["code"] for cause in results["verdict"]["causes"]}
    assert not codes & {"FAILED_REQUESTS", "NEVER_KEEPS_UP"}, done.stdout + done.stderr
    assert results["verdict"]["headline"] == "latency_ratio"
    assert results["verdict"]["overloaded"] == []
    for window in results["windows"]:
        expected = RATE * (window["end"] - window["start"])  # on a busy machine, a window lasts longer
        assert abs(window["requests"] - expected) <= 3  # each of the processes begins and ends between two arrivals
        assert (window["overloaded"], window["given_up"], window["failures"]) == (False, 0, 0)
    assert f"at {RATE} requests per second" in done.stdout.lower().replace("\n", " ")
    assert "make loadtest" in results["command"]
    assert f"RATE={RATE}" in results["command"]
    written = "".join(path.read_text(errors="ignore") for path in (stack.folder / "reports/latest").iterdir())
    assert stack.environment["API_KEYS"] not in done.stdout + done.stderr + written
    assert (stack.folder / "reports/latest/p95.png").exists()


@pytest.mark.slow
def test_server_that_cannot_keep_up_is_named(stack):
    done = loadtest(stack, RATE=2000, USERS=64, WINDOW=1, WARMUP=0)
    assert done.returncode != 0
    assert "does not keep up" in done.stdout + done.stderr
    assert "Not proven: the server never keeps up with 2000 requests per second. " in done.stdout
    assert "Set a lower RATE." in done.stdout
    results = stack.results()
    assert results["verdict"]["overloaded"] == ["none", "dynamic"]
    # Every request that arrived is in the file, whether it was sent or not.
    with (newest_report(stack) / "requests.csv").open() as file:
        assert sum(1 for _ in csv.DictReader(file)) == sum(window["requests"] for window in results["windows"])


def test_missing_batching_fails_with_the_cause(stack):
    done = loadtest(stack, USERS=1, WINDOW=1, MIN_RATIO=50)
    assert done.returncode != 0
    assert "Not proven: with dynamic batching on, 'encoder' ran only 1.00 texts per execution. " in done.stdout
    assert "Set more USERS" in done.stdout
    assert "Also: the ratio is below MIN_RATIO=50." in done.stdout
    assert "below MIN_RATIO=50" in (stack.folder / "reports/latest/report.html").read_text()


def test_interrupt_restores_the_server_and_keeps_windows(stack):
    process, lines = running(stack, MODES="instances dynamic", **TWO_WORKERS)
    process.wait_until(lambda: measured_windows(lines) >= 2, "a whole round")
    os.killpg(process.pid, signal.SIGTERM)
    process.wait_until(lambda: "restoring the server's configuration" in "".join(lines), "the end of the load")
    os.killpg(process.pid, signal.SIGTERM)  # again, while the configuration is being restored
    process.wait(COMMAND_S)
    text = "".join(lines)
    assert process.returncode != 0
    assert "restoring the server's configuration" in text
    assert "report.html" in text
    assert "Traceback" not in text
    assert stack.results()["stopped"] == "interrupted"


def test_killed_server_ends_the_run_and_keeps_its_windows(stack):
    process, lines = running(stack, MODES="instances dynamic")
    process.wait_until(lambda: measured_windows(lines) >= 2, "a whole round")
    stack.server().send_signal(signal.SIGKILL)
    assert process.wait(COMMAND_S) != 0
    text = "".join(lines)
    assert "stopped early" in text
    assert "Traceback" not in text
    assert len(stack.results()["windows"]) >= 2
    stack.wait(lambda: stack.triton.live(), "the restarted server")
    stack.make("up")


def test_second_comparison_is_refused(stack):
    process, lines = running(stack, **ENDLESS, **TWO_WORKERS)
    try:
        wait_for_connections(stack, process, "HTTP", 8, 8)
        done = loadtest(stack)
        assert done.returncode != 0
        assert "another comparison or search is running against this stack" in done.stderr
        # Nor do other settings restart the server.
        done = stack.make("up", PROMETHEUS_RETENTION="8d")
        assert done.returncode != 0
        assert "is running against this stack, and this command would restart the stack" in done.stderr
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(COMMAND_S)
    # An early interrupt with workers is as quiet as one without.
    text = "".join(lines)
    assert "interrupted" in text
    assert "Traceback" not in text


def test_formats_are_compared_and_an_interrupt_puts_the_system_back(stack, encoder_checkpoints):
    formats = {"SYSTEM": "mood", "FORMATS": "onnx python"}
    stack.assemble(
        {"SYSTEMS": "mood", "SOURCE": encoder_checkpoints["mood"]}, {"SYSTEMS": "mood.onnx mood.python", **formats}
    )
    stack.make("up", SYSTEMS="embedding mood mood.python")  # as after a comparison that was killed
    process, lines = running(stack, **formats)
    process.wait_until(lambda: sum(bool(re.match(r" *\d+  (onnx|python) ", line)) for line in lines) >= 2, "a round")
    assert stack.triton.config("mood")["ensemble_scheduling"]["step"][0]["model_name"] in ("mood.onnx", "mood.python")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(COMMAND_S) != 0
    text, results = "".join(lines), stack.results()
    assert "Traceback" not in text
    assert "equal labels" in text
    assert results["quality"] == {"python": {"equal_labels": 1.0}}
    assert list(results["modes"]) == results["formats"] == ["onnx", "python"]
    assert results["verdict"]["baseline"] == "onnx"
    assert results["modes"]["python"]["models"].keys() >= {"encoder"}
    assert stack.triton.config("mood")["ensemble_scheduling"]["step"][0]["model_name"] == "mood_encoder"
    assert stack.ask("mood", input_text=["rain"])["label"].shape == (1, 1)
    assert not [model for model in stack.triton.index() if model.startswith("mood.")]
    stack.make("remove", SYSTEM="mood")


def test_wrong_setting_is_one_sentence(stack):
    for settings, message in (
        ({"LOADTEST_CPUS": "99"}, "LOADTEST_CPUS=99"),
        ({"MAX_BATCH": 128}, "MAX_BATCH=128: 'embedding' takes 64"),
    ):
        done = loadtest(stack, **settings)
        assert done.returncode != 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_locust_page_drives_the_load(stack):
    process = stack.start_make("locust", USERS=4)
    try:
        url = f"http://127.0.0.1:{stack.environment['LOCUST_PORT']}"

        def curl(*arguments: str) -> str:
            return subprocess.run(["curl", "-s", *arguments], capture_output=True, text=True, timeout=120).stdout

        stack.wait(lambda: "Locust" in curl(url), "Locust's page")
        curl("-X", "POST", f"{url}/swarm", "-d", "user_count=4", "-d", "spawn_rate=4")
        stack.wait(lambda: '"num_requests":' in curl(f"{url}/stats/requests"), "statistics")
        stack.wait(lambda: counted_requests(curl(f"{url}/stats/requests")) > 20, "requests")
        metrics = f"http://127.0.0.1:{stack.environment['LOADTEST_METRICS_PORT']}/metrics"
        counter = r'loadtest_requests_total\{mode="as configured",outcome="ok",run="",system="embedding"\} (\S+)'
        stack.wait(
            lambda: (sample := re.search(counter, curl(metrics))) and float(sample[1]) > 10,
            "the requests in the metrics",
        )
        stack.wait(lambda: 'loadtest_users{run="",system="embedding"} 4.0' in curl(metrics), "the users in the metrics")
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(COMMAND_S)


def counted_requests(text: str) -> int:
    """Return the number of requests in Locust's statistics."""
    return next((s["num_requests"] for s in json.loads(text)["stats"] if s["name"] == "embedding"), 0)
