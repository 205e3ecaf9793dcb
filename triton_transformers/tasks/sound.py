"""The tasks of sound."""

from __future__ import annotations

from triton_transformers.tasks.task import CANDIDATES, FEW_TOKENS, LABELS, OPTIONS, Hub, Task
from triton_transformers.tasks.texts import SORTS

FIELDS = {"audio": "audio"}

TASKS = {
    "audio-classification": Task("classifies sound", FIELDS, LABELS, drawing="labels"),
    "zero-shot-audio-classification": Task(
        "sorts sound into labels of your own", FIELDS, CANDIDATES, SORTS, drawing="labels"
    ),
    "automatic-speech-recognition": Task(
        "writes speech down",
        FIELDS,
        f"chunk_length_s {OPTIONS} prompt return_duration return_language return_timestamps stride_length_s",
        hub=Hub(options=OPTIONS),
        ability="transcription",
        quick={OPTIONS: FEW_TOKENS},
        drawing="text",
    ),
    "text-to-audio": Task(
        "speaks a text",
        {"text": "text"},
        f"forward_params {OPTIONS}",
        hub=Hub(options=OPTIONS, own=frozenset(("forward_params", "seed")), file="audio"),
        ability="speech",
        is_random=True,
        is_ascii=True,
        drawing="sound",
    ),
}
