"""Decodes the images of requests and prepares them for a model. It knows nothing of Triton's requests."""

from __future__ import annotations

import contextlib
import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from serving.engines.lean_transformers import transformers
from serving.triton.parameters import int_parameter, usable_cpus
from serving.triton.types import Array, BadRequest, ConfigError, ModelConfig, Tensors
from serving.vision.files import Place, opened, upright

PIXELS, ENCODED = "image", "image_bytes"  # the inputs
MAX_PIXELS = 50_000_000
# Decoded, converted and resized, a pixel takes up to 18 bytes. Larger images than this are processed one at a time.
LARGE_PIXELS = 4_000_000


@dataclass(frozen=True)
class InputImage:
    """One image of a request: a file, or an array [height, width, 3] of 0 to 255."""

    place: Place
    data: bytes | Array


def input_images(tensors: Tensors) -> list[InputImage]:
    """Return a request's images, from the one of the two inputs that it has."""
    if len(tensors) != 1:
        both_or_neither = "both" if tensors else "neither"
        raise BadRequest(f"send one of the inputs '{PIXELS}' and '{ENCODED}', not {both_or_neither}")
    ((name, rows),) = tensors.items()
    if name == PIXELS:
        if rows.ndim != 4 or rows.shape[-1] != 3 or 0 in rows.shape:
            raise BadRequest(f"input '{name}' must have shape [N, height, width, 3], not {list(rows.shape)}", name)
        if not (rows.min() >= 0 and rows.max() <= 255):  # false for NaN
            raise BadRequest(f"input '{name}' must hold numbers from 0 to 255", name)
    else:
        rows = rows.ravel()
    return [InputImage(Place(name, row), data) for row, data in enumerate(rows)]


class ImageProcessor:
    """A model's own image processor (preprocessor_config.json), on all CPUs."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        self.max_pixels = int_parameter(config, "max_pixels", MAX_PIXELS)
        Image.MAX_IMAGE_PIXELS = None  # we check max_pixels instead
        try:
            self.processor: Any = transformers.AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True
            )
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"{folder} has no image processor that loads: put the model's preprocessor_config.json there, or run "
                f"`make models` ({error})"
            ) from None
        # Decoding and resizing let other threads run. Each thread leaves a small image, so at most one large image per
        # thread is in memory.
        self.workers = ThreadPoolExecutor(usable_cpus())
        self.large = threading.Lock()

    def __call__(self, batch: list[list[InputImage]]) -> list[Array | Exception]:
        """Return the pixel_values of each request, or its error, for the images of all requests at once."""
        futures = [[self.workers.submit(self.pixel_values, image) for image in request] for request in batch]
        wait(itertools.chain(*futures))  # also after an error: they read Triton's memory, which ends with this call
        return [_stacked(request) for request in futures]

    def pixel_values(self, image: InputImage) -> Array:
        width, height = self.size(image)
        self.check_size(image, width, height)
        with self.large if width * height > LARGE_PIXELS else contextlib.nullcontext():
            array = self.decode(image)
            processed = self.processor([array], return_tensors="np", input_data_format="channels_last")
        return np.asarray(processed["pixel_values"][0], np.float32)

    def size(self, image: InputImage) -> tuple[int, int]:
        """Return (width, height), of a file by its header, before any pixel is decoded."""
        if isinstance(image.data, bytes):
            with opened(image.place, image.data) as file:
                return file.size
        height, width, _ = image.data.shape
        return width, height

    def decode(self, image: InputImage) -> Array:
        """Decode as transformers does: upright, RGB, transparent parts made opaque."""
        if not isinstance(image.data, bytes):
            return np.rint(image.data).astype(np.uint8)
        with opened(image.place, image.data) as file:
            return np.asarray(upright(file))

    def check_size(self, image: InputImage, width: int, height: int) -> None:
        """Check the image's pixels, and those it has after a processor enlarges its shorter edge."""
        size = getattr(self.processor, "size", None) or {}
        edge = size.get("shortest_edge", 0) if hasattr(size, "get") else 0
        enlarged = edge * edge * max(width, height) // max(1, min(width, height))
        if max(width * height, enlarged) > self.max_pixels:
            raise image.place.error(f"has {width} x {height} pixels, too many for max_pixels={self.max_pixels}")


def _stacked(futures: list[Future[Array]]) -> Array | Exception:
    try:
        return np.stack([future.result() for future in futures])
    except Exception as error:
        return error
