"""The gateway on a real stack, through the clients that people use, unchanged."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pydantic
import pytest
from transformers import AutoTokenizer

from tests.support.batches import one_batch, stopped
from tests.support.checkpoints import encoders, language
from tests.support.embedding import embed
from tests.support.generation import metrics, settled, text
from tests.support.openai_clients import CLIENTS, NEEDS_CLIENTS
from tests.support.stacks import TestStack
from triton_transformers.corpus import MIXED
from triton_transformers.settings import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("client_packages"), NEEDS_CLIENTS]

KEY = TestStack.client_key
IN_FLIGHT = 32  # as conftest.py sets it
CONTEXT = 32768
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} Call them as <tool_call>\n{name, arguments}\n</tool_call>.\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# A completion that takes longer than any pause of a busy machine. Its most probable token never ends the text.
LONG = {"model": "mychat", "prompt": "I am going", "max_tokens": CONTEXT - 20, "temperature": 0}
TEXTS = MIXED.texts[:150]  # more than max_batch_size
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which battery fits?"}]


@pytest.fixture(scope="module")
def mychat(tmp_path_factory) -> Path:
    return save_mychat(tmp_path_factory.mktemp("mychat"))


@pytest.fixture(scope="module")
def served(stack, mychat, encoder_checkpoints) -> TestStack:
    stack.assemble(
        {"SYSTEMS": "mychat", "SOURCE": mychat, "TASK": "text-generation", "FORMAT": "openvino-fp32"},
        *({"SYSTEMS": name, "SOURCE": source, "FORMAT": "onnx"} for name, source in encoder_checkpoints.items()),
    )
    return stack.serve("mychat", *encoder_checkpoints)


def save_mychat(folder: Path) -> Path:
    """Save a tiny model that chats, with a context that takes long to fill."""
    language.save_gpt2(folder, context=CONTEXT)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(served) -> str:
    return f"{served.gateway}/v1"


@pytest.fixture(scope="module")
def client(openai, url) -> Iterator:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def new_async_client(openai, url) -> Callable:
    return lambda: openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)


@pytest.fixture
def prompt_of(mychat) -> Callable[[list[dict]], str]:
    """Return a function that renders messages with the model's template."""
    tokenizer = AutoTokenizer.from_pretrained(mychat)
    return lambda messages: tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def continued(served: TestStack, prompt: str, tokens: int) -> str:
    """Return what Triton itself adds to the prompt."""
    return text(served, "mychat", prompt, max_new_tokens=tokens).removeprefix(prompt)


def tokens(served: TestStack, *texts: str) -> int:
    """Return how many tokens the embedding system's tokenizer makes of the texts."""
    return int(served.ask("tokenizer", input_text=list(texts))["attention_mask"].sum())


def in_flight(served: TestStack) -> float:
    """Return how many requests the gateway works on."""
    return float(re.search(r"^gateway_in_flight (\S+)$", served.metrics("GATEWAY_METRICS_PORT"), re.MULTILINE)[1])


# --- models, keys, errors ---------------------------------------------------------------------------------------------


def test_refusal_of_triton_names_the_param(openai, client):
    """tests/conformance/apis has those that the gateway itself refuses."""
    for options, param in (
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "number!"}}}},
            "response_format",
        ),
        ({"messages": [{"role": "user", "content": "battery " * CONTEXT}]}, "messages"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**{"model": "mychat", "messages": QUESTION} | options)
        assert error.value.param == param
        assert error.value.code != "context_length_exceeded" or param == "messages"


