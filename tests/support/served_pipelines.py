"""Small pipelines that several modules of tests serve, each on a stack that may have some of them already."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.support.checkpoints.pipelines import find_pipeline
from tests.support.stacks import TestStack

# The name of a system -> its task.
PIPELINES = {
    "sounds": "audio-classification",
    "hears": "automatic-speech-recognition",
    "speaks": "text-to-audio",
    "counts": "table-question-answering",
    "reads": "document-question-answering",
    "judges": "zero-shot-classification",
    "sorts": "zero-shot-image-classification",
    "segments": "image-segmentation",
    "finds": "object-detection",
    "translates": "translation",
    "summarizes": "summarization",
    "watches": "video-classification",
}


def assemble_pipelines(stack: TestStack, folder: Path, names: Iterable[str]) -> str:
    """Save the weights of these pipelines in the folder, and assemble the pipelines that the stack lacks.

    Return what `make models` would print.
    """
    pipelines = {name: find_pipeline(PIPELINES[name]) for name in names}
    settings = [
        {"SYSTEMS": name, "SOURCE": pipeline.save(folder / name), "TASK": pipeline.task if pipeline.chosen else ""}
        for name, pipeline in pipelines.items()
    ]
    present = {path.name for path in (stack.folder / "models").iterdir()}
    return stack.assemble(*(setting for setting in settings if setting["SYSTEMS"] not in present))
