"""The rows of a request: read as texts, token ids or images, split into as many as a model takes, and joined again.

An image must be the file itself. Only chats may have addresses of images, which gateway/text/image_urls.py fetches.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from gateway.edge.errors import ApiError, shown
from gateway.triton.context import PARTS_AT_ONCE, Gateway
from gateway.triton.inference import Outputs
from gateway.triton.served import System
from triton_transformers.protocol import TOKEN_COUNT, TOKENIZED
from triton_transformers.tensors import Row, Tensor
from triton_transformers.triton_messages import is_too_large_batch

Result = TypeVar("Result")
Columns = Mapping[str, Sequence[Row]]  # input -> its rows
IMAGE = "image_bytes"  # the input of systems that take images
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
# One text, the token ids of one, or a list of them, as OpenAI's API has it.
Input = str | list[str | TokenId | list[TokenId]]
# An error names so many empty texts.
NAMED_TEXTS = 10
# The formats that the models read -> how their files begin.
FORMATS: Mapping[str, bytes] = {
    "image/jpeg": b"\xff\xd8\xff",
    "image/png": b"\x89PNG\r\n\x1a\n",
    "image/webp": b"RIFF",
}
NAMES = "JPEG, PNG or WebP"
DATA_URL = re.compile(r"data:(image/[\w.+-]+)(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)
WEB = re.compile(r"(https?|ftp|file|s3|gs)://", re.IGNORECASE)


@dataclass(frozen=True)
class Answers:
    """The outputs of all rows of a request, in the parts in which Triton answered them."""

    parts: Sequence[Outputs]

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return an output of numbers, of the same shape for each row."""
        arrays = [part[name].array() for part in self.parts]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def arrays(self, name: str) -> list[npt.NDArray[Any]]:
        """Return an output of numbers for each row. The rows of a part are padded to the longest of them."""
        return [row for part in self.parts for row in part[name].array()]

    def texts(self, name: str) -> list[str]:
        return [text for part in self.parts for text in part[name].texts()]

    @property
    def token_counts(self) -> list[int] | None:
        """Return the number of tokens of each row, or None if the model does not report it."""
        return self.array(TOKEN_COUNT).ravel().tolist() if TOKEN_COUNT in self.parts[0] else None

    @cached_property
    def tokens(self) -> int | None:
        """Return the number of tokens of all rows, or None if the model does not report it."""
        counts = self.token_counts
        return None if counts is None else sum(counts)

    def usage(self, **others: int) -> dict[str, int] | None:
        return None if self.tokens is None else {"prompt_tokens": self.tokens, "total_tokens": self.tokens, **others}


async def infer_rows(gateway: Gateway, system: System, columns: Columns, outputs: Sequence[str]) -> Answers:
    """Return the outputs of the rows. Count their tokens, if the system reports the number."""
    if TOKEN_COUNT in system.outputs and [*outputs] != [TOKENIZED]:
        outputs = [*outputs, TOKEN_COUNT]
    try:
        parts = await _infer(gateway, system, columns, outputs)
    except ApiError as error:
        if error.status != 400 or not is_too_large_batch(error.message):
            raise
        # The model was loaded again with a smaller max_batch_size.
        gateway.served.forget(system.name)
        parts = await _infer(gateway, await gateway.served.find(system.name), columns, outputs)
    return counted(gateway, parts)


def counted(gateway: Gateway, parts: Sequence[Outputs]) -> Answers:
    """Return the answers, and count their tokens."""
    answers = Answers(parts)
    gateway.counters.tokens(answers.tokens or 0)
    return answers


async def _infer(gateway: Gateway, system: System, columns: Columns, outputs: Sequence[str]) -> list[Outputs]:
    count = len(next(iter(columns.values())))
    if count <= system.max_batch:
        return [await gateway.infer(system, _tensors(columns, 0, count), outputs)]
    # A request asks for no more turns than there are, so that long requests take them in rotation.
    own_turns, turns = asyncio.Semaphore(PARTS_AT_ONCE), gateway.turns[system.name]

    async def part(start: int) -> Outputs:
        async with own_turns, turns:
            return await gateway.infer(system, _tensors(columns, start, start + system.max_batch), outputs)

    return await together(part(start) for start in range(0, count, system.max_batch))


def _tensors(columns: Columns, start: int, end: int) -> list[Tensor]:
    rows = {name: texts[start:end] for name, texts in columns.items()}
    return [Tensor.from_texts(name, texts, [len(texts), 1]) for name, texts in rows.items()]


