"""Images of requests are decoded as transformers does, and refused before they fill the memory."""

from __future__ import annotations

import base64
import io
import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import transformers
from PIL import Image, PngImagePlugin
from transformers.image_utils import load_image

from serving.triton.types import BadRequest, ConfigError
from serving.vision.files import Place
from serving.vision.processor import ImageProcessor, InputImage, input_images

SIDE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def processor(folder) -> ImageProcessor:
    return ImageProcessor({}, folder)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
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


def exif_orientation(orientation: int) -> dict:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return {"exif": exif}


FILES = {
    "JPEG": encoded(gradient(), "JPEG"),
    "progressive JPEG": encoded(gradient(), "JPEG", progressive=True),
    "PNG": encoded(gradient(), "PNG"),
    "WebP": encoded(gradient(), "WEBP"),
    "grey JPEG": encoded(gradient().convert("L"), "JPEG"),
    "CMYK JPEG": encoded(gradient().convert("CMYK"), "JPEG"),
    "black and white": encoded(gradient().convert("1"), "PNG"),
    "grey with alpha": encoded(gradient().convert("LA"), "PNG"),
    "palette": encoded(gradient().quantize(8), "PNG"),
    "palette with a transparent colour": encoded(gradient().quantize(8), "PNG", transparency=3),
    "transparent PNG": encoded(transparent(), "PNG"),
    "transparent WebP": encoded(transparent(), "WEBP", lossless=True),
    **{f"orientation {n}": encoded(gradient(), "JPEG", **exif_orientation(n)) for n in range(1, 9)},
}


@pytest.mark.parametrize("kind", FILES)
def test_file_decodes_as_in_transformers(processor, kind):
    expected = np.asarray(load_image(Image.open(io.BytesIO(FILES[kind]))))
    assert expected.shape[2] == 3
    for data in (FILES[kind], base64.encodebytes(FILES[kind])):
        np.testing.assert_array_equal(processor.decode(InputImage(Place("image", 0), data)), expected)


def test_sixteen_bit_grey_is_scaled_to_eight(processor):
    """Scale values that transformers clips to white."""
    deep = (np.arange(256).reshape(16, 16) * 256 + 77).astype(np.uint16)
    decoded = processor.decode(InputImage(Place("image", 0), encoded(Image.fromarray(deep), "PNG")))
    np.testing.assert_array_equal(decoded, np.stack([deep >> 8] * 3, axis=-1))


def test_fractional_pixels_are_rounded(processor):
    """Round fractions, which transformers refuses; read zeros and ones on the scale of 255, which it rescales."""
    near = np.array(gradient(), np.float32)
    near[near < 255] += 0.4
    whole = processor([input_images({"image": np.array(gradient(), np.float32)[None]})])[0]
    np.testing.assert_array_equal(processor([input_images({"image": near[None]})])[0], whole)
    dark = processor([input_images({"image": np.ones((1, 3, 3, 3), np.float32)})])[0]
    np.testing.assert_allclose(dark, 2 / 255 - 1, atol=1e-6)


def test_broken_image_fails_only_its_request(processor):
    good, broken = InputImage(Place("image", 0), FILES["PNG"]), InputImage(Place("image", 1), FILES["PNG"][:-40])
    first, second, third = processor([[good, good], [good, broken], [good]])
    assert first.shape == (2, 3, SIDE, SIDE)
    assert isinstance(second, BadRequest)
    assert str(second) == "input 'image': row 1 is not a whole JPEG, PNG or WebP file"
    np.testing.assert_array_equal(third[0], first[1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8\xff",
        b"/9j/not base64!",
        encoded(gradient(), "GIF"),
        encoded(gradient(), "TIFF"),
        b"%PDF-1.4",
        *(file[: len(file) // 2] for file in (FILES["JPEG"], FILES["PNG"], FILES["WebP"])),
    ],
)
def test_broken_file_is_refused(processor, data):
    with pytest.raises(BadRequest, match="is not a whole"):
        processor.decode(InputImage(Place("image", 0), data))


def test_mangled_files_raise_only_bad_request(processor):
    random = np.random.default_rng(3)
    for file in (FILES["JPEG"], FILES["PNG"], FILES["WebP"], FILES["palette"], FILES["orientation 6"]):
        for _ in range(60):
            mangled = bytearray(file)
            for at in random.integers(0, len(file), 6):
                mangled[at] = random.integers(256)
            try:
                processor.decode(InputImage(Place("image", 0), bytes(mangled)))
            except BadRequest:
                continue


def refuse(folder, file: str) -> tuple[str, int]:
    """Return the error message for the file, and by how many kilobytes the process grew."""
    processor = ImageProcessor({}, folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadRequest) as error:
        processor.pixel_values(InputImage(Place("image", 0), Path(file).read_bytes()))
    return str(error.value), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_decompression_bomb_is_refused_before_decoding(folder, tmp_path, kind):
    """Refuse a real bomb: a small file that decodes to more than 50 megabytes."""
    bomb = Image.new("L", (7_100, 7_100))
    bomb.save(tmp_path / "bomb", kind, lossless=True, quality=0, method=0)  # the fastest WebP
    del bomb
    # In a process of its own, because the peak of this one may already be higher.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        message, growth = pool.submit(refuse, folder, str(tmp_path / "bomb")).result()
    assert message == "input 'image': row 0 has 7100 x 7100 pixels, too many for max_pixels=50000000"
    assert growth < 20_000


def test_bomb_in_a_png_text_chunk_is_refused(processor):
    comments = PngImagePlugin.PngInfo()
    comments.add_text("x", "0" * 50_000_000, zip=True)
    with pytest.raises(BadRequest, match="is not a whole"):
        processor.decode(InputImage(Place("image", 0), encoded(gradient(), "PNG", pnginfo=comments)))


def test_max_pixels_comes_from_config(folder):
    config = {"parameters": {"max_pixels": {"string_value": "959"}}}
    with pytest.raises(BadRequest, match="40 x 24 pixels, too many for max_pixels=959"):
        ImageProcessor(config, folder).pixel_values(InputImage(Place("image", 0), FILES["PNG"]))


def test_wrong_inputs_are_refused():
    white = np.full((2, 4, 5, 3), 255.0, np.float32)
    assert [image.place for image in input_images({"image": white})] == [Place("image", 0), Place("image", 1)]
    with pytest.raises(BadRequest, match="not neither"):
        input_images({})
    with pytest.raises(BadRequest, match="not both"):
        input_images({"image": white, "image_bytes": np.array([[b""]], np.object_)})
    for pixels in (white + 1, white - 256, white * np.nan, white * np.inf):
        with pytest.raises(BadRequest, match="'image' must hold numbers from 0 to 255"):
            input_images({"image": pixels})
    for shape in ((2, 4, 5, 4), (2, 4, 5, 1), (4, 5, 3), (1, 0, 5, 3), (1, 4, 0, 3), (0, 4, 5, 3)):
        with pytest.raises(BadRequest, match="'image' must have shape"):
            input_images({"image": np.zeros(shape, np.float32)})


def test_folder_without_processor_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no image processor"):
        ImageProcessor({}, tmp_path)
