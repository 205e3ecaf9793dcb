"""Text to its whole continuation, one token after the other from an ONNX language model that is served beside it.

Greedy. The texts of all requests are generated together: they join between two tokens and leave as soon as they end,
each with a past of its own.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared import serving
from shared.config import int_parameter, parameter, version_file
from shared.errors import BadRequest, ConfigError
from shared.metrics import Metrics

TEXT, COUNT, OUT = "TEXT", "max_new_tokens", "out"


@dataclass(eq=False)  # each is itself alone, and can be in a set
class Row:
    """One text on its way."""

    unread: list[int]  # what the model has not seen: the prompt, then the newest token
    wanted: int
    new: list[int] = field(default_factory=list)
    ended: bool = False
    length: int = 0  # tokens that the model has seen,
    past: np.ndarray | None = None  # and what it keeps of them: [positions, numbers]

    def read(self, present: np.ndarray) -> None:
        """The unread are seen; what is kept of them are the last of `present` [tokens, numbers]."""
        if self.past is None:
            self.past = np.empty((len(self.unread) + self.wanted, present.shape[1]), present.dtype)
        seen = slice(self.length, self.length + len(self.unread))
        self.past[seen] = present[-len(self.unread) :]
        self.length = seen.stop

    def add(self, token: int, ends: set[int]) -> None:
        if token not in ends:
            self.new.append(token)
        self.ended = token in ends or len(self.new) == self.wanted
        self.unread = [token]


@dataclass(eq=False)
class Job:
    """One request: its texts, and where the answer goes."""

    rows: list[Row]
    sender: object

    @property
    def ended(self) -> bool:
        return all(row.ended for row in self.rows)


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        return auto_complete_model_config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.tokenizer = Tokenizer.from_file(str(version_file(args, "tokenizer.json")))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        generation = json.loads(version_file(args, "generation_config.json").read_text())
        self.positions, self.ends = generation["max_length"], set(generation["eos_token_id"])
        self.model = parameter(config, "model", "gpt2")
        self.max_new_tokens = int_parameter(config, "max_new_tokens", 20)
        self.max_batch = int_parameter(config, "max_batch", 32)
        if self.max_new_tokens < 1 or self.max_batch < 1:
            raise ConfigError("parameters 'max_new_tokens' and 'max_batch' must be at least 1")
        self.feed = Feed()
        self.metrics = Metrics(args, "texts", "tokens", "generated_tokens", "runs")
        self.arrivals: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # A thread of its own, so that Triton hands over the next request while this one is on its way.
        self.loop = threading.Thread(target=self.generate, daemon=True)
        self.loop.start()

    def finalize(self):
        self.arrivals.put(None)
        self.loop.join(timeout=2)
        self.metrics.close()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                self.load_model()
                self.arrivals.put(Job(self.rows(request), sender))
            except Exception as error:
                send(sender, serving.error_response(error))

    def load_model(self) -> None:
        """Not in initialize(), for a server that is just starting loads nothing on behalf of a model."""
        if not pb_utils.is_model_ready(self.model):
            pb_utils.load_model(self.model)

    def rows(self, request) -> list[Row]:
        wanted = wanted_tokens(request)
        encodings = self.tokenizer.encode_batch_fast(serving.texts(request, TEXT, "text"))
        rows = []
        for number, encoding in enumerate(encodings):
            room = self.positions - len(encoding)
            if not encoding.ids:
                raise BadRequest(f"input '{TEXT}': text {number} is empty, there is nothing to continue")
            if room < (wanted or 1):
                raise BadRequest(
                    f"input '{TEXT}': text {number} has {len(encoding)} tokens; of the model's {self.positions} "
                    f"positions that leaves {max(0, room)}, and {wanted or 1} new tokens are wanted"
                )
            rows.append(Row(encoding.ids, wanted or min(self.max_new_tokens, room)))
        self.metrics.add(texts=len(encodings), tokens=sum(map(len, encodings)))
        return rows

    def generate(self) -> None:
        """The loop, until finalize()."""
        jobs: list[Job] = []
        while (arrived := self.arrived(wait=not jobs)) is not None:
            jobs += arrived
            rows = [row for job in jobs for row in job.rows if not row.ended][: self.max_batch]
            try:
                self.advance(rows)
            except Exception as error:
                for job in [job for job in jobs if not set(rows).isdisjoint(job.rows)]:
                    jobs.remove(job)
                    send(job.sender, serving.error_response(error))
            for job in [job for job in jobs if job.ended]:
                jobs.remove(job)
                self.answer(job)

    def arrived(self, wait: bool) -> list[Job] | None:
        jobs = [self.arrivals.get()] if wait else []
        while not self.arrivals.empty():
            jobs.append(self.arrivals.get())
        return None if None in jobs else jobs

    def advance(self, rows: list[Row]) -> None:
        """One more token for each. Who has just come is run apart: it has a whole prompt unread, the others a token."""
        before, joining = [row for row in rows if row.length], [row for row in rows if not row.length]
        for together in filter(None, (before, joining)):
            logits, present = self.ask(self.feed(together))
            present = present.reshape(len(together), max(len(row.unread) for row in together), -1)
            for row, token, kept in zip(together, logits.argmax(axis=1).tolist(), present, strict=True):
                row.read(kept)
                row.add(token, self.ends)
            self.metrics.add(runs=1)

    def ask(self, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        wanted = ["logits", "present"]
        response = pb_utils.InferenceRequest(
            model_name=self.model,
            inputs=[pb_utils.Tensor(name, array) for name, array in feed.items()],
            requested_output_names=wanted,
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            raise RuntimeError(f"model '{self.model}' did not answer: {response.error().message()}")
        return [pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in wanted]

    def answer(self, job: Job) -> None:
        continuations = self.tokenizer.decode_batch([row.new for row in job.rows])
        self.metrics.add(generated_tokens=sum(len(row.new) for row in job.rows))
        array = np.array([text.encode() for text in continuations], np.object_)
        send(job.sender, pb_utils.InferenceResponse([pb_utils.Tensor(OUT, array)]))


def wanted_tokens(request) -> int | None:
    tensor = pb_utils.get_input_tensor_by_name(request, COUNT)
    if tensor is None:
        return None
    count = int(tensor.as_numpy().item())
    if count < 1:
        raise BadRequest(f"input '{COUNT}' must be at least 1")
    return count


class Feed:
    """Rows as one batch for the model, whose `past` is in the same memory each time: that of 8 texts of 70 tokens of
    GPT-2 is 41 MB, and pages fresh from the system take five times as long to fill."""

    def __init__(self) -> None:
        self.memory = np.zeros(0, np.float32)

    def __call__(self, rows: list[Row]) -> dict[str, np.ndarray]:
        """A past is padded on its right and new tokens on their left: the mask tells which count, and the graph takes
        a token's position from the mask."""
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

    def past(self, *shape: int) -> np.ndarray:
        """What was there before stays where no row writes, which is where the mask is 0."""
        size = int(np.prod(shape))
        if size > self.memory.size:
            self.memory = np.zeros(2 * size, np.float32)
        return self.memory[:size].reshape(shape)


def send(sender, response) -> None:
    try:
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as error:  # the others still want theirs
        pb_utils.Logger.log_warn(f"an answer could not be sent: {error}")
