"""The example requests that users send: texts or images, for the inputs of the system, and as they go over the wire."""

from __future__ import annotations

import hashlib
import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.http import InferResult

from loadtest.server.switching import composing
from triton_transformers.http import opener
from triton_transformers.settings import Settings, UserError
from triton_transformers.tasks.examples import Sizes, Traits
from triton_transformers.tasks.kinds import embedding, kind
from triton_transformers.tasks.media import jpeg, photograph
from triton_transformers.tasks.requests import masked, required_inputs, text_columns
from triton_transformers.tasks.task import PIPELINE
from triton_transformers.tensors import Tensor
from triton_transformers.triton import Config, Triton, generates, is_front

# The sizes of images and sounds, and how many examples there are of each size.
SIZES = Sizes(
    ((96, 96), (160, 120), (240, 320), (320, 240), (480, 360), (512, 512), (640, 480), (1024, 768), (900, 1200)),
    (1, 2, 3, 4, 6, 8, 10, 14, 20),
    are_photographs=True,
)
FILES_PER_SIZE = 4
ANSWER_S = 120  # of a single request
# The largest image for models that take pixels: as FP32 a megapixel is 12 MB on the wire.
SMALL = 320 * 240
ABOUT = {
    "images": "generated ones, from thumbnails to a megapixel",
    "pairs of images": "generated ones, from thumbnails to a megapixel",
    "pages": "generated ones, from thumbnails to a megapixel, with the words of the texts",
    "sounds": f"generated ones, of {SIZES.seconds[0]} to {SIZES.seconds[-1]} seconds",
    "videos": "generated ones, of the frames that the model reads",
    "tables": "of one to eight rows",
}


@dataclass(frozen=True)
class Examples:
    """The requests, each a list of inputs, and what reports call them: texts, images, sounds, ..."""

    noun: str
    requests: list[list[Tensor]]
    generates: bool = False  # each request has the model continue a text
    kind: str = "other"  # of the system, which chooses the gateway's route
    outputs: tuple[str, ...] = ()  # to ask for; none: all
    unit: str = ""  # of what requests have more or less, such as seconds of sound
    amounts: tuple[float, ...] = ()  # of the unit in each request
    may_be_slow: bool = False  # a request may take seconds

    @property
    def sha256(self) -> str:
        return hashlib.sha256(b"".join(tensor.data for request in self.requests for tensor in request)).hexdigest()

    @classmethod
    def from_server(cls, settings: Settings, texts: list[str]) -> Examples:
        """Build the examples that the running system takes."""
        configs = composing(Triton(settings.url("TRITON_HTTP_PORT")), settings.system)
        return cls.from_configs(configs, settings, texts)

    @classmethod
    def from_configs(cls, configs: dict[str, Config], settings: Settings, texts: list[str]) -> Examples:
        """Build the examples that a system of these models takes."""
        return cls.from_config(configs[settings.system], masked(texts, configs), settings.tokens)

    @classmethod
    def from_config(cls, config: Config, texts: list[str], new_tokens: int = 1) -> Examples:
        """Build examples for the inputs of a model configuration.

        Optional inputs are left out, except for the number of new tokens of a generating model.
        """
        if config.get("model_transaction_policy", {}).get("decoupled"):
            raise UserError(
                f"SYSTEM={config['name']} streams its responses, and a load test needs one response per request: set "
                f"the system that answers once ({config['name'].removesuffix('_stream')})"
            )
        if config.get("backend") == PIPELINE:
            return cls.from_pipeline(Traits.from_config(config), texts, new_tokens)
        batch = [1] if config.get("max_batch_size") else []
        inputs = {tensor["name"]: tensor for tensor in config["input"]}
        if "image_bytes" in inputs:
            files = [[Tensor.from_texts("image_bytes", [file], [*batch, 1])] for file in map(jpeg, images())]
            return cls("images", files, unit="images")
        if "image" in inputs and [int(axis) for axis in inputs["image"]["dims"]] == [-1, -1, 3]:
            pixels = ((image.shape, image.astype(np.float32).tobytes()) for image in images(SMALL))
            files = [[Tensor("image", "FP32", [*batch, *shape], data)] for shape, data in pixels]
            return cls("images", files, unit="images")
        required = required_inputs(config)
        unsupported = [tensor["name"] for tensor in required if tensor["data_type"] != "TYPE_STRING"]
        if unsupported or not required:
            names = ", ".join(unsupported or inputs)
            raise UserError(
                f"SYSTEM={config['name']} takes {names}: load tests send texts and files only. Set another SYSTEM"
            )
        columns = text_columns([tensor["name"] for tensor in required], texts)
        requests = [
            [Tensor.from_texts(name, [column[row % len(column)]], [*batch, 1]) for name, column in columns.items()]
            for row in range(len(texts))
        ]
        continues = generates(config) or is_front(config)
        if continues:
            count = Tensor("max_new_tokens", "INT32", [1], new_tokens.to_bytes(4, "little"))
            requests = [[*request, count] for request in requests]
        outputs = {tensor["name"]: [int(size) for size in tensor["dims"]] for tensor in config.get("output", [])}
        # Other outputs than the vector may need a step of their own, which only requests for them pay.
        vector = embedding(outputs)
        system_kind = kind(inputs, outputs, int(config.get("max_batch_size", 0)))
        return cls("texts", requests, continues, system_kind, (vector,) if vector else ())

    @classmethod
    def from_pipeline(cls, traits: Traits, texts: list[str], new_tokens: int = 1) -> Examples:
        """Build examples with the fields of a pipeline's task."""
        rows = traits.rows(len(SIZES.images) * FILES_PER_SIZE if traits.media else len(texts), texts, SIZES)
        parameters = traits.long(new_tokens)
        own = {"parameters": json.dumps(parameters).encode()} if parameters else {}
        requests = [
            [Tensor.from_texts(name, [value], [1, 1]) for name, value in (row.fields | own).items()] for row in rows
        ]
        amounts = tuple(row.amount for row in rows)
        return cls(traits.noun, requests, unit=traits.unit, amounts=amounts, may_be_slow=True)


