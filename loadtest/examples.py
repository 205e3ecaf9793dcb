"""The example requests that users send: texts or images, for the inputs of the system under test."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loadtest import sample_images
from loadtest.generating import generates
from loadtest.switching import composing
from triton_transformers.kinds import embedding, kind
from triton_transformers.settings import Settings, UserError
from triton_transformers.triton import Config, Triton

# The length of the first of two texts. No tokenizer makes more tokens than bytes, and a model of 128 tokens cuts long
# contexts into windows only if the question takes less than half of them.
QUESTION_BYTES = 48


class Tensor(NamedTuple):
    """One input of a request; `data` is in Triton's binary format."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes


@dataclass(frozen=True)
class Examples:
    """The requests, each a list of inputs, and what reports call them: texts or images."""

    noun: str
    requests: list[list[Tensor]]
    generates: bool = False  # each request has the model continue a text
    kind: str = "other"  # of the system, which chooses the gateway's route
    outputs: tuple[str, ...] = ()  # to ask for; none: all

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
        # A fill-mask model takes exactly one mask token per text.
        masks = (config.get("parameters", {}).get("exactly_one") for config in configs.values())
        if mask := next(filter(None, masks), None):
            texts = [f"{mask['string_value']} {text}" for text in texts]
        return cls.from_config(configs[settings.system], texts, settings.tokens)

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
        batch = [1] if config.get("max_batch_size") else []
        inputs = {tensor["name"]: tensor for tensor in config["input"]}
        if "image_bytes" in inputs:
            return cls("images", [[_bytes("image_bytes", batch, file)] for file in sample_images.files()])
        if "image" in inputs and [int(axis) for axis in inputs["image"]["dims"]] == [-1, -1, 3]:
            return cls("images", [[_pixels("image", batch, image)] for image in sample_images.small()])
        # A model that accepts `prompt` or `text_input` requires neither: send the first one.
        required = [tensor for tensor in inputs.values() if not tensor.get("optional")] or config["input"][:1]
        unsupported = [tensor["name"] for tensor in required if tensor["data_type"] != "TYPE_STRING"]
        if unsupported or not required:
            names = ", ".join(unsupported or inputs)
            raise UserError(
                f"SYSTEM={config['name']} takes {names}: load tests send only texts and images. Set another SYSTEM"
            )
        # Several inputs, such as question and context, get different texts.
        columns = [[*texts[n:], *texts[:n]] for n in range(len(required))]
        if len(columns) > 1:
            columns[0] = _questions(texts)
        requests = [
            [
                _bytes(tensor["name"], batch, column[row % len(column)].encode())
                for tensor, column in zip(required, columns, strict=True)
            ]
            for row in range(len(texts))
        ]
        if generates(config):
            count = Tensor("max_new_tokens", "INT32", [1], new_tokens.to_bytes(4, "little"))
            requests = [[*request, count] for request in requests]
        outputs = {tensor["name"]: [int(size) for size in tensor["dims"]] for tensor in config.get("output", [])}
        # Other outputs than the vector may need a step of their own, which only requests for them pay.
        vector = embedding(outputs)
        system_kind = kind(inputs, outputs, int(config.get("max_batch_size", 0)))
        return cls("texts", requests, generates(config), system_kind, (vector,) if vector else ())


def _questions(texts: list[str]) -> list[str]:
    """Return the short questions among the texts, or else the beginning of each text."""
    questions = [text for text in texts if text.endswith("?") and len(text.encode()) <= QUESTION_BYTES]
    return questions or [text.encode()[:QUESTION_BYTES].decode(errors="ignore") for text in texts]


def _bytes(name: str, batch: list[int], data: bytes) -> Tensor:
    return Tensor(name, "BYTES", [*batch, 1], len(data).to_bytes(4, "little") + data)


def _pixels(name: str, batch: list[int], image: sample_images.Image) -> Tensor:
    return Tensor(name, "FP32", [*batch, *image.shape], image.astype(np.float32).tobytes())
