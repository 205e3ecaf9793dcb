"""The part of the page about transformers' pipelines: a form for each task, and the drawing of its answer."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from gateway.page_fields import Box, Field
from gateway.served_systems import System

PARAMETERS, CANDIDATES = "parameters", "candidate_labels"


class Task(NamedTuple):
    """The purpose of a pipeline, and the function of page_answers.js that draws its answer."""

    purpose: str
    answer: str = "json"
    text: str = "A dog sleeps on the sofa while it rains."


TASKS = {
    "any-to-any": Task("continues texts, images and sound", "text", "Which planet is the largest?"),
    "audio-classification": Task("classifies sound", "labels"),
    "automatic-speech-recognition": Task("writes speech down", "text"),
    "decision": Task("decides by questions about a state"),
    "depth-estimation": Task("estimates the depth of an image", "depth"),
    "document-question-answering": Task("finds the answer to a question in an image of a document", "labels"),
    "feature-extraction": Task("turns a text into a vector for each token"),
    "fill-mask": Task("fills in a masked word", "labels", "Paris is the [MASK] of France."),
    "image-classification": Task("classifies images", "labels"),
    "image-feature-extraction": Task("turns an image into vectors"),
    "image-segmentation": Task("finds the areas of an image", "masks"),
    "image-text-to-text": Task("continues a text about images", "text", "What is in the image?"),
    "keypoint-matching": Task("finds the points that two images share"),
    "mask-generation": Task("cuts an image into objects", "masks"),
    "object-detection": Task("finds objects in an image", "boxes"),
    "summarization": Task("summarizes a text", "text"),
    "table-question-answering": Task("finds the answer to a question in a table", "table"),
    "text-classification": Task("classifies texts", "labels", "I love this film."),
    "text-generation": Task("continues a text", "text", "The three laws of robotics are"),
    "text-to-audio": Task("speaks a text", "sound"),
    "text2text-generation": Task("turns a text into another", "text"),
    "token-classification": Task(
        "recognizes names and other entities", "entities", "Marie Curie was born in Warsaw and worked in Paris."
    ),
    "translation": Task("translates a text", "text"),
    "video-classification": Task("classifies videos", "labels"),
    "zero-shot-audio-classification": Task("sorts sound into labels of your own", "labels"),
    "zero-shot-classification": Task("sorts a text into labels of your own", "labels"),
    "zero-shot-image-classification": Task("sorts an image into labels of your own", "labels"),
    "zero-shot-object-detection": Task("finds objects of your own labels in an image", "boxes"),
}
# The kinds of fields that are files -> the label, and the name of a file in a command.
FILES = {
    "image": ("Image (JPEG, PNG or WebP)", "image.jpg"),
    "images": ("Images (JPEG, PNG or WebP)", "image.jpg"),
    "audio": ("Sound", "speech.wav"),
    "video": ("Video", "clip.mp4"),
}
# The labels and examples of fields with names of their own.
NAMED = {
    "question": ("Question", "What is the total?"),
    "query": ("Question", "How old is Ada?"),
    "table": ("Table, as comma-separated values or JSON", "name,age\nAda,36\nGrace,85"),
    "word_boxes": ("Words with their boxes (JSON), if the server does not read them itself", ""),
    "state": ("State (JSON)", '"I was charged twice and want a refund."'),
    "questions": (
        "Questions (JSON)",
        '{"refund": {"type": "noul", "instructions": "Is a refund requested?"}}',
    ),
}
OPTIONAL = ("word_boxes", "assets")
LABELS = "a landscape, a street at night, a cat"


def is_pipeline(system: System) -> bool:
    return bool(system.config.backend == "pipeline")


def task_of(system: System) -> Task:
    name = system.parameter("task")
    return TASKS.get(name, Task(f"runs the pipeline of {name}"))


def box(system: System) -> Box:
    return Box("pipeline", list(fields(system)), "Send", answer=task_of(system).answer)


def fields(system: System) -> Iterator[Field]:
    """Yield the fields of a row, then the labels if the task needs some, then the parameters of the call."""
    kinds = dict(field.split("=") for field in system.parameter("fields").split(","))
    for number, (name, kind) in enumerate(kinds.items()):
        # A chat may be without files.
        required = number == 0 or not (name in OPTIONAL or "chat" in kinds.values())
        if kind in FILES:
            yield Field(name, FILES[kind][0], kind, required=required)
            continue
        label, text = NAMED.get(name, (name.replace("_", " ").capitalize(), task_of(system).text))
        yield Field(name, label, value=text, rows=3 if name in ("text", "table") else 1, required=required)
    if CANDIDATES in system.parameter("required_parameters").split(","):
        yield Field(CANDIDATES, "Labels, separated by commas", value=LABELS)
    yield Field(PARAMETERS, "Parameters of the pipeline (JSON, optional)", required=False)


def command(system: System, curl: str) -> str:
    """Return a command that sends an example with this call of curl."""
    inputs, files = {}, []
    for field in fields(system):
        if not field.required:
            continue
        if field.type in FILES:
            count = 2 if field.type == "images" else 1
            inputs[field.name] = json.dumps(["%s"] * count) if field.type == "images" else "%s"
            files += [FILES[field.type][1]] * count
        elif field.name == CANDIDATES:
            inputs[PARAMETERS] = json.dumps({CANDIDATES: field.value.split(", ")})
        elif field.name == "table":
            inputs[field.name] = '{"name": ["Ada", "Grace"], "age": ["36", "85"]}'
        else:
            inputs[field.name] = field.value
    body = json.dumps({"inputs": inputs}, ensure_ascii=False)
    if not files:
        return f"{curl} \\\n  -d {shlex.quote(body)}"
    # printf would read the backslashes before quotes in a text.
    quoted = shlex.quote(body.replace("\\", "\\\\"))
    return "printf {} {} |\n  {} -d @-".format(quoted, " ".join(f'"$(base64 -w0 {file})"' for file in files), curl)
