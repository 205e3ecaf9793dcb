"""The front of a model that streams: it forwards each request to that model, the engine, and answers it once.

Triton lets a model either stream or answer once. So a system has two models, and this one needs neither the weights nor
a library that computes.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.text.chat_template import MESSAGES
from serving.text.prompts import ONE_ANSWER, TEXT_INPUT, parameters
from serving.triton import responses
from serving.triton.backend import Backend
from serving.triton.metrics import REQUEST_COUNTERS
from serving.triton.parameters import parameter
from serving.triton.types import Array, BadRequest, Busy, CalledModelError, ConfigError, InstanceArgs, ModelConfig
from triton_transformers import triton_messages
from triton_transformers.errors import ERROR_STATUS, TypedError, decode
from triton_transformers.protocol import CANCEL, ENGINE, HEARTBEATS, SILENCE_S, TOKENIZED

# How often to ask Triton whether clients still wait, and the largest share of the time for it.
CHECK_S, CHECK_SHARE = 0.5, 0.05
# How long to keep the iterators of responses that have ended: TRITON-FAULTS.md#iterators-of-responses.
KEPT_S = 10.0
ITS_PART = "which generates for this one"


@dataclass(eq=False)
class Waiting:
    """A request that the engine has not answered yet."""

    key: str  # cancels it at the engine; the id is no such key, because several clients may choose the same one
    sender: pb_utils.InferenceResponseSender
    shape: tuple[int, ...] | None  # of the outputs, if the engine gives them another one
    tokenizes: bool  # it asks for TOKENIZED alone
    is_typed: bool  # it asks for typed errors
    arrived_at: float
    heard_at: float = math.inf  # when the engine's newest response came

    def hear(self) -> None:
        self.heard_at = time.monotonic()


class GenerationFront(Backend):
    counters = REQUEST_COUNTERS

    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        self.engine = parameter(config, ENGINE)
        self.has_rows = config.get("max_batch_size", 0) > 0
        self.waiting: set[Waiting] = set()
        self.lock = threading.Lock()  # no thread may ask Triton about a request after its last response
        self.ended: deque[tuple[float, Iterator[pb_utils.InferenceResponse]]] = deque()  # with the times of their ends
        self.closed = threading.Event()
        try:
            if not pb_utils.is_model_ready(self.engine):
                pb_utils.load_model(self.engine)
        except Exception as error:
            if not triton_messages.is_starting(str(error)):  # while Triton starts, serve.sh lets it load the engine
                raise ConfigError(f"model '{self.engine}', {ITS_PART}, does not load: {error}") from None

    def initialize(self, args: InstanceArgs) -> None:
        super().initialize(args)
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()

    def finalize(self) -> None:
        """End the threads. Triton unloads a model only after all its requests got responses."""
        self.closed.set()
        self.watcher.join(timeout=2)
        super().finalize()

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                # Triton reuses the memory of the inputs after this call, so build the other request now.
                key = secrets.token_hex(8)
                inputs, shape = self.forwarded(request)
                wishes = {name: plain(value) for name, value in parameters(request).items()}
                names = list(request.requested_output_names())
                tokenizes = names == [TOKENIZED]
                call = self.request(
                    request.request_id(), inputs, names, wishes | {ONE_ANSWER: key, HEARTBEATS: not tokenizes}
                )
                waiting = Waiting(key, sender, shape, tokenizes, bool(wishes.get(ERROR_STATUS)), time.monotonic())
            except Exception as error:
                responses.send_last(sender, responses.error_response(error, responses.asks_typed(request)))
                continue
            with self.lock:
                self.waiting.add(waiting)
            # No pool: a thread whose engine has crashed waits for ever, and must not keep this process from ending.
            threading.Thread(target=self.answer, args=(waiting, call), daemon=True).start()

    def request(
        self, id: str, inputs: dict[str, Array], names: list[str], wishes: dict[str, bool | int | str]
    ) -> pb_utils.InferenceRequest:
        return pb_utils.InferenceRequest(
            request_id=id,
            model_name=self.engine,
            inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
            requested_output_names=list({*names, TOKENIZED}),  # an error that comes late is in this output
            parameters=wishes | {ERROR_STATUS: True},
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        )

    def forwarded(self, request: pb_utils.InferenceRequest) -> tuple[dict[str, Array], tuple[int, ...] | None]:
        """Return the inputs for the engine, and the shape of the outputs if it is another one.

        A config.pbtxt can give the front a batch dimension, which the engine does not have.
        """
        inputs = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
        if not self.has_rows:
            return inputs, None
        shape = None
        for name, rows in inputs.items():
            if name in ("prompt", TEXT_INPUT, MESSAGES):
                shape, inputs[name] = rows.shape, rows.reshape(-1)
            elif (rows == rows[0]).all():
                inputs[name] = rows[0]
            else:
                raise BadRequest(f"input '{name}' must have the same value for all prompts of the request", name)
        return inputs, shape

    def answer(self, waiting: Waiting, call: pb_utils.InferenceRequest) -> None:
        try:
            response = self.passed_on(self.last_response(call, waiting.hear), waiting)
        except Exception as error:
            response = responses.error_response(error, waiting.is_typed)
        self.finish(waiting, response)

    def last_response(
        self, call: pb_utils.InferenceRequest, hear: Callable[[], None] = lambda: None
    ) -> pb_utils.InferenceResponse:
        """Send the request, and return the response with its outputs, or with its error.

        The engine sends empty responses before, and Triton may send one at the end.
        """
        stream, answer = call.exec(decoupled=True), None
        try:
            for response in stream:
                hear()
                if response.has_error() or response.output_tensors():
                    answer = response
        finally:
            self.ended.append((time.monotonic(), stream))
        if answer is None:
            raise RuntimeError(f"model '{self.engine}' sent no answer")
        return answer

    def finish(self, waiting: Waiting, response: pb_utils.InferenceResponse) -> None:
        with self.lock:
            if waiting not in self.waiting:
                return
            self.waiting.remove(waiting)
        responses.send_last(waiting.sender, response)

    def passed_on(self, response: pb_utils.InferenceResponse, waiting: Waiting) -> pb_utils.InferenceResponse:
        if response.has_error():
            raise error_of(response.error().message(), self.engine)
        tensors = response.output_tensors()
        if tensors[0].name() == TOKENIZED and not waiting.tokenizes:
            raise error_of(tensors[0].as_numpy()[0].decode(), self.engine)
        self.metrics.add_request(waiting.arrived_at, waiting.arrived_at)
        if waiting.shape:
            tensors = [pb_utils.Tensor(tensor.name(), tensor.as_numpy().reshape(waiting.shape)) for tensor in tensors]
        return pb_utils.InferenceResponse(tensors)

    def watch(self) -> None:
        """End the texts of clients that left, and the requests to an engine that has crashed.

        See TRITON-FAULTS.md#cancellations and TRITON-FAULTS.md#crashed-processes-of-texts.
        """
        pause = CHECK_S
        while not self.closed.wait(pause):
            begin = time.monotonic()
            while self.ended and self.ended[0][0] < begin - KEPT_S:
                self.ended.popleft()
            for waiting in list(self.waiting):
                if time.monotonic() > waiting.heard_at + SILENCE_S:
                    self.finish(waiting, responses.error_response(crash(self.engine), waiting.is_typed))
                    continue
                with self.lock:
                    left = waiting in self.waiting and waiting.sender.is_cancelled()
                if left:
                    inputs = {TEXT_INPUT: b"", CANCEL: waiting.key.encode()}
                    arrays = {name: np.array([value], np.object_) for name, value in inputs.items()}
                    with contextlib.suppress(Exception):  # the next round tries again
                        self.last_response(self.request("", arrays, ["text_output"], {ONE_ANSWER: waiting.key}))
            pause = max(CHECK_S, (time.monotonic() - begin) / CHECK_SHARE)


def error_of(message: str, engine: str) -> Exception:
    """Return the engine's error, or Triton's: TRITON-FAULTS.md#errors-of-called-models."""
    if typed := decode(message):
        return CalledModelError(typed)
    if triton_messages.is_not_ready(message):
        return Busy(f"model '{engine}', {ITS_PART}, is not loaded: load it, or try again later")
    if triton_messages.is_crash(message):
        return crash(engine)
    status = 400 if triton_messages.is_wrong_tensor(message) else 500
    return CalledModelError(TypedError.from_sentence(status, message))


def crash(engine: str) -> Busy:
    return Busy(f"the process of model '{engine}', {ITS_PART}, crashed: try again")


def plain(value: Any) -> bool | int | str:
    """Return the value of a parameter in a type that requests to other models can have: Triton refuses floats there."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else repr(value)
    return value if isinstance(value, bool | int | str) else json.dumps(value)
