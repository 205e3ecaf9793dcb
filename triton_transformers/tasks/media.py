"""Make the files of example requests: images, sound and videos, the same in every run.

`make smoke` runs in an environment without numpy and Pillow, so only photographs need these.
"""

from __future__ import annotations

import io
import math
import random
import struct
import wave
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

BLOCK = 8  # pixels
RATE = 16_000  # of sounds in Hz
FRAMES_PER_SECOND = 8


def png(number: int, width: int, height: int, shift: int = 0) -> bytes:
    """Return an image of coloured blocks, rotated to the left by `shift` pixels."""
    source = random.Random(number)
    lines = []
    for top in range(0, height, BLOCK):
        line = b"".join(source.randbytes(3) * BLOCK for _ in range(0, width, BLOCK))[: 3 * width]
        start = 3 * (shift % width)
        lines.append((b"\0" + line[start:] + line[:start]) * min(BLOCK, height - top))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(lines))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


def photograph(number: int, width: int, height: int) -> Any:
    """Return the pixels of broad patches of colour under some noise, whose JPEG file is as large as a photograph's."""
    import numpy as np
    from PIL import Image

    source = np.random.default_rng(number)
    patches = Image.fromarray(source.integers(0, 256, (12, 12, 3), np.uint8))
    smooth = np.asarray(patches.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    return np.clip(smooth + source.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)


def jpeg(pixels: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return file.getvalue()


def wav(number: int, seconds: float, rate: int = RATE) -> bytes:
    """Return two tones, which repeat after a second."""
    turns = [2 * math.pi * step / rate for step in range(rate)]
    tones = [0.3 * math.sin((200 + 90 * number) * turn) + 0.1 * math.sin(1234 * turn) for turn in turns]
    samples = array("h", [round(32_767 * tone) for tone in tones]) * math.ceil(seconds)
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(samples.itemsize)
        sound.setframerate(rate)
        sound.writeframes(samples[: int(seconds * rate)].tobytes())
    return file.getvalue()


def video(number: int, width: int, height: int, frames: int) -> bytes:
    """Return a moving image as AVI."""
    return avi([png(number, width, height, 3 * step) for step in range(frames)], width, height)


def avi(images: Sequence[bytes], width: int, height: int) -> bytes:
    """Return a video whose frames are PNG files, for which FFmpeg knows the codec MPNG."""

    def chunk(name: bytes, *parts: bytes) -> bytes:
        data = b"".join(parts)
        return name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)

    count, codec = len(images), b"MPNG"
    main = struct.pack("<14I", 1_000_000 // FRAMES_PER_SECOND, 0, 0, 0, count, 0, 1, 0, width, height, 0, 0, 0, 0)
    stream = struct.pack("<4s4s12I", b"vids", codec, 0, 0, 0, 1, FRAMES_PER_SECOND, 0, count, 0, 0, 0, 0, 0)
    bitmap = struct.pack("<3I2H4s5I", 40, width, height, 1, 24, codec, 3 * width * height, 0, 0, 0, 0)
    headers = chunk(b"LIST", b"strl", chunk(b"strh", stream), chunk(b"strf", bitmap))
    frames = (chunk(b"00dc", image) for image in images)
    return chunk(
        b"RIFF",
        b"AVI ",
        chunk(b"LIST", b"hdrl", chunk(b"avih", main), headers),
        chunk(b"LIST", b"movi", *frames),
    )
