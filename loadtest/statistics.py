"""The numbers of a comparison and its verdict, computed from its windows alone."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.windows import Counters, Window
from scripts.common.settings import MODES

# The content of results.json, or a part of it (docs/comparison.md).
Results = dict[str, Any]

# Cores that Locust's busiest process may use before it counts as the bottleneck: the limit of Locust's own warning.
CLIENT_LIMIT = 0.9
# Triton updates its counters one after the other, so a reading under load may fall between two of them.
COUNTER_SKEW = 2
# Mean batch from which batching counts as proven.
BATCHED_FROM = 1.02
FASTER, SLOWER, NOT_PROVEN = "faster", "slower", "not proven"
NARROW = "More ROUNDS or a longer WINDOW narrow it."

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; for more, the last is a little too wide.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t95(degrees: int) -> float:
    return _T95[min(degrees, len(_T95)) - 1]


@dataclass(frozen=True)
class ModelBatches:
    """Triton's figures for one model: batch sizes, and time per request."""

    mean_batch: float
    queue_ms: float
    compute_ms: float
    batches: dict[int, int]  # executions by batch size

    @classmethod
    def from_counters(cls, counters: Sequence[Counters]) -> ModelBatches:
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
    """Return the model that computes the most: the one whose batches matter."""
    total: Counter[str] = Counter()
    for window in windows:
        for name, counters in window.counters.items():
            total[name] += counters.compute_ns
    return total.most_common(1)[0][0]


def summary(windows: list[Window], model: str) -> Results:
    """Return the numbers of several windows of one mode.

    Throughput is the windows' geometric mean, so that the quotient of two modes is the ratio of the verdict.
    """
    latencies = [s.latency_ms for w in windows for s in w.samples if not s.error]
    p50, p95, p99 = np.percentile(latencies, (50, 95, 99)).tolist() if latencies else (None,) * 3
    models = {name: ModelBatches.from_counters([w.counters[name] for w in windows]) for name in windows[0].counters}
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


def window_record(window: Window, model: str) -> Results:
    return {
        "mode": window.mode,
        "round": window.round,
        "start": window.start,
        "end": window.end,
        "began_at": window.began_at,
        **{key: value for key, value in summary([window], model).items() if key != "models"},
    }


def verdict(windows: list[Window], model: str) -> Results:
    """Compare dynamic batching with each other mode. The headline is the ratio to the best of them."""
    rounds = complete_rounds(windows)
    others = [mode for mode in modes_of(windows) if mode != "dynamic"]
    baseline = best(rounds, others)
    ratios = {mode: ratio(rounds, mode) for mode in others}
    p95 = {mode: summary([by_mode[mode] for by_mode in rounds], model)["p95_ms"] for mode in (baseline, "dynamic")}
    return {
        **ratios[baseline],
        "baseline": baseline,
        "outcome": outcome(ratios[baseline]["ci95"]),
        "p95_ratio": p95["dynamic"] / p95[baseline],
        "ratios": ratios,
        "batched": not batching_error(windows, model),
        "client_bound": any(w.client_cpu >= CLIENT_LIMIT for w in windows),
    }


def best(rounds: list[dict[str, Window]], modes: list[str]) -> str:
    """Return the mode with the highest throughput of all rounds together.

    As the baseline it never flatters dynamic batching: of two modes that are equally good, it is the one that chance
    favoured.
    """
    return max(modes, key=lambda mode: geometric_mean([throughput(by_mode[mode]) for by_mode in rounds]))


def ratio(rounds: list[dict[str, Window]], other: str) -> Results:
    """Return the ratio dynamic / other over the rounds, with the interval that their spread allows."""
    logs = [math.log(throughput(by_mode["dynamic"]) / throughput(by_mode[other])) for by_mode in rounds]
    mean = float(np.mean(logs))
    interval = None
    if len(logs) > 1:
        half = t95(len(logs) - 1) * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
        interval = [math.exp(mean - half), math.exp(mean + half)]
    return {"throughput_ratio": math.exp(mean), "ci95": interval}


def outcome(interval: list[float] | None) -> str:
    """Return what dynamic batching does to the throughput, if the interval of the ratio proves that."""
    if interval is None or interval[0] <= 1 <= interval[1]:
        return NOT_PROVEN
    return FASTER if interval[0] > 1 else SLOWER


