"""Task `text-generation`: prompts in, texts out, those that wait at the same time generated together.

Triton batches nothing here, for its batches want a batch dimension and the published request has none. So execute()
only checks a request and queues its prompts; a thread of this module generates, and answers when a text is done.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared import pretrained, serving
from shared.config import int_parameter, parameter
from shared.decoding import Decoder, Options, Row
from shared.errors import BadRequest, Busy, ConfigError
from shared.metrics import Metrics

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
CANCELLED = pb_utils.TritonError.CANCELLED
# To ask whether a client is still there is a round trip to Triton.
LOOK_EVERY_S = 0.25
# They are looked for after every token, while everybody waits.
MOST_STOPS, LONGEST_STOP = 16, 256


class TextGeneration:
    # Texts that are generated together at most, where the config does not say.
    usual_batch = 32

    def __init__(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.streams = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.defaults = defaults(config)
        self.max_batch = int_parameter(config, "max_batch", self.usual_batch)
        self.gather_s = int_parameter(config, "gather_milliseconds", 10) / 1000
        self.max_waiting = int_parameter(config, "max_waiting", 1000)
        if self.max_batch < 1 or self.max_waiting < 1 or self.gather_s < 0:
            raise ConfigError("parameters 'max_batch', 'max_waiting' must be at least 1, 'gather_milliseconds' 0")
        self.decoder = self.load_decoder(config, args)
        self.metrics = Metrics(args, "texts", "tokens", "padding_tokens", "generated_tokens", "runs")
        self.waiting: queue.Queue[Row | None] = queue.Queue()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: {self.place()}, "
            f"context {self.decoder.context or 'unlimited'}, up to {self.max_batch} texts together"
        )

    def load_decoder(self, config: dict, args: dict[str, str]) -> Decoder:
        return Decoder(pretrained.load(AutoModelForCausalLM, config, args), load_tokenizer(config, args))

    def place(self) -> str:
        """Where it runs and how precisely, for the log."""
        return f"{pretrained.name_of(self.decoder.model.dtype)} on {self.decoder.model.device}"

    def close(self) -> None:
        """Triton ends a model only when all its requests are answered, so nothing waits."""
        self.waiting.put(None)
        self.thread.join(timeout=2)
        self.metrics.close()

    # --- taking requests ----------------------------------------------------------------------------------------------

    def execute(self, requests: Sequence) -> None:
        for request in requests:
            job = Job(request.get_response_sender(), self.streams)
            try:
                job.rows = self.prepare(request, job)
                if self.waiting.qsize() + len(job.rows) > self.max_waiting:
                    raise Busy(f"{self.waiting.qsize()} texts wait already: ask again later")
            except Exception as error:
                job.fail(error)
            for row in job.rows:
                self.waiting.put(row)

    def prepare(self, request, job: Job) -> list[Row]:
        prompts = texts(request, "prompt")
        if not prompts:
            raise BadRequest("input 'prompt' holds no prompt")
        if self.streams and len(prompts) > 1:
            raise BadRequest(f"input 'prompt' holds {len(prompts)} prompts; streaming takes one a request")
        said = {name: value for name in RULES if (value := number(request, name)) is not None}
        stop = tuple(texts(request, "stop"))
        if len(stop) > MOST_STOPS or not all(0 < len(each) <= LONGEST_STOP for each in stop):
            raise BadRequest(f"input 'stop' takes {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters at most")
        return [self.row(job, prompt, said, stop) for prompt in prompts]

    def row(self, job: Job, prompt: str, said: dict[str, float], stop: tuple[str, ...]) -> Row:
        tokens = self.decoder.encode(prompt)
        if not tokens:
            raise BadRequest("input 'prompt' is empty, and this model has no token to begin a text with")
        if max(tokens) >= self.decoder.vocabulary:
            raise BadRequest("input 'prompt' has a token that the tokenizer knows and the model does not")
        options = {"seed": random.getrandbits(63)} | self.defaults | said
        room = (self.decoder.context or math.inf) - len(tokens)
        if room < said.get("max_new_tokens", 1):
            left = f"room for {room} new ones" if room > 0 else "no room for new ones"
            raise BadRequest(
                f"input 'prompt' has {len(tokens)} tokens; in the model's context of {self.decoder.context} that "
                f"leaves {left}, and 'max_new_tokens' is {options['max_new_tokens']}"
            )
        options["max_new_tokens"] = min(options["max_new_tokens"], room)
        return Row(prompt, tokens, Options(**options, stop=stop), job)

    # --- generating ---------------------------------------------------------------------------------------------------

    def work(self) -> None:
        while first := self.waiting.get():
            for part in self.decoder.parts(self.gathered(first)):
                self.run_apart(part)

    def gathered(self, first: Row) -> list[Row]:
        """All that wait, and what comes within a moment: who got an answer from the last batch may ask again."""
        rows = [first]
        deadline = time.monotonic() + self.gather_s
        with contextlib.suppress(queue.Empty):
            while len(rows) < self.max_batch:
                rows.append(self.waiting.get(timeout=max(0, deadline - time.monotonic())))
        return rows

    def run_apart(self, rows: list[Row]) -> None:
        """Together; where that fails, what is left one by one, so that only the culprit bears its error."""
        rows = [row for row in rows if not row.done]
        failure = self.run(rows) if rows else None
        if failure and len(rows) == 1:
            rows[0].owner.fail(failure)
        elif failure:
            for row in rows:
                self.run_apart([row])

    def run(self, rows: list[Row]) -> Exception | None:
        jobs = {row.owner for row in rows}
        next_look = 0.0

        def tell() -> None:
            nonlocal next_look
            look = time.monotonic() >= next_look
            if look:
                next_look = time.monotonic() + LOOK_EVERY_S
            for job in jobs:
                job.tell(look)

        try:
            self.decoder.generate(rows, tell)
        except Exception as error:
            return error.with_traceback(None)  # whose frames hold the batch's memory
        self.count(rows)
        return None

    def count(self, rows: list[Row]) -> None:
        lengths = [len(row.prompt_tokens) for row in rows]
        self.metrics.add(
            texts=len(rows),
            tokens=sum(lengths),
            padding_tokens=max(lengths) * len(rows) - sum(lengths),
            generated_tokens=sum(row.new_tokens for row in rows),
            runs=1,
        )


class Job:
    """One request: its rows, and its answer, whole or piece by piece. Answered once its last response is out."""

    def __init__(self, sender, streams: bool) -> None:
        self.sender = sender
        self.streams = streams
        self.rows: list[Row] = []
        self.sent = 0  # characters
        self.answered = False

    def tell(self, look: bool) -> None:
        """Whatever is ready to be sent; with `look`, an end where nobody waits for it any more."""
        if self.answered:
            return
        if look and self.sender.is_cancelled():
            self.finish(pb_utils.InferenceResponse(error=pb_utils.TritonError("the client is gone", CANCELLED)))
        elif all(row.done for row in self.rows):
            self.finish(response([(row.prompt + row.text)[self.sent :] for row in self.rows]))
        elif self.streams:
            self.send_piece()

    def send_piece(self) -> None:
        (row,) = self.rows
        piece = (row.prompt + row.text)[self.sent :]
        if piece:
            self.sent += len(piece)
            self.sender.send(response([piece]))

    def fail(self, error: Exception) -> None:
        if not self.answered:
            self.finish(serving.error_response(error))

    def finish(self, last) -> None:
        self.answered = True
        for row in self.rows:
            row.done = True
        try:
            self.sender.send(last, flags=FINAL)
        except Exception as error:  # the others of the batch still want theirs
            pb_utils.Logger.log_warn(f"an answer could not be sent: {error}")


# --- what a request may say ------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    kind: type
    sound: Callable[[float], bool]
    words: str
    default: float | None = None


RULES = {
    "max_new_tokens": Rule(int, lambda n: n >= 1, "a whole number of at least 1", 64),
    "temperature": Rule(float, lambda t: 0 <= t < math.inf, "0 (the likeliest token each time) or more", 0.0),
    "top_p": Rule(float, lambda p: 0 < p <= 1, "more than 0 and at most 1", 1.0),
    "seed": Rule(int, lambda seed: seed >= 0, "a whole number of at least 0"),
}


def defaults(config: dict) -> dict[str, float]:
    """What holds for requests that do not say: the config's parameters."""
    values = {name: default(config, name, rule) for name, rule in RULES.items()}
    return {name: value for name, value in values.items() if value is not None}


def default(config: dict, name: str, rule: Rule) -> float | None:
    text = parameter(config, name)
    if not text:
        return rule.default
    with contextlib.suppress(ValueError):
        if rule.sound(value := rule.kind(text)):
            return value
    raise ConfigError(f"parameter '{name}' must be {rule.words}, not '{text}'")


def number(request, name: str) -> float | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    value = tensor.as_numpy().item()
    if not RULES[name].sound(value):
        raise BadRequest(f"input '{name}' must be {RULES[name].words}")
    return value


def texts(request, name: str) -> list[str]:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return []
    try:
        return [value.decode() for value in tensor.as_numpy().ravel()]
    except UnicodeDecodeError as error:
        raise BadRequest(f"input '{name}' is not valid UTF-8 (byte {error.start})") from None


def response(answers: list[str]):
    return pb_utils.InferenceResponse([pb_utils.Tensor("text", np.array([a.encode() for a in answers], np.object_))])


def load_tokenizer(config: dict, args: dict[str, str]):
    return AutoTokenizer.from_pretrained(
        pretrained.weights_folder(config, args),
        local_files_only=True,
        trust_remote_code=pretrained.trusts_remote_code(config),
    )
