"""From windows to numbers, from numbers to a verdict. No server, no clock: the same windows give the same answer."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from loadtest.switching import MODES
from loadtest.windows import Counters, Window

# Share of one core above which Locust, being one process, is what limits the throughput: Locust's own warning.
CLIENT_LIMIT = 0.9
# Mean batch from which on we say that batching happened.
BATCHED_FROM = 1.02

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond, the last one, a little too wide.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t95(degrees: int) -> float:
    return _T95[min(degrees, len(_T95)) - 1]


@dataclass(frozen=True)
class ModelBatches:
    """What Triton did with one model's requests."""

    mean_batch: float
    queue_ms: float
    compute_ms: float
    batches: dict[int, int]

    @classmethod
    def of(cls, counters: Sequence[Counters]) -> ModelBatches:
        requests = sum(c.requests for c in counters) or 1
        executions = sum(c.executions for c in counters)
        batches: Counter[int] = Counter()
        for c in counters:
            batches.update(c.batches)
        return cls(
            mean_batch=sum(c.rows for c in counters) / executions if executions else 0.0,
            queue_ms=sum(c.queue_ns for c in counters) / requests / 1e6,
            compute_ms=sum(c.compute_ns for c in counters) / requests / 1e6,
            batches=dict(sorted(batches.items())),
        )


def throughput(window: Window) -> float:
    return sum(not s.error for s in window.samples) / (window.end - window.start)


def failures(window: Window) -> int:
    return sum(bool(s.error) for s in window.samples)


def heaviest(windows: list[Window]) -> str:
    """The model in which the time goes: the one whose batches decide."""
    total: Counter[str] = Counter()
    for window in windows:
        for name, counters in window.counters.items():
            total[name] += counters.compute_ns
    return total.most_common(1)[0][0]


def summary(windows: list[Window], model: str) -> dict:
    """The figures of some windows of one mode together. Throughput is their geometric mean, so ratios agree."""
    latencies = [s.latency_ms for w in windows for s in w.samples if not s.error]
    p50, p95, p99 = np.percentile(latencies, (50, 95, 99)).tolist() if latencies else (None,) * 3
    models = {name: ModelBatches.of([w.counters[name] for w in windows]) for name in windows[0].counters}
    return {
        "throughput_rps": geometric_mean([throughput(w) for w in windows]),
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "requests": sum(len(w.samples) for w in windows),
        "answered_by_triton": sum(w.counters[model].requests for w in windows),
        "failures": sum(map(failures, windows)),
        "mean_batch": models[model].mean_batch,
        "queue_ms": sum(m.queue_ms for m in models.values()),
        "compute_ms": sum(m.compute_ms for m in models.values()),
        "cpu": float(np.mean([w.client_cpu for w in windows])),
        "models": {name: asdict(m) for name, m in models.items()},
    }


def window_record(window: Window, model: str) -> dict:
    return {
        "mode": window.mode,
        "round": window.round,
        "start": window.start,
        "end": window.end,
        "began_at": window.began_at,
        **{key: value for key, value in summary([window], model).items() if key != "models"},
    }


def verdict(windows: list[Window], model: str) -> dict:
    """The ratio dynamic / none, round by round, with the interval its spread over rounds allows."""
    by_mode = {mode: [w for w in windows if w.mode == mode] for mode in MODES}
    rounds = paired(windows)
    logs = [math.log(throughput(dynamic) / throughput(none)) for none, dynamic in rounds]
    mean = float(np.mean(logs))
    interval = None
    if len(logs) > 1:
        half = t95(len(logs) - 1) * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
        interval = [math.exp(mean - half), math.exp(mean + half)]
    p95 = {mode: summary(by_mode[mode], model)["p95_ms"] for mode in MODES}
    return {
        "throughput_ratio": math.exp(mean),
        "ci95": interval,
        "p95_ratio": p95["dynamic"] / p95["none"],
        "batched": not unproven(windows, model),
        "client_bound": any(w.client_cpu >= CLIENT_LIMIT for w in windows),
    }


def paired(windows: list[Window]) -> list[tuple[Window, Window]]:
    """(none, dynamic) of each round that has both and was answered in both."""
    found: dict[int, dict[str, Window]] = {}
    for window in windows:
        if throughput(window):
            found.setdefault(window.round, {})[window.mode] = window
    return [(pair["none"], pair["dynamic"]) for pair in found.values() if len(pair) == 2]


def unproven(windows: list[Window], model: str, noun: str = "texts") -> str:
    """Why Triton's counters do not show batching off in the one mode and on in the other; nothing if they do."""
    for window in windows:
        for name, counters in window.counters.items():
            if window.mode == "none" and counters.rows != counters.executions:
                mean = ModelBatches.of([counters]).mean_batch
                return (
                    f"with dynamic batching off, '{name}' still ran {mean:.2f} {noun} an execution: "
                    "something else was using the server"
                )
        mean = ModelBatches.of([window.counters[model]]).mean_batch
        if window.mode == "dynamic" and mean < BATCHED_FROM:
            return f"with dynamic batching on, '{model}' ran only {mean:.2f} {noun} an execution"
    return ""


def foreign(found: dict) -> str:
    """Whether Triton answered more than Locust asked for; nothing if it did not, but for what windows cut off."""
    windows = found["windows"]
    answered, asked = (sum(window[key] for window in windows) for key in ("answered_by_triton", "requests"))
    if answered <= 1.25 * asked + 2 * found["settings"]["users"] * len(windows):
        return ""
    return f"Triton answered {answered} requests in the windows, and Locust sent {asked}: somebody else used the server"


def geometric_mean(values: list[float]) -> float:
    return math.exp(float(np.mean(np.log(values)))) if min(values) > 0 else 0.0


def write_csv(windows: list[Window], path: Path) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["answered_at_s", "latency_ms", "mode", "round", "error"])
        for window in windows:
            rows.writerows(
                [f"{s.at:.6f}", f"{s.latency_ms:.3f}", window.mode, window.round, s.error] for s in window.samples
            )


def window_line(window: Window) -> str:
    figures = summary([window], heaviest([window]))
    p95 = "-" if figures["p95_ms"] is None else f"{figures['p95_ms']:.0f}"
    return (
        f"{window.round:>5}  {window.mode:<8}{figures['throughput_rps']:>11.1f}{p95:>9}"
        f"{figures['mean_batch']:>8.2f}{figures['failures']:>8}"
    )
