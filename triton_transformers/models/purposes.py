"""Name what an architecture of transformers does, if it is of a kind that is not served."""

from __future__ import annotations

import inspect
from typing import Any

# A kind of model -> what it does. The kinds are those of transformers' MODEL_FOR_<kind>_MAPPING_NAMES, which list the
# architectures; other architectures of the kind end in its name (CTC: ...ForCTC).
KINDS = {
    "AUDIO_CLASSIFICATION": "classifies sound",
    "AUDIO_FRAME_CLASSIFICATION": "classifies sound",
    "AUDIO_XVECTOR": "recognizes speakers",
    "CAUSAL_IMAGE_MODELING": "generates images",
    "CTC": "transcribes speech",
    "DEPTH_ESTIMATION": "estimates the depth of images",
    "DOCUMENT_QUESTION_ANSWERING": "answers questions about scanned pages",
    "IMAGE_SEGMENTATION": "segments images",
    "IMAGE_TEXT_TO_TEXT": "generates text from images",
    "IMAGE_TO_IMAGE": "turns images into other images",
    "INSTANCE_SEGMENTATION": "segments images",
    "KEYPOINT_DETECTION": "finds points in images",
    "KEYPOINT_MATCHING": "matches the points of two images",
    "MASKED_IMAGE_MODELING": "fills in hidden parts of images",
    "MASK_GENERATION": "segments images",
    "MULTIPLE_CHOICE": "chooses one of several texts",
    "NEXT_SENTENCE_PREDICTION": "judges whether one sentence follows another",
    "OBJECT_DETECTION": "finds objects in images",
    "RETRIEVAL": "returns several vectors for each page",
    "SEMANTIC_SEGMENTATION": "labels each pixel of an image",
    "SPEECH_SEQ_2_SEQ": "transcribes speech",
    "TABLE_QUESTION_ANSWERING": "answers questions about tables",
    "TEXT_TO_SPECTROGRAM": "speaks texts",
    "TEXT_TO_WAVEFORM": "makes sound from texts",
    "TIME_SERIES_CLASSIFICATION": "classifies series of measurements",
    "TIME_SERIES_PREDICTION": "forecasts series of measurements",
    "TIME_SERIES_REGRESSION": "forecasts series of measurements",
    "UNIVERSAL_SEGMENTATION": "segments images",
    "VIDEO_CLASSIFICATION": "classifies videos",
    "VISUAL_QUESTION_ANSWERING": "answers questions about images",
    "ZERO_SHOT_OBJECT_DETECTION": "finds objects in images",
}
# The end of an architecture's name -> what it does, for kinds that transformers does not list.
ENDINGS = {
    "DPRReader": "marks answers in DPR's passages",
    "ViTMAEForPreTraining": "fills in hidden parts of images",
    "ViTMAEModel": "sees a random part of each image",
}
# The purpose of a ...ForConditionalGeneration, unless it is an encoder-decoder of texts.
GENERATES = "generates text from images, sound or other text"
# An input that a model takes beside or instead of tokens and images -> what the model takes.
INPUTS = {
    "bbox": "the places of words on a page",
    "input_features": "sound",
    "input_values": "sound",
    "past_values": "series of measurements",
    "pixel_values_videos": "texts, images and videos together",
    "visual_embeds": "texts and images together",
    "xpath_tags_seq": "the markup of web pages",
}
# The methods of a model for texts and images that turn each kind into vectors of one space.
TEXT_FEATURES, IMAGE_FEATURES = "get_text_features", "get_image_features"
# Kinds whose types of models read nothing else, whatever the architecture's head.
WHOLE_TYPES = ("TABLE_QUESTION_ANSWERING", "VIDEO_CLASSIFICATION")


def purpose_of(architecture: str, model_type: str) -> str:
    """Return what a model that is not served does, after "which", or "" for other models."""
    name = architecture.lower()
    for kind, purpose in KINDS.items():
        if name.endswith(f"for{kind.replace('_', '').lower()}"):
            return purpose
    from transformers.models.auto import modeling_auto

    for kind, purpose in KINDS.items():
        listed = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {})
        names = [name for entry in listed.values() for name in ((entry,) if isinstance(entry, str) else entry)]
        if architecture in names or (kind in WHOLE_TYPES and model_type in listed):
            return purpose
    return next((purpose for ending, purpose in ENDINGS.items() if architecture.endswith(ending)), "")


def unserved_input(architecture: str, config_class: type[Any]) -> str:
    """Return what a model reads that no task sends, or "". Without an architecture, ask the class without a head."""
    import transformers

    network: Any = getattr(transformers, architecture, None)
    if not architecture and config_class in transformers.MODEL_MAPPING:
        network = transformers.MODEL_MAPPING[config_class]
    inputs = inspect.signature(network.forward).parameters if hasattr(network, "forward") else ()
    return next((description for name, description in INPUTS.items() if name in inputs), "")


def encodes_texts_and_images(architecture: str) -> bool:
    """Return whether an architecture of transformers turns texts and images into vectors of one space."""
    import transformers

    network = getattr(transformers, architecture, None)
    return hasattr(network, TEXT_FEATURES) and hasattr(network, IMAGE_FEATURES)


def takes_images(architecture: str) -> bool:
    """Return whether an architecture of transformers takes images and no texts."""
    import transformers

    return getattr(getattr(transformers, architecture, None), "main_input_name", "") == "pixel_values"