def test_context_overflow_has_openais_code(openai, client):
    for ask in (
        lambda: client.completions.create(model="mychat", prompt="battery " * CONTEXT),
        lambda: client.completions.create(model="mychat", prompt="battery " * CONTEXT, stream=True),
        lambda: client.completions.create(model="mychat", prompt="battery", max_tokens=CONTEXT),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            ask()
        assert (error.value.code, error.value.param) == ("context_length_exceeded", "prompt")


# --- embeddings -------------------------------------------------------------------------------------------------------


def test_embeddings_equal_tritons(served, client):
    texts = [*TEXTS[:5], "비 그친 뒤 골목에 🥖"]
    answer = client.embeddings.create(model="embedding", input=texts)
    assert np.allclose([item.embedding for item in answer.data], embed(served, *texts), atol=1e-6)
    assert [item.index for item in answer.data] == list(range(len(texts)))
    assert answer.model == "embedding"


def test_token_ids_get_the_vector_of_their_text(served, openai, client, url):
    texts = [*TEXTS[:20], "word " * 1000]
    rows = [served.post("/tokenize", model="embedding", prompt=text) for text in texts]
    assert [row["count"] for row in rows[:20]] == [tokens(served, text) for text in texts[:20]]
    assert rows[-1]["tokens"][1:-1] == rows[-1]["tokens"][1:2] * 1000
    answer = client.embeddings.create(model="embedding", input=[row["tokens"] for row in rows[:20]])
    assert np.allclose([item.embedding for item in answer.data], embed(served, *texts[:20]), atol=1e-6)
    assert answer.usage.prompt_tokens == tokens(served, *texts[:20])
    with pytest.raises(openai.BadRequestError, match=f"more than {rows[0]['max_model_len']} tokens"):
        client.embeddings.create(model="embedding", input=rows[-1]["tokens"])


def test_detokenize_and_completions_take_ids(served, client, url):
    row = served.post("/tokenize", model="mychat", prompt="I am going")
    assert served.post("/detokenize", model="mychat", tokens=row["tokens"]) == {"prompt": "I am going"}
    answer = client.completions.create(model="mychat", prompt=row["tokens"], max_tokens=12, temperature=0)
    assert answer.choices[0].text == continued(served, "I am going", 12)
    assert row["max_model_len"] == CONTEXT


def root_of(url: str) -> str:
    return url.removesuffix("/v1")


def test_concurrent_clients_form_batches(served, new_async_client):
    async def ask() -> list[list[float]]:
        async with new_async_client() as client:
            answers = await asyncio.gather(
                *(client.embeddings.create(model="embedding", input=text) for text in TEXTS[:IN_FLIGHT])
            )
        return [answer.data[0].embedding for answer in answers]

    expected = embed(served, *TEXTS[:IN_FLIGHT])
    with one_batch(served, "encoder", IN_FLIGHT):
        vectors = asyncio.run(ask())
    assert np.allclose(vectors, expected, atol=1e-5)


# --- texts ------------------------------------------------------------------------------------------------------------


def test_completion_equals_tritons(served, mychat, client):
    answer = client.completions.create(model="mychat", prompt="I am going", max_tokens=20, temperature=0)
    (choice,) = answer.choices
    assert choice.text == continued(served, "I am going", 20)
    assert answer.usage.completion_tokens <= 20
    assert choice.finish_reason == ("length" if answer.usage.completion_tokens == 20 else "stop")
    tokenizer = AutoTokenizer.from_pretrained(mychat)
    assert answer.usage.prompt_tokens == len(tokenizer("I am going").input_ids)


def test_chat_equals_tritons_answer_to_the_rendered_template(served, prompt_of, client):
    answer = client.chat.completions.create(model="mychat", messages=QUESTION, max_tokens=20, temperature=0)
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert message.content == continued(served, prompt_of(QUESTION), 20)
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in QUESTION]
    again = client.chat.completions.create(model="mychat", messages=parts, max_completion_tokens=20, temperature=0)
    assert again.choices[0].message.content == message.content


def test_streamed_chat_equals_the_whole_answer(client):
    options = {"model": "mychat", "messages": QUESTION, "max_tokens": 30, "seed": 5, "temperature": 1.2}
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage
    assert last.choices == []
    assert len(chunks) > 5


