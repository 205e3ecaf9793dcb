"""Decode images, sound and videos in a process of their own, because a file of a client can crash or stall a decoder.

The files travel through a file in memory that both processes have: first the client's, then the numbers in it.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from serving.triton.types import Array, BadRequest
from serving.triton.worker_process import serve_lines
from serving.vision.files import opened, upright

DECODE_SECONDS = 20  # of CPU time
# More than the process has with the libraries.
MEMORY_BYTES = 3 << 30
CHANNELS, RATES = 8, range(1000, 384_001)
BLOCK_FRAMES = 1 << 20
# A page of an Ogg: the byte of its flags, the flag of the last page, and the byte that counts its segments.
OGG, FLAGS, LAST_PAGE, SEGMENTS = b"OggS", 5, 4, 26
# The bytes at a place in a file -> the only demuxer that may open it. FFmpeg's own choice may be a playlist, which
# names other files and addresses.
CONTAINERS = (
    (4, b"ftyp", "mov"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
    (8, b"AVI ", "avi"),
    (0, b"GIF8", "gif"),
    (0, OGG, "ogg"),
    (0, b"\xff\xf1", "aac"),
)


def image(data: bytes, limits: dict[str, Any]) -> Array:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # max_pixels is checked instead
    with opened(None, data) as file:
        width, height = file.size
    # Outside the block, because `opened` reports each error in it as a broken file.
    check(width * height, limits, "max_pixels", f"it has {width} x {height} pixels")
    with opened(None, data) as file:
        return np.asarray(upright(file))


def sound(data: bytes, limits: dict[str, Any]) -> Array:
    """Return the samples of all channels' mean, at the rate of the model."""
    import soundfile

    if data.startswith(OGG) and not is_whole_ogg(data):  # libsndfile reads it as far as it goes
        raise BadRequest("it is cut off")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            check_sound(file.channels, file.samplerate)
            check(file.frames / file.samplerate, limits, "max_seconds", f"it has {file.frames / file.samplerate:.0f} s")
            blocks = file.blocks(BLOCK_FRAMES, dtype="float32", always_2d=True)
            return resampled(blocks, file.samplerate, limits, file.frames)
    except soundfile.LibsndfileError:
        return sound_of_container(data, limits)


def is_whole_ogg(data: bytes) -> bool:
    page = data[data.rindex(OGG) :]
    if len(page) <= SEGMENTS or not page[FLAGS] & LAST_PAGE:
        return False
    sizes = page[SEGMENTS + 1 :][: page[SEGMENTS]]
    return len(page) >= SEGMENTS + 1 + len(sizes) + sum(sizes)


def resampled(blocks: Iterator[Array], rate: int, limits: dict[str, Any], frames: int = 0) -> Array:
    """Return one channel at the model's rate. A header may promise more or fewer frames than follow."""
    import soxr

    mono: list[Array] = []
    length = 0
    for block in blocks:
        mono.append(block.mean(axis=1))
        length += len(block)
        check(length / rate, limits, "max_seconds", "it is too long")
    if length < frames:
        raise BadRequest(f"it is cut off: it has {length} of {frames} samples")
    samples: Array = np.concatenate(mono) if mono else np.zeros(0, np.float32)
    if not len(samples):
        raise BadRequest("it has no sound")
    if not np.isfinite(samples).all():
        raise BadRequest("it has samples that are not finite numbers")
    return soxr.resample(samples, rate, limits["rate"]) if rate != limits["rate"] else samples


def sound_of_container(data: bytes, limits: dict[str, Any]) -> Array:
    with container_of(data, "WAV, FLAC, Ogg, MP3, MP4 or WebM") as container:
        if not container.streams.audio:
            raise BadRequest("it has no sound")
        stream = container.streams.audio[0]
        check_sound(stream.codec_context.channels, stream.rate)
        frames = (frame.to_ndarray().reshape(-1, 1) for frame in mono_frames(container, stream.rate))
        return resampled(frames, stream.rate, limits)


def mono_frames(container: Any, rate: int) -> Iterator[Any]:
    import av

    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    for frame in container.decode(audio=0):
        yield from resampler.resample(frame)
    yield from resampler.resample(None)


def video(data: bytes, limits: dict[str, Any]) -> Array:
    """Return the first frames."""
    frames: list[Array] = []
    with container_of(data, "MP4, WebM, AVI or GIF") as container:
        if not container.streams.video:
            raise BadRequest("it has no video")
        stream = container.streams.video[0]
        width, height = stream.width, stream.height
        size = f"it has {width} x {height} pixels in {limits['frames']} frames"
        check(width * height, limits, "max_pixels", size)  # before the first one is decoded
        check(width * height * limits["frames"], limits, "max_video_pixels", size)
        for frame in container.decode(stream):
            if (frame.width, frame.height) != (width, height):
                raise BadRequest("its frames differ in size")
            frames.append(frame.to_ndarray(format="rgb24"))
            if len(frames) == limits["frames"]:
                break
    if len(frames) < limits["frames"]:
        raise BadRequest(f"it has {len(frames)} frames, and the model reads {limits['frames']}")
    return np.stack(frames)


def container_of(data: bytes, names: str) -> Any:
    demuxer = next((name for place, magic, name in CONTAINERS if data[place : place + len(magic)] == magic), None)
    if demuxer is None or importlib.util.find_spec("av") is None:
        raise BadRequest(f"it is not a whole file of the kinds {names}")
    import av

    av.logging.set_level(None)
    return av.open(io.BytesIO(data), format=demuxer)


def check(value: float, limits: dict[str, Any], name: str, what: str) -> None:
    if value > limits[name]:
        raise BadRequest(f"{what}, too many for {name}={limits[name]}")


def check_sound(channels: int, rate: int) -> None:
    if not 0 < channels <= CHANNELS or rate not in RATES:
        allowed = f"1 to {CHANNELS} channels of {RATES[0]} to {RATES[-1]} Hz"
        raise BadRequest(f"it has {channels} channels of {rate} Hz, and {allowed} are allowed")


DECODERS = {"image": image, "audio": sound, "video": video}


def main() -> None:
    os.nice(5)  # models have priority over decoders
    setup = json.loads(sys.stdin.readline())
    descriptor = setup["file"]

    def answer(order: dict[str, Any]) -> dict[str, Any]:
        try:
            data = os.pread(descriptor, order["size"], 0)
            decoded = np.ascontiguousarray(DECODERS[order["kind"]](data, order))
        except BadRequest as error:
            return {"error": str(error)}
        except MemoryError:
            return {"error": "it needs too much memory to decode"}
        except ImportError as error:
            return {"error": f"this server lacks the Python package {error.name}, which reads such files"}
        except Exception:  # a broken file can raise anything, and the message can quote the file
            return {"error": f"it is damaged, or no {order['kind']} of a known kind"}
        view = memoryview(decoded.tobytes())
        os.ftruncate(descriptor, 0)
        written = 0
        while written < len(view):
            written += os.pwrite(descriptor, view[written:], written)
        return {"shape": decoded.shape, "dtype": decoded.dtype.name}

    serve_lines(answer, DECODE_SECONDS, MEMORY_BYTES)


if __name__ == "__main__":
    main()
