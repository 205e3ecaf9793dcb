"""OpenAI's moderations: a classifier of texts finds the labels that need attention."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from gateway.apis.vllm import usage
from gateway.edge.bodies import json_response
from gateway.edge.errors import ApiError
from gateway.edge.routes import ApiRoute
from gateway.text import encoders
from gateway.text.row_fields import Part, read_rows, texts_only
from gateway.triton.context import Gateway, read
from gateway.triton.served import System
from triton_transformers.tensors import Row

THRESHOLD = 0.5
# Windows of a long text share this part of their tokens, so that one of them has the whole of a phrase at a border.
OVERLAP = 4
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
    found = categories(system)
    parts = await split_into_windows(gateway, system, texts)
    if any(isinstance(element, Part) for element in body.input):
        parts = [[row for part in parts for row in part]]
    rows = [row for part in parts for row in part]
    if len(rows) > (most := gateway.config.limits.texts):
        message = (
            f"'input' makes {len(rows)} windows of the length that the model reads; at most {most} are allowed "
            "(GATEWAY_TEXTS). Send fewer or shorter texts."
        )
        raise ApiError(400, message, "input", "too_many_inputs")
    answers = await encoders.classify(gateway, system, [(row, "") for row in rows], "input")
    results = []
    for scored in np.split(answers.array("scores"), np.cumsum([len(part) for part in parts])[:-1]):
        highest = zip(system.labels, scored.max(axis=0).tolist(), strict=True)
        scores = {label: score for label, score in highest if label in found}
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
    answer: dict[str, Any] = {"id": f"modr-{uuid.uuid4().hex}", "model": system.name, "results": results}
    return json_response(answer | {"usage": usage(answers.tokens)})


async def split_into_windows(gateway: Gateway, system: System, texts: Sequence[str]) -> list[list[Row]]:
    """Return each text as the rows that the model reads: itself, or windows of its tokens if it is too long."""
    if not system.can(["tokens"]):  # until `make models` assembles it again
        return [[text] for text in texts]
    tokenized = await encoders.tokenized(gateway, system, texts)
    return [windows_of(row) or [text] for text, row in zip(texts, tokenized, strict=True)]


def windows_of(row: encoders.TokenizedRow) -> list[Row]:
    """Return windows of a text that overlap, each with the special tokens; none if the model reads the whole text."""
    ids, (before, after) = row.ids, row.special
    if row.max_length is None or len(ids) <= row.max_length:
        return []
    first, own, last = ids[:before], ids[before : len(ids) - after], ids[len(ids) - after :]
    size = row.max_length - before - after
    step = size - size // OVERLAP
    return [[*first, *own[start : start + size], *last] for start in range(0, len(own) - size + step, step)]


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


ROUTES = [
    # Not every classifier moderates, so the page does not show it.
    ApiRoute("/v1/moderations", moderate, "classify", is_shown=False),
]