def test_concurrent_chats_run_together(served, new_async_client):
    """Triton stands still until all have arrived at the gateway."""

    async def ask(resume: Callable[[], None]) -> list[str]:
        async with new_async_client() as client:

            async def chat(number: int) -> str:
                stream = await client.chat.completions.create(
                    model="mychat", messages=QUESTION, max_tokens=20, seed=number % 4, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            chats = asyncio.gather(*map(chat, range(16)))
            await asyncio.to_thread(served.wait, lambda: in_flight(served) == 16, "16 chats in the gateway")
            resume()
            return await chats

    before = settled(served, "mychat_stream")
    with stopped(served) as resume:
        answers = asyncio.run(ask(resume))
    assert answers == answers[:4] * 4
    now = settled(served, "mychat_stream")
    assert now["texts"] - before["texts"] == 16
    assert now["generated_tokens"] - before["generated_tokens"] > 1.5 * (now["runs"] - before["runs"])


@pytest.mark.parametrize("streams", [True, False])
def test_client_that_leaves_cancels_its_text(served, new_async_client, streams):
    model = "mychat_stream"  # which generates for mychat
    before = settled(served, model)

    async def leave_early() -> None:
        async with new_async_client() as client:
            request = asyncio.create_task(client.completions.create(**LONG, stream=streams))
            await asyncio.to_thread(served.wait, lambda: metrics(served, model)["running_texts"] == 1, "the text")
            if streams:
                assert await anext(await request)
            request.cancel()

    asyncio.run(leave_early())
    now = served.wait(lambda: ended(served, model, before["texts"] + 1), "the end of the text")
    assert now["generated_tokens"] - before["generated_tokens"] < CONTEXT / 2


def ended(served: TestStack, model: str, texts: float) -> dict[str, float] | None:
    """Return the counters if that many texts have ended and none is running."""
    now = metrics(served, model)
    return settled(served, model) if now["texts_total"] >= texts and not now["running_texts"] else None


def test_choices_and_logprobs(served, prompt_of, client):
    options = {"model": "mychat", "messages": QUESTION, "max_tokens": 5, "seed": 7}
    choices = client.chat.completions.create(**options, n=3, logprobs=True).choices
    for number, choice in enumerate(choices):
        alone = client.chat.completions.create(**options | {"seed": 7 + number}).choices[0]
        assert choice.message.content == alone.message.content
        assert len(choice.logprobs.content) == 5
        assert all(token.logprob <= 0 for token in choice.logprobs.content)
        for token in choice.logprobs.content:
            assert bytes(token.bytes) == token.token.encode() or "\ufffd" in token.token
    assert len({choice.message.content for choice in choices}) > 1
    greedy = {"model": "mychat", "prompt": "I am going", "max_tokens": 5, "temperature": 0}
    whole = client.completions.create(**greedy, logprobs=0).choices[0].logprobs
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(**greedy, logprobs=0, stream=True)]
    assert "".join(whole.tokens) == continued(served, "I am going", 5)
    assert [token for piece in pieces if piece for token in piece.tokens] == whole.tokens
    assert [offset for piece in pieces if piece for offset in piece.text_offset] == whole.text_offset


def test_options_of_vllm_shape_the_text(served, client):
    options = {"model": "mychat", "prompt": "I am going", "max_tokens": 5}
    greedy = continued(served, "I am going", 5)
    assert client.completions.create(**options, extra_body={"top_k": 1}).choices[0].text == greedy
    filled = client.completions.create(**options, temperature=2, extra_body={"ignore_eos": True, "min_tokens": 5})
    assert (filled.choices[0].finish_reason, filled.usage.completion_tokens) == ("length", 5)


# --- forms and tools --------------------------------------------------------------------------------------------------


class Battery(pydantic.BaseModel):
    """A battery. Each value of it is a short text, so that a model with random weights comes to the end."""

    size: Literal["CR2032", "AA"]
    full: bool


def test_client_gets_the_object_that_it_asks_for(client):
    with client.chat.completions.stream(model="mychat", messages=QUESTION, response_format=Battery) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Battery)


# --- what OpenAI's API does not have ----------------------------------------------------------------------------------


def test_classify_gives_tritons_labels(served):
    texts = list(TEXTS[:8])
    expected = served.ask("mood", input_text=texts)
    answer = served.post("/v1/classify", model="mood", input=texts)
    assert [item["label"] for item in answer["data"]] == expected["label"].ravel().tolist()
    for item, score in zip(answer["data"], expected["score"].ravel(), strict=True):
        assert item["num_classes"] == len(item["probs"]) == len(encoders.MOODS)
        assert math.isclose(max(item["probs"]), score, abs_tol=1e-5)


# --- clients of other APIs --------------------------------------------------------------------------------------------

QUERY, DOCUMENTS = "Which battery fits?", list(TEXTS[:12])


@pytest.fixture(scope="module")
def scores(served) -> list[float]:
    """Return Triton's own score of each document."""
    return served.ask("reranker", query=[QUERY] * len(DOCUMENTS), text=DOCUMENTS)["score"].ravel().tolist()