def modes_of(windows: list[Window]) -> list[str]:
    """Return the modes that were measured, in the order in which reports show them."""
    return [mode for mode in MODES if any(window.mode == mode for window in windows)]


def complete_rounds(windows: list[Window]) -> list[dict[str, Window]]:
    """Return the windows by mode of each round in which every mode answered requests."""
    modes = modes_of(windows)
    if "dynamic" not in modes or len(modes) < 2:
        return []
    rounds: dict[int, dict[str, Window]] = {}
    for window in windows:
        if throughput(window):
            rounds.setdefault(window.round, {})[window.mode] = window
    return [by_mode for by_mode in rounds.values() if len(by_mode) == len(modes)]


def batching_error(windows: list[Window], model: str, noun: str = "texts") -> str:
    """Return how Triton's counters contradict the modes, or nothing: only dynamic batching runs batches."""
    for window in windows:
        for name, counters in window.counters.items():
            if window.mode != "dynamic" and abs(counters.rows - counters.executions) > COUNTER_SKEW:
                mean = ModelBatches.from_counters([counters]).mean_batch
                return (
                    f"with dynamic batching off, '{name}' still ran {mean:.2f} {noun} per execution: "
                    "something else was using the server"
                )
        mean = ModelBatches.from_counters([window.counters[model]]).mean_batch
        if window.mode == "dynamic" and mean < BATCHED_FROM:
            return f"with dynamic batching on, '{model}' ran only {mean:.2f} {noun} per execution"
    return ""


def complaints(results: Results) -> list[str]:
    """Return why the comparison does not count; without complaints its exit code is 0."""
    reasons = []
    if results["stopped"]:
        reasons.append(f"stopped early: {results['stopped']}; what was measured until then is kept")
    if results["unproven"]:
        reasons.append(results["unproven"] + likely_cause(results))
    reasons.append(foreign_requests(results))
    if failed := sum(window["failures"] for window in results["windows"]):
        reasons.append(f"{failed} request(s) failed; requests.csv has their errors")
    if results["verdict"]["client_bound"]:
        reasons.append(
            "Locust used a whole core, so the server was not the limit: set more WORKERS, fewer USERS, or a heavier "
            "SYSTEM"
        )
    reasons.append(missed_ratio(results))
    return [reason for reason in reasons if reason]


def likely_cause(results: Results) -> str:
    if results["modes"]["dynamic"]["mean_batch"] >= BATCHED_FROM:
        return ""
    if results["settings"]["users"] == 1:
        return ": one user never has two requests waiting; use more USERS"
    return (
        ". Likely causes: too few USERS for the model's instances, requests of unequal length on an input without "
        "allow_ragged_batch, or a max_batch_size of 1 (docs/comparison.md)"
    )


def foreign_requests(results: Results) -> str:
    """Return that Triton answered more requests than Locust sent, allowing for those that cross a window's edges."""
    windows = results["windows"]
    answered, sent = (sum(window[key] for window in windows) for key in ("answered_by_triton", "requests"))
    if answered <= 1.25 * sent + 2 * results["settings"]["users"] * len(windows):
        return ""
    return f"Triton answered {answered} requests in the windows, but Locust sent {sent}: something else used the server"


def missed_ratio(results: Results) -> str:
    """Return why the ratio does not prove MIN_RATIO: the whole interval has to reach it."""
    minimum, ratio = results["settings"]["min_ratio"], results["verdict"]["throughput_ratio"]
    if not minimum:
        return ""
    if ratio < minimum:
        return f"the throughput ratio {ratio:.2f} is below MIN_RATIO={minimum:g}"
    if not (interval := results["verdict"]["ci95"]):
        return f"one round has no interval that could prove MIN_RATIO={minimum:g}"
    if interval[0] >= minimum:
        return ""
    if outcome(interval) == NOT_PROVEN:  # then the verdict's sentence shows the interval, and what to do
        return f"the interval begins below MIN_RATIO={minimum:g}"
    return (
        f"the throughput ratio's 95 % interval, {interval[0]:.2f} to {interval[1]:.2f}, begins below "
        f"MIN_RATIO={minimum:g}. {NARROW}"
    )


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
