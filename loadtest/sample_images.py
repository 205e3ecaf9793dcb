"""Generated images for load tests, from thumbnails to a megapixel, the same in every run."""

from __future__ import annotations

import io
import math

import numpy as np
import numpy.typing as npt
from PIL import Image as pillow

Image = npt.NDArray[np.uint8]

SIZES = ((96, 96), (160, 120), (240, 320), (320, 240), (480, 360), (512, 512), (640, 480), (1024, 768), (900, 1200))
IMAGES_PER_SIZE = 4
SMALL = 320 * 240


def images(largest: float = math.inf) -> list[Image]:
    """Return the images of at most this number of pixels."""
    random = np.random.default_rng(1)
    sizes = [(width, height) for width, height in SIZES if width * height <= largest]
    return [generate(random, width, height) for width, height in sizes for _ in range(IMAGES_PER_SIZE)]


def files() -> list[bytes]:
    return [jpeg(image) for image in images()]


def small() -> list[Image]:
    """Return the small images, for models that take pixels: as FP32 a megapixel is 12 MB on the wire."""
    return images(SMALL)


def generate(random: np.random.Generator, width: int, height: int) -> Image:
    """Return broad patches of colour under some noise, whose JPEG file is as large as a photograph's."""
    patches = pillow.fromarray(random.integers(0, 256, (12, 12, 3), np.uint8))
    smooth = np.asarray(patches.resize((width, height), pillow.Resampling.BICUBIC), np.float32)
    return np.clip(smooth + random.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)


def jpeg(pixels: Image) -> bytes:
    file = io.BytesIO()
    pillow.fromarray(pixels).save(file, "JPEG", quality=85)
    return file.getvalue()
