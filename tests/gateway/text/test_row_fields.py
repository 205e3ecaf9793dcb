"""Images in requests: the shapes that clients send, and one sentence for each that is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from PIL import Image

from gateway.edge.config import Limits
from gateway.edge.errors import ApiError
from gateway.text.row_fields import Part, is_image, read_image
from tests.support.gateway import RunningGateway, gateway_before
from tests.support.triton_stand_in import embedding, text_image, vector


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


# --- routes -----------------------------------------------------------------------------------------------------------

DATA_URL = url("PNG")
OF_IMAGE = [len(PNG), 0, 0, 0]


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with gateway_before(text_image(), embedding(), limits=Limits(texts=10)) as (running, _):
        yield running


def embed(gateway: RunningGateway, path: str = "/v1/embeddings", **fields: Any) -> Any:
    reply = gateway.post(path, {"model": "clip"} | fields)
    assert reply.status == 200, reply.body
    return reply.json


def vectors(answer: Any) -> list[list[float]]:
    assert [item["index"] for item in answer["data"]] == [*range(len(answer["data"]))]
    return [item["embedding"] for item in answer["data"]]


def test_texts_and_images_share_a_list_in_their_order(gateway):
    part = {"type": "image_url", "image_url": {"url": DATA_URL}}
    answer = embed(gateway, input=["a", DATA_URL, "b c", part, {"type": "text", "text": "d"}, {"image": DATA_URL}])
    expected = [vector("a"), OF_IMAGE, vector("b c"), OF_IMAGE, vector("d"), OF_IMAGE]
    assert vectors(answer) == [pytest.approx(row, abs=1e-6) for row in expected]
    assert answer["usage"]["prompt_tokens"] == 3 + 4 + 3  # an image has no tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"input": DATA_URL},
        {"input": [DATA_URL]},
        {"input": [DATA_URL], "modality": "image"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": DATA_URL}}]}]},
        {"messages": [{"role": "user", "content": [{"image": DATA_URL}, {"type": "text", "text": ""}]}]},
    ],
    ids=["a data URL", "a list", "Infinity's", "vLLM's", "vLLM's with an empty text"],
)
def test_requests_of_clients_get_the_vector_of_an_image(gateway, fields):
    assert vectors(embed(gateway, **fields)) == [OF_IMAGE]


def test_text_of_a_message_is_embedded_and_a_data_url_for_a_model_of_texts(gateway):
    message = {"messages": [{"role": "user", "content": "a"}]}
    for text, fields in (("a", message), (DATA_URL, {"model": "embedding", "input": [DATA_URL]})):
        assert vectors(embed(gateway, **fields)) == [pytest.approx(vector(text), abs=1e-6)]


@pytest.mark.parametrize(
    "fields",
    [
        {"images": [DATA_URL], "input_type": "image"},
        {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": DATA_URL}}]}]},
    ],
)
def test_cohere_embeds_images(gateway, fields):
    answer = embed(gateway, "/v2/embed", embedding_types=["float"], **fields)
    assert answer["embeddings"]["float"] == [OF_IMAGE]
    assert answer["texts"] == []


@pytest.mark.parametrize(
    ("path", "fields", "param", "reason"),
    [
        ("/v1/embeddings", {"input": [{"image": "https://example.org/a.png"}]}, "input[0]", "the gateway fetches none"),
        ("/v1/embeddings", {"input": ["a", {"image": url("GIF")}]}, "input[1]", "is image/gif"),
        ("/v1/embeddings", {"input": [url("GIF")]}, "input[0]", "is image/gif"),
        ("/v1/embeddings", {"input": ["a cat"], "modality": "image"}, "input[0]", "must be an image as a data URL"),
        ("/v1/embeddings", {"input": [DATA_URL] * 11}, "input", "at most 10 are possible"),
        ("/v1/embeddings", {}, "input", "either 'input' or 'messages'"),
        (
            "/v1/embeddings",
            {"messages": [{"role": "user", "content": [{"text": "a"}, {"image": DATA_URL}]}]},
            "messages",
            "one text or one image",
        ),
        ("/v1/embeddings", {"model": "embedding", "input": [{"image": DATA_URL}]}, "input", "takes texts, not images"),
        (
            "/v1/embeddings",
            {"model": "embedding", "input": "a", "modality": "image"},
            "input",
            "takes texts, not images",
        ),
        ("/v2/embed", {"images": ["https://example.org/a.png"]}, "images[0]", "the gateway fetches none"),
        ("/v2/embed", {"images": [DATA_URL], "texts": ["a"]}, "texts", "one of 'texts', 'images' and 'inputs'"),
        (
            "/v2/embed",
            {"inputs": [{"content": [{"text": "a"}, {"image": DATA_URL}]}]},
            "inputs[0]",
            "only texts or one image",
        ),
    ],
)
def test_refusal_names_the_image(gateway, path, fields, param, reason):
    reply = gateway.post(path, {"model": "clip"} | fields)
    assert reply.status == 400, reply.body
    assert reason in str(reply.json)
    if path == "/v1/embeddings":
        assert reply.error["param"] == param
