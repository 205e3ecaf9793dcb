"""A request to generate text while its texts run: what its client has got, and when it ends."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable

import triton_python_backend_utils as pb_utils

from serving.generation.row import Row
from serving.text.prompts import Piece, PromptRequest
from serving.triton import responses
from serving.triton.metrics import Metrics
from serving.triton.types import Cancelled


class Job:
    """One request: its rows, and its response, whole or in pieces."""

    def __init__(
        self,
        request: PromptRequest,
        sender: pb_utils.InferenceResponseSender,
        streams: bool,
        echoes: bool,
        metrics: Metrics,
    ) -> None:
        self.request = request
        self.sender = sender
        self.streams = streams
        self.echoes = echoes  # each text begins with its prompt
        self.metrics = metrics
        self.rows: list[Row[Job]] = []
        # Characters of the texts, new tokens, and their logprobs.
        self.sent = self.sent_tokens = self.sent_logprobs = 0
        self.on_finish: Callable[[], object] | None = None
        self.finished = False  # the last response is sent
        self.end_requested = False
        self.arrived_at = time.monotonic()
        self.began_at = math.inf

    def begin(self) -> None:
        """Note that a text of the request begins to run."""
        self.began_at = min(self.began_at, time.monotonic())

    def update(self, check_cancelled: bool) -> None:
        """Send what is ready. With `check_cancelled`, ask Triton whether the client still waits."""
        if check_cancelled or self.end_requested:
            self.end_if_cancelled()
        if self.finished:
            return
        if all(row.done for row in self.rows):
            response = self.request.response([self.unsent(row) for row in self.rows])
            # The client may measure its own time as soon as it has the response, and must not find less.
            self.metrics.add_request(self.arrived_at, self.began_at)
            self.finish(response)
        elif self.streams:
            self.send_piece()

    def end_if_cancelled(self) -> None:
        if not self.finished and (self.end_requested or self.sender.is_cancelled()):
            self.fail(Cancelled("the client cancelled the request"))

    def unsent(self, row: Row[Job]) -> Piece:
        text = ((row.prompt if self.echoes else "") + row.text)[self.sent :]
        # A batch that failed runs again from its first token.
        new_tokens = max(0, row.new_tokens - self.sent_tokens)
        logprobs = json.dumps(row.logprobs[self.sent_logprobs : row.known_logprobs]) if row.logprobs else "[]"
        return Piece(
            text, row.finish_reason, len(row.prompt_tokens), new_tokens, row.cached_tokens, logprobs, row.stop_reason
        )

    def send_piece(self) -> None:
        piece = self.unsent(*self.rows)
        (row,) = self.rows
        is_scored = row.scored or row.options.prompt_logprobs is None
        if piece.text and is_scored:
            self.sent += len(piece.text)
            self.sent_tokens += piece.num_output_tokens
            self.sent_logprobs = max(self.sent_logprobs, row.known_logprobs)
            self.sender.send(self.request.response([piece]))

    def fail(self, error: Exception) -> None:
        if not self.finished:
            self.finish(self.request.error_response(error))

    def finish(self, response: pb_utils.InferenceResponse) -> None:
        self.finished = True
        for row in self.rows:
            row.done, row.images = True, None
        if self.on_finish:
            self.on_finish()
        responses.send_last(self.sender, response)
        # Free its shared memory now. The job and its rows refer to each other, so Python frees them later.
        del self.sender