def check_ranking(ranking: list[tuple[int, float]], scores: list[float], top_n: int = len(DOCUMENTS)) -> None:
    """Check the numbers of the documents and their scores, from the best one to the worst."""
    assert [number for number, _ in ranking] == sorted(range(len(scores)), key=lambda n: -scores[n])[:top_n]
    assert np.allclose([score for _, score in ranking], [scores[number] for number, _ in ranking], atol=1e-5)


def test_coheres_client_embeds_and_reranks(served, url, scores):
    import cohere

    client = cohere.ClientV2(api_key=KEY, base_url=root_of(url))
    texts = list(TEXTS[:5])
    options = {"input_type": "search_query", "embedding_types": ["float", "ubinary"]}
    embeddings = client.embed(model="embedding", texts=texts, **options).embeddings
    expected = embed(served, *texts)
    assert np.allclose(embeddings.float_, expected, atol=1e-5)
    assert embeddings.ubinary == np.packbits(expected > 0, axis=1).tolist()
    ranked = client.rerank(model="reranker", query=QUERY, documents=DOCUMENTS, top_n=5)
    check_ranking([(result.index, result.relevance_score) for result in ranked.results], scores, 5)


# --- the docs ---------------------------------------------------------------------------------------------------------


def examples(language: str) -> list[str]:
    """Return the code of docs/gateway.md in this language that talks to the gateway."""
    blocks = re.findall(
        rf"^```{language}\n(.*?)^```$", (ROOT / "docs/gateway.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return [block for block in blocks if ":8080/v1" in block and "https://" not in block]


def test_python_examples_work_as_written(url):
    code = "".join(examples("python")).replace("http://localhost:8080/v1", url).replace('"none"', repr(KEY))
    checks = """
vectors = [embeddings.embed_query("a"), embedding.get_query_embedding("a"), *embeddings.embed_documents(["a"])]
assert {len(vector) for vector in vectors} == {384}, vectors
assert chat.invoke("Which battery fits?").content
"""
    paths = {"PYTHONPATH": str(CLIENTS)}
    command = [sys.executable, "-c", code + checks]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout


# The systems of these are those of test_openai_audio.py.
ELSEWHERE = ("/v1/audio/", "/v1/moderations")


@pytest.mark.parametrize(
    "command",
    [
        command
        for block in examples("sh")
        for command in re.findall(r"^curl (?:'[^']*'|\\\n|[^'\n])*$", block, re.M)
        if not any(path in command for path in ELSEWHERE)
    ],
)
def test_curl_examples_work_as_written(url, command):
    command = command.replace("localhost:8080/v1", url).replace(
        "curl ", f"curl -sS --fail-with-body -H 'Authorization: Bearer {KEY}' "
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(("{", "data: {"))


# --- many clients -----------------------------------------------------------------------------------------------------


def test_burst_gets_only_answers_and_429(served, client):
    """Triton stands still until the gateway has refused all requests that are too many."""
    count = 10 * IN_FLIGHT
    port = int(served.environment["GATEWAY_PORT"])
    body = json.dumps({"model": "embedding", "input": TEXTS[0]}).encode()
    headers = {
        "Host": f"127.0.0.1:{port}",
        "Authorization": f"Bearer {KEY}",
        "Content-Type": "application/json",
        "Content-Length": len(body),
        "Connection": "close",
    }
    lines = ["POST /v1/embeddings HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    request = "\r\n".join(lines).encode() + body

    async def burst(resume: Callable[[], None]) -> list[bytes]:
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
        for _, writer in connections:
            writer.write(request)
        answers = [asyncio.create_task(reader.read()) for reader, _ in connections]
        await asyncio.to_thread(
            served.wait, lambda: sum(answer.done() for answer in answers) >= count - IN_FLIGHT, "the refusals"
        )
        resume()
        received = await asyncio.gather(*answers)
        for _, writer in connections:
            writer.close()
        return received

    with stopped(served) as resume:
        answers = asyncio.run(asyncio.wait_for(burst(resume), 300))
    statuses = [int(answer.split()[1]) for answer in answers]
    assert (statuses.count(200), statuses.count(429)) == (IN_FLIGHT, count - IN_FLIGHT)
    assert all(b"retry-after:" in answer.lower() for answer in answers if b" 429 " in answer[:20])
    assert client.embeddings.create(model="embedding", input="a").data
