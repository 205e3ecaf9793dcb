"""Pictures made up for the load: of all sizes from a thumbnail to a megapixel, the same in every run."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

SIZES = ((96, 96), (160, 120), (240, 320), (320, 240), (480, 360), (512, 512), (640, 480), (1024, 768), (900, 1200))
OF_EACH = 4
SMALL = 320 * 240


def all_sizes() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [picture(random, width, height) for width, height in SIZES for _ in range(OF_EACH)]


def files() -> list[bytes]:
    return [jpeg(each) for each in all_sizes()]


def small() -> list[np.ndarray]:
    """For those who take no files: as FP32 a megapixel is 12 MB on the wire."""
    return [each for each in all_sizes() if each.shape[0] * each.shape[1] <= SMALL]


def picture(random: np.random.Generator, width: int, height: int) -> np.ndarray:
    """Broad patches of colour under some noise: a file as large as a photograph's."""
    patches = Image.fromarray(random.integers(0, 256, (12, 12, 3), np.uint8))
    smooth = np.asarray(patches.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    return np.clip(smooth + random.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)


def jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return file.getvalue()
