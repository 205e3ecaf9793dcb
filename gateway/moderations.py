"""OpenAI's moderations: a classifier of texts finds the labels that need attention."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway import encoder_answers as encoders
from gateway.api_error import ApiError
from gateway.bodies import json_response
from gateway.context import read
from gateway.rows import Part, read_rows
from gateway.served_systems import System
from gateway.vllm_api import texts_only

THRESHOLD = 0.5
# The names of labels, as letters and digits alone, that say that nothing was found.
NEUTRAL = {"acceptable", "benign", "clean", "harmless", "neutral", "none", "normal", "ok", "okay", "safe", "sfw"}
NEGATIONS = ("not", "non", "no")


class ModerationsBody(msgspec.Struct, forbid_unknown_fields=True):
    input: str | list[str | Part]
    model: str | None = None  # None: the only classifier


async def moderate(request: Request) -> Response:
    """Return for each text, or for all parts of one, the labels that the model finds in it."""
    gateway, body, system = await read(request, ModerationsBody, "classify")
    texts = texts_only(read_rows(gateway, system, body.input, "input"), "input")
    if any(isinstance(element, Part) for element in body.input):
        texts = ["\n".join(texts)]
    found = categories(system)
    answers = await encoders.classify(gateway, system, [(text, "") for text in texts], "input")
    results = []
    for row in answers.array("scores").tolist():
        scores = {label: score for label, score in zip(system.labels, row, strict=True) if label in found}
        flags = {label: score > THRESHOLD for label, score in scores.items()}
        inputs = {label: ["text"] for label in scores}
        results.append(
            {
                "flagged": any(flags.values()),
                "categories": flags,
                "category_scores": scores,
                "category_applied_input_types": inputs,
            }
        )
    answer: dict[str, Any] = {"id": encoders.new_id("modr"), "model": system.name, "results": results}
    return json_response(answer | {"usage": answers.usage()})


def categories(system: System) -> list[str]:
    """Return the labels that need attention. Raise ApiError if the model always finds one."""
    labels = system.labels
    found = [label for label in labels if not is_neutral(label, labels)]
    if not found or (found == labels and system.parameter("activation") != "sigmoid"):
        message = (
            f"The model '{system.name}' is no moderator: its labels ({', '.join(labels)}) must have harmful ones, and "
            "one for harmless texts. POST /v1/classify answers with it."
        )
        raise ApiError(400, message, "model", "model_not_supported")
    return found


def is_neutral(label: str, labels: list[str]) -> bool:
    """Return whether a label says that nothing was found: by its name, or as the negation of another one."""
    name, *others = (re.sub(r"[\W_]", "", text).lower() for text in (label, *labels))
    return name in NEUTRAL or any(name == negation + other for negation in NEGATIONS for other in others)
