"""Reads the rows of a request for a pipeline: its own names, JSON, the files in it, and the call's parameters.

Pipelines take a text in place of an image or of sound for a path or an address, and read that. So only what a worker
decoded gets to a field for media, and only known parameters get to the call.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from serving.triton.parameters import parameter
from serving.triton.types import BadRequest, ModelConfig
from triton_transformers.tasks.table import TASKS
from triton_transformers.tasks.task import SAMPLING

INPUTS, PARAMETERS = "inputs", "parameters"
MEDIA = ("image", "audio", "video")
DATA_URL = re.compile(rb"data:[\w.+-]+/[\w.+-]+;base64,")
# The start of a file in base64: no media file begins with so many letters and digits.
ENCODED = re.compile(rb"[A-Za-z0-9+/]{24}")
WHOLE, NUMBER, FLAG, TEXT, OBJECT = "a whole number", "a number", "true or false", "a text", "an object"
NUMBERS, TEXTS, CHOICE = "a number or a list of numbers", "a text or a list of texts", "true, false or a text"
VECTOR = "a list of numbers"
# The forms of values -> their types, and the forms of the entries of lists.
TYPES: dict[str, Any] = {
    WHOLE: int, NUMBER: int | float, FLAG: bool, TEXT: str, OBJECT: dict, NUMBERS: int | float, TEXTS: str,
    CHOICE: bool | str, VECTOR: int | float,
}  # fmt: skip
ENTRIES = {NUMBERS: NUMBER, TEXTS: TEXT, VECTOR: VECTOR}


class Parameter(NamedTuple):
    """The form of a parameter, and the bounds of its numbers: those beyond them would multiply work."""

    form: str
    minimum: float
    maximum: float


# The parameters of a call, and of the objects in it, with the pipelines' own names.
BOUNDS = {
    name: Parameter(form, minimum, maximum)
    for form, minimum, maximum, names in (
        (WHOLE, 0, 4096, "max_length min_length min_new_tokens top_k"),
        (WHOLE, 1, 4096, "max_new_tokens num_frames"),
        (WHOLE, 1, 16, "frame_sampling_rate num_beam_groups num_beams num_return_sequences"),
        (WHOLE, 1, 128, "points_per_crop"),
        (WHOLE, 16, 128, "points_per_batch"),
        (WHOLE, 0, 2, "crops_n_layers"),
        (WHOLE, 1, 1e6, "crop_n_points_downscale_factor max_answer_len max_question_len max_seq_len"),
        (WHOLE, 0, 1e6, "doc_stride no_repeat_ngram_size seed speaker_id stride"),
        (NUMBER, 0, 1e6, "chunk_length_s"),
        (NUMBER, -1e6, 1e6, "crop_overlap_ratio crops_nms_thresh guidance_scale length_penalty mask_threshold"),
        (NUMBER, -1e6, 1e6, "max_hole_area max_sprinkle_area min_p overlap_mask_area_threshold pred_iou_thresh"),
        (NUMBER, -1e6, 1e6, "repetition_penalty speaking_rate stability_score_offset stability_score_thresh"),
        (NUMBER, -1e6, 1e6, "temperature threshold top_p"),
        (NUMBERS, -1e6, 1e6, "stride_length_s"),
        (VECTOR, -1e6, 1e6, "speaker_embeddings"),
        (FLAG, 0, 1, "add_special_tokens clean_up_tokenization_spaces continue_final_message do_sample"),
        (FLAG, 0, 1, "handle_impossible_answer multi_label output_bboxes_mask output_rle_mask pool"),
        (FLAG, 0, 1, "return_duration return_full_text return_language sequential"),
        (CHOICE, 0, 1, "early_stopping padding return_timestamps truncation"),
        (TEXT, 0, 0, "aggregation_strategy function_to_apply generation_mode hypothesis_template language prefix"),
        (TEXT, 0, 0, "prompt src_lang subtask task tgt_lang"),
        (TEXTS, 0, 0, "candidate_labels ignore_labels stop_sequence targets"),
        (OBJECT, 0, 0, "forward_params generate_kwargs"),
    )
    for name in names.split()
}
IN_OBJECTS = (
    f"{SAMPLING} generation_mode language return_timestamps speaker_embeddings speaker_id speaking_rate task tgt_lang"
)
MAX_ENTRIES = 1000  # of a list
MAX_FILES = 16  # of a row
MAX_POINTS = 5 * 32**2  # of a mask generation: 32 x 32 in the image and in each crop of one layer


class Row(NamedTuple):
    """One row: what the pipeline takes, and the parameters of its call as JSON, so that equal ones are found."""

    value: Any
    parameters: str

    def decoded(self) -> Row:
        """Return the row once its files are decoded, or raise BadRequest."""
        return self._replace(value=resolved(self.value))


class Inputs:
    """The fields of a task, each with its kind: text, json, chat, image, images, audio or video."""

    def __init__(self, config: ModelConfig, decode: Callable[[str, bytes, str, str], Future[Any]]) -> None:
        pairs = (field.split("=") for field in parameter(config, "fields").split(","))
        self.fields: dict[str, str] = {name: kind for name, kind in pairs}
        self.needs = [name for name in parameter(config, "required_parameters").split(",") if name]
        # Parameters of clients that this task's pipeline takes beside its other fields.
        self.moved = [name for name in parameter(config, "field_parameters").split(",") if name]
        task = TASKS.get(parameter(config, "task"))
        self.known = {*(task.parameters.split() if task else ()), "seed"}
        self.decode = decode

    def rows(self, tensors: Mapping[str, list[bytes]]) -> list[Row]:
        """Return the rows of a request, from its tensors by name."""
        return [row.decoded() for row in self.begin(tensors)]

    def begin(self, tensors: Mapping[str, list[bytes]]) -> list[Row]:
        """Return the rows before the files in them are decoded, which happens on other threads."""
        own = {name: tensors[name] for name in self.fields if name in tensors}
        if bool(own) == (INPUTS in tensors):
            raise BadRequest(f"send either the input '{INPUTS}', or those of {', '.join(self.fields)}")
        counts = {len(values) for values in tensors.values()}
        if len(counts) != 1:
            raise BadRequest("the inputs differ in their number of rows")
        rows = []
        for number in range(counts.pop()):
            where = f"row {number}"
            fields = {name: self.field(self.fields[name], name, own[name][number], where) for name in own}
            fields = fields or self.fields_of(tensors[INPUTS][number], where)
            texts = tensors.get(PARAMETERS)
            parameters = self.parameters(texts[number] if texts else b"", where)
            fields |= {name: parameters.pop(name) for name in self.moved if name in parameters}
            value = fields if len(self.fields) + len(self.moved) > 1 else next(iter(fields.values()))
            rows.append(Row(value, json.dumps(parameters, sort_keys=True)))
        return rows

    def fields_of(self, data: bytes, where: str) -> dict[str, Any]:
        """Return the fields of a row of `inputs`: the only one as it is, or a JSON object of several."""
        (first, kind), *others = self.fields.items()
        if not others:
            return {first: self.field(kind, INPUTS, data, where)}
        if kind == "image" and not data.lstrip().startswith(b"{"):
            return {first: self.field(kind, INPUTS, data, where)}
        if kind in ("text", "chat") and not data.lstrip().startswith((b"{", b"[{")):
            return {first: self.field("text", INPUTS, data, where)}
        content = parsed(data, f"{where} of '{INPUTS}'")
        if kind == "chat" and isinstance(content, list):
            return {first: self.chat(content, where)}
        if not isinstance(content, dict) or not content or not content.keys() <= self.fields.keys():
            raise BadRequest(f"{where} of '{INPUTS}' must be a JSON object with some of {', '.join(self.fields)}")
        return {
            name: self.field(self.fields[name], name, dumped(value, self.fields[name]), where)
            for name in self.fields
            if (value := content.get(name)) is not None
        }

    def field(self, kind: str, name: str, data: bytes, where: str) -> Any:
        """Return one field; for media, what becomes it."""
        place = f"{where} of '{name}'"
        if kind in MEDIA:
            return self.decode(kind, file_of(data), place, name)
        if kind == "text":
            try:
                return data.decode()
            except UnicodeDecodeError:
                raise BadRequest(f"{place} is not valid UTF-8", name) from None
        if kind == "chat":
            if not data.lstrip().startswith(b"["):
                return self.field("text", name, data, where)
            return self.chat(parsed(data, place), where)
        content = parsed(data, place)
        if kind == "images":
            many = isinstance(content, list | dict) and content
            if not many:
                raise BadRequest(f"{place} must be a JSON list or object of images in base64", name)
            check_count(len(content), place, MAX_FILES, "files")
            if isinstance(content, dict):
                return {key: self.media("image", value, place, name) for key, value in content.items()}
            return [self.media("image", value, place, name) for value in content]
        return content

    def media(self, kind: str, value: Any, place: str, name: str) -> Any:
        if isinstance(value, dict):
            value = value.get("data_base64")
        if not isinstance(value, str):
            raise BadRequest(f"{place}: each {kind} must be a text in base64; addresses and paths are not read", name)
        return self.decode(kind, file_of(value.encode()), place, name)

    def chat(self, messages: Any, where: str) -> list[dict[str, Any]]:
        """Return a chat with decoded files, and nothing else that a template or a processor could load."""
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        files = [part for part in parts if isinstance(part, dict) and part.get("type") in MEDIA]
        check_count(len(files), where, MAX_FILES, "files")
        chat = []
        for message in messages:
            if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
                raise BadRequest(f"{where}: each message of a chat must be an object with a role")
            content = message.get("content")
            if isinstance(content, list):
                content = [self.part(part, where) for part in content]
            elif not isinstance(content, str):
                raise BadRequest(f"{where}: the content of a message must be a text or a list of parts")
            chat.append({"role": role, "content": content})
        return chat

    def part(self, part: Any, where: str) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return {"type": kind, "text": part["text"]}
        if kind in ("image", "audio"):
            return {"type": kind, kind: self.media(kind, part.get(kind), where, kind)}
        raise BadRequest(f"{where}: a part of a message must have the type text, image or audio, and its content")

    def parameters(self, data: bytes, where: str) -> dict[str, Any]:
        content = parsed(data, f"{where} of '{PARAMETERS}'") if data.strip() else {}
        if not isinstance(content, dict):
            raise BadRequest(f"{where} of '{PARAMETERS}' must be a JSON object")
        check_parameters(content, where, self.known)
        check_chunks(content, where)
        check_points(content, where)
        if missing := [name for name in self.needs if name not in content]:
            raise BadRequest(f"{where}: the parameter '{missing[0]}' is missing: send it in the input '{PARAMETERS}'")
        return content


def check_parameters(given: dict[str, Any], where: str, known: Collection[str]) -> None:
    """Raise BadRequest for a name that is unknown, and for a value of another form or beyond its bounds."""
    for name, value in given.items():
        if name not in known:
            names = ", ".join(sorted(known))
            raise BadRequest(f"{where}: the parameter '{name[:50]}' is unknown. The task takes {names}")
        form, minimum, maximum = BOUNDS[name]
        place = f"{where}: {name}"
        if value is not None and not has_form(value, form):
            raise BadRequest(f"{place} must be {form}")
        if isinstance(value, dict):
            check_parameters(value, place, IN_OBJECTS.split())
        # Pipelines split the labels in a text.
        entries = value if isinstance(value, list) else value.split(",") if isinstance(value, str) else [value]
        check_count(len(entries), place, MAX_ENTRIES, "entries")
        for entry in entries:
            if isinstance(entry, int | float) and not minimum <= entry <= maximum:
                raise BadRequest(f"{place} must be at least {minimum:.0f} and at most {maximum:.0f}")


def has_form(value: Any, form: str) -> bool:
    if isinstance(value, list):
        return form in ENTRIES and all(has_form(entry, ENTRIES[form]) for entry in value)
    return isinstance(value, TYPES[form]) and (not isinstance(value, bool) or form in (FLAG, CHOICE))


def check_count(count: int, where: str, limit: int, noun: str) -> None:
    if count > limit:
        raise BadRequest(f"{where} has {count} {noun}; at most {limit} are allowed")


def check_chunks(parameters: dict[str, Any], where: str) -> None:
    """Raise BadRequest for chunks of a sound that begin too close together: each is a run of the network."""
    chunk = parameters.get("chunk_length_s") or 0
    stride = parameters.get("stride_length_s") or 0
    both = stride if isinstance(stride, list) else [stride]
    if chunk and (chunk < 1 or max(both, default=0) > chunk / 3):
        raise BadRequest(f"{where}: chunk_length_s must be at least 1, and stride_length_s at most a third of it")


def check_points(parameters: dict[str, Any], where: str) -> None:
    """Raise BadRequest for too many points of a mask generation. Layer n has 4**n crops, each with all points."""
    points, layers = parameters.get("points_per_crop") or 32, parameters.get("crops_n_layers") or 0
    total = points**2 * sum(4**layer for layer in range(layers + 1))
    if total > MAX_POINTS:
        raise BadRequest(
            f"{where}: points_per_crop and crops_n_layers ask for {total} points; at most {MAX_POINTS} are allowed"
        )


def resolved(value: Any) -> Any:
    """Return the value with what was decoded in place of what decodes it."""
    if isinstance(value, Future):
        return value.result()
    if isinstance(value, dict):
        return {key: resolved(part) for key, part in value.items()}
    return [resolved(part) for part in value] if isinstance(value, list) else value


def file_of(data: bytes) -> bytes:
    """Return a file that may be sent in base64, or as a data URL, which JSON needs."""
    text = data[match.end() :] if (match := DATA_URL.match(data)) else data
    if ENCODED.match(text):
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error:
            pass
    return data


def dumped(value: Any, kind: str) -> bytes:
    """Return a field of a JSON object as if it had come alone: as JSON, or as a text or a file in base64."""
    is_text = isinstance(value, str) and kind not in ("json", "images")
    return value.encode(errors="surrogatepass") if is_text else json.dumps(value).encode()


def parsed(data: bytes, place: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise BadRequest(f"{place} is not valid JSON") from None
