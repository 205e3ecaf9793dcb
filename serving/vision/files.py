"""Decodes image files as cameras mean them to be seen. It imports nothing that takes long."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from serving.triton.types import BadRequest
from triton_transformers.errors import INVALID_VALUE

FORMATS = ("JPEG", "PNG", "WEBP")
# The first characters of each format in base64, which clients need to send a file in JSON.
BASE64 = (b"/9j/", b"iVBORw0KGgo", b"UklGR")


class Place(NamedTuple):
    """The row of an input that has an image."""

    name: str
    row: int

    def error(self, problem: str) -> BadRequest:
        message = f"input '{self.name}': row {self.row} {problem}"
        return BadRequest(message, self.name, code=INVALID_VALUE, index=self.row)


@contextlib.contextmanager
def opened(place: Place | None, data: bytes) -> Iterator[Image.Image]:
    try:
        if data.startswith(BASE64):
            data = base64.b64decode(data)
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except MemoryError:
        raise
    except Exception:  # a broken file can raise anything, and the message can quote the file
        problem = "is not a whole JPEG, PNG or WebP file"
        raise (place.error(problem) if place else BadRequest(f"it {problem}")) from None


def upright(image: Image.Image) -> Image.Image:
    """Return an image as cameras mean it to be seen, in colours."""
    return _eight_bits(ImageOps.exif_transpose(image)).convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit grey to 8 bits. Pillow would clip it at 255, which makes the image white."""
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
