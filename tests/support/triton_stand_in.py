"""A Triton server for the gateway's tests: it answers from a table of models, at once, late, or with an error.

It stands in for a server with weights, so that tests can choose its answers, hold them back, and see what is cancelled.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from gateway.edge.errors import STATUSES
from triton_transformers.errors import ERROR_STATUS, TypedError
from triton_transformers.tensors import TOKEN_IDS, Tensor

WAIT_S = 40  # less than GATEWAY_TIMEOUT, which would end a request too
# An input or output: its type and dimensions, as in config.pbtxt.
Signature = dict[str, tuple[str, list[int]]]
Answer = Callable[[dict[str, Tensor]], Iterable[list[Tensor]]]


@dataclass
class Model:
    """A model. `answer` yields the tensors of each response to a request, and may raise `Failure`."""

    name: str
    inputs: Signature
    outputs: Signature
    answer: Answer
    max_batch: int = 64
    decoupled: bool = False
    parameters: dict[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()  # of the inputs
    settings: dict[str, Any] = field(default_factory=dict)  # other fields of its configuration
    ready: bool = True
    # Requests wait while it is clear. A stream waits before each response.
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def config(self) -> model_config_pb2.ModelConfig:
        def tensors(signature: Signature) -> list[dict[str, Any]]:
            return [
                {"name": name, "data_type": f"TYPE_{kind}", "dims": dims}
                | ({"optional": True} if name in self.optional else {})
                for name, (kind, dims) in signature.items()
            ]

        config = {
            "name": self.name,
            "max_batch_size": self.max_batch,
            "input": tensors(self.inputs),
            "output": tensors(self.outputs),
            "model_transaction_policy": {"decoupled": self.decoupled},
            "parameters": {key: {"string_value": value} for key, value in self.parameters.items()},
            **self.settings,
        }
        return json_format.ParseDict(config, model_config_pb2.ModelConfig())


class Failure(Exception):
    """An error that the stand-in reports with this status: a backend's of ours if it has a typed form."""

    def __init__(self, code: grpc.StatusCode, message: str, typed: TypedError | None = None) -> None:
        super().__init__(message)
        self.code, self.typed = code, typed

    def shown(self, request: service_pb2.ModelInferRequest) -> str:
        return self.typed.encode() if self.typed and request.parameters[ERROR_STATUS].bool_param else str(self)


def refusal(status: int, sentence: str, *fields: str, code: str = "", index: int | None = None) -> Failure:
    """Return an error of a backend of ours."""
    return Failure(STATUSES[status], sentence, TypedError.from_sentence(status, sentence, code, fields, index))


@dataclass(frozen=True)
class Received:
    """A request that reached the stand-in."""

    model: str
    inputs: dict[str, Tensor]
    outputs: list[str]  # those that it names
    id: str = ""


