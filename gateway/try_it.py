"""POST /try/{system}: send texts or an image to a system of any kind, and get its outputs as JSON, shortened.

The page needs it for systems that have no OpenAI route. Programs use Triton's own API, which answers in full.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from gateway import bodies
from gateway.api_error import ApiError, shown
from gateway.bodies import json_response
from gateway.context import gateway_of
from gateway.inference import CANCEL
from gateway.page_boxes import text_inputs
from gateway.served_systems import System
from triton_transformers.kinds import TOKENIZED
from triton_transformers.model_config import DATA_TYPES
from triton_transformers.tensors import DTYPES, Tensor

ELEMENTS = 256  # of an output, at most
CHARACTERS = 4096  # of a text, at most


class TryBody(msgspec.Struct, forbid_unknown_fields=True):
    """The texts by the names of the inputs. An image is its file in base64, under image_bytes."""

    inputs: dict[str, str]


async def try_it(request: Request) -> Response:
    gateway = gateway_of(request)
    body = await bodies.read(request, TryBody)
    system = await gateway.served.find(request.path_params["system"], param="system")
    tensors = input_tensors(system, body.inputs)
    names = [tensor.name for tensor in system.config.output if tensor.name != TOKENIZED]
    outputs = await gateway.inference.infer(system.name, tensors, names, system.cancellable)
    return json_response({"model": system.name, "outputs": [shortened(tensor) for tensor in outputs.values()]})


def input_tensors(system: System, texts: dict[str, str]) -> list[Tensor]:
    """Return the inputs of one row. Raise ApiError with the name of an input that is missing, empty or unknown."""
    if system.streams:
        raise ApiError(400, f"The model '{system.name}' streams its responses: send it to /v1/completions.", "system")
    known = [
        tensor.name
        for tensor in system.config.input
        if DATA_TYPES[tensor.data_type] == "STRING" and tensor.name != CANCEL
    ]
    required = [tensor.name for tensor in text_inputs(system.config)]
    if not required:
        names = ", ".join(tensor.name for tensor in system.config.input)
        message = f"The model '{system.name}' takes {names}, which are not texts or images: use Triton's own API."
        raise ApiError(400, message, "system")
    for name in texts:
        if name not in known:
            raise ApiError(
                400, f"The model '{system.name}' takes the texts {', '.join(known)}.", f"inputs.{shown(name)}"
            )
    for name in required:
        if not texts.get(name):
            raise ApiError(400, f"The model '{system.name}' requires this input.", f"inputs.{name}")
    shape = [1, 1] if system.max_batch else [1]
    return [Tensor.from_texts(name, [text], shape) for name, text in texts.items()]


def shortened(tensor: Tensor) -> dict[str, Any]:
    """Return the tensor as JSON has it, with its first elements."""
    if tensor.datatype == "BYTES":
        data: list[Any] = [text[:CHARACTERS] for text in tensor.texts()[:ELEMENTS]]
    else:
        values = tensor.array().ravel()[:ELEMENTS] if tensor.datatype in DTYPES else np.empty(0)  # BF16
        # JSON has no NaN and no infinity.
        data = [value if math.isfinite(value) else None for value in values.tolist()]
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape), "data": data}
