"""Read the images of requests: files as data URLs, in the shapes that public clients send.

The gateway fetches no URL: clients could reach other servers through it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from gateway.api_error import ApiError, shown

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


def read_image(url: str, where: str, is_base64: bool = False) -> bytes:
    """Return the file in a data URL, or with `is_base64` also one in base64 alone. Raise ApiError for any other."""
    if WEB.match(url):
        message = (
            f"'{where}' is the address of an image, and the gateway fetches none: send the image itself, as "
            "data:image/png;base64,..."
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
