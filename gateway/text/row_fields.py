"""Read the fields of a request that have rows: texts, token ids or images.

An image must be the file itself. Only chats may have addresses of images, which gateway/text/image_urls.py fetches.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from gateway.edge.errors import ApiError, shown
from gateway.triton.context import Gateway
from gateway.triton.served import System
from triton_transformers.protocol import IMAGE
from triton_transformers.tensors import Row

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


def texts_only(rows: Sequence[Row], param: str) -> list[str]:
    texts = [row for row in rows if isinstance(row, str)]
    if len(texts) < len(rows):
        raise ApiError(400, "This model takes texts, not token ids.", param, "unsupported_value")
    return texts


def check_count(gateway: Gateway, count: int, param: str) -> None:
    """Raise ApiError if a request has no texts, or too many."""
    limit = gateway.config.limits.texts
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
