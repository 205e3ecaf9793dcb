"""Backend `onnx_generate`: continues texts with an ONNX language model that the same server serves.

It generates greedily, one token per run, for the texts of all requests together. A text joins between two runs and
leaves as soon as it ends, because each has its own past (the model's keys and values of earlier tokens).
"""

from __future__ import annotations

import json
import math
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared import serving
from shared.backend import Backend
from shared.errors import BadRequest, ConfigError
from shared.metrics import REQUEST_COUNTERS
from shared.parameters import int_parameter, parameter, version_file
from shared.prompts import DETAILS, RULES, TEXT_OUTPUT, Piece, PromptRequest, read_request
from shared.types import Array, InstanceArgs, ModelConfig, Tensors

COUNT = "max_new_tokens"
OPTIONS = {name: RULES[name] for name in (COUNT, "exclude_input_in_output", *(f"return_{name}" for name in DETAILS))}


@dataclass(eq=False)  # compared by identity, so that rows fit into a set
class Row:
    """One text that is being continued."""

    unread: list[int]  # tokens that the model has not seen: the prompt, then the newest token
    max_new_tokens: int
    new: list[int] = field(default_factory=list)  # without the end token
    finish_reason: str = ""
    length: int = 0  # number of tokens that the model has seen
    past: Array = field(default_factory=lambda: np.empty((0, 0)))  # their keys and values: [positions, numbers]

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.unread)

    def mark_read(self, present: Array) -> None:
        """Append the unread tokens' keys and values, which are the last rows of `present` [tokens, numbers]."""
        if not self.length:
            self.past = np.empty((len(self.unread) + self.max_new_tokens, present.shape[1]), present.dtype)
        seen = slice(self.length, self.length + len(self.unread))
        self.past[seen] = present[-len(self.unread) :]
        self.length = seen.stop

    def add(self, token: int, end_tokens: set[int]) -> None:
        self.unread = [token]
        if token in end_tokens:
            self.finish_reason = "stop"
            return
        self.new.append(token)
        if len(self.new) == self.max_new_tokens:
            self.finish_reason = "length"

    @property
    def done(self) -> bool:
        return bool(self.finish_reason)


@dataclass(eq=False)
class Job:
    """One request: its texts and its response sender."""

    request: PromptRequest
    rows: list[Row]
    sender: pb_utils.InferenceResponseSender
    arrived_at: float = field(default_factory=time.monotonic)
    began_at: float = math.inf

    @property
    def done(self) -> bool:
        return all(row.done for row in self.rows)


