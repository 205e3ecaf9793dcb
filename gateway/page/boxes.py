"""The part of the page about each system: its purpose, the fields of its box, and a command to try it.

POST /try/{system} sends texts or an image to a system of any kind, and returns its outputs, shortened. The page needs
it for systems that have no OpenAI route. Programs use Triton's own API, which answers in full.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from gateway.edge import bodies
from gateway.edge.bodies import json_response
from gateway.edge.errors import ApiError, shown
from gateway.page import pipelines
from gateway.page.fields import Box, Field
from gateway.text.image_urls import IMAGES
from gateway.text.tool_calls import FAMILIES
from gateway.triton.context import gateway_of
from gateway.triton.served import System
from triton_transformers.model_config import ModelConfig, from_message
from triton_transformers.protocol import CANCEL, IMAGE, TOKENIZED
from triton_transformers.tasks.command import commands, examples, text_inputs
from triton_transformers.tasks.generation import QUESTION
from triton_transformers.tasks.table import TASKS
from triton_transformers.tasks.task import Task
from triton_transformers.tasks.vectors import CAPTIONS, QUERY, TEXTS
from triton_transformers.tensors import DTYPES, Tensor

ELEMENTS = 256  # of an output, at most
CHARACTERS = 4096  # of a text, at most

IMAGE_LABEL = "Image (JPEG, PNG or WebP)"


def purpose(system: System) -> str:
    """Return what the system does, as the end of a sentence."""
    if takes_both(system):
        return "turns texts and images into vectors of one space"
    if task := row_of(system):
        return task.purpose + chatting(system)
    inputs, outputs = (
        ", ".join(tensor.name for tensor in side) for side in (system.config.input, system.config.output)
    )
    return f"takes {inputs} and returns {outputs}"


def row_of(system: System) -> Task | None:
    """Return the task of the system, by its kind or else by its tensors; None if they are those of no task."""
    if system.is_pipeline:
        return pipelines.task_of(system)
    of_kind = (task for task in TASKS.values() if task.kind == system.kind)
    return next(of_kind, system.task)


def chatting(system: System) -> str:
    """Return how the system chats, as the end of a sentence; nothing if it is no language model."""
    if system.kind != "generation":
        return ""
    if "chat" not in system.abilities:
        return "; no chats, because it has no chat template"
    skills = ", ".join(chat_skills(system))
    return ", and answers in a chat" + (f" ({skills})" if skills else "")


def chat_skills(system: System) -> list[str]:
    """Return what the model can do in a chat."""
    skills = {
        "images": IMAGES in system.inputs,
        "tools": system.tool_parser in FAMILIES.keys() - {""},
        "reasoning": system.parameter("reasoning"),
    }
    return [skill for skill, has_skill in skills.items() if has_skill]


def takes_both(system: System) -> bool:
    """Return whether the system turns texts and images into vectors of one space."""
    return system.kind == "embedding" and IMAGE in system.inputs


def config_of(system: System) -> ModelConfig:
    """Return the system's configuration in the form that other programs read from files."""
    parameters = {name: value.string_value for name, value in system.config.parameters.items()}
    return from_message(system.config, parameters)


def box(system: System, streams: bool) -> Box | None:
    """Return the form to try the system; None if it takes tensors that a page cannot fill."""
    query = Field("query", "Query", value=QUERY)
    texts = Field("texts", "Texts, one in each line", value="\n".join(TEXTS), rows=4)
    if takes_both(system):
        texts = Field("texts", "Texts, one in each line", value="\n".join(CAPTIONS), rows=4)
        return Box("embedding", [Field("image", IMAGE_LABEL, "image"), texts], "Compare")
    if system.kind == "embedding":
        return Box("embedding", [query, texts], "Compare")
    if system.kind == "rerank":
        return Box("rerank", [query, texts], "Sort")
    if system.kind == "classify":
        lines = "I love this film.\nThe service was slow and the food was cold."
        return Box("classify", [Field("input", "Texts, one in each line", value=lines, rows=3)], "Classify")
    if system.kind == "generation":
        return chat_box(system, streams) if "chat" in system.abilities else text_box(system, streams)
    if system.is_pipeline:
        return pipelines.box(system)
    if system.streams:
        return None
    fields = [
        Field(name, IMAGE_LABEL, "image")
        if name == IMAGE
        else Field(name, name.replace("_", " ").capitalize(), value=text, rows=3 if len(text) > 60 else 2)
        for name, text in examples(config_of(system), system.mask_token).items()
    ]
    return Box("other", fields, "Send") if fields else None


