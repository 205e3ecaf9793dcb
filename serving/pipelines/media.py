"""Decodes the files of requests in processes that may end: their limits, and the numbers that come back."""

from __future__ import annotations

import json
import os
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from serving.pipelines.media_worker import DECODE_SECONDS
from serving.triton.parameters import int_parameter, usable_cpus
from serving.triton.types import Array, BadRequest, Busy, ModelConfig
from serving.triton.worker_process import WorkerEnded, WorkerProcess

# Parameters of the model's configuration, with their defaults.
LIMITS = {
    "max_bytes": 100_000_000,
    "max_pixels": 50_000_000,
    "max_video_pixels": 200_000_000,
    "max_seconds": 1800,
    "max_decoded_bytes": 4_000_000_000,  # of the files of all requests at work
}


class MediaDecoder:
    """Decodes several files side by side, each on a thread with a process of its own, which its first file starts."""

    def __init__(self, config: ModelConfig) -> None:
        self.limits = {name: int_parameter(config, name, default) for name, default in LIMITS.items()}
        self.memory = DecodedBytes(self.limits["max_decoded_bytes"])
        self.pool = ThreadPoolExecutor(min(4, usable_cpus()), thread_name_prefix="media")
        self.local = threading.local()

    def decode(self, kind: str, data: bytes, where: str, field: str, **options: Any) -> Future[Array]:
        """Return an image [H,W,3], sound at the option `rate`, or a video's first `frames` [T,H,W,3]; or BadRequest."""
        return self.pool.submit(self.decode_in_worker, kind, data, where, field, options)

    def decode_in_worker(self, kind: str, data: bytes, where: str, field: str, options: dict[str, Any]) -> Array:
        if len(data) > self.limits["max_bytes"]:
            problem = f"it has {len(data)} bytes, too many for max_bytes={self.limits['max_bytes']}"
            raise BadRequest(f"{where}: {problem}", field)
        try:
            if not hasattr(self.local, "worker") or self.local.worker.process.has_ended:
                self.local.worker = MediaWorker(self.memory)
            decoded: Array = self.local.worker.decode(data, {"kind": kind, **self.limits, **options})
            return decoded
        except WorkerEnded as error:  # the next file gets another one
            vars(self.local).pop("worker", None)
            raise BadRequest(f"{where}: it takes {error} to decode", field) from None
        except BadRequest as error:
            raise BadRequest(f"{where}: {error}", field) from None

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


class DecodedBytes:
    """Counts the bytes of decoded files until their arrays are freed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.lock = threading.RLock()  # a thread that holds it may free an array

    def hold(self, decoded: Array) -> None:
        """Count the bytes of an array until it is freed. Raise BadRequest, or Busy if others leave too few."""
        if decoded.nbytes > self.limit:
            raise BadRequest(f"decoded it has {decoded.nbytes} bytes, too many for max_decoded_bytes={self.limit}")
        with self.lock:
            if self.used + decoded.nbytes > self.limit:
                raise Busy(f"the decoded files of all requests exceed max_decoded_bytes={self.limit}: try again later")
            self.used += decoded.nbytes
        weakref.finalize(decoded, self.release, decoded.nbytes)

    def release(self, size: int) -> None:
        with self.lock:
            self.used -= size


class MediaWorker:
    """A process that decodes, and the file in memory that it shares with this one."""

    def __init__(self, memory: DecodedBytes) -> None:
        self.memory = memory
        self.file = os.fdopen(os.memfd_create("media"), "r+b", buffering=0)
        descriptor = self.file.fileno()
        self.process = WorkerProcess("serving.pipelines.media_worker", DECODE_SECONDS, [descriptor])
        self.process.ask(json.dumps({"file": descriptor}))

    def decode(self, data: bytes, order: dict[str, Any]) -> Array:
        self.file.seek(0)
        self.file.truncate()
        self.file.write(data)
        answer = self.process.ask(json.dumps(order | {"size": len(data)}))
        decoded = np.empty(answer["shape"], answer["dtype"])
        try:
            self.memory.hold(decoded)
            self.file.seek(0)
            free = decoded.reshape(-1).view(np.uint8).data
            while count := self.file.readinto(free):  # Linux reads at most 2 GiB at once
                free = free[count:]
        finally:
            self.file.truncate(0)
        return decoded
