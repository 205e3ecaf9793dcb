"""Images in requests: the shapes that clients send, and one sentence for each that is refused."""

from __future__ import annotations

import base64
import io

import msgspec
import pytest
from PIL import Image

from gateway.edge.errors import ApiError
from gateway.text.row_fields import Part, is_image, read_image


def file(kind: str) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (2, 2), "red").save(content, kind)
    return content.getvalue()


def url(kind: str, media_type: str = "") -> str:
    return f"data:{media_type or f'image/{kind.lower()}'};base64,{base64.b64encode(file(kind)).decode()}"


PNG = file("PNG")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": url("PNG")}},
        {"type": "image_url", "image_url": {"url": url("PNG"), "detail": "auto"}},
        {"type": "input_image", "image_url": url("PNG")},
        {"image": url("PNG")},
        {"image": base64.b64encode(PNG).decode()},
    ],
    ids=["chats", "chats with detail", "responses", "Jina's", "Jina's in base64"],
)
def test_shapes_of_clients_are_read(part):
    assert msgspec.convert(part, Part).row("input[0]") == PNG


def test_texts_stay_texts():
    for part in ({"type": "text", "text": "a"}, {"type": "input_text", "text": "a"}, {"text": "a"}):
        assert msgspec.convert(part, Part).row("input[0]") == "a"


def test_formats_of_the_models_are_read():
    for kind in ("PNG", "JPEG", "WEBP"):
        assert is_image(url(kind))
        assert read_image(url(kind), "input") == file(kind)
    assert read_image(url("JPEG", "image/jpg"), "input") == file("JPEG")
    assert read_image(url("PNG", "IMAGE/PNG;charset=utf-8"), "input") == PNG


REFUSED = {
    "http": ("https://example.org/cat.png", "is the address of an image, and the gateway fetches none"),
    "file": ("file:///etc/passwd", "is the address of an image, and the gateway fetches none"),
    "text": ("a cat", "must be an image as a data URL"),
    "not in base64": ("data:image/png,abc", "must be an image as a data URL"),
    "another type": ("data:text/plain;base64,YQ==", "must be an image as a data URL"),
    "GIF": (url("GIF"), "is image/gif: send JPEG, PNG or WebP"),
    "SVG": ("data:image/svg+xml;base64,YQ==", "is image/svg+xml: send JPEG, PNG or WebP"),
    "GIF called PNG": (url("GIF", "image/png"), "is no JPEG, PNG or WebP file"),
    "damaged": ("data:image/png;base64,iVBOR*", "is not valid base64"),
    "empty": ("data:image/png;base64,", "is no JPEG, PNG or WebP file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_image_is_refused_by_its_place(case):
    value, reason = REFUSED[case]
    with pytest.raises(ApiError) as error:
        read_image(value, "input[3]")
    assert reason in error.value.message
    assert error.value.message.startswith("'input[3]' ")
    assert error.value.param == "input[3]"
    assert error.value.status == 400


@pytest.mark.parametrize("part", [{}, {"text": "a", "image": url("PNG")}, {"type": "image_url"}])
def test_part_has_one_text_or_image(part):
    with pytest.raises(ApiError, match="must have one text or one image"):
        msgspec.convert(part, Part).row("input[0]")
