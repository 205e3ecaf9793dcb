"""Build the results of `make tune` and of `make loadtest OVERLOAD=3` without a server."""

from __future__ import annotations

import random
from typing import Any

from loadtest.load.arrivals import Sample
from loadtest.measure.verdicts import Cause, Code, judge
from loadtest.overload import overload

DIFF = """\
--- encoder/config.pbtxt
+++ encoder/configs/cpu.pbtxt
@@ -5,7 +5,7 @@
-max_batch_size: 64
+max_batch_size: 16
 dynamic_batching { }
"""


def arm(label: str, ratio: float | None, outcome: str, around: float = 300, reason: str = "") -> dict:
    """Return a candidate whose rounds and probes lie around a value."""
    values = [around * (ratio or 1) * noise for noise in (0.99, 1.02)] if ratio else []
    return {
        "label": label,
        "changes": {"encoder": {"max_batch_size": 16}},
        "base": {},
        "values": values,
        "base_values": [value / ratio for value in values] if ratio else [],
        "ratio": ratio,
        "ci95": [ratio * 0.95, ratio * 1.05] if ratio else None,
        "outcome": outcome,
        "reason": reason,
        "probes": probes(around * ratio) if ratio else [],
    }


def probes(goodput: float, target: float = 100) -> list:
    """Return what a bisection tries on a server whose p95 rises steeply towards its capacity."""
    numbers = random.Random(goodput)
    capacity = goodput / 0.8
    rates = [goodput * factor for factor in (0.8, 1, 1.25, 1.12, 1.06, 0.95)]
    return [
        (rate, target * 0.2 / (1 - rate / capacity) * numbers.uniform(0.9, 1.1) if rate < capacity * 0.98 else None)
        for rate in rates
    ]


def better() -> dict:
    """Return what a search for a p95 of 100 ms found: a candidate that is better."""
    arms = [
        arm("encoder: max_batch_size 16", 1.12, "better"),
        arm("encoder: max_batch_size 128", 0.93, "not better"),
        arm("encoder: instances 2 x 1 threads", 1.02, "likely better", 340),
        arm("tokenizer: max_queue_delay_microseconds 2000", 0.99, "not proven", 340),
        arm("encoder: engine onnxruntime", None, "failed", reason="Triton refused to load it: [no such] engine"),
    ]
    settings = {
        "workload": "mixed", "protocol": "http", "users": 256, "workers": 0, "seed": 1, "minutes": 10,
        "loadtest_cpus": "", "triton_cpus": "", "arrivals": "poisson",
    }  # fmt: skip
    return {
        "run": "20261123T060000Z", "date": "2026-11-23 06:00 UTC",
        "system": "embedding", "profile": "cpu", "runtime": "local", "noun": "texts",
        "host": {"cpu": "A CPU", "cores": 2, "memory_gb": 8.0, "gpu": None, "system": "Linux"},
        "triton": {"version": "2.51.0", "image": None, "cores": 2}, "engines": {"encoder": "openvino bf16"},
        "goal": {"p95_ms": 100.0}, "new_tokens": None, "command": "make tune P95=100", "settings": settings,
        "arms": arms,
        "original": {"label": "as configured", "values": [303.0, 298.0, 309.0], "probes": probes(303)},
        "winner": {"label": arms[0]["label"], "changes": {}, "values": [341.0, 338.0], "probes": probes(340)},
        "confirmation": {
            "original": [304.1, 298.2, 305.0, 301.0], "winner": [339.0, 336.4, 345.9, 340.1], "ratio": 1.126,
            "ci95": [1.05, 1.2],
        },
        "outcome": "better", "notes": ["requests of more than 16 texts will be refused"],
        "configs": {"encoder": {"max_batch_size": 16}}, "diff": DIFF,
        "files": {"encoder/configs/cpu.pbtxt": "max_batch_size: 16\n"}, "seconds": 571.2, "stopped": "",
        "verdict": judge([], 1.126, [1.12, 1.13, 1.13], (1.05, 1.2)), "resumed": False, "uncounted": 1,
        "measurements": [{"label": "as configured", "value": 303.0, "is_bound": False}] * 12,
    }  # fmt: skip


