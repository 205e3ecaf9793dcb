"""The part of the page about transformers' pipelines: a form for each task, and the drawing of its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gateway.page.fields import Box, Field
from gateway.triton.served import System
from triton_transformers.tasks.pipeline_command import SAMPLES, TEXT, example_command

PARAMETERS, CANDIDATES = "parameters", "candidate_labels"


class Task(NamedTuple):
    """The purpose of a pipeline, and the function of page_answers.js that draws its answer."""

    purpose: str
    answer: str = "json"
    text: str = TEXT


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
    "image-to-text": Task("describes images, or reads the text in them", "text"),
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
# The kinds of fields that are files -> the label.
FILES = {
    "image": "Image (JPEG, PNG or WebP)",
    "images": "Images (JPEG, PNG or WebP)",
    "audio": "Sound",
    "video": "Video",
}
# The labels and examples of fields with names of their own.
NAMED = {
    "question": ("Question", SAMPLES["question"]),
    "query": ("Question", SAMPLES["query"]),
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


def task_of(system: System) -> Task:
    name = system.parameter("task")
    return TASKS.get(name, Task(f"runs the pipeline of {name}"))


def box(system: System) -> Box:
    return Box("pipeline", list(fields(system)), "Send", answer=task_of(system).answer)


def fields(system: System) -> Iterator[Field]:
    """Yield the fields of a row, then the labels if the task needs some, then the parameters of the call."""
    kinds = system.pipeline_fields
    for number, (name, kind) in enumerate(kinds.items()):
        # A chat may be without files.
        required = number == 0 or not (name in OPTIONAL or "chat" in kinds.values())
        if kind in FILES:
            yield Field(name, FILES[kind], kind, required=required)
            continue
        label, text = NAMED.get(name, (name.replace("_", " ").capitalize(), task_of(system).text))
        yield Field(name, label, value=text, rows=3 if name in ("text", "table") else 1, required=required)
    if CANDIDATES in system.parameter("required_parameters").split(","):
        yield Field(CANDIDATES, "Labels, separated by commas", value=LABELS)
    yield Field(PARAMETERS, "Parameters of the pipeline (JSON, optional)", required=False)


def command(system: System, curl: str) -> str:
    """Return a command that sends an example with this call of curl."""
    needs_labels = CANDIDATES in system.parameter("required_parameters").split(",")
    parameters = {CANDIDATES: LABELS.split(", ")} if needs_labels else {}
    return example_command(curl, system.pipeline_fields, parameters, task_of(system).text)
