"""Task `text-generation`: continues the prompts that wait at the same time together.

Triton does not batch these requests, because the published request has no batch dimension. So execute() only checks a
request and queues its prompts; a thread of this module generates, and responds when a text is done.
"""

from __future__ import annotations

import contextlib
import math
import queue
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from shared import pretrained, serving
from shared.backend import Backend
from shared.decoding import Decoder, Options, Row
from shared.errors import BadRequest, Busy, ConfigError
from shared.parameters import int_parameter, parameter
from shared.prompts import NUMBERS, PromptRequest, Rule, read_option, read_request
from shared.types import InstanceArgs, ModelConfig

CANCELLED = pb_utils.TritonError.CANCELLED
# Each check whether a client still waits is a round trip to Triton.
CANCEL_CHECK_S = 0.25


class TextGeneration(Backend):
    counters = ("texts", "tokens", "padding_tokens", "generated_tokens", "runs")
    default_max_batch = 32

    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        self.streams = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.defaults = default_options(config)
        self.max_batch = int_parameter(config, "max_batch", self.default_max_batch)
        self.gather_s = int_parameter(config, "gather_milliseconds", 10) / 1000
        self.max_waiting = int_parameter(config, "max_waiting", 1000)
        if self.max_batch < 1 or self.max_waiting < 1 or self.gather_s < 0:
            raise ConfigError("parameters 'max_batch', 'max_waiting' must be at least 1, 'gather_milliseconds' 0")
        self.decoder = self.load_decoder(config, args)
        self.waiting: queue.Queue[Row[Job] | None] = queue.Queue()

    def load_decoder(self, config: ModelConfig, args: InstanceArgs) -> Decoder:
        return Decoder(pretrained.load(AutoModelForCausalLM, config, args), load_tokenizer(config, args))

    def initialize(self, args: InstanceArgs) -> None:
        super().initialize(args)
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: {self.placement()}, "
            f"context {self.decoder.context or 'unlimited'}, up to {self.max_batch} texts per batch"
        )

    def placement(self) -> str:
        """Return the model's precision and device, for the log."""
        return f"{pretrained.name_of(self.decoder.model.dtype)} on {self.decoder.model.device}"

    def finalize(self) -> None:
        """End the thread. Triton unloads a model only after all its requests got responses, so no text waits."""
        self.waiting.put(None)
        self.thread.join(timeout=2)
        super().finalize()

    # --- taking requests ----------------------------------------------------------------------------------------------

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                job = self.prepare(request, sender)
            except Exception as error:
                serving.send_last(sender, serving.error_response(error))
                continue
            for row in job.rows:
                self.waiting.put(row)

    def prepare(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender) -> Job:
        read = read_request(request, "prompt", "text")
        streams = read.options.get("stream", self.streams)
        if streams and not self.streams:
            raise BadRequest("option 'stream' is true, but this model answers once: send it to <this model>_stream")
        if streams and len(read.prompts) > 1:
            raise BadRequest(f"input '{read.name}' holds {len(read.prompts)} prompts; streaming takes one per request")
        # Clients of vLLM's backend, which ask for a stream, expect it without the prompt.
        job = Job(read, sender, streams, read.echoes(default="stream" not in read.options or not streams))
        job.rows = [self.row(job, prompt) for prompt in read.prompts]
        if self.waiting.qsize() + len(job.rows) > self.max_waiting:
            raise Busy(f"{self.waiting.qsize()} texts wait already: try again later")
        return job

    def row(self, job: Job, prompt: str) -> Row[Job]:
        name, requested = job.request.name, job.request.options
        tokens = self.decoder.encode(prompt)
        if not tokens:
            raise BadRequest(f"input '{name}' is empty, and this model has no token to begin a text with")
        if max(tokens) >= self.decoder.vocabulary:
            raise BadRequest(f"input '{name}' has a token that the tokenizer knows and the model does not")
        options: dict[str, Any] = {"seed": random.getrandbits(63), "stop": ()} | self.defaults
        options |= {name: requested[name] for name in Options.__dataclass_fields__ if name in requested}
        room = (self.decoder.context or math.inf) - len(tokens)
        if room < requested.get("max_new_tokens", 1):
            left = f"room for {room} new ones" if room > 0 else "no room for new ones"
            raise BadRequest(
                f"input '{name}' has {len(tokens)} tokens; in the model's context of {self.decoder.context} that "
                f"leaves {left}, and 'max_new_tokens' is {options['max_new_tokens']}"
            )
        options["max_new_tokens"] = min(options["max_new_tokens"], room)
        return Row(prompt, tokens, Options(**options), job)

    # --- generating ---------------------------------------------------------------------------------------------------

    def work(self) -> None:
        while first := self.waiting.get():
            for batch in self.decoder.batches(self.gather(first)):
                self.run_apart(batch)

    def gather(self, first: Row[Job]) -> list[Row[Job]]:
        """Return all rows that wait or arrive within `gather_s`: clients of the last batch may ask again."""
        rows = [first]
        deadline = time.monotonic() + self.gather_s
        with contextlib.suppress(queue.Empty):
            while len(rows) < self.max_batch:
                row = self.waiting.get(timeout=max(0, deadline - time.monotonic()))
                if row is None:  # finalize() was called
                    self.waiting.put(None)
                    break
                rows.append(row)
        return rows

    def run_apart(self, rows: list[Row[Job]]) -> None:
        """Run the rows at once. If that fails, run each alone, so that only the row at fault gets the error."""
        rows = [row for row in rows if not row.done]
        error = self.run(rows) if rows else None
        if error and len(rows) == 1:
            rows[0].owner.fail(error)
        elif error:
            for row in rows:
                self.run_apart([row])

    def run(self, rows: list[Row[Job]]) -> Exception | None:
        jobs = {row.owner for row in rows}
        next_check = 0.0

        def after_token() -> None:
            nonlocal next_check
            check = time.monotonic() >= next_check
            if check:
                next_check = time.monotonic() + CANCEL_CHECK_S
            for job in jobs:
                job.update(check)

        try:
            self.decoder.generate(rows, after_token)
        except Exception as error:
            return error.with_traceback(None)  # the traceback's frames hold the batch's memory
        self.count(rows)
        return None

    def count(self, rows: list[Row[Job]]) -> None:
        lengths = [len(row.prompt_tokens) for row in rows]
        self.metrics.add(
            texts=len(rows),
            tokens=sum(lengths),
            padding_tokens=max(lengths) * len(rows) - sum(lengths),
            generated_tokens=sum(row.new_tokens for row in rows),
            runs=1,
        )


