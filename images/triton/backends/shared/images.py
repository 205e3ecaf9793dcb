"""InputImages as requests bring them, and as a model wants them. Knows nothing of Triton's requests."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from transformers import AutoImageProcessor

from shared.errors import BadRequest, ConfigError
from shared.parameters import int_parameter, usable_cpus

PIXELS, ENCODED = "image", "image_bytes"  # the inputs
FORMATS = ("JPEG", "PNG", "WEBP")
# How each of them begins in base64, which is what a client can put into JSON.
BASE64 = (b"/9j/", b"iVBORw0KGgo", b"UklGR")
MAX_PIXELS = 50_000_000
# Unpacked, converted and resized, a pixel takes up to 18 bytes. Of pictures larger than this, one at a time.
LARGE_PIXELS = 4_000_000


@dataclass(frozen=True)
class InputImage:
    """A row of a request: an encoded file, or [height, width, 3] of 0 to 255. `where` is for messages."""

    where: str
    data: bytes | np.ndarray


def input_images(given: dict[str, np.ndarray]) -> list[InputImage]:
    """A request's, of the two inputs the one that it gives."""
    if len(given) != 1:
        raise BadRequest(f"give one of the inputs '{PIXELS}' and '{ENCODED}', not {'both' if given else 'neither'}")
    ((name, rows),) = given.items()
    if name == PIXELS:
        if rows.ndim != 4 or rows.shape[-1] != 3 or 0 in rows.shape:
            raise BadRequest(f"input '{name}' must have shape [N, height, width, 3], not {list(rows.shape)}")
        if not (rows.min() >= 0 and rows.max() <= 255):  # NaN is neither
            raise BadRequest(f"input '{name}' must hold numbers from 0 to 255")
    else:
        rows = rows.ravel()
    return [InputImage(f"input '{name}': row {row}", data) for row, data in enumerate(rows)]


class ImageProcessor:
    """A model's own image processor (preprocessor_config.json), on all CPUs."""

    def __init__(self, config: dict, folder: Path) -> None:
        self.max_pixels = int_parameter(config, "max_pixels", MAX_PIXELS)
        Image.MAX_IMAGE_PIXELS = None  # max_pixels is the limit here
        try:
            self.processor = AutoImageProcessor.from_pretrained(folder, use_fast=False, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"{folder} has no image processor that can be used (`make models`): {error}") from None
        # Decoding and resizing let other threads run. A picture is small when its thread is done with it, so that
        # never more large ones than threads are in memory.
        self.workers = ThreadPoolExecutor(usable_cpus())
        self.large = threading.Lock()

    def __call__(self, batch: list[list[InputImage]]) -> list[np.ndarray | Exception]:
        """All requests' pictures at once: pixel_values of each request, or what is wrong with it."""
        futures = [[self.workers.submit(self.pixel_values, picture) for picture in request] for request in batch]
        wait(itertools.chain(*futures))  # all of them: what they read is Triton's, and gone after this
        return [_together(request) for request in futures]

    def pixel_values(self, picture: InputImage) -> np.ndarray:
        width, height = self.size(picture)
        self.check_size(picture, width, height)
        with self.large if width * height > LARGE_PIXELS else contextlib.nullcontext():
            array = self.decode(picture)
            done = self.processor([array], return_tensors="np", input_data_format="channels_last")
        return np.asarray(done["pixel_values"][0], np.float32)

    def size(self, picture: InputImage) -> tuple[int, int]:
        """Of a file, as its header says, before any pixel is decoded."""
        if isinstance(picture.data, bytes):
            with opened(picture) as image:
                return image.size
        height, width, _ = picture.data.shape
        return width, height

    def decode(self, picture: InputImage) -> np.ndarray:
        """As transformers loads a picture: upright, RGB, what is transparent made opaque."""
        if not isinstance(picture.data, bytes):
            return np.rint(picture.data).astype(np.uint8)
        with opened(picture) as image:
            return np.asarray(_eight_bits(ImageOps.exif_transpose(image)).convert("RGB"))

    def check_size(self, picture: InputImage, width: int, height: int) -> None:
        """Of the picture, and of what a processor that goes by the shorter edge would blow a long strip up to."""
        size = getattr(self.processor, "size", None) or {}
        edge = size.get("shortest_edge", 0) if hasattr(size, "get") else 0
        enlarged = edge * edge * max(width, height) // max(1, min(width, height))
        if max(width * height, enlarged) > self.max_pixels:
            raise BadRequest(
                f"{picture.where} has {width} x {height} pixels, too many for max_pixels={self.max_pixels}"
            )


@contextlib.contextmanager
def opened(picture: InputImage) -> Iterator[Image.Image]:
    data = picture.data
    try:
        if data.startswith(BASE64):
            data = base64.b64decode(data)
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except MemoryError:
        raise
    except Exception:  # a broken file can raise anything, and what it says may quote the file
        raise BadRequest(f"{picture.where} is not a whole JPEG, PNG or WebP file") from None


def _eight_bits(image: Image.Image) -> Image.Image:
    """Pillow would cut 16-bit grey off at 255: a white picture."""
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _together(futures: list[Future]) -> np.ndarray | Exception:
    try:
        return np.stack([future.result() for future in futures])
    except Exception as error:
        return error
