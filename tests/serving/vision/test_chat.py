"""Chats with images: each text is that of transformers alone, whatever is in its batch."""

from __future__ import annotations

import functools
import importlib
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText

from export.catalogue import FormatUnavailable
from serving.generation.decoding import Decoder
from serving.generation.row import Options, Row
from serving.triton.types import BadRequest
from serving.vision.chat import ChatImages
from tests.support.checkpoints.vision_language import FAMILIES, save_vision_language
from tests.support.python_backend import instance_args, parameters
from tests.support.served import assemble

pytestmark = pytest.mark.usefixtures("one_thread", "stored")

NEW_TOKENS = 12


def picture(seed: int, width: int = 40, height: int = 56, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 4, width // 4, 3), np.uint8)
    Image.fromarray(pixels).resize((width, height)).save(file, kind)
    return file.getvalue()


def user(*parts: str | bytes) -> dict[str, Any]:
    """Return a message of texts and images. The images stay files, until a model gets them apart."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "file": p} for p in parts]
    return {"role": "user", "content": content}


SAID = {"role": "assistant", "content": "A market."}
CHATS = {
    "one image": [user(picture(1), "What is this?")],
    "a wide image": [user("Which battery fits", picture(2, 120, 24), "the torch?")],
    "a text": [{"role": "user", "content": "Which battery fits the small torch? The second one, she said."}],
    "two images": [user(picture(1), "or", picture(3, 24, 24), "?")],
    "an earlier image": [user(picture(4, 64, 64), "It rains"), SAID, {"role": "user", "content": "and then?"}],
    "images in turns": [user("a", picture(5)), SAID, user(picture(6, 32, 80), "b", picture(1))],
    "a short text": [{"role": "user", "content": "It"}],
}


class Loaded:
    def __init__(self, folder: Any) -> None:
        self.folder = folder
        arguments = {"model_repository": str(folder.parent), "model_version": folder.name}
        self.images = ChatImages({}, arguments)
        self.model = AutoModelForImageTextToText.from_pretrained(folder).eval()
        self.decoder = Decoder(AutoModelForImageTextToText.from_pretrained(folder).eval(), self.images.tokenizer)

    def sent(self, chat: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Return a chat as a model gets it: its messages and its images."""
        files = [part["file"] for message in chat for part in message["content"] if "file" in part]
        return [message | {"content": without_files(message["content"])} for message in chat], files

    def row(self, chat: list[dict[str, Any]]) -> Row[Any]:
        messages, files = self.sent(chat)
        prompt = self.images.template.prompt(self.images.parts(messages, len(files)))
        tokens, inputs = self.images.encode(prompt, files)
        row: Row[Any] = Row(prompt, tokens, Options(NEW_TOKENS, 0.0, 1.0, 1, ()))
        row.images = inputs
        return row

    def new_tokens(self, rows: list[Row[Any]]) -> list[list[int]]:
        for row in rows:
            row.done = False
        self.decoder.generate(rows, lambda: None)
        return [row.tokens[len(row.prompt_tokens) :] for row in rows]

    def reference(self, chat: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Return the prompt's tokens and the new ones of transformers' own processor and generate()."""
        opened = [message | {"content": with_images(message["content"])} for message in chat]
        inputs = self.images.processor.apply_chat_template(
            opened, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        tokens = self.model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)[0].tolist()
        length = inputs["input_ids"].shape[1]
        return tokens[:length], tokens[length:]


def without_files(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [{name: value for name, value in part.items() if name != "file"} for part in content]


def with_images(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [
        {"type": "image", "image": Image.open(io.BytesIO(part["file"])).convert("RGB")} if "file" in part else part
        for part in content
    ]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function that loads a model of a family once."""

    @functools.cache
    def load(family: str) -> Loaded:
        folder = tmp_path_factory.mktemp(family) / "1"
        folder.mkdir()
        return Loaded(save_vision_language(folder, family))

    return load


@pytest.fixture(params=FAMILIES)
def loaded(request, load) -> Loaded:
    return load(request.param)


def test_texts_of_a_batch_are_those_of_transformers_alone(loaded):
    rows = {name: loaded.row(chat) for name, chat in CHATS.items()}
    expected = {name: loaded.reference(chat) for name, chat in CHATS.items()}
    assert {name: row.prompt_tokens for name, row in rows.items()} == {name: own for name, (own, _) in expected.items()}
    new = {name: own for name, (_, own) in expected.items()}
    assert len({tuple(tokens) for tokens in new.values()}) == len(CHATS)  # the texts depend on the chats
    for batch in (list(rows), list(rows)[::-1], *([name] for name in rows)):
        assert loaded.new_tokens([rows[name] for name in batch]) == [new[name] for name in batch]


def test_answer_depends_on_the_image(loaded):
    rows = [loaded.row([user(picture(seed), "What is this?")]) for seed in range(4)]
    assert len({row.prompt for row in rows}) == 1
    assert len(set(map(tuple, loaded.new_tokens(rows)))) > 1


# --- requests that are refused ----------------------------------------------------------------------------------------

IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "It"}
VIDEO = {"type": "video"}
REFUSED = {
    "an image without a place": ([TEXT], [picture(1)], "has 1 images, and 'messages' has places for 0"),
    "a place without an image": ([IMAGE, TEXT], [], "has 0 images, and 'messages' has places for 1"),
    "another part": ([IMAGE, VIDEO], [picture(1)], "the content of message 0 must be a text, or a list of"),
    "a damaged file": ([IMAGE, IMAGE], [picture(1), picture(2)[:99]], "row 1 is not a whole JPEG, PNG or WebP file"),
    "another format": ([IMAGE], [picture(1, kind="GIF")], "row 0 is not a whole JPEG, PNG or WebP file"),
    "too many pixels": ([IMAGE] * 3, [picture(1, 200, 160)] * 3, "row 2 makes the images larger than max_pixels=90000"),
    "a line": ([IMAGE], [picture(1, 4, 804)], "row 0 is more than 200 times as long as wide"),
    "an imitated image": ([IMAGE, {"type": "text", "text": "<image>"}], [picture(1)], "a text has <image>, which"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_request_is_refused(load, case):
    content, files, reason = REFUSED[case]
    reader = load("llava").images
    reader.max_pixels = 90_000
    with pytest.raises(BadRequest) as error:
        parts = reader.parts([{"role": "user", "content": content}], len(files))
        reader.encode(reader.template.prompt(parts), files)
    assert reason in str(error.value)


def test_text_cannot_imitate_an_image(loaded):
    for token in loaded.images.placeholders:
        tokens, _ = loaded.images.encode(f"It {token} rains", [])
        with pytest.raises(BadRequest, match="stands for an image"):
            loaded.images.check_text(tokens)


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (3, 3), (300, 2)])
def test_smallest_images_are_read(loaded, size):
    (row,) = [loaded.row([user(picture_of(size), "?")])]
    assert len(loaded.new_tokens([row])[0]) == NEW_TOKENS


def picture_of(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("L", size, 200).save(file, "PNG")
    return file.getvalue()


# --- the backend ------------------------------------------------------------------------------------------------------


def request_of(pb_utils: Any, messages: list[dict[str, Any]], files: list[bytes], **options: object) -> Any:
    sent = {"messages": np.array([json.dumps(messages).encode()], object), "max_new_tokens": [NEW_TOKENS]}
    if files:
        sent["images"] = np.array(files, object)
    return pb_utils.InferenceRequest(["text", "num_input_tokens"], options, **sent)


def test_backend_prepares_the_images_of_few_requests_at_a_time(load, pb_utils):
    """Prepared images take much memory. A wrong image, like an answer, makes room for the next request."""
    library = load("llava")
    backend = importlib.import_module("serving.generation.batched").BatchedGeneration()
    config = {"input": [{"name": "images"}]} | parameters(max_batch=1)
    backend.initialize(instance_args(library.folder.parent, config))
    requests = []
    for number in range(9):
        chat = [user(picture(number), "What is this?")]
        messages, files = library.sent(chat)
        requests.append((chat, request_of(pb_utils, messages, [files[0][: 99 if number % 2 else None]])))
    backend.execute([request for _, request in requests])
    for number, (chat, request) in enumerate(requests):
        assert request.sender.finished.wait(60)
        response = request.sender.responses[0]
        if number % 2:
            assert response.error == ("INVALID_ARG", "input 'images': row 0 is not a whole JPEG, PNG or WebP file")
            continue
        prompt, new = library.reference(chat)
        assert response.outputs == {
            "text": [library.decoder.decode(new).encode()],
            "num_input_tokens": [len(prompt)],
        }
    assert [backend.image_room.acquire(timeout=60) for _ in range(2)] == [True, True]
    assert not backend.image_room.acquire(blocking=False)
    backend.finalize()


# --- OpenVINO GenAI ---------------------------------------------------------------------------------------------------


@pytest.fixture
def on_openvino(tmp_path, pb_utils):
    """Return a function that starts a model on OpenVINO GenAI, and one that asks it chats at the same time."""
    started = []

    def start(library: Loaded, **own: object) -> Any:
        assemble(library.folder, tmp_path, "openvino-fp32")
        backend = importlib.import_module("serving.generation.openvino.engine").GenAIGeneration()
        config = {"input": [{"name": "images"}]} | parameters(cache_gigabytes=1, **own)
        backend.initialize(instance_args(tmp_path / "m", config))
        started.append(backend)

        def ask(*chats: list[dict[str, Any]], **options: object) -> list[Any]:
            requests = [request_of(pb_utils, *library.sent(chat), **options) for chat in chats]
            backend.execute(requests)
            assert all(request.sender.finished.wait(60) for request in requests)
            return [request.sender.responses[0] for request in requests]

        return ask

    yield start
    for backend in started:
        backend.finalize()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma3"])
def test_texts_on_openvino_are_those_of_transformers(load, on_openvino, family):
    library = load(family)
    # These have one text and other images, and the images of a chat before.
    chats = [*CHATS.values(), *([user(picture(seed), "What is this?")] for seed in (7, 8)), CHATS["an earlier image"]]
    expected = []
    for chat in chats:
        prompt, new = library.reference(chat)
        expected.append({"text": [library.decoder.decode(new).encode()], "num_input_tokens": [len(prompt)]})
    ask = on_openvino(library)
    for batch in (range(len(chats)), range(len(chats))[::-1], *([i] for i in range(len(chats)))):
        answers = ask(*(chats[i] for i in batch))
        assert [answer.outputs for answer in answers] == [expected[i] for i in batch]


def test_gemma_is_refused_for_openvino(load, tmp_path):
    with pytest.raises(FormatUnavailable, match="its attention sees an image's tokens in both directions"):
        assemble(load("gemma3").folder, tmp_path, "openvino-fp32")


def test_options_of_a_chat_with_an_image_on_openvino(load, on_openvino):
    library = load("qwen2_vl")
    chat = CHATS["one image"]
    _, new = library.reference(chat)
    text = library.decoder.decode(new)
    ask = on_openvino(library, client_grammars="true")

    def answer(**options: object) -> str:
        (response,) = ask(chat, **options)
        return str(response.error[1]) if response.error else response.outputs["text"][0].decode()

    assert answer(logprobs=3, return_logprobs=True) == text
    assert answer(temperature=1.5, top_k=1, seed=3, presence_penalty=0.0) == text
    assert answer(stop="go") == text[: text.index("go")]
    assert answer(structured_outputs=json.dumps({"choice": ["rain", "snow"]})) in ("rain", "snow")
    assert "'repetition_penalty': OpenVINO GenAI does not have it together with images" in answer(
        repetition_penalty=1.5
    )
    assert answer() == text


def test_requests_with_images_beyond_the_limit_are_refused(load, on_openvino, monkeypatch):
    library = load("llava")
    chat = CHATS["one image"]
    ask = on_openvino(library, max_batch=1, max_waiting=2)
    answers = ask(*[chat] * 20)
    errors = {answer.error for answer in answers}
    assert None in errors
    assert all("wait already: try again later" in message for _, message in errors - {None})
    assert len(errors) > 1
