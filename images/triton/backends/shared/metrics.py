"""What the backends tell Prometheus, on Triton's own /metrics. docs/metrics.md lists every name."""

from __future__ import annotations

import ctypes
import json
import threading
from collections import Counter

import triton_python_backend_utils as pb_utils

from shared.memory import memory

COUNTERS = {
    "texts": "Texts tokenized",
    "images": "Pictures that a model's image processor was given",
    "truncated_texts": "Texts that were longer than max_length and were cut",
    "tokens": "Tokens of the texts themselves",
    "generated_tokens": "Tokens that the model added to texts",
    "padding_tokens": "Tokens added so that rows are of one length",
    "padding_rows": "Rows added to fill a batch up to what the model was compiled for",
    "runs": "Runs of the model's graph; packing makes several of one execution",
}
SEND_EVERY_S = 0.5


class Metrics:
    """One model's.

    Triton is told by a thread: each number is a round trip to it, of a fifth of a millisecond under load, and whatever
    goes wrong there must not reach a request.
    """

    def __init__(self, args: dict, *counters: str) -> None:
        self.config = json.loads(args["model_config"])
        self.labels = {"model": args["model_name"], "version": args["model_version"]}
        self.counters = counters
        self.counted: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._tell, daemon=True)
        self.thread.start()

    def add(self, **counts: int) -> None:
        with self.lock:
            self.counted.update(counts)

    def close(self) -> None:
        """The last of it, before the process ends."""
        self.closed.set()
        self.thread.join(timeout=2)

    def _tell(self) -> None:
        try:
            totals = {name: _metric("COUNTER", f"{name}_total", COUNTERS[name], self.labels) for name in self.counters}
            self._gauge("dynamic_batching", "1 where the model's configuration batches dynamically, else 0").set(
                int("dynamic_batching" in self.config)
            )
            self._gauge("max_batch_size", "The model's max_batch_size").set(self.config.get("max_batch_size", 0))
            used = self._gauge("memory_used_bytes", "Memory in use where Triton runs: its container, or the machine")
            limit = self._gauge("memory_limit_bytes", "Memory there is: the container's limit, or the machine's")
            over = False
            while not over:
                over = self.closed.wait(SEND_EVERY_S)
                with self.lock:
                    counted, self.counted = self.counted, Counter()
                for name, count in counted.items():
                    totals[name].increment(count)
                # Triton goes on showing what a model said that is no longer loaded.
                for gauge, value in zip((used, limit), (0, 0) if over else memory(), strict=True):
                    gauge.set(value)
        except Exception as error:
            pb_utils.Logger.log_warn(f"{self.labels['model']}: no more metrics of this backend: {error}")

    def _gauge(self, name: str, description: str):
        return _metric("GAUGE", name, description, self.labels)


def _metric(kind: str, name: str, description: str, labels: dict[str, str]):
    family = pb_utils.MetricFamily(
        name=f"transformers_{name}", description=description, kind=getattr(pb_utils.MetricFamily, kind)
    )
    metric = family.Metric(labels=labels)
    # To the end of the process: to destroy one crashes the process, or, where it does not, takes the metric from the
    # process that came in its place (triton-inference-server/server #8662, #8663).
    for each in (family, metric):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    return metric
