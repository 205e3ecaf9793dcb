"""Turns what a pipeline returns into JSON: images and masks as PNG, sound as WAV, both in base64; arrays as lists."""

from __future__ import annotations

import base64
import io
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from serving.triton.types import Array

IEEE_FLOAT = 3  # the format of samples in a WAV file


def encoded(answer: Any) -> bytes:
    return json.dumps(plain(answer), ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")


def plain(value: Any) -> Any:
    """Return a value that JSON knows. Numbers that it does not know become null."""
    if isinstance(value, Mapping) and value.keys() == {"audio", "sampling_rate"}:
        rate = int(value["sampling_rate"])
        return {"audio": wav(np.asarray(value["audio"]), rate), "sampling_rate": rate}
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "messages"):  # a chat
        return plain(value.messages)
    if hasattr(value, "getbands"):  # an image of Pillow
        return png(value)
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().float().cpu() if value.is_floating_point() else value.cpu()
    array = np.asarray(value)
    if array.dtype == bool and array.ndim == 2:
        from PIL import Image

        return png(Image.fromarray(array.astype(np.uint8) * 255))
    return plain(array.tolist())


def png(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def wav(samples: Array, rate: int) -> str:
    """Return the samples [length] or [channels, length] unchanged, as a WAV file of 32-bit floats.

    That of libsndfile has the time in it, so equal sounds would be different answers.
    """
    channels = len(samples) if samples.ndim > 1 else 1
    data = samples.T.astype("<f4").tobytes()
    form = struct.pack("<IHHIIHH", 16, IEEE_FLOAT, channels, rate, 4 * channels * rate, 4 * channels, 32)
    content = b"WAVEfmt " + form + b"data" + struct.pack("<I", len(data)) + data
    return base64.b64encode(b"RIFF" + struct.pack("<I", len(content)) + content).decode()
