"""Define the shape of a pipeline's answer for each task, as JSON, to check answers without transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

# A shape is one of these, a type, a list of one shape (at least one element), or the fields that an object must have.
NUMBER, TEXT, ANY = float, str, object


class Some(NamedTuple):
    """A list that may be empty: a detector may find nothing."""

    shape: Any


class Numbers(NamedTuple):
    """Numbers in nested lists, at least one."""


class File(NamedTuple):
    """A file in base64, by how it begins."""

    start: str


PNG, WAV = File("iVBORw0KGgo"), File("UklGR")
LABELS = [{"score": NUMBER, "label": TEXT}]
BOXES = Some({"score": NUMBER, "label": TEXT, "box": dict.fromkeys(("xmin", "ymin", "xmax", "ymax"), NUMBER)})
POINT = {"x": NUMBER, "y": NUMBER}
CONTINUED = [{"generated_text": ANY}]  # a text, or a chat if the request is one
ANSWERS: dict[str, Any] = {
    "any-to-any": CONTINUED,
    "audio-classification": LABELS,
    "automatic-speech-recognition": {"text": TEXT},
    "decision": {"refund": ANY},
    "depth-estimation": {"predicted_depth": Numbers(), "depth": PNG},
    "document-question-answering": [{"answer": ANY}],
    "feature-extraction": Numbers(),
    "fill-mask": [{"score": NUMBER, "token_str": TEXT, "sequence": TEXT}],
    "image-classification": LABELS,
    "image-feature-extraction": Numbers(),
    "image-segmentation": Some({"label": TEXT, "mask": PNG}),
    "image-text-to-text": CONTINUED,
    "image-to-text": [{"generated_text": TEXT}],
    "keypoint-matching": Some({"keypoint_image_0": POINT, "keypoint_image_1": POINT, "score": NUMBER}),
    "mask-generation": {"masks": Some(PNG), "scores": Some(NUMBER)},
    "object-detection": BOXES,
    "summarization": [{"summary_text": TEXT}],
    "table-question-answering": {"answer": TEXT},
    "text-classification": LABELS,
    "text-generation": CONTINUED,
    "text-to-audio": {"audio": WAV, "sampling_rate": NUMBER},
    "text2text-generation": [{"generated_text": TEXT}],
    "token-classification": Some({"score": NUMBER, "word": TEXT}),
    "translation": [{"translation_text": TEXT}],
    "video-classification": LABELS,
    "zero-shot-audio-classification": LABELS,
    "zero-shot-classification": {"sequence": TEXT, "labels": [TEXT], "scores": [NUMBER]},
    "zero-shot-image-classification": LABELS,
    "zero-shot-object-detection": BOXES,
}


def defect(answer: Any, shape: Any, place: str = "the answer") -> str:
    """Return where an answer does not have the shape, or nothing."""
    match shape:
        case dict():
            if not isinstance(answer, dict) or (missing := [name for name in shape if name not in answer]):
                return f"{place} has no '{missing[0]}'" if isinstance(answer, dict) else f"{place} is no object"
            parts = [(answer[name], own, f"{place}.{name}") for name, own in shape.items()]
        case [own] if isinstance(shape, list):
            if not isinstance(answer, list) or not answer:
                return f"{place} is no list with an element"
            parts = [(part, own, f"{place}[{number}]") for number, part in enumerate(answer)]
        case Some(own):
            if answer == []:
                return ""
            return defect(answer, [own], place)
        case Numbers():
            nested = isinstance(answer, list) and answer
            return defect(answer, [Numbers()], place) if nested else defect(answer, NUMBER, place)
        case File(start):
            is_file = isinstance(answer, str) and answer.startswith(start)
            return "" if is_file else f"{place} is no {'image' if shape == PNG else 'sound'} in base64"
        case _:
            kinds = (int, float) if shape is NUMBER else shape
            is_right = isinstance(answer, kinds) and answer is not None and not isinstance(answer, bool)
            return "" if is_right else f"{place} is no {'number' if shape is NUMBER else 'text'}"
    return next(filter(None, (defect(*part) for part in parts)), "")


def leaves(value: Any) -> list[Any]:
    """Return the numbers and texts of an answer in order, with the names and lengths that hold them."""
    if isinstance(value, dict):
        return [leaf for name in sorted(value) for leaf in (name, *leaves(value[name]))]
    if isinstance(value, list):
        return [len(value), *(leaf for part in value for leaf in leaves(part))]
    return [value]
