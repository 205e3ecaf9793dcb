"""Make example rows for the pipeline of any task: to assemble it, to check its answers, and to load it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from triton_transformers.tasks.media import jpeg, photograph, png, video, wav
from triton_transformers.tasks.table import TASKS
from triton_transformers.tasks.task import Task

# The fact of a record with the parameters that each request needs: the languages of a translation.
NEEDS = "needed_parameters"
# The parameter of config.pbtxt with the properties of the model that its examples depend on, as JSON.
TRAITS = "examples"
# The length of a question, so that a model of 128 tokens has room for its context. No tokenizer makes more tokens than
# bytes.
QUESTION_BYTES = 48
# The kinds of media -> the noun for a row, and the unit of its amount.
MEDIA = {
    "image": ("images", "images"),
    "images": ("pairs of images", "images"),
    "audio": ("sounds", "seconds of sound"),
    "video": ("videos", "videos"),
}
PEOPLE = {
    "Ada": 36,
    "Grace": 85,
    "Edsger": 72,
    "Barbara": 86,
    "Alan": 41,
    "Katherine": 101,
    "Donald": 88,
    "Frances": 98,
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of examples: images in pixels, width first, and sounds in seconds."""

    images: Sequence[tuple[int, int]]
    seconds: Sequence[float]
    are_photographs: bool = False  # Pillow makes these


SMALL = Sizes(((64, 48), (40, 90), (64, 64), (200, 120)), (0.9, 1.7, 1.3, 2.4))


class Example(NamedTuple):
    """The fields of a row, and how many of the task's units it has: images, seconds of sound, pages."""

    fields: dict[str, bytes]
    amount: float


@dataclass(frozen=True)
class Traits:
    """A task, and what else its examples depend on: some properties of the model."""

    task: str
    frames: int = 0  # of a video that the model reads
    mask_token: str = ""
    chats: bool = False  # it has a chat template
    parameters: dict[str, Any] = field(default_factory=dict)  # that each request needs, beside the task's own

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Traits:
        """Return the traits of a pipeline from its configuration in Triton's JSON."""
        texts = {name: value["string_value"] for name, value in config["parameters"].items()}
        return cls(texts["task"], **json.loads(texts.get(TRAITS, "{}")))

    def as_parameter(self) -> str:
        """Return the traits that are not the defaults, as from_config() reads them, or nothing."""
        others = {name: value for name, value in asdict(self).items() if value and name != "task"}
        return json.dumps(others) if others else ""

    @property
    def row(self) -> Task:
        return TASKS[self.task]

    @property
    def required(self) -> dict[str, Any]:
        """Return the parameters without which the pipeline does not answer."""
        return {**self.row.required, **self.parameters}

    @property
    def quick(self) -> dict[str, Any]:
        """Return parameters for few examples."""
        return {**self.required, **self.row.quick}

    def long(self, new_tokens: int) -> dict[str, Any]:
        """Return parameters for a load. Only a model that continues texts needs a limit to end."""
        if self.row.ends_by is None:
            return self.required
        limit = {"max_new_tokens": new_tokens}
        return self.required | ({self.row.ends_by: limit} if self.row.ends_by else limit)

    @property
    def media(self) -> str:
        """Return the kind of file in each row, or nothing."""
        return next((kind for kind in self.row.fields.values() if kind in MEDIA and self.row.files), "")

    @property
    def noun(self) -> str:
        """Return what people call a row."""
        return self.row.noun or (MEDIA[self.media][0] if self.media else "texts")

    @property
    def unit(self) -> str:
        """Return what the amounts of the rows count, or nothing."""
        return "pages" if self.noun == "pages" else MEDIA[self.media][1] if self.media else ""

    def rows(self, count: int, texts: Sequence[str], sizes: Sizes = SMALL) -> list[Example]:
        """Return rows of different sizes, each with the task's own fields."""
        if self.row.is_ascii:
            texts = [text for text in texts if text.isascii()] or texts
        return [self.example(number, texts, sizes) for number in range(count)]

    def example(self, number: int, texts: Sequence[str], sizes: Sizes) -> Example:
        seconds = sizes.seconds[number % len(sizes.seconds)]
        values = {name: self.value(name, kind, number, texts, sizes) for name, kind in self.row.fields.items()}
        fields = {
            name: value if isinstance(value, bytes) else value.encode() for name, value in values.items() if value
        }
        return Example(fields, seconds if self.media == "audio" else self.row.files or 1)

    def value(self, name: str, kind: str, number: int, texts: Sequence[str], sizes: Sizes) -> bytes | str:
        """Return one field, or nothing if the row does without it."""
        text, short = texts[number % len(texts)], questions(texts)
        match kind:
            case "image":
                return image(number, sizes)
            case "audio":
                return wav(number, sizes.seconds[number % len(sizes.seconds)]) if self.media else ""
            case "video":
                width, height = sizes.images[number % len(sizes.images)]
                return video(number, width // 4 * 2, height // 4 * 2, self.frames)
            case "images" if self.chats or not self.media:
                return ""
            case "images":
                return json.dumps([encoded(image(number + n, sizes)) for n in range(self.row.files)])
            case "chat" if self.chats and (self.media or number % 2):
                parts = [{"type": "image", "image": encoded(image(number, sizes))}] if self.media else []
                parts.append({"type": "text", "text": text})
                # The templates of processors may know contents of parts only, and those of tokenizers only texts.
                has_parts = "images" in self.row.fields
                return json.dumps([{"role": "user", "content": parts if has_parts else text}])
            case "json":
                return json.dumps(structure(name, text, number))
        if name in ("question", "query"):
            return short[number % len(short)]
        return f"{text} {self.mask_token}".strip()


def runs_rows_alone(config: Mapping[str, Any]) -> bool:
    """Return whether a pipeline runs the rows of a batch one after the other."""
    size: str = config["parameters"].get("batch_size", {}).get("string_value", "1")
    return size == "1"


def structure(name: str, text: str, number: int) -> Any:
    """Return a field that is JSON, or nothing for files that a row does without."""
    people = [*PEOPLE][: 1 + number % len(PEOPLE)]
    values = {
        "table": {"name": people, "age": [str(PEOPLE[name]) for name in people]},
        "word_boxes": [[word, [10 * n % 900, 20, 10 * n % 900 + 40, 40]] for n, word in enumerate(text.split())],
        "state": text,
        "questions": {"refund": {"type": "noul", "instructions": "Is a refund requested?"}},
    }
    return values[name]


def questions(texts: Sequence[str]) -> list[str]:
    """Return the short questions among the texts, or else the beginning of each text."""
    short = [text for text in texts if text.endswith("?") and len(text.encode()) <= QUESTION_BYTES]
    return short or [text.encode()[:QUESTION_BYTES].decode(errors="ignore") for text in texts]


def image(number: int, sizes: Sizes) -> bytes:
    width, height = sizes.images[number % len(sizes.images)]
    return jpeg(photograph(number, width, height)) if sizes.are_photographs else png(number, width, height)


def encoded(file: bytes) -> str:
    return base64.b64encode(file).decode()