class Job:
    """One request: its rows, and its response, whole or in pieces."""

    def __init__(
        self, request: PromptRequest, sender: pb_utils.InferenceResponseSender, streams: bool, echoes: bool
    ) -> None:
        self.request = request
        self.sender = sender
        self.streams = streams
        self.echoes = echoes  # each text begins with its prompt
        self.rows: list[Row[Job]] = []
        self.sent = 0  # characters
        self.finished = False  # the last response is sent

    def update(self, check_cancelled: bool) -> None:
        """Send what is ready. With `check_cancelled`, end the job if its client no longer waits."""
        if self.finished:
            return
        if check_cancelled and self.sender.is_cancelled():
            error = pb_utils.TritonError("the client cancelled the request", CANCELLED)
            self.finish(pb_utils.InferenceResponse(error=error))
        elif all(row.done for row in self.rows):
            self.finish(self.request.response([self.unsent(row) for row in self.rows]))
        elif self.streams:
            self.send_piece()

    def unsent(self, row: Row[Job]) -> str:
        return ((row.prompt if self.echoes else "") + row.text)[self.sent :]

    def send_piece(self) -> None:
        if piece := self.unsent(*self.rows):
            self.sent += len(piece)
            self.sender.send(self.request.response([piece]))

    def fail(self, error: Exception) -> None:
        if not self.finished:
            self.finish(serving.error_response(error))

    def finish(self, response: pb_utils.InferenceResponse) -> None:
        self.finished = True
        for row in self.rows:
            row.done = True
        serving.send_last(self.sender, response)


def default_options(config: ModelConfig) -> dict[str, Any]:
    """Return the config's options, for requests that do not set them."""
    values = {name: default_option(config, name, rule) for name, rule in NUMBERS.items()}
    return {name: value for name, value in values.items() if value is not None}


def default_option(config: ModelConfig, name: str, rule: Rule) -> float | None:
    if not (text := parameter(config, name)):
        return rule.default
    try:
        value: float = read_option(rule, f"parameter '{name}'", text)
    except BadRequest as error:
        raise ConfigError(f"{error}, not '{text}'") from None
    return value


def load_tokenizer(config: ModelConfig, args: InstanceArgs) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        pretrained.weights_folder(config, args),
        local_files_only=True,
        trust_remote_code=pretrained.trusts_remote_code(config),
    )
    return tokenizer