class TritonPythonModel(Backend):
    counters = ("texts", "tokens", "generated_tokens", "runs", *REQUEST_COUNTERS)

    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        self.tokenizer = Tokenizer.from_file(str(version_file(args, "tokenizer.json")))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        generation = json.loads(version_file(args, "generation_config.json").read_text())
        self.positions, self.end_tokens = generation["max_length"], set(generation["eos_token_id"])
        self.model = parameter(config, "model", "gpt2")
        self.max_new_tokens = int_parameter(config, "max_new_tokens", 20)
        self.max_batch = int_parameter(config, "max_batch", 32)
        if self.max_new_tokens < 1 or self.max_batch < 1:
            raise ConfigError("parameters 'max_new_tokens' and 'max_batch' must be at least 1")
        self.batch_inputs = BatchInputs()
        self.arrivals: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

    def initialize(self, args: InstanceArgs) -> None:
        super().initialize(args)
        # A thread of our own lets Triton pass the next request while this one is generated.
        self.thread = threading.Thread(target=self.generate, daemon=True)
        self.thread.start()

    def finalize(self) -> None:
        self.arrivals.put(None)
        self.thread.join(timeout=2)
        super().finalize()

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self.load_model()
                read = read_request(request, "TEXT", "out", OPTIONS)
                self.arrivals.put(Job(read, self.rows(read), sender))
            except Exception as error:
                serving.send_last(sender, serving.error_response(error))

    def load_model(self) -> None:
        """Load the language model on the first request: docs/triton-faults.md#errors-of-called-models."""
        if not pb_utils.is_model_ready(self.model):
            pb_utils.load_model(self.model)

    def rows(self, request: PromptRequest) -> list[Row]:
        requested = request.options.get(COUNT)
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        if len(texts) < len(request.prompts):
            raise BadRequest(f"input '{request.name}': this model takes texts, not token ids")
        encodings = self.tokenizer.encode_batch_fast(texts)
        rows = []
        for number, encoding in enumerate(encodings):
            text, room = f"input '{request.name}': text {number}", self.positions - len(encoding)
            if not encoding.ids:
                raise BadRequest(f"{text} is empty; send at least one token to continue")
            if room < (requested or 1):
                raise BadRequest(
                    f"{text} has {len(encoding)} tokens; of the model's {self.positions} positions that leaves "
                    f"{max(0, room)}, and {requested or 1} new tokens are requested"
                )
            rows.append(Row(encoding.ids, requested or min(self.max_new_tokens, room)))
        self.metrics.add(texts=len(encodings), tokens=sum(map(len, encodings)))
        return rows

    def generate(self) -> None:
        """Continue all texts, one token at a time, until finalize() ends the thread."""
        jobs: list[Job] = []
        while (arrived := self.arrived_jobs(wait=not jobs)) is not None:
            jobs += arrived
            rows = [row for job in jobs for row in job.rows if not row.done][: self.max_batch]
            for job in jobs:
                if job.rows[0] in rows:
                    job.began_at = min(job.began_at, time.monotonic())
            try:
                self.advance(rows)
            except Exception as error:
                for job in [job for job in jobs if not set(rows).isdisjoint(job.rows)]:
                    jobs.remove(job)
                    serving.send_last(job.sender, serving.error_response(error))
            for job in [job for job in jobs if job.done]:
                jobs.remove(job)
                self.respond(job)

    def arrived_jobs(self, wait: bool) -> list[Job] | None:
        """Return the new jobs, or None at the end."""
        jobs: list[Job] = []
        while wait or not self.arrivals.empty():
            if (job := self.arrivals.get()) is None:
                return None
            jobs.append(job)
            wait = False
        return jobs

    def advance(self, rows: list[Row]) -> None:
        """Generate one token for each row.

        New rows run apart from the others: they have a whole prompt unread, the others one token.
        """
        old, new = [row for row in rows if row.length], [row for row in rows if not row.length]
        for batch in filter(None, (old, new)):
            logits, present = self.run_model(self.batch_inputs(batch))
            present = present.reshape(len(batch), max(len(row.unread) for row in batch), -1)
            for row, token, row_present in zip(batch, logits.argmax(axis=1).tolist(), present, strict=True):
                row.mark_read(row_present)
                row.add(token, self.end_tokens)
            self.metrics.add(runs=1)

    def run_model(self, inputs: Tensors) -> list[Array]:
        outputs = ["logits", "present"]
        response = pb_utils.InferenceRequest(
            model_name=self.model,
            inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
            requested_output_names=outputs,
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            raise RuntimeError(f"model '{self.model}' failed: {response.error().message()}")
        tensors = [pb_utils.get_output_tensor_by_name(response, name) for name in outputs]
        return [tensor.as_numpy() for tensor in tensors if tensor is not None]

    def respond(self, job: Job) -> None:
        texts = self.tokenizer.decode_batch([row.new for row in job.rows])
        if job.request.echoes(TEXT_OUTPUT in job.request.outputs):
            texts = [f"{prompt}{text}" for prompt, text in zip(job.request.prompts, texts, strict=True)]
        self.metrics.add(generated_tokens=sum(len(row.new) for row in job.rows))
        pieces = [
            Piece(text, row.finish_reason, row.prompt_tokens, len(row.new) + (row.finish_reason == "stop"))
            for text, row in zip(texts, job.rows, strict=True)
        ]
        serving.send_last(job.sender, job.request.response(pieces))
        self.metrics.add_request(job.arrived_at, job.began_at)


class BatchInputs:
    """Builds the model's inputs for a batch of rows, with `past` in the same memory each time.

    The past of 8 texts of 70 tokens takes 41 MB with GPT-2, and new pages from the system take five times as long to
    fill.
    """

    def __init__(self) -> None:
        self.memory = np.zeros(0, np.float32)

    def __call__(self, rows: list[Row]) -> Tensors:
        """Pad each past on its right and new tokens on their left.

        The mask marks what counts; the graph takes each token's position from it.
        """
        new, before = max(len(row.unread) for row in rows), max(row.length for row in rows)
        ids = np.zeros((len(rows), new), np.int64)
        mask = np.zeros((len(rows), before + new), np.int64)
        past = self.past(len(rows), before, rows[0].past.shape[1] if before else 0)
        for i, row in enumerate(rows):
            ids[i, new - len(row.unread) :] = row.unread
            mask[i, : row.length] = 1
            mask[i, before + new - len(row.unread) :] = 1
            if row.length:
                past[i, : row.length] = row.past[: row.length]
        return {"input_ids": ids, "attention_mask": mask, "past": past.reshape(len(rows), -1)}

    def past(self, *shape: int) -> Array:
        """Return uncleared memory: old values stay where no row writes, and there the mask is 0."""
        size = int(np.prod(shape))
        if size > self.memory.size:
            self.memory = np.zeros(2 * size, np.float32)
        return self.memory[:size].reshape(shape)