class TritonStandIn(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The server, as a context manager. `port` lets it come back at the same address; hosts are replicas."""

    version = "2.72.0"

    def __init__(self, *models: Model, port: int = 0, threads: int = 256, host: str = "127.0.0.1") -> None:
        self.models = {model.name: model for model in models}
        self.received: list[Received] = []
        self.running: list[str] = []  # the models of the requests that it answers now
        self.cancelled: list[str] = []  # the models of the requests that were cancelled
        self.loads: list[tuple[service_pb2.RepositoryModelLoadRequest, dict[str, str | bytes]]] = []  # with metadata
        self.load_failure: Failure | None = None
        self.answers_about_models = threading.Event()  # cleared as by a load, which Triton completes first
        self.answers_about_models.set()
        self._changed = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(threads), options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"{host}:{port}")
        self.host = host

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def __enter__(self) -> TritonStandIn:
        self._server.start()
        return self

    def stop(self) -> None:
        """End at once, as in a crash: requests that run are not answered."""
        self._server.stop(None).wait()

    def __exit__(self, *_: object) -> None:
        self.answers_about_models.set()
        for model in self.models.values():
            model.gate.set()
        self.stop()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition about `received`, `running` or `cancelled` holds."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), (self.received, self.running, self.cancelled)

    # --- Triton's methods -------------------------------------------------------------------------------------------

    def ModelInfer(self, request, context):
        try:
            (response,) = self._responses(request, context)
        except Failure as error:
            context.abort(error.code, error.shown(request))
        return response

    def ModelStreamInfer(self, requests, context):
        for request in requests:
            if request.model_name not in self.models:  # Triton answers that without a status
                message = f"Request for unknown model: '{request.model_name}' is not found"
                yield service_pb2.ModelStreamInferResponse(error_message=message)
                continue
            try:
                for response in self._responses(request, context):
                    yield service_pb2.ModelStreamInferResponse(infer_response=response)
            except Failure as error:  # so are errors of the model
                yield service_pb2.ModelStreamInferResponse(error_message=error.shown(request))

    def ModelConfig(self, request, context):
        if not self.answers_about_models.wait(WAIT_S):
            context.abort(grpc.StatusCode.INTERNAL, "a caller waited for the whole load")
        return service_pb2.ModelConfigResponse(config=self._model(request.name, context).config)

    def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=request.name in self.models and self.models[request.name].ready)

    def RepositoryModelLoad(self, request, context):
        self.loads.append((request, dict(context.invocation_metadata())))
        if self.load_failure:
            context.abort(self.load_failure.code, str(self.load_failure))
        return service_pb2.RepositoryModelLoadResponse()

    def ServerReady(self, request, context):
        return service_pb2.ServerReadyResponse(ready=all(model.ready for model in self.models.values()))

    def ServerMetadata(self, request, context):
        self.answers_about_models.wait(WAIT_S)
        return service_pb2.ServerMetadataResponse(name="triton", version=self.version)

    # --- its table --------------------------------------------------------------------------------------------------

    def _model(self, name: str, context: grpc.ServicerContext) -> Model:
        # Triton's own status and words.
        if name not in self.models:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        if not self.models[name].ready:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{name}' has no available versions")
        return self.models[name]

    def _responses(self, request, context) -> Iterator[service_pb2.ModelInferResponse]:
        model = self._model(request.model_name, context)
        inputs = {
            tensor.name: Tensor(tensor.name, tensor.datatype, list(tensor.shape), data)
            for tensor, data in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        ended = threading.Event()

        def record_end() -> None:
            with self._changed:
                self.running.remove(model.name)
                if not ended.is_set():
                    self.cancelled.append(model.name)
                self._changed.notify_all()

        with self._changed:
            names = [output.name for output in request.outputs]
            self.received.append(Received(model.name, inputs, names, request.id))
            self.running.append(model.name)
            self._changed.notify_all()
        if not context.add_callback(record_end):
            record_end()
            return
        try:
            rows = next(iter(inputs.values())).shape[0] if model.max_batch and inputs else 1
            if rows > (model.max_batch or 1):
                limit = f"batch-size must be <= {model.max_batch} for '{model.name}'"
                message = f"[request id: <id_unknown>] inference request {limit}"
                raise Failure(grpc.StatusCode.INVALID_ARGUMENT, message)
            for tensors in model.answer(inputs):
                while not model.gate.wait(0.02):
                    if not context.is_active():
                        return
                yield response_message(model.name, tensors, [output.name for output in request.outputs])
            ended.set()
        except Failure:
            ended.set()
            raise


def response_message(model: str, tensors: Iterable[Tensor], names: list[str]) -> service_pb2.ModelInferResponse:
    response = service_pb2.ModelInferResponse(model_name=model, model_version="1")
    for tensor in tensors:
        if not names or tensor.name in names:
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            response.raw_output_contents.append(tensor.data)
    return response


# --- models ---------------------------------------------------------------------------------------------------------


def vector(text: str, width: int = 4) -> list[float]:
    """Return the embedding of a text: unit length, and another one for each text."""
    values = np.array([len(text), *(ord(character) % 32 for character in text[: width - 1].ljust(width - 1))], "f")
    return list(values / np.linalg.norm(values))


def embedding(name: str = "embedding", width: int = 4, max_batch: int = 64, counts: bool = True) -> Model:
    """Return a model that embeds texts. A text has as many tokens as words, and two more."""

    def answer(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        rows = read_rows(inputs["input_text"])
        texts = [row if isinstance(row, str) else text_of(row) or " " for row in rows]
        tensors = [Tensor.from_values("output__0", "FP32", [vector(text, width) for text in texts]), tokenized(rows)]
        if counts:
            tensors.append(token_counts(texts))
        yield tensors

    outputs: Signature = {"output__0": ("FP32", [width])}
    if counts:
        outputs |= {"token_count": ("INT32", [1]), "tokenized": ("STRING", [1])}
    return Model(name, {"input_text": ("STRING", [1])}, outputs, answer, max_batch)


def text_image(name: str = "clip", width: int = 4, max_batch: int = 2) -> Model:
    """Return a model that embeds texts as `embedding` does, and images by the size of their files."""
    texts = embedding(name, width)

    def answer(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        if "input_text" in inputs:
            yield from texts.answer(inputs)
            return
        sizes = [len(file) for file in rows_of(inputs["image_bytes"])]
        counts = Tensor.from_values("token_count", "INT32", [[0]] * len(sizes))
        yield [Tensor.from_values("output__0", "FP32", [[size, *[0] * (width - 1)] for size in sizes]), counts]

    inputs: Signature = {"input_text": ("STRING", [1]), "image_bytes": ("STRING", [1])}
    return Model(name, inputs, texts.outputs, answer, max_batch, optional=tuple(inputs))


def rows_of(tensor: Tensor) -> list[bytes]:
    rows, start = [], 0
    while start < len(tensor.data):
        end = start + 4 + int.from_bytes(tensor.data[start : start + 4], "little")
        rows.append(tensor.data[start + 4 : end])
        start = end
    return rows


def reranker(name: str = "reranker", max_batch: int = 64, tokenizes: bool = False) -> Model:
    """Return a model that scores a text by the share of the query's words that it has."""

    def score(query: str, text: str) -> float:
        words = query.split()
        return sum(word in text.split() for word in words) / max(1, len(words))

    def answer(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        queries, texts = read_rows(inputs["query"]), inputs["text"].texts()
        pairs = [(row if isinstance(row, str) else "", text) for row, text in zip(queries, texts, strict=True)]
        scores = Tensor.from_values("score", "FP32", [[score(*pair)] for pair in pairs])
        yield [scores, token_counts([" ".join(pair) for pair in pairs]), *([tokenized(queries)] if tokenizes else [])]

    inputs: Signature = {"query": ("STRING", [1]), "text": ("STRING", [1])}
    outputs: Signature = {"score": ("FP32", [1]), "token_count": ("INT32", [1])}
    outputs |= {"tokenized": ("STRING", [1])} if tokenizes else {}
    return Model(name, inputs, outputs, answer, max_batch)


def of_texts(name: str, outputs: Signature, compute: Callable[[list[str]], list[Tensor]], **options: Any) -> Model:
    """Return a model of texts, which also counts their tokens."""

    def answer(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        texts = inputs["input_text"].texts()
        yield [*compute(texts), token_counts(texts)]

    counted: Signature = outputs | {"token_count": ("INT32", [1])}
    return Model(name, {"input_text": ("STRING", [1])}, counted, answer, **options)


def classifier(name: str = "classifier", max_batch: int = 64) -> Model:
    """Return a model that finds a text positive if it has the word good."""

    def compute(texts: list[str]) -> list[Tensor]:
        scores = [[0.25, 0.75] if "good" in text else [0.75, 0.25] for text in texts]
        labels = ["positive" if "good" in text else "negative" for text in texts]
        return [
            Tensor.from_texts("label", labels, [len(texts), 1]),
            Tensor.from_values("score", "FP32", [[max(row)] for row in scores]),
            Tensor.from_values("scores", "FP32", scores),
        ]

    outputs: Signature = {"label": ("STRING", [1]), "score": ("FP32", [1]), "scores": ("FP32", [2])}
    parameters = {"labels": '["negative", "positive"]'}
    return of_texts(name, outputs, compute, max_batch=max_batch, parameters=parameters)


def sparse(name: str = "sparse") -> Model:
    """Return a model whose sparse vector has a weight for each different character."""

    def compute(texts: list[str]) -> list[Tensor]:
        sets = [sorted(map(ord, {*text})) for text in texts]
        width = max(map(len, sets))
        ids = [[*row, *[-1] * (width - len(row))] for row in sets]
        weights = [[max(0, id) / 8 for id in row] for row in ids]
        return [Tensor.from_values("token_id", "INT64", ids), Tensor.from_values("weight", "FP32", weights)]

    return of_texts(name, {"token_id": ("INT64", [-1]), "weight": ("FP32", [-1])}, compute)


def token_encoder(name: str = "per_token", width: int = 2) -> Model:
    """Return a model with a vector for each token, of which a text has as many as words, and two more."""

    def compute(texts: list[str]) -> list[Tensor]:
        counts = [len(text.split()) + 2 for text in texts]
        vectors = np.zeros((len(texts), max(counts), width), "f")
        for row, count in zip(vectors, counts, strict=True):
            row[:count] = np.arange(1, count + 1)[:, None]
        return [Tensor.from_values("last_hidden_state", "FP32", vectors)]

    return of_texts(name, {"last_hidden_state": ("FP32", [-1, width])}, compute)


def ids_of(text: str) -> list[int]:
    """Return the token ids of a text: of each character, between two special ones."""
    return [1, *map(ord, text), 2]


def text_of(ids: list[int], with_special: bool = False) -> str:
    return "".join(chr(id) if id > 2 else f"[{id}]" * with_special for id in ids)


def read_rows(tensor: Tensor) -> list[str | list[int]]:
    """Return the rows of an input as the backends read them: texts or token ids."""
    return [
        np.frombuffer(row[1:], "<i4").tolist() if row.startswith(TOKEN_IDS) else row.decode() for row in rows_of(tensor)
    ]


def tokenized(rows: list[str | list[int]], special: tuple[int, int] = (1, 1)) -> Tensor:
    """Return the rows in their other form, as the backends do."""
    contents = [
        {"ids": ids_of(row), "special": special, "max_length": 256, "offsets": [(i, i + 1) for i in range(len(row))]}
        | {"special_texts": ["[1]", "[2]"]}
        if isinstance(row, str)
        else {"text": text_of(row, True), "plain_text": text_of(row)}
        for row in rows
    ]
    return Tensor.from_texts("tokenized", [json.dumps(content) for content in contents], [len(rows), 1])


def token_counts(texts: list[str]) -> Tensor:
    return Tensor.from_values("token_count", "INT32", [[len(text.split()) + 2] for text in texts])


GENERATION_INPUTS: Signature = {
    "text_input": ("STRING", [-1]),
    "messages": ("STRING", [1]),
    "max_new_tokens": ("INT32", [1]),
    "temperature": ("FP32", [1]),
    "top_p": ("FP32", [1]),
    "seed": ("INT64", [1]),
    "stop": ("STRING", [-1]),
    "cancel": ("STRING", [1]),
    "stream": ("BOOL", [1]),
    "exclude_input_in_output": ("BOOL", [1]),
}
GENERATION_OUTPUTS: Signature = {
    "text_output": ("STRING", [-1]),
    "finish_reason": ("STRING", [-1]),
    "num_input_tokens": ("UINT32", [-1]),
    "num_output_tokens": ("UINT32", [-1]),
    "num_cached_tokens": ("UINT32", [-1]),
    "logprobs": ("STRING", [-1]),
    "stop_reason": ("STRING", [-1]),
    "tokenized": ("STRING", [-1]),
}
COUNTED = [f" {word}" for word in ("ein", "zwei", "drei", "vier", "fünf", "🥖")]


def generator(
    name: str = "counter", inputs: Signature = GENERATION_INPUTS, streams: bool = False, pieces: list[str] = COUNTED
) -> Model:
    """Return a model that continues every text with the same pieces, one token each."""

    def logprobs(text: str) -> str:
        """Return the probabilities of each piece, all alike, with one alternative."""
        tokens = [piece for piece in pieces if piece in text]
        top = [{"id": 7, "token": "x", "logprob": -9999.0}]
        return json.dumps([{"id": 5, "token": token, "logprob": -0.5, "top": top} for token in tokens])

    def response(texts: list[str], reasons: list[str], prompts: list[str], new_tokens: list[int]) -> list[Tensor]:
        return [
            Tensor.from_texts("text_output", texts),
            Tensor.from_texts("finish_reason", reasons),
            Tensor.from_values("num_input_tokens", "UINT32", [len(prompt.split()) for prompt in prompts]),
            Tensor.from_values("num_output_tokens", "UINT32", new_tokens),
            Tensor.from_values("num_cached_tokens", "UINT32", [1] * len(prompts)),
            Tensor.from_texts("logprobs", [logprobs(text) for text in texts]),
            Tensor.from_texts("stop_reason", ["x" if reason == "stop" else "" for reason in reasons]),
        ]

    def answer(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        source = "messages" if "messages" in inputs else "text_input"
        rows = read_rows(inputs[source])
        prompts = [row if isinstance(row, str) else text_of(row) for row in rows]
        if inputs.keys() <= {source, "sampling_parameters"}:
            yield [tokenized(rows, (0, 0) if source == "messages" else (1, 1))]
            return
        limit = inputs["max_new_tokens"].array().item() if "max_new_tokens" in inputs else len(pieces)
        echo = "exclude_input_in_output" not in inputs or not inputs["exclude_input_in_output"].array().item()
        new, reason = pieces[:limit], "stop" if limit >= len(pieces) else "length"
        if not streams or "cancel" in inputs or not inputs["stream"].array().item():
            texts = [(prompt if echo else "") + "".join(new) for prompt in prompts]
            yield response(texts, [reason] * len(texts), prompts, [len(new)] * len(texts))
            return
        for number, piece in enumerate(new):
            text = (prompts[0] if echo and not number else "") + piece
            yield response([text], [reason if number == len(new) - 1 else ""], prompts, [1])

    return Model(name, inputs, GENERATION_OUTPUTS, answer, max_batch=0, decoupled=streams)
