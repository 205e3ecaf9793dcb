"""The part of the page about transformers' pipelines: a form for each task, and the drawing of its answer."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.page.fields import Box, Field
from gateway.triton.served import System
from triton_transformers.tasks.command import SAMPLES
from triton_transformers.tasks.task import Task

PARAMETERS, CANDIDATES = "parameters", "candidate_labels"


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
    return system.task or Task(f"runs the pipeline of {system.parameter('task')}")


def box(system: System) -> Box:
    return Box("pipeline", list(fields(system)), "Send", answer=task_of(system).drawing)


def fields(system: System) -> Iterator[Field]:
    """Yield the fields of a row, then the labels if the task needs some, then the parameters of the call."""
    kinds = system.pipeline_fields
    for number, (name, kind) in enumerate(kinds.items()):
        # A chat may be without files.
        required = number == 0 or not (name in OPTIONAL or "chat" in kinds.values())
        if kind in FILES:
            yield Field(name, FILES[kind], kind, required=required)
            continue
        label, text = NAMED.get(name, (name.replace("_", " ").capitalize(), task_of(system).example))
        yield Field(name, label, value=text, rows=3 if name in ("text", "table") else 1, required=required)
    if CANDIDATES in system.parameter("required_parameters").split(","):
        yield Field(CANDIDATES, "Labels, separated by commas", value=LABELS)
    yield Field(PARAMETERS, "Parameters of the pipeline (JSON, optional)", required=False)
