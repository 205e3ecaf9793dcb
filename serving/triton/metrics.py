"""Adds the backends' metrics to Triton's own /metrics. docs/monitoring.md lists every name."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence

import triton_python_backend_utils as pb_utils

from serving.triton.memory import memory, process_memory
from serving.triton.parameters import usable_cpus
from serving.triton.types import InstanceArgs

COUNTERS = {
    "texts": "Texts tokenized",
    "images": "Images that an image processor received",
    "truncated_texts": "Texts longer than max_length, which were cut",
    "tokens": "Tokens of the texts, without padding",
    "prefix_cached_tokens": "Tokens of prompts whose keys and values came from the prefix cache",
    "generated_tokens": "Tokens that the model added to texts",
    "first_tokens": "Texts that ended and have at least one generated token",
    "first_token_microseconds": "Time from the arrival of these texts to their first generated token",
    "later_tokens": "Tokens that were generated after the first ones of these texts",
    "later_token_microseconds": "Time from the first generated token of these texts to their last",
    "padding_tokens": "Tokens added to give rows the same length",
    "padding_rows": "Rows added to reach the batch size that the model was compiled for",
    "runs": "Runs of the model's graph; packing makes several runs of one execution",
    "requests": "Requests that the model answered completely",
    "request_microseconds": "Time from the arrival of these requests to their last response",
    "waiting_microseconds": "Time from the arrival of these requests until the first of their texts ran",
}
GAUGES = {
    "running_texts": "Texts that are being continued",
    "waiting_texts": "Texts that wait until one of the running texts has ended",
    "cache_usage_ratio": "Share of the cache for keys and values that is in use",
}
# A backend that responds after execute() counts these: TRITON-FAULTS.md#counters.
REQUEST_COUNTERS = ("requests", "request_microseconds", "waiting_microseconds")
SEND_INTERVAL_S = 0.5


class Metrics:
    """The metrics of one model.

    A thread sends them, because each number is a round trip to Triton (0.2 ms under load), and an error there must not
    reach a request.
    """

    def __init__(
        self,
        args: InstanceArgs,
        *counters: str,
        gauges: Sequence[str] = (),
        engine_labels: dict[str, str] | None = None,
    ) -> None:
        self.config = json.loads(args["model_config"])
        self.labels = {"model": args["model_name"], "version": args["model_version"]}
        # The name of the instance. Prometheus has a label `instance` of its own.
        self.process = {"process": args["model_instance_name"]}
        self.counters = counters
        self.engine_labels = engine_labels
        self.counts: Counter[str] = Counter()
        self.values: dict[str, float] = dict.fromkeys(gauges, 0)
        self.lock = threading.Lock()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._send, daemon=True)
        self.thread.start()

    def add(self, **counts: int) -> None:
        with self.lock:
            self.counts.update(counts)

    def add_request(self, arrived_at: float, began_at: float) -> None:
        """Count a request whose last response is ready; both times are those of time.monotonic()."""
        now = time.monotonic()
        self.add(
            requests=1,
            request_microseconds=round(1e6 * (now - arrived_at)),
            waiting_microseconds=round(1e6 * (began_at - arrived_at)),
        )

    def set(self, **values: float) -> None:
        """Set gauges."""
        with self.lock:
            self.values.update(values)

    def close(self) -> None:
        """Send the last counts before the process ends."""
        self.closed.set()
        self.thread.join(timeout=2)

    def _send(self) -> None:
        try:
            totals = {name: _metric("COUNTER", f"{name}_total", COUNTERS[name], self.labels) for name in self.counters}
            self._gauge("dynamic_batching", "1 if the model's configuration batches dynamically, else 0").set(
                int("dynamic_batching" in self.config)
            )
            self._gauge("max_batch_size", "The model's max_batch_size").set(self.config.get("max_batch_size", 0))
            self._gauge("cpus", "CPUs that Triton may use").set(usable_cpus())
            gauges = {name: self._gauge(name, GAUGES[name]) for name in self.values}
            process = self._gauge("process_memory_bytes", "Own memory of a Python process of the model", **self.process)
            server = self._gauge("server_memory_bytes", "Own memory of tritonserver, without the models' processes")
            used = self._gauge("memory_used_bytes", "Memory in use in Triton's container, or on the machine")
            limit = self._gauge("memory_limit_bytes", "Memory limit of Triton's container, or memory of the machine")
            engine = "1 for the engine and the precision that the model runs in"
            engines = [self._gauge("engine", engine, **self.engine_labels)] if self.engine_labels else []
            for engine_gauge in engines:
                engine_gauge.set(1)  # at once, because `make status` often follows the load
            closed = False
            while not closed:
                closed = self.closed.wait(SEND_INTERVAL_S)
                with self.lock:
                    counts, self.counts = self.counts, Counter()
                    values = dict(self.values)
                for name, count in counts.items():
                    totals[name].increment(count)
                # TRITON-FAULTS.md#lost-metrics
                for name, gauge in gauges.items():
                    gauge.set(0 if closed else values[name])
                sizes = (0, 0, 0, 0) if closed else (process_memory(), process_memory(os.getppid()), *memory())
                for gauge, size in zip((process, server, used, limit), sizes, strict=True):
                    gauge.set(size)
                for engine_gauge in engines:
                    engine_gauge.set(int(not closed))
        except Exception as error:
            pb_utils.Logger.log_warn(f"{self.labels['model']}: the backend's metrics stopped: {error}")

    def _gauge(self, name: str, description: str, **labels: str) -> pb_utils.Metric:
        return _metric("GAUGE", name, description, self.labels | labels)


def _metric(kind: str, name: str, description: str, labels: dict[str, str]) -> pb_utils.Metric:
    family = pb_utils.MetricFamily(
        name=f"transformers_{name}", description=description, kind=getattr(pb_utils.MetricFamily, kind)
    )
    metric = family.Metric(labels=labels)
    # Keep both until the process ends: TRITON-FAULTS.md#lost-metrics.
    for kept in (family, metric):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    return metric