async def together(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results of all. If one fails, cancel the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


class ImageUrl(msgspec.Struct):
    """As in OpenAI's chats; `detail` and other fields change nothing here."""

    url: str


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A text or an image: a part of OpenAI's chats and responses, and of Cohere's inputs, or an input of Jina's."""

    type: Literal["text", "input_text", "image_url", "input_image"] | None = None
    text: str | None = None
    image_url: str | ImageUrl | None = None
    image: str | None = None  # a data URL, or the file in base64

    def row(self, where: str) -> str | bytes:
        """Return the text, or the image's file. `where` is the part's place in the request, for messages."""
        image = self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url
        given = [value for value in (self.text, image, self.image) if value is not None]
        if len(given) != 1:
            raise ApiError(400, f"'{where}' must have one text or one image.", where, "invalid_value")
        return given[0] if self.text is not None else read_image(given[0], where, is_base64=self.image is not None)


def is_image(text: str) -> bool:
    """Return whether a text is an image as a data URL."""
    return DATA_URL.match(text, 0, 100) is not None


def read_image(url: str, where: str, is_base64: bool = False, remedy: str = "") -> bytes:
    """Return the file in a data URL, or with `is_base64` also one in base64 alone. Raise ApiError for any other.

    `remedy` is another way out of the error for an address.
    """
    if WEB.match(url):
        message = (
            f"'{where}' is the address of an image, and the gateway fetches none: send the image itself, as "
            f"data:image/png;base64,...{remedy}"
        )
        raise ApiError(400, message, where, "unsupported_value")
    match = DATA_URL.match(url)
    if match is None and (not is_base64 or url.startswith("data:")):
        message = f"'{where}' must be an image as a data URL: data:image/png;base64,..."
        raise ApiError(400, message, where, "invalid_value")
    kind = match[1].lower().replace("image/jpg", "image/jpeg") if match else ""
    if kind not in ("", *FORMATS):
        raise ApiError(400, f"'{where}' is {shown(kind)}: send {NAMES}.", where, "unsupported_value")
    try:
        file = base64.b64decode(url[match.end() if match else 0 :], validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(400, f"'{where}' is not valid base64.", where, "invalid_value") from None
    if not file.startswith(tuple(FORMATS.values())):
        raise ApiError(400, f"'{where}' is no {NAMES} file.", where, "unsupported_value")
    return file


def check_count(gateway: Gateway, count: int, param: str) -> None:
    """Raise ApiError if a request has no texts, or too many."""
    limit = gateway.limits.texts
    if not count:
        raise ApiError(400, f"'{param}' must not be empty.", param)
    if count > limit:
        message = f"'{param}' has {count} elements; at most {limit} are possible (GATEWAY_TEXTS)."
        raise ApiError(400, message, param, "too_many_inputs")


def as_rows(value: str | Sequence[Row | int | Part], param: str) -> list[Row]:
    """Return the rows that a field has. Raise ApiError if it has token ids beside other elements."""
    if isinstance(value, str):
        return [value]
    elements = [part.row(f"{param}[{i}]") if isinstance(part, Part) else part for i, part in enumerate(value)]
    ids = [element for element in elements if isinstance(element, int)]
    if ids and len(ids) == len(elements):
        return [ids]
    if ids:
        raise ApiError(400, f"'{param}' has token ids beside other elements: send a list of lists.", param)
    return [element for element in elements if not isinstance(element, int)]


def read_rows(
    gateway: Gateway, system: System, value: str | Sequence[Row | int | Part], param: str, only_images: bool = False
) -> list[Row]:
    """Return the rows that a field has. Raise ApiError if the system cannot answer them."""
    is_list = not isinstance(value, str)
    rows = as_rows(value, param)
    check_rows(gateway, rows, param, is_list)
    if IMAGE in system.inputs:
        rows = [
            read_image(row, f"{param}[{index}]" if is_list else param)
            if isinstance(row, str) and (only_images or is_image(row))
            else row
            for index, row in enumerate(rows)
        ]
    elif only_images or any(isinstance(row, bytes) for row in rows):
        raise ApiError(400, f"The model '{system.name}' takes texts, not images.", param, "unsupported_value")
    check_ids(system, rows, param)
    return rows


def check_ids(system: System, rows: Sequence[Row], param: str) -> None:
    """Raise ApiError for token ids if the system takes only texts."""
    if not system.tokenizing_model and not all(isinstance(row, str | bytes) for row in rows):
        message = f"The model '{system.name}' takes texts, not token ids, until `make models` assembles it again."
        raise ApiError(400, message, param, "unsupported_value")


def check_rows(gateway: Gateway, rows: Sequence[Row], param: str, is_list: bool = True) -> None:
    """Raise ApiError if a request has no rows, too many, or empty ones."""
    check_count(gateway, len(rows), param)
    if all(rows):
        return
    empty = [f"{param}[{index}]" if is_list else param for index, row in enumerate(rows) if not row]
    if len(rows) == 1:
        raise ApiError(400, f"'{empty[0]}' must not be an empty string.", empty[0])
    names = ", ".join(f"'{name}'" for name in empty[:NAMED_TEXTS])
    others = f" and {len(empty) - NAMED_TEXTS} others" if len(empty) > NAMED_TEXTS else ""
    verb = "are empty strings" if len(empty) > 1 else "is an empty string"
    message = f"{names}{others} {verb}, so none of the {len(rows)} texts was answered. Leave empty strings out."
    raise ApiError(400, message, empty[0])
