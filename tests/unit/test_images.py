"""InputImages: what files become, what is refused, and before how much of it is in memory."""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys

import numpy as np
import pytest
import transformers
from PIL import Image, PngImagePlugin
from transformers.image_utils import load_image

from scripts.common.settings import ROOT
from shared.errors import BadRequest, ConfigError
from shared.images import ImageProcessor, InputImage, input_images

SIDE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def processor(folder) -> ImageProcessor:
    return ImageProcessor({}, folder)


def file_of(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def gradient(height: int = 24, width: int = 40) -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([rows * 5, columns * 5, rows + columns], axis=-1).astype(np.uint8))


def transparent() -> Image.Image:
    image = gradient()
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def turned(orientation: int) -> dict:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return {"exif": exif}


FILES = {
    "JPEG": file_of(gradient(), "JPEG"),
    "progressive JPEG": file_of(gradient(), "JPEG", progressive=True),
    "PNG": file_of(gradient(), "PNG"),
    "WebP": file_of(gradient(), "WEBP"),
    "grey JPEG": file_of(gradient().convert("L"), "JPEG"),
    "CMYK JPEG": file_of(gradient().convert("CMYK"), "JPEG"),
    "black and white": file_of(gradient().convert("1"), "PNG"),
    "grey with alpha": file_of(gradient().convert("LA"), "PNG"),
    "palette": file_of(gradient().quantize(8), "PNG"),
    "palette with a transparent colour": file_of(gradient().quantize(8), "PNG", transparency=3),
    "transparent PNG": file_of(transparent(), "PNG"),
    "transparent WebP": file_of(transparent(), "WEBP", lossless=True),
    **{f"turned {n}": file_of(gradient(), "JPEG", **turned(n)) for n in range(1, 9)},
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_what_transformers_makes_of_it(processor, kind):
    expected = np.asarray(load_image(Image.open(io.BytesIO(FILES[kind]))))
    assert expected.shape[2] == 3
    for data in (FILES[kind], base64.encodebytes(FILES[kind])):
        np.testing.assert_array_equal(processor.decode(InputImage("", data)), expected)


def test_sixteen_bits_of_grey(processor):
    """Transformers makes them white."""
    deep = (np.arange(256).reshape(16, 16) * 256 + 77).astype(np.uint16)
    found = processor.decode(InputImage("", file_of(Image.fromarray(deep), "PNG")))
    np.testing.assert_array_equal(found, np.stack([deep >> 8] * 3, axis=-1))


def test_numbers_between_the_integers_are_rounded(processor):
    """Transformers refuses them; and takes zeros and ones for black and white, whatever scale the others have."""
    near = np.array(gradient(), np.float32)
    near[near < 255] += 0.4
    whole = processor([input_images({"image": np.array(gradient(), np.float32)[None]})])[0]
    np.testing.assert_array_equal(processor([input_images({"image": near[None]})])[0], whole)
    dark = processor([input_images({"image": np.ones((1, 3, 3, 3), np.float32)})])[0]
    np.testing.assert_allclose(dark, 2 / 255 - 1, atol=1e-6)


def test_each_request_of_a_batch_has_its_own(processor):
    good, broken = InputImage("good", FILES["PNG"]), InputImage("broken", FILES["PNG"][:-40])
    first, second, third = processor([[good, good], [good, broken], [good]])
    assert first.shape == (2, 3, SIDE, SIDE)
    assert isinstance(second, BadRequest)
    assert str(second) == "broken is not a whole JPEG, PNG or WebP file"
    np.testing.assert_array_equal(third[0], first[1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8\xff",
        b"/9j/not base64!",
        file_of(gradient(), "GIF"),
        file_of(gradient(), "TIFF"),
        b"%PDF-1.4",
        *(file[: len(file) // 2] for file in (FILES["JPEG"], FILES["PNG"], FILES["WebP"])),
    ],
)
def test_broken_files(processor, data):
    with pytest.raises(BadRequest, match="is not a whole"):
        processor.decode(InputImage("row 0", data))


def test_no_file_however_mangled_is_anything_but_the_clients_fault(processor):
    random = np.random.default_rng(3)
    for file in (FILES["JPEG"], FILES["PNG"], FILES["WebP"], FILES["palette"], FILES["turned 6"]):
        for _ in range(60):
            mangled = bytearray(file)
            for at in random.integers(0, len(file), 6):
                mangled[at] = random.integers(256)
            try:
                processor.decode(InputImage("", bytes(mangled)))
            except BadRequest:
                continue


BOMB = """
import io, resource, sys, numpy as np
from PIL import Image
from shared.errors import BadRequest
from shared.images import ImageProcessor, InputImage
processor = ImageProcessor({}, sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    processor.pixel_values(InputImage("row 0", sys.stdin.buffer.read()))
except BadRequest as error:
    print(error, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, sep="|")
"""


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_bomb_is_refused_before_it_is_unpacked(folder, kind):
    """A real one: a few kilobytes that would be 64 megabytes and more."""
    bomb = file_of(Image.new("L", (8_000, 8_000)), kind)
    done = subprocess.run(
        [sys.executable, "-c", BOMB, folder],
        input=bomb,
        capture_output=True,
        cwd=ROOT / "images/triton/backends",
        env=os.environ | {"USE_TORCH": "0"},
        timeout=60,
    )
    said, grown = done.stdout.decode().split("|")
    assert said == "row 0 has 8000 x 8000 pixels, too many for max_pixels=50000000"
    assert int(grown) < 20_000


def test_a_bomb_in_the_text_of_a_png(processor):
    comments = PngImagePlugin.PngInfo()
    comments.add_text("x", "0" * 50_000_000, zip=True)
    with pytest.raises(BadRequest, match="is not a whole"):
        processor.decode(InputImage("", file_of(gradient(), "PNG", pnginfo=comments)))


def test_max_pixels_is_the_configs(folder):
    config = {"parameters": {"max_pixels": {"string_value": "959"}}}
    with pytest.raises(BadRequest, match="40 x 24 pixels, too many for max_pixels=959"):
        ImageProcessor(config, folder).pixel_values(InputImage("", FILES["PNG"]))


def test_what_a_request_must_hold():
    white = np.full((2, 4, 5, 3), 255.0, np.float32)
    assert [picture.where for picture in input_images({"image": white})] == [
        "input 'image': row 0",
        "input 'image': row 1",
    ]
    with pytest.raises(BadRequest, match="not neither"):
        input_images({})
    with pytest.raises(BadRequest, match="not both"):
        input_images({"image": white, "image_bytes": np.array([[b""]], np.object_)})
    for wrong in (white + 1, white - 256, white * np.nan, white * np.inf):
        with pytest.raises(BadRequest, match="'image' must hold numbers from 0 to 255"):
            input_images({"image": wrong})
    for shape in ((2, 4, 5, 4), (2, 4, 5, 1), (4, 5, 3), (1, 0, 5, 3), (1, 4, 0, 3), (0, 4, 5, 3)):
        with pytest.raises(BadRequest, match="'image' must have shape"):
            input_images({"image": np.zeros(shape, np.float32)})


def test_a_folder_without_a_processor(tmp_path):
    with pytest.raises(ConfigError, match="no image processor"):
        ImageProcessor({}, tmp_path)
