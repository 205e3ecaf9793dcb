"""Official clients, unchanged, before the stand-in for Triton. tests/stack has one for each kind of answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.apis.clients import CLIENTS_OF, OBJECTS, Clients, anthropic, cohere, hugging_face, openai
from tests.conformance.apis.rows import BY_ID
from tests.conformance.apis.run import difference, read_answer, read_request
from tests.conformance.apis.world import World
from tests.support.openai_clients import NEEDS_CLIENTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("client_packages"), NEEDS_CLIENTS]
CALLS = {f"{clients.case}-{name}": (clients, call) for clients in CLIENTS_OF for name, call in clients.calls.items()}


@pytest.mark.parametrize(("clients", "call"), CALLS.values(), ids=CALLS)
def test_client_gets_what_the_raw_request_gets(world: World, clients: Clients, call: Callable[[str], Any]) -> None:
    case = BY_ID[clients.case]
    gateway = world.gateway_of(case, clients.fields)
    reply = gateway.request("POST", case.url, *case.sent(**clients.fields))
    assert reply.status == 200, reply.body
    got = call(gateway.url)
    assert not (wrong := difference(clients.part(read_answer(reply)), got)), wrong
    raw, *_ = sent = [read_request(request) for request in world.triton.received]
    hidden = {"model": str, "outputs": list}  # a stream has a model of its own
    assert not (wrong := difference(raw | hidden, sent[-1])), wrong
    assert len(sent) == 2


@pytest.mark.parametrize("call", OBJECTS.values(), ids=OBJECTS)
def test_client_gets_the_object_that_it_asks_for(
    world: World, call: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or litellm fetches the prices of models
    assert call(world.every.url).model_dump() == {"size": "AA", "full": True}
    (request,) = map(read_request, world.triton.received)
    assert "CR2032" in json.dumps(request["structured_outputs"])


def raises(error: type[Exception], status: int, call: Callable[[], Any]) -> Any:
    with pytest.raises(error) as raised:
        call()
    assert getattr(raised.value, "status_code", status) == status
    return raised.value


def test_clients_raise_their_own_errors(world: World) -> None:
    import anthropic as of_anthropic
    import cohere as of_cohere
    import openai as of_openai
    from huggingface_hub.errors import HfHubHTTPError

    url, messages = world.every.url, [{"role": "user", "content": "a"}]
    client, claude = openai(url), anthropic(url)
    for named in ({"n": 10**6}, {"functions": [{"name": "f"}]}):
        ask: Any = {"model": "counter", "messages": messages, **named}
        error = raises(of_openai.BadRequestError, 400, lambda ask=ask: client.chat.completions.create(**ask))
        assert [error.param] == [*named]
    raises(of_openai.AuthenticationError, 401, client.with_options(api_key="another").models.list)
    message: Any = {"max_tokens": 5, "messages": messages}
    too_few: Any = message | {"extra_body": {"top_k": -5}}
    wrong_key = claude.with_options(api_key="another")
    raises(of_anthropic.AuthenticationError, 401, lambda: wrong_key.messages.create(model="counter", **message))
    raises(of_anthropic.NotFoundError, 404, lambda: claude.messages.create(model="nobody", **message))
    raises(of_anthropic.BadRequestError, 400, lambda: claude.messages.create(model="counter", **too_few))
    rerank: Any = {"model": "nobody", "query": "a", "documents": ["b"]}
    raises(of_cohere.errors.NotFoundError, 404, lambda: cohere(url).rerank(**rerank))
    labels = hugging_face(f"{url}/models/nobody")
    assert "does not exist" in str(raises(HfHubHTTPError, 404, lambda: labels.text_classification("a")))


def test_models_are_listed(world: World) -> None:
    client = openai(world.every.url)
    assert {"embedding", "counter"} <= {model.id for model in client.models.list()}
    assert client.models.retrieve("embedding").id == "embedding"
