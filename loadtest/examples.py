"""What is sent to the system under test: texts or pictures, as its inputs want them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from loadtest import sample_images as pictures
from loadtest.switching import composing
from scripts.common.settings import Settings, UserError
from scripts.common.triton import Triton


class Tensor(NamedTuple):
    """One input of a request; `data` as it is in memory and on the wire."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes


@dataclass(frozen=True)
class Examples:
    """`noun`: what they are, in reports."""

    noun: str
    requests: list[list[Tensor]]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(b"".join(tensor.data for request in self.requests for tensor in request)).hexdigest()

    @classmethod
    def of(cls, settings: Settings, texts: list[str]) -> Examples:
        """Of the kind that the system wants, as the server describes it."""
        system = settings["SYSTEM"]
        configs = composing(Triton(settings.url("TRITON_HTTP_PORT")), system)
        for parameters in (config.get("parameters", {}) for config in configs.values()):
            if "exactly_one" in parameters:  # the token that a fill-mask model is to fill in
                texts = [f"{parameters['exactly_one']['string_value']} {text}" for text in texts]
        return cls.wanted(configs[system], texts)

    @classmethod
    def wanted(cls, config: dict, texts: list[str]) -> Examples:
        batch = [1] if config.get("max_batch_size") else []
        inputs = {tensor["name"]: tensor for tensor in config["input"]}
        if "image_bytes" in inputs:
            return cls("pictures", [[_bytes("image_bytes", batch, file)] for file in pictures.files()])
        if "image" in inputs and [int(axis) for axis in inputs["image"]["dims"]] == [-1, -1, 3]:
            return cls("pictures", [[_pixels("image", batch, picture)] for picture in pictures.small()])
        needed = [tensor for tensor in inputs.values() if not tensor.get("optional")]
        odd = [tensor["name"] for tensor in needed if tensor["data_type"] != "TYPE_STRING"]
        if odd or not needed:
            raise UserError(
                f"SYSTEM={config['name']} takes {', '.join(odd or inputs)}: only texts and pictures are made up"
            )
        requests = [
            # Of two, as question and context are, each gets another text.
            [_bytes(tensor["name"], batch, texts[(row + n) % len(texts)].encode()) for n, tensor in enumerate(needed)]
            for row in range(len(texts))
        ]
        return cls("texts", requests)


def _bytes(name: str, batch: list[int], data: bytes) -> Tensor:
    return Tensor(name, "BYTES", [*batch, 1], len(data).to_bytes(4, "little") + data)


def _pixels(name: str, batch: list[int], picture) -> Tensor:
    return Tensor(name, "FP32", [*batch, *picture.shape], picture.astype("float32").tobytes())