def text_box(system: System, streams: bool) -> Box:
    prompt = Field("prompt", "Prompt", value="The three laws of robotics are", rows=3)
    return Box("generation", [prompt, *limits(system, "64")], "Generate", streams)


def chat_box(system: System, streams: bool) -> Box:
    skills = chat_skills(system)
    fields = [
        Field("prompt", "Message", value=QUESTION, rows=2),
        *([Field("image", f"{IMAGE_LABEL}, optional", "image", required=False)] if "images" in skills else []),
    ]
    options = [
        Field("mode", "Mode", "choice", choices=[("chat", "Answer in a chat"), ("text", "Continue the text")]),
        Field("system", "System message, for a chat", required=False),
        *([Field("tools", "Tools (JSON), for a chat", required=False)] if "tools" in skills else []),
        *limits(system, "512"),
    ]
    return Box("generation", fields, "Send", streams, options=options, chats=True)


def limits(system: System, tokens: str) -> list[Field]:
    return [
        Field("max_tokens", "Maximum tokens", "number", tokens, min="1", step="1"),
        Field("temperature", "Temperature", "number", f"{system.sampling().get('temperature', 0)}", step="0.1"),
    ]


def command(system: System, url: str, needs_key: bool) -> str:
    """Return commands that send an example to the routes of the system; nothing if no route takes its tensors."""
    chats = "chat" in system.abilities
    return "\n\n".join(commands(system.name, config_of(system), system.mask_token, chats, url, needs_key))


# --- POST /try/{system} -----------------------------------------------------------------------------------------------


class TryBody(msgspec.Struct, forbid_unknown_fields=True):
    """The texts by the names of the inputs. Images, sound and videos are their files in base64."""

    inputs: dict[str, str]


async def try_it(request: Request) -> Response:
    gateway = gateway_of(request)
    body = await bodies.read(request, TryBody)
    system = await gateway.served.find(request.path_params["system"], param="system")
    tensors = input_tensors(system, body.inputs)
    names = [tensor.name for tensor in system.config.output if tensor.name != TOKENIZED]
    outputs = await gateway.infer(system, tensors, names)
    # A part of a pipeline's answer would not be JSON.
    characters = None if system.is_pipeline else CHARACTERS
    shortened_outputs = [shortened(tensor, characters) for tensor in outputs.values()]
    return json_response({"model": system.name, "outputs": shortened_outputs})


def input_tensors(system: System, texts: dict[str, str]) -> list[Tensor]:
    """Return the inputs of one row. Raise ApiError with the name of an input that is missing, empty or unknown."""
    if system.streams:
        raise ApiError(400, f"The model '{system.name}' streams its responses: send it to /v1/completions.", "system")
    config = config_of(system)
    known = [tensor.name for tensor in config.inputs if tensor.is_text and tensor.name != CANCEL]
    required = [tensor.name for tensor in text_inputs(config)]
    if not required:
        names = ", ".join(tensor.name for tensor in system.config.input)
        message = f"The model '{system.name}' takes {names}, which are not texts or images: use Triton's own API."
        raise ApiError(400, message, "system")
    for name in texts:
        if name not in known:
            raise ApiError(
                400, f"The model '{system.name}' takes the inputs {', '.join(known)}.", f"inputs.{shown(name)}"
            )
    # Which inputs a pipeline requires depends on its task, and its backend knows.
    for name in [] if texts and system.is_pipeline else required:
        if not texts.get(name):
            raise ApiError(400, f"The model '{system.name}' requires this input.", f"inputs.{name}")
    shape = [1, 1] if system.max_batch else [1]
    return [Tensor.from_texts(name, [text], shape) for name, text in texts.items()]


def shortened(tensor: Tensor, characters: int | None = CHARACTERS) -> dict[str, Any]:
    """Return the tensor as JSON has it, with its first elements."""
    if tensor.datatype == "BYTES":
        data: list[Any] = [text[:characters] for text in tensor.texts()[:ELEMENTS]]
    else:
        values = tensor.array().ravel()[:ELEMENTS] if tensor.datatype in DTYPES else np.empty(0)  # BF16
        # JSON has no NaN and no infinity.
        data = [value if math.isfinite(value) else None for value in values.tolist()]
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape), "data": data}
