"""Define the tasks of transformers' pipelines: the fields of their rows, and which of them a checkpoint can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# The format that serves them, and its recipe.
PIPELINE = "pipeline"
# The fact of a record with the parameters that each request needs: the languages of a translation.
NEEDS = "needed_parameters"
TEXTS = ("text2text-generation", "summarization", "translation")
# The types of models that turn texts into texts, and were made for one of these tasks.
MADE_FOR = {
    "translation": ("fsmt", "m2m_100", "marian", "mbart", "nllb-moe"),
    "summarization": ("bigbird_pegasus", "led", "pegasus", "pegasus_x"),
}


@dataclass(frozen=True)
class PipelineTask:
    """The fields of a row with their kinds: text, json, chat, image, images, audio or video."""

    fields: dict[str, str]
    # The parameters without which the pipeline cannot answer, with values for examples.
    required: dict[str, Any] = field(default_factory=dict)
    field_parameters: tuple[str, ...] = ()  # those that the pipeline takes beside its fields


CANDIDATES = {"candidate_labels": ["a cat", "a dog on a sofa", "rain"]}
CHAT = {"text": "chat", "images": "images"}

# The tasks that another recipe serves faster, where it can. The pipeline does it with FORMAT=pipeline.
FASTER = {
    "feature-extraction": PipelineTask({"text": "text"}),
    "text-classification": PipelineTask({"text": "text"}),
    "token-classification": PipelineTask({"text": "text"}),
    "fill-mask": PipelineTask({"text": "text"}),
    "image-classification": PipelineTask({"image": "image"}),
    "image-feature-extraction": PipelineTask({"image": "image"}),
    "text-generation": PipelineTask({"text": "chat"}),
    "image-text-to-text": PipelineTask(CHAT),
}
PIPELINE_TASKS = {
    "audio-classification": PipelineTask({"audio": "audio"}),
    "automatic-speech-recognition": PipelineTask({"audio": "audio"}),
    "text-to-audio": PipelineTask({"text": "text"}),
    "table-question-answering": PipelineTask({"table": "json", "query": "text"}),
    "document-question-answering": PipelineTask({"image": "image", "question": "text", "word_boxes": "json"}),
    "zero-shot-classification": PipelineTask({"text": "text"}, CANDIDATES),
    "zero-shot-image-classification": PipelineTask({"image": "image"}, CANDIDATES),
    "zero-shot-audio-classification": PipelineTask({"audio": "audio"}, CANDIDATES),
    "image-segmentation": PipelineTask({"image": "image"}),
    "object-detection": PipelineTask({"image": "image"}),
    "zero-shot-object-detection": PipelineTask({"image": "image"}, CANDIDATES, ("candidate_labels",)),
    "decision": PipelineTask({"state": "json", "questions": "json", "assets": "images"}),
    "depth-estimation": PipelineTask({"image": "image"}),
    "video-classification": PipelineTask({"video": "video"}),
    "mask-generation": PipelineTask({"image": "image"}),
    "keypoint-matching": PipelineTask({"images": "images"}),
    "any-to-any": PipelineTask({**CHAT, "audio": "audio"}),
    "image-to-text": PipelineTask({"image": "image"}),
    **{task: PipelineTask({"text": "text"}) for task in TEXTS},
    **FASTER,
}
# An encoder of images with a decoder of texts. With the encoder of Donut it answers questions, with others it only
# describes or reads its images.
IMAGES_TO_TEXTS, DONUT, DOCUMENTS = "VisionEncoderDecoderModel", "donut-swin", "document-question-answering"
# More lists of transformers, by the end of their names, of the architectures that a pipeline takes beside its own.
MORE_LISTS = {"image-segmentation": ("INSTANCE_SEGMENTATION", "UNIVERSAL_SEGMENTATION")}
# The tasks that a checkpoint can do beside the one that it was made for: TASK chooses them.
SECOND = ("zero-shot-classification", "zero-shot-image-classification", "any-to-any", "decision")
# The tasks of lists that also have architectures for something more special.
GENERAL = ("text-generation", "fill-mask")
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
        lists += [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in MORE_LISTS.get(task, ())]
        if architecture in set(names_in(lists, model_type)):
            found.append(task)
    if "any-to-any" not in found and architecture in set(
        names_in([modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES], model_type)
    ):
        found += TEXTS
    made_for = {task for task, kinds in MADE_FOR.items() if model_type in kinds}
    return sorted(found, key=lambda task: (task not in made_for, task in SECOND, task in GENERAL))


def names_in(lists: list[Any], model_type: str) -> Iterator[str]:
    for listed in lists:
        names = listed.get(model_type, ())
        yield from (names,) if isinstance(names, str) else names
