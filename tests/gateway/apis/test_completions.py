"""Completions and chats: streams, seeds and logprobs of prompts. The rest is conformance/apis."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import grpc
import pytest

from gateway.apis import completions
from gateway.edge import outages
from gateway.edge.streams import EventStream
from gateway.text.generation import Chunk, TokenLogprob
from gateway.text.tool_calls import Delta
from tests.conformance.apis.openai_text import CHAT as TALK
from tests.conformance.apis.run import read_request
from tests.conformance.apis.world import INPUTS, failing, with_parameters
from tests.support.gateway import RunningGateway, gateway_before
from tests.support.triton_stand_in import COUNTED, WAIT_S, Failure, Model, TritonStandIn, generator, refusal
from triton_transformers.tensors import Tensor

JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningGateway, TritonStandIn]]:
    lost = "Stub process 'input ' is not healthy, a secret of the server"
    models = [
        with_parameters(generator(inputs=INPUTS), adapters="legal tone"),
        generator("counter_stream", INPUTS, streams=True),
        failing("lost_stream", Failure(grpc.StatusCode.INTERNAL, lost)),
        failing("broken_stream", refusal(500, "RuntimeError: it failed"), after=2),
    ]
    with gateway_before(*models) as served:
        yield served


@contextlib.contextmanager
def open_stream(gateway: RunningGateway, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps({"model": "counter", "stream": True} | body), JSON)
        yield connection.getresponse()


def next_event(response: http.client.HTTPResponse) -> Any:
    """Return the next event, "[DONE]" at the end, and None after it."""
    if not (line := response.readline()):
        return None
    data = line.decode().removeprefix("data: ").removesuffix("\n")
    assert response.readline() == b"\n"
    return data if data == "[DONE]" else json.loads(data)


def stream(gateway: RunningGateway, path: str, **body: Any) -> list[Any]:
    with open_stream(gateway, path, body) as response:
        assert response.status == 200, response.read()
        return list(iter(lambda: next_event(response), None))


def test_adapters_are_listed(gateway: RunningGateway) -> None:
    listed = {model["id"]: model for model in gateway.get("/v1/models").json["data"]}
    assert [listed[f"counter:{name}"]["parent"] for name in ("legal", "tone")] == ["counter"] * 2
    assert gateway.get("/v1/models/counter:tone").json == listed["counter:tone"]


@pytest.mark.parametrize("streams", [False, True])
def test_choices_have_seeds_of_their_own(gateway: RunningGateway, triton: TritonStandIn, streams: bool) -> None:
    """A model that does not stream gets all prompts in one request."""
    body = {"model": "counter", "prompt": ["a", "b c"], "n": 2, "seed": 2**63 - 1, "stream": streams}
    assert gateway.post(COMPLETIONS, body).status == 200
    seeds = sorted(request.inputs["seed"].array().item() for request in triton.received)
    assert seeds == ([0, 0, 2**63 - 1, 2**63 - 1] if streams else [0, 2**63 - 1])


def test_each_event_has_the_usage_so_far(gateway: RunningGateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last, _ = stream(gateway, COMPLETIONS, prompt="a", max_tokens=2, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 2]
    assert last["usage"] == events[-1]["usage"]


SCORED = [
    TokenLogprob(3, "<s>", None),
    TokenLogprob(4, " a", -0.25, top=[TokenLogprob(9, "b", -0.1), TokenLogprob(4, " a", -0.25)]),
    TokenLogprob(5, " ein", -0.5, top=[TokenLogprob(5, " ein", -0.5)]),
]
PROMPT_LOGPROBS = [
    None,
    {
        "4": {"logprob": -0.25, "rank": 2, "decoded_token": " a"},
        "9": {"logprob": -0.1, "rank": 1, "decoded_token": "b"},
    },
]


@pytest.mark.parametrize(
    ("fields", "sent", "tokens", "own"),
    [
        ({"echo": True, "logprobs": 1}, {"logprobs": 1, "prompt_logprobs": 1}, ["<s>", " a", " ein"], None),
        ({"logprobs": 2, "prompt_logprobs": 0}, {"logprobs": 2, "prompt_logprobs": 0}, [" ein"], PROMPT_LOGPROBS),
        ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}, [], PROMPT_LOGPROBS),
        ({"echo": True, "prompt_logprobs": 2}, {"prompt_logprobs": 2}, [], PROMPT_LOGPROBS),
    ],
)
@pytest.mark.parametrize("pieces", [1, 3])
def test_tokens_of_prompts_have_logprobs(gateway, triton, fields, sent, tokens, own, pieces) -> None:
    """Send the fields, then read an answer with logprobs of two tokens of the prompt, whole and in pieces."""
    assert gateway.post(COMPLETIONS, {"model": "counter", "prompt": "a", "max_tokens": 0, **fields}).status == 200
    (request,) = map(read_request, triton.received)
    assert {"max_new_tokens": [0], **sent}.items() <= request.items()
    reported = SCORED if "logprobs" in fields else SCORED[:2]
    body = completions.CompletionsBody(model="m", prompt="a", **fields)
    form = completions.CompletionsForm(body)
    chunk = Chunk(0, [Delta(content="a ein")], None, 2, 1, None, reported, None)
    parts = [reported] if pieces == 1 else [[], reported[:2], reported[2:]]
    chunks = [chunk._replace(logprobs=part) for part in parts]
    found = [form.logprobs(chunk) for chunk in chunks]
    lists = [one["logprobs"] for one in found if "logprobs" in one]
    assert [token for one in lists for token in one["tokens"]] == tokens
    if "<s>" in tokens:
        assert [value for one in lists for value in one["token_logprobs"]] == [None, -0.25, -0.5]
        assert [value for one in lists for value in one["top_logprobs"]][:2] == [None, {"b": -0.1, " a": -0.25}]
        assert [value for one in lists for value in one["text_offset"]] == [0, 3, 5]
    assert [one.get("prompt_logprobs") for one in found] == ([own] if pieces == 1 else [None, own, None])


def test_part_of_a_character_has_the_bytes_that_the_engine_knows() -> None:
    assert completions.chat_token(TokenLogprob(7, "\ufffd", -0.5))["bytes"] is None
    assert completions.chat_token(TokenLogprob(7, "\ufffd", -0.5, [240, 159]))["bytes"] == [240, 159]


@pytest.mark.parametrize("is_chat", [False, True])
def test_stream_has_openais_form(gateway: RunningGateway, is_chat: bool) -> None:
    path, source = (CHAT, {"messages": TALK["messages"]}) if is_chat else (COMPLETIONS, {"prompt": "one"})
    *events, done = stream(gateway, path, max_tokens=3, **source)
    assert done == "[DONE]"
    texts = [" ein", " zwei", " drei", ""]
    contents = [{"text": text} for text in texts]
    if is_chat:
        begin = {"delta": {"role": "assistant", "content": ""}}
        contents = [begin, *({"delta": {"content": text} if text else {}} for text in texts)]
    assert [event["choices"] for event in events] == [
        [{"index": 0, **content, "finish_reason": "length" if content is contents[-1] else None, "logprobs": None}]
        for content in contents
    ]
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    assert {(event["object"], event["model"]) for event in events} == {(kind, "counter")}
    assert len({(event["id"], event["created"]) for event in events}) == 1
    assert "usage" not in events[0]


def on_demand(model: Model) -> threading.Semaphore:
    """Let the model generate its next piece only when the semaphore is released."""
    answer, permits = model.answer, threading.Semaphore(0)

    def wait(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        for response in answer(inputs):
            permits.acquire(timeout=WAIT_S)
            yield response

    model.answer = wait
    return permits


def test_event_leaves_before_the_next_piece_exists() -> None:
    model = generator("counter_stream", streams=True)
    permits = on_demand(model)
    permits.release()
    with (
        gateway_before(generator(), model) as (gateway, _),
        open_stream(gateway, COMPLETIONS, {"prompt": "a"}) as response,
    ):
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in response.headers
        for text in COUNTED:
            assert next_event(response)["choices"][0]["text"] == text
            permits.release()


def test_stream_whose_head_cannot_be_sent_is_closed() -> None:
    closed = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
        finally:
            closed.append(True)

    async def fail(message: Any) -> None:
        raise ConnectionError

    async def respond() -> None:
        stream = events()
        response = EventStream(await anext(stream), stream, WAIT_S, b"", lambda error: b"")
        with pytest.raises(ConnectionError):
            await response({}, None, fail)
        assert closed

    asyncio.run(respond())


def test_stream_whose_process_is_lost_has_its_own_status(gateway, monkeypatch) -> None:
    monkeypatch.setattr(outages, "LIMIT_S", 0)
    reply = gateway.post(COMPLETIONS, {"model": "lost_stream", "prompt": "a", "stream": True})
    assert reply.status == 503
    assert "secret" not in reply.error["message"]


def test_tokens_and_first_pieces_are_counted(gateway: RunningGateway) -> None:
    def sample(name: str, **labels: str) -> float:
        value = gateway.server.config.app.counters.registry.get_sample_value(f"gateway_{name}", labels)
        return value or 0.0

    def samples() -> list[float]:
        gateway.get("/health")  # so that the last request is counted
        by_code = [sample("requests_total", route=COMPLETIONS, code=code) for code in ("200", "500")]
        by_kind = [sample("tokens_total", kind=kind) for kind in ("prompt", "completion")]
        return [*by_code, *by_kind, sample("first_token_seconds_count", route=COMPLETIONS)]

    before = samples()
    assert gateway.post(COMPLETIONS, {"model": "counter", "prompt": "one two", "max_tokens": 3}).status == 200
    stream(gateway, COMPLETIONS, prompt="one two", max_tokens=3)
    stream(gateway, COMPLETIONS, prompt="one two", model="broken_stream")
    assert [now - then for now, then in zip(samples(), before, strict=True)] == [2, 1, 6, 8, 2]
