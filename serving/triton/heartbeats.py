"""Send empty responses to clients that wait, so that they notice a crash.

See TRITON-FAULTS.md#crashed-processes-of-texts. The first one also frees a thread of Triton's:
TRITON-FAULTS.md#calls-that-wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import cast

import triton_python_backend_utils as pb_utils

# The longest time between two responses to a request: clients give up after SILENCE_S.
BEAT_S = 2.0


class BeatingSender:
    """A response sender that sends an empty response at once, and whenever a request has got none for BEAT_S."""

    def __init__(self, sender: pb_utils.InferenceResponseSender, beating: set[BeatingSender]) -> None:
        self.sender = sender
        self.beating = beating
        self.lock = threading.Lock()  # no response may follow the last one
        self.is_cancelled = sender.is_cancelled
        self.send(pb_utils.InferenceResponse([]))
        beating.add(self)

    def send(self, response: pb_utils.InferenceResponse, flags: int = 0) -> None:
        with self.lock:
            if flags == pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL:
                self.beating.discard(self)
            self.sent_at = time.monotonic()
            self.sender.send(response, flags)

    def beat(self) -> None:
        with self.lock:
            if self in self.beating and time.monotonic() >= self.sent_at + BEAT_S:
                self.sent_at = time.monotonic()
                self.sender.send(pb_utils.InferenceResponse([]))


class Heartbeats:
    """The requests that get heartbeats, and the thread that sends them."""

    def __init__(self) -> None:
        self.beating: set[BeatingSender] = set()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def sender(self, sender: pb_utils.InferenceResponseSender) -> pb_utils.InferenceResponseSender:
        """Return a sender for the responses of this request, which gets heartbeats until its last response."""
        return cast("pb_utils.InferenceResponseSender", BeatingSender(sender, self.beating))

    def run(self) -> None:
        while not self.closed.wait(BEAT_S / 2):
            for sender in list(self.beating):
                with contextlib.suppress(Exception):  # shared memory may be full; the next round tries again
                    sender.beat()

    def close(self) -> None:
        self.closed.set()
        self.thread.join()
