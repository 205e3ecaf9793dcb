"""Chats with images through the gateway: the answers are those of transformers, alone and together."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.serving.vision.test_chat import CHATS, NEW_TOKENS, Loaded, picture, user
from tests.support.checkpoints.vision_language import save_vision_language
from tests.support.generation import send_concurrently
from tests.support.stacks import TestStack

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

# A family on each engine; tests/serving/vision/test_chat.py has the others.
FORMATS = {"llava": "openvino-fp32", "gemma3": "python"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: save_vision_language(folder / family / "1", family) for family in FORMATS}


@pytest.fixture(scope="module")
def assembled(stack: TestStack, sources) -> TestStack:
    # The task follows from config.json.
    stack.assemble(
        *(
            {"SYSTEMS": family, "SOURCE": source, "TASK": "", "FORMAT": FORMATS[family]}
            for family, source in sources.items()
        )
    )
    return stack


def sent(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat as OpenAI's clients send it."""
    return [message | {"content": parts(message["content"])} for message in chat]


def parts(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": data_url(part["file"])}} if "file" in part else part
        for part in content
    ]


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


@pytest.mark.parametrize("family", FORMATS)
def test_answers_are_those_of_transformers(assembled, sources, family):
    stack = assembled.serve(family, f"{family}_stream")
    library = Loaded(sources[family])

    def expected(chat: list[dict[str, Any]]) -> tuple[str, int]:
        prompt, new = library.reference(chat)
        return library.decoder.decode(new), len(prompt)

    def ask(chat: list[dict[str, Any]]) -> tuple[str, int]:
        answer = stack.post("/v1/chat/completions", model=family, messages=sent(chat), **options)
        return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]

    options = {"temperature": 0, "max_tokens": NEW_TOKENS}
    chats = list(CHATS.values())
    texts = list(map(expected, chats))
    assert list(map(ask, chats)) == texts
    assert send_concurrently(2 * len(chats), lambda i: ask(chats[i % len(chats)])) == 2 * texts
    assert streamed(stack, family, sent(chats[0])) == texts[0][0]


def streamed(stack: TestStack, model: str, messages: list[dict[str, Any]]) -> str:
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": NEW_TOKENS, "stream": True}
    with request(stack, body) as response:
        events = [line.removeprefix(b"data: ") for line in response if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def request(stack: TestStack, body: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {stack.client_key}"}
    address = f"{stack.gateway}/v1/chat/completions"
    return urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers), timeout=300)


def test_wrong_image_fails_its_request_alone(assembled, sources):
    stack = assembled.serve("llava", "llava_stream")
    good, bad = [user(picture(1), "What is this?")], [user("What", picture(1)), user(picture(2)[:300], "is this?")]

    def ask(i: int) -> int:
        chat = bad if i % 2 else good
        try:
            return int(request(stack, {"model": "llava", "messages": sent(chat), "max_tokens": 4}).status)
        except urllib.error.HTTPError as error:
            answer = json.load(error)["error"]
            assert answer["param"] == "messages[1].content[0]"
            assert answer["message"] == "'messages[1].content[0]' is not a whole JPEG, PNG or WebP file"
            return error.code

    assert send_concurrently(8, ask) == [200, 400] * 4
