"""Files of clients are decoded within limits, in processes that may end, and bad ones get a reason."""

from __future__ import annotations

import io
import os
import signal
import struct
import zlib
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import soxr
from PIL import Image

from serving.pipelines.media import MediaDecoder
from serving.triton.types import BadRequest, Busy
from serving.triton.worker_process import WorkerEnded, WorkerProcess
from tests.support.python_backend import parameters
from triton_transformers.tasks import media
from triton_transformers.tasks.media import photograph, wav

LIMITS = {"max_bytes": 2_000_000, "max_pixels": 30_000, "max_video_pixels": 60_000, "max_seconds": 5}


@pytest.fixture(scope="module")
def decoder():
    decoder = MediaDecoder(parameters(**LIMITS))
    yield decoder
    decoder.close()


def decode(decoder: MediaDecoder, kind: str, data: bytes, **options: Any) -> np.ndarray:
    options = {"audio": {"rate": 16_000}, "video": {"frames": 4}}.get(kind, {}) | options
    return decoder.decode(kind, data, "row 0", kind, **options).result()


def sound(rate: int = 16_000, seconds: float = 1, channels: int = 1, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    times = np.arange(int(rate * seconds)) / rate
    samples = np.stack([np.sin(440 * (n + 1) * times) * 0.3 for n in range(channels)], axis=1)
    soundfile.write(file, samples, rate, format=kind)
    return file.getvalue()


def silence(seconds: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(seconds * 8000, np.int16), 8000, format="FLAC")
    return file.getvalue()


def png(number: int = 0) -> bytes:
    return media.png(number, 64, 48)


def mp4(number: int, width: int = 64, height: int = 48, frames: int = 10) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for step in range(frames):
            shown = av.VideoFrame.from_ndarray(photograph(number + step, width, height), format="rgb24")
            for packet in stream.encode(shown):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()


def webm(seconds: int = 1) -> bytes:
    """Return a sound as browsers record it."""
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream("libopus", rate=48_000)
        samples = (np.sin(np.arange(48_000 * seconds) / 20) * 9000).astype(np.int16).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = 48_000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    return file.getvalue()


def bomb(side: int) -> bytes:
    """Return a PNG whose header promises side x side pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\0IDAT"


def test_image_is_decoded_upright(decoder):
    file = io.BytesIO()
    image = Image.fromarray(photograph(0, 64, 48))
    exif = image.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    image.save(file, "PNG", exif=exif)
    assert np.array_equal(decode(decoder, "image", file.getvalue()), np.rot90(photograph(0, 64, 48), -1))


@pytest.mark.parametrize(("rate", "channels", "kind"), [(16_000, 1, "WAV"), (44_100, 2, "FLAC"), (8000, 2, "OGG")])
def test_sound_is_mixed_and_resampled(decoder, rate, channels, kind):
    data = sound(rate, channels=channels, kind=kind)
    mono = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)[0].mean(axis=1)
    expected = soxr.resample(mono, rate, 16_000)
    np.testing.assert_allclose(decode(decoder, "audio", data), expected, atol=1e-6)


def test_sound_of_a_container_is_read(decoder):
    assert 15_000 < len(decode(decoder, "audio", webm())) < 18_000


@pytest.mark.parametrize("video", [mp4(0), media.video(0, 64, 48, 10)], ids=["MP4", "AVI"])
def test_video_has_its_first_frames(decoder, video):
    frames = decode(decoder, "video", video)
    assert frames.shape == (4, 48, 64, 3)
    assert frames[0].std() > 10


def not_finite() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.array([0, np.nan], np.float32), 16_000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def with_number(data: bytes, place: int, number: int, order: str = "<I") -> bytes:
    """Return a file with a lie in its header."""
    size = struct.calcsize(order)
    return data[:place] + struct.pack(order, number) + data[place + size :]


def compressed(chunk: bytes) -> bytes:
    """Return a PNG with a chunk that is 50 MB when decompressed."""
    content = chunk + b"a\0\0" + zlib.compress(bytes(50_000_000), 1)
    checked = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    return png()[:33] + checked + png()[33:]


def gif(frames: int) -> bytes:
    file = io.BytesIO()
    first, *others = (Image.fromarray(photograph(number, 64, 48)).convert("L") for number in range(frames))
    first.save(file, "GIF", save_all=True, append_images=others)
    return file.getvalue()


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n"
MP4 = mp4(0)
BAD = {
    "cut image": ("image", png()[:200], "it is not a whole JPEG, PNG or WebP file"),
    "image of 20,000 px": ("image", bomb(20_000), "it has 20000 x 20000 pixels, too many for max_pixels=30000"),
    "PNG with a text of 50 MB": ("image", compressed(b"zTXt"), "it is not a whole JPEG, PNG or WebP file"),
    "PNG with a profile of 50 MB": ("image", compressed(b"iCCP"), "it is not a whole JPEG, PNG or WebP file"),
    "GIF of large frames": ("video", with_number(gif(2), 6, 65_535 << 16 | 65_535), "it is damaged, or no video"),
    "MP4 with many samples": ("video", with_number(MP4, MP4.find(b"stts") + 8, 2**31 - 1, ">I"), "memory to decode"),
    "MP4 with a large index": ("video", with_number(MP4, MP4.find(b"stsz") + 12, 2**31 - 1, ">I"), "it is damaged, or"),
    "MP4 header before a playlist": ("video", MP4[:32] + PLAYLIST, "it is damaged, or no video of a known kind"),
    "archive": ("image", b"PK\x03\x04" + bytes(1000), "it is not a whole JPEG, PNG or WebP file"),
    "sound after an image": ("audio", png() + sound(), "it is not a whole file of the kinds WAV, FLAC"),
    "sound as an image": ("image", sound(), "it is not a whole JPEG, PNG or WebP file"),
    "path": ("image", b"/etc/passwd", "it is not a whole JPEG, PNG or WebP file"),
    "nothing": ("audio", b"", "it is not a whole file of the kinds WAV, FLAC"),
    "image as a sound": ("audio", png(), "it is not a whole file of the kinds WAV, FLAC"),
    "long sound": ("audio", sound(seconds=6), "it has 6 s, too many for max_seconds=5"),
    "sound of 2 hours in a small file": ("audio", silence(7200), "it has 7200 s, too many for max_seconds=5"),
    "sound of many channels": ("audio", sound(channels=12), "it has 12 channels of 16000 Hz"),
    "sound of 1 Hz": ("audio", with_number(wav(0, 0.9), 24, 1), "it has 1 channels of 1 Hz"),
    "cut FLAC": ("audio", sound(kind="FLAC")[:-2000], "it is not a whole file of the kinds"),
    "cut Ogg": ("audio", sound(kind="OGG")[:-500], "it is cut off"),
    "Ogg without its last page": ("audio", sound(kind="OGG").rpartition(b"OggS")[0], "it is cut off"),
    "long sound in small blocks": ("audio", webm(6), "it is too long, too many for max_seconds=5"),
    "sound without samples": ("audio", sound(seconds=0), "it has no sound"),
    "sound that is not finite": ("audio", not_finite(), "finite"),
    "large file": ("audio", bytes(2_000_001), "it has 2000001 bytes, too many for max_bytes=2000000"),
    "playlist": ("video", PLAYLIST, "it is not a whole file of the kinds MP4"),
    "playlist in a sound": ("audio", PLAYLIST, "it is not a whole file of the kinds WAV"),
    "cut video": ("video", mp4(0)[:300], "it is damaged, or no video of a known kind"),
    "short video": ("video", mp4(0, frames=2), "it has 2 frames, and the model reads 4"),
    "video of large frames": ("video", mp4(0, 200, 120), "too many for max_video_pixels=60000"),
    "video without pictures": ("video", webm(), "it has no video"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_refused_with_the_reason(decoder, name):
    kind, data, reason = BAD[name]
    with pytest.raises(BadRequest) as error:
        decode(decoder, kind, data)
    assert reason in str(error.value)
    assert str(error.value).startswith("row 0: ")
    assert len(decode(decoder, "audio", sound())) == 16_000


LYING = {
    "WAV that promises 4 GB": ("audio", with_number(wav(0, 0.9), 4, 2**32 - 1), (14_400,)),
    "GIF of many frames": ("video", gif(400), (4, 48, 64, 3)),
    "sound behind an image": ("image", png() + sound(), (48, 64, 3)),
}


@pytest.mark.parametrize("name", LYING)
def test_file_is_read_no_further_than_needed(decoder, name):
    kind, data, shape = LYING[name]
    assert decode(decoder, kind, data).shape == shape


def test_decoded_bytes_are_bounded_until_their_arrays_are_freed():
    size = 48 * 64 * 3
    decoder = MediaDecoder(parameters(max_decoded_bytes=2 * size))
    kept = [decode(decoder, "image", png()) for _ in range(2)]
    with pytest.raises(Busy, match=f"all requests exceed max_decoded_bytes={2 * size}"):
        decode(decoder, "image", png())
    kept.pop()
    assert np.array_equal(decode(decoder, "image", png()), kept[0])
    decoder.close()


def test_file_that_exceeds_the_decoded_bytes_alone_is_refused():
    size = 48 * 64 * 3
    decoder = MediaDecoder(parameters(max_decoded_bytes=size - 1))
    with pytest.raises(BadRequest, match=f"row 0: decoded it has {size} bytes, too many for"):
        decode(decoder, "image", png())
    decoder.close()


def test_worker_that_hangs_ends():
    worker = WorkerProcess("tests.support.hanging_worker", 0.1)
    assert worker.ask("{}") == {}  # that it is ready
    with pytest.raises(WorkerEnded, match=r"more than 0\.1 s"):
        worker.ask("{}")
    assert worker.process.returncode == -signal.SIGALRM


def test_worker_that_ends_costs_only_its_file(monkeypatch):
    decoder = MediaDecoder(parameters())
    decoder.pool._max_workers = 1

    def end() -> None:
        process = decoder.pool.submit(lambda: decoder.local.worker.process.process).result()
        os.kill(process.pid, signal.SIGSEGV)
        process.wait(60)

    assert decode(decoder, "image", png()).shape == (48, 64, 3)
    end()
    assert decode(decoder, "image", png()).shape == (48, 64, 3)
    end()
    monkeypatch.setattr(WorkerProcess, "has_ended", False)  # as if it ended during the work
    with pytest.raises(BadRequest, match="row 0: it takes too much memory to decode"):
        decode(decoder, "image", png())
    assert decode(decoder, "image", png()).shape == (48, 64, 3)
    decoder.close()
