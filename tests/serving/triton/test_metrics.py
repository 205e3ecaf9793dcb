"""The metrics of the load generator and of the backends."""

from __future__ import annotations

import ast
import contextlib
import mmap
import os
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.load import telemetry
from loadtest.load.arrivals import Sample
from loadtest.load.telemetry import Metrics
from serving.triton.memory import memory, process_memory
from triton_transformers.ports import free_ports
from triton_transformers.settings import MODES, ROOT


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"loadtest_{name}", {"run": "r", "system": "s", **labels})


def test_all_counters_begin_at_zero():
    metrics = Metrics("r", "s", MODES)
    for mode in MODES:
        assert value(metrics, "measured_seconds_total", mode=mode) == 0
        assert value(metrics, "request_duration_seconds_count", mode=mode) == 0
        for outcome in ("ok", "failed"):
            assert value(metrics, "requests_total", mode=mode, outcome=outcome) == 0


def test_window_counts_each_sample_once():
    metrics = Metrics("r", "s", MODES)
    samples = [Sample(0.1, 20.0, ""), Sample(0.2, 40.0, "")]
    with metrics.window("none", 1) as update:
        assert value(metrics, "window", mode="none", round="1") == 1
        update(samples, 0.5)
        # A worker opens its window a moment before the master does: a sample from after the window is not counted.
        samples += [Sample(0.7, 99.0, "500"), Sample(1.01, 20.0, "")]
        update(samples, 1.0)
        update(samples, 1.0)
    assert value(metrics, "window", mode="none", round="1") is None
    assert value(metrics, "measured_seconds_total", mode="none") == 1
    assert value(metrics, "requests_total", mode="none", outcome="ok") == 2
    assert value(metrics, "requests_total", mode="none", outcome="failed") == 1
    assert value(metrics, "requests_total", mode="dynamic", outcome="ok") == 0
    # Latencies are those of successful responses only.
    assert value(metrics, "request_duration_seconds_sum", mode="none") == pytest.approx(0.06)
    # Only the current mode is set.
    metrics.mode("none")
    metrics.mode("dynamic")
    assert [value(metrics, "mode", mode=mode) for mode in ("none", "dynamic")] == [None, 1]


def test_metrics_are_served_until_the_end_of_the_run(monkeypatch):
    monkeypatch.setattr(telemetry, "LAST_SCRAPE_S", 60)  # must not delay the end, because nothing was counted
    (port,) = free_ports(1)
    with Metrics("r", "s", MODES).served("127.0.0.1", port):
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20).read().decode()
    families = {family.name for family in text_string_to_metric_families(text)}
    assert families == {
        "loadtest_users", "loadtest_cpu_cores", "loadtest_mode", "loadtest_window", "loadtest_measured_seconds",
        "loadtest_requests", "loadtest_request_duration_seconds", "loadtest_verdict", "loadtest_proven_ratio",
    }  # fmt: skip
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20)


@pytest.mark.parametrize("scraped_before", [False, True])
def test_metrics_stay_until_a_late_prometheus_has_the_last_values(monkeypatch, scraped_before):
    """Without a Prometheus, they stay for the shorter time."""
    monkeypatch.setattr(telemetry, "LAST_SCRAPE_S", 0.2)
    monkeypatch.setattr(telemetry, "LATE_SCRAPE_S", 60)
    (port,) = free_ports(1)
    metrics, ended = Metrics("r", "s", MODES), threading.Event()

    def scrape() -> bytes:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read()

    def run() -> None:
        with metrics.served("127.0.0.1", port):
            if scraped_before:
                scrape()
            metrics.count("none", [], 1.0)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    pages = []
    while scraped_before and not ended.wait(0.3):
        with contextlib.suppress(OSError):  # it has just ended
            pages.append(scrape())
    thread.join()
    last = b'loadtest_measured_seconds_total{mode="none",run="r",system="s"} 1.0'
    assert sum(last in page for page in pages) >= telemetry.LAST_SCRAPES * scraped_before


def test_process_memory_grows_with_what_the_process_allocates_and_leaves_out_shared_pages():
    before = process_memory()
    block = bytes([1]) * 2**26
    assert 2**25 < process_memory() - before < 2**27
    before = process_memory()
    with mmap.mmap(-1, 2**26) as shared:
        shared.write(block)
        assert process_memory() - before < 2**25
        assert process_memory(os.getpid()) > 0


@pytest.fixture
def machine(tmp_path):
    """Return a reader of a machine with 1000 KiB, 300 of them free, and with empty control groups."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  300 kB\n")
    (tmp_path / "cgroup/memory").mkdir(parents=True)

    def read() -> tuple[int, int]:
        return memory(tmp_path / "cgroup", tmp_path / "proc")

    read.cgroup = tmp_path / "cgroup"
    return read


def test_memory_without_control_group_is_the_machines(machine):
    assert machine() == (700 * 1024, 1000 * 1024)


@pytest.mark.parametrize(
    ("folder", "used", "limit", "inactive"),
    [
        ("", "memory.current", "memory.max", "inactive_file"),
        ("memory", "memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"),
    ],
)
def test_memory_with_a_limit_is_the_control_groups(machine, folder, used, limit, inactive):
    (machine.cgroup / folder / used).write_text("5000\n")
    (machine.cgroup / folder / limit).write_text("8000\n")
    (machine.cgroup / folder / "memory.stat").write_text(f"anon 1\n{inactive} 2000\n")
    assert machine() == (3000, 8000)
    # Each version of control groups writes "no limit" in its own way.
    for none in ("max\n", f"{2**63 - 4096}\n"):
        (machine.cgroup / folder / limit).write_text(none)
        assert machine() == (700 * 1024, 1000 * 1024)


def test_every_metric_of_the_backends_is_documented():
    """Read the source, because the module imports only inside Triton."""
    module = ast.parse((ROOT / "serving/triton/metrics.py").read_text())
    names = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and node.targets[0].id in ("COUNTERS", "GAUGES")
    }
    documented = (ROOT / "docs/monitoring.md").read_text()
    assert [name for name in names["COUNTERS"] if f"| `transformers_{name}_total` | counter |" not in documented] == []
    assert [name for name in names["GAUGES"] if f"| `transformers_{name}` | gauge |" not in documented] == []
