"""Find the tasks whose pipelines take a checkpoint, by transformers' own lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton_transformers.tasks.table import PIPELINE_TASKS
from triton_transformers.tasks.texts import TEXT_TO_TEXT

# An encoder of images with a decoder of texts. With the encoder of Donut it answers questions, with others it only
# describes or reads its images.
IMAGES_TO_TEXTS, DONUT, DOCUMENTS = "VisionEncoderDecoderModel", "donut-swin", "document-question-answering"
SOUND_FEATURES = ("get_text_features", "get_audio_features")


def pipeline_tasks_of(architecture: str, model_type: str) -> list[str]:
    """Return the tasks whose pipelines take this architecture, by transformers' own lists; the likeliest first."""
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.pipelines import SUPPORTED_TASKS

    network = getattr(transformers, architecture, None)
    if all(hasattr(network, method) for method in SOUND_FEATURES):
        return ["zero-shot-audio-classification"]
    if architecture == IMAGES_TO_TEXTS:  # in no list of its tasks
        return [DOCUMENTS, "image-to-text"]
    found = []
    supported: dict[str, Any] = SUPPORTED_TASKS
    for task, entry in supported.items():
        lists = [auto._model_mapping._model_mapping for auto in entry["pt"] if auto is not modeling_auto.AutoModel]
        more = PIPELINE_TASKS[task].lists if task in PIPELINE_TASKS else ()
        lists += [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in more]
        if architecture in set(names_in(lists, model_type)):
            found.append(task)
    if "any-to-any" not in found and architecture in set(
        names_in([modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES], model_type)
    ):
        found += TEXT_TO_TEXT

    def order(task: str) -> tuple[bool, int]:
        row = PIPELINE_TASKS.get(task)
        return (model_type not in row.types, row.rank) if row else (True, 0)

    return sorted(found, key=order)


def names_in(lists: list[Any], model_type: str) -> Iterator[str]:
    for listed in lists:
        names = listed.get(model_type, ())
        yield from (names,) if isinstance(names, str) else names