def nothing_better(result: dict) -> dict:
    arms = [arm("encoder: max_batch_size 16", 1.01, "not proven"), arm("encoder: max_batch_size 8", 0.9, "not better")]
    return result | {
        "outcome": "nothing better", "arms": arms, "winner": None, "confirmation": None, "diff": "", "configs": {},
        "notes": [], "verdict": judge([Cause(Code.NOTHING_BETTER)]),
    }  # fmt: skip


def not_confirmed(result: dict) -> dict:
    again = result["confirmation"]
    confirmation = again | {
        "ratio": 1.02,
        "ci95": [0.98, 1.06],
        "winner": [1.02 * value for value in again["original"]],
    }
    return result | {
        "outcome": "not confirmed", "confirmation": confirmation, "diff": "", "configs": {}, "notes": [],
        "verdict": judge([Cause(Code.NOT_CONFIRMED)]),
    }  # fmt: skip


def at_rate(result: dict) -> dict:
    """Return the same search for the least p95 at 200 requests/s."""

    def latency(measured: dict) -> dict:
        values, beside = ([20000 / value for value in measured.get(key, [])] for key in ("values", "base_values"))
        return measured | {"values": values, "base_values": beside, "probes": [(200.0, value) for value in values]}

    again = result["confirmation"]
    return result | {
        "goal": {"rate": 200.0},
        "arms": [latency(arm) for arm in result["arms"]],
        "original": latency(result["original"]),
        "winner": result["winner"] and latency(result["winner"]),
        "confirmation": again
        and again | {key: [20000 / value for value in again[key]] for key in ("original", "winner")},
    }


# --- an overload ------------------------------------------------------------------------------------------------------

REFUSAL = '429 {"error": {}}'
SETTINGS = {"factor": 3.0, "target_ms": 1000.0, "in_flight": 256, "window_s": 20.0}
# The server answers 78 requests per second, each after more than 3 s in the queue.
LATE = {
    "system": "embedding", "settings": SETTINGS, "host": {"cores": 2}, "capacity_rps": 78.0, "scheduled_rps": 234.0,
    "arrived_rps": 234.0, "sent_rps": 234.0, "late_p50_ms": 0.5, "late_p95_ms": 3.0, "goodput_rps": 0.0,
    "goodput_ratio": 0.0, "answered_rps": 78.0, "accepted_p50_ms": 2840.0, "accepted_p95_ms": 3300.0,
    "refused_share": 0.66, "refused": 3000, "refused_p50_ms": 2.0, "refused_p95_ms": 44.0,
    "refused_since_sent_p50_ms": 1.0, "refused_since_sent_p95_ms": 43.0, "failed": 0, "given_up": 0,
    "lone_p50_ms": 15.0, "as_fast_ms": 30.0, "recovered_s": 3.5, "client_cores": 0.3, "other_cores": 0.1,
}  # fmt: skip


def overloaded(samples: list[Sample], **changes: Any) -> dict[str, Any]:
    """Return all results of an overload of 20 s with these responses."""
    results = LATE | {
        "run": "R", "date": "2026-11-23 06:00 UTC",
        "profile": "cpu", "runtime": "local", "command": "make loadtest OVERLOAD=3", "engines": {},
        "triton": {"version": "2.51.0", "image": None, "cores": 2},
        "host": {"cpu": "A CPU", "cores": 2, "memory_gb": 8.0, "gpu": None, "system": "Linux"},
        "settings": SETTINGS | {"users": 32, "workers": 0, "triton_cpus": "", "loadtest_cpus": ""},
        "timeline": overload.timeline(samples, 1000.0), "single_requests": [(0.1, 900.0), (1.0, None), (3.5, 20.0)],
    } | changes  # fmt: skip
    results["verdict"] = judge(overload.causes(results), results["goodput_ratio"])
    return results | {"advice": overload.advice(results)}