# --- generated images -------------------------------------------------------------------------------------------------


def images(largest: float = math.inf) -> list[Any]:
    """Return the images of at most this number of pixels."""
    sizes = [(width, height) for width, height in SIZES.images if width * height <= largest]
    return [photograph(number, *sizes[number // FILES_PER_SIZE]) for number in range(len(sizes) * FILES_PER_SIZE)]


# --- requests as they go over the wire; users encode each of them once, before the load begins ------------------------


@dataclass(frozen=True)
class HttpRequest:
    """A KServe v2 request with binary tensors: a JSON header, then the tensors' data."""

    body: bytes
    header_length: int


@dataclass(frozen=True)
class Route:
    """A route of the gateway. `body` builds a request from the texts by the names of their tensors."""

    path: str
    answers: str  # the field of a response that holds them
    body: Callable[[dict[str, str]], dict[str, Any]]


# For each kind of system that the gateway answers for (triton_transformers/tasks/kinds.py).
ROUTES = {
    # OpenAI's own clients ask for base64.
    "embedding": Route("/v1/embeddings", "data", lambda t: {"input": t["input_text"], "encoding_format": "base64"}),
    "sparse": Route("/v1/embeddings", "data", lambda t: {"input": t["input_text"], "embedding_type": "sparse"}),
    "multi": Route("/v1/embeddings", "data", lambda t: {"input": t["input_text"], "embedding_type": "multi"}),
    "classify": Route("/v1/classify", "data", lambda t: {"input": t["input_text"]}),
    "rerank": Route("/v1/rerank", "results", lambda t: {"query": t["query"], "documents": [t["text"]]}),
    # Temperature 0 takes the most likely token, as Triton does without further inputs.
    "generation": Route("/v1/completions", "choices", lambda t: {"prompt": next(iter(t.values())), "temperature": 0}),
}


def gateway_request(model: str, kind: str, tensors: list[Tensor], streams: bool = False) -> bytes:
    """Return the body of a request to the route of this kind; `streams` asks for each token as it comes."""
    body = ROUTES[kind].body({t.name: t.data[4:].decode() for t in tensors if t.datatype == "BYTES"})
    for tensor in tensors:
        if tensor.name == "max_new_tokens":
            body["max_tokens"] = int.from_bytes(tensor.data, "little")
    if streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({"model": model, **body}).encode()


def http_request(tensors: list[Tensor], outputs: Sequence[str] = ()) -> HttpRequest:
    """Return a request for these outputs, or for all outputs of the model."""
    fields: dict[str, Any] = {
        "inputs": [
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "datatype": tensor.datatype,
                "parameters": {"binary_data_size": len(tensor.data)},
            }
            for tensor in tensors
        ],
        "parameters": {"binary_data_output": True},  # of outputs that are not named
    }
    if outputs:
        fields["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    header = json.dumps(fields, separators=(",", ":")).encode()
    return HttpRequest(header + b"".join(tensor.data for tensor in tensors), len(header))


def ask(url: str, model: str, tensors: list[Tensor], outputs: Sequence[str] = ()) -> dict[str, Any]:
    """Send a request over HTTP, and return the outputs by name. Raise ValueError for an error of Triton."""
    encoded = http_request(tensors, outputs)
    headers = {"Inference-Header-Content-Length": str(encoded.header_length)}
    request = urllib.request.Request(f"{url}/v2/models/{model}/infer", encoded.body, headers)
    try:
        with opener.open(request, timeout=ANSWER_S) as response:
            header_length = int(response.headers.get("Inference-Header-Content-Length", 0)) or None
            result = InferResult.from_response_body(response.read(), header_length=header_length)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{error.code} {error.read()[:200].decode(errors='replace')}") from None
    return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}


def grpc_request(model: str, tensors: list[Tensor], outputs: Sequence[str] = ()) -> service_pb2.ModelInferRequest:
    """Return a request for these outputs, or for all outputs of the model."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name in outputs:
        request.outputs.add(name=name)
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.data)
    return request
