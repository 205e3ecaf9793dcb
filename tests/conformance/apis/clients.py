"""Official clients: each must get what the raw request of a case gets, with the same request to Triton.

The packages are those of tests/openai_clients.lock, which are imported in the rows: that takes seconds.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pydantic

from tests.conformance.apis.embeddings import DOCUMENTS
from tests.conformance.apis.run import KEY
from tests.support.openai_clients import CLIENTS

TEXTS = ["a", "two words"]
ABOUT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which battery fits?"}]
SYSTEM, USER = (message["content"] for message in ABOUT)
PAIRS = [(message["role"], message["content"]) for message in ABOUT]


class Battery(pydantic.BaseModel):
    """The object that the models called battery and battery_caller generate."""

    size: Literal["CR2032", "AA"]
    full: bool


@dataclass(frozen=True)
class Clients:
    """Clients that get the same part of the answer that the raw request of a case with these fields gets."""

    case: str
    fields: dict[str, Any]
    part: Callable[[Any], Any]
    calls: dict[str, Callable[[str], Any]]  # with the address of the gateway


def openai(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def anthropic(url: str) -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=url, api_key=KEY, max_retries=0)


def cohere(url: str, version: str = "ClientV2") -> Any:
    import cohere

    return getattr(cohere, version)(api_key=KEY, base_url=url)


def hugging_face(address: str) -> Any:
    from huggingface_hub import InferenceClient

    return InferenceClient(model=address, token=KEY)


def infinity(url: str, route: str, body: str, *options: Any, **fields: Any) -> Any:
    import infinity_client
    from infinity_client import models
    from infinity_client.api import default

    client = infinity_client.AuthenticatedClient(base_url=url, token=KEY, raise_on_unexpected_status=True)
    __import__(f"infinity_client.api.default.{route}")
    return getattr(default, route).sync(client=client, body=getattr(models, body)(*options, **fields))


def langchain(kind: str, url: str, **options: Any) -> Any:
    import langchain_openai

    return getattr(langchain_openai, kind)(base_url=f"{url}/v1", api_key=KEY, **options)


# --- parts of raw answers ---------------------------------------------------------------------------------------------


def vectors(answer: Any) -> Any:
    return [row["embedding"] for row in answer["data"]]


def ranking(answer: Any) -> Any:
    return [(row["index"], row.get("relevance_score", row.get("score"))) for row in answer["results"]]


def content(answer: Any) -> Any:
    return answer["choices"][0]["message"]["content"]


def ranked(results: Any) -> Any:
    return [(row.index, row.relevance_score) for row in results]


# --- calls of more than a line ----------------------------------------------------------------------------------------


def streamed_chat(url: str) -> str:
    options = {"model": "counter", "messages": ABOUT, "stream_options": {"include_usage": True}}
    *chunks, last = openai(url).chat.completions.create(**options, stream=True)
    assert (chunks[0].choices[0].delta.role, last.choices, last.usage.completion_tokens) == ("assistant", [], 6)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def streamed_response(url: str) -> str:
    with openai(url).responses.stream(model="counter", instructions=SYSTEM, input=USER) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text
    return text


def streamed_message(url: str) -> str:
    options: Any = {"model": "counter", "system": SYSTEM, "messages": ABOUT[1:], "max_tokens": 9}
    with anthropic(url).messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text
    return text


def generated(url: str, streams: bool) -> str:
    client = hugging_face(f"{url}/models/counter")
    return "".join(client.text_generation("a", max_new_tokens=2, stream=streams))


def jina(url: str) -> Any:
    from langchain_community.document_compressors import jina_rerank

    jina_rerank.JINA_API_URL = f"{url}/v1/rerank"  # this client has its address in a constant
    results = jina_rerank.JinaRerank(model="reranker", jina_api_key=KEY, top_n=2).rerank(DOCUMENTS, "red")
    return [(row["index"], row["relevance_score"]) for row in results]


def langchain_cohere(url: str) -> Any:
    from langchain_cohere import CohereRerank

    results = CohereRerank(model="reranker", cohere_api_key=KEY, base_url=url, top_n=2).rerank(DOCUMENTS, "red")
    return [(row["index"], row["relevance_score"]) for row in results]


def llama_index(url: str, package: str, kind: str, **options: Any) -> Any:
    import importlib

    from llama_index.core.schema import NodeWithScore, TextNode

    module = importlib.import_module(f"llama_index.postprocessor.{package}")
    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(number))) for number, text in enumerate(DOCUMENTS)]
    ranked = getattr(module, kind)(base_url=url, top_n=2, **options).postprocess_nodes(nodes, query_str="red")
    return [(int(node.node.node_id), node.score) for node in ranked]


def llama_index_embedding(url: str) -> Any:
    from llama_index.embeddings.openai import OpenAIEmbedding

    options: Any = {"model_name": "embedding", "api_base": f"{url}/v1", "api_key": KEY, "max_retries": 0}
    return OpenAIEmbedding(**options).get_text_embedding_batch(TEXTS)


def llama_index_of_tei(url: str) -> Any:
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    options: Any = {"model_name": "any", "base_url": url, "auth_token": KEY}
    return TextEmbeddingsInference(**options).get_text_embedding_batch(TEXTS)


def langchain_of_tei(url: str) -> Any:
    from langchain_huggingface import HuggingFaceEndpointEmbeddings

    return HuggingFaceEndpointEmbeddings(model=f"{url}/embed", huggingfacehub_api_token=KEY).embed_documents(TEXTS)


NODE = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[1] + "/v1", apiKey: process.argv[2], maxRetries: 0 });
const messages = JSON.parse(process.argv[3]);
const stream = await client.chat.completions.create({ model: "counter", messages, stream: true });
let text = "";
for await (const chunk of stream) text += chunk.choices[0].delta.content ?? "";
const error = await client.chat.completions.create({ model: "counter", messages, n: 1000000 }).catch((e) => e);
console.log(JSON.stringify([text, error.constructor.name, error.param]));
"""


def node(url: str) -> Any:
    command = ["node", "--input-type=module", "--eval", NODE, "--", url, KEY, json.dumps(ABOUT)]
    done = subprocess.run(command, cwd=CLIENTS, capture_output=True, text=True, timeout=300, check=True)
    text, *error = json.loads(done.stdout)
    assert error == ["BadRequestError", "n"]
    return text


# --- rows -------------------------------------------------------------------------------------------------------------

CHAT = {"messages": ABOUT}
FLOATS = {"texts": TEXTS, "embedding_types": ["float"]}
RANK = {"model": "reranker", "query": "red", "documents": DOCUMENTS, "top_n": 2}
MESSAGE: dict[str, Any] = {"system": SYSTEM, "messages": ABOUT[1:]}
RESPONSE: dict[str, Any] = {"instructions": SYSTEM, "input": USER}
FEW: dict[str, Any] = {"model": "counter", "max_tokens": 2, "temperature": 0.5}


def embedded(url: str, **options: Any) -> Any:
    answer = openai(url).embeddings.create(model="embedding", input=TEXTS, **options)
    return [row.embedding for row in answer.data]


def embedded_by_infinity(url: str) -> Any:
    return [row.embedding for row in infinity(url, "embeddings", "OpenAIEmbeddingInputText", TEXTS, "embedding").data]


def embedded_by_cohere(url: str, version: str) -> Any:
    options: Any = {"model": "embedding", "input_type": "search_query", **FLOATS}
    return cohere(url, version).embed(**options).embeddings.float_


def features(address: str) -> Any:
    return hugging_face(address).feature_extraction(TEXTS).tolist()


CLIENTS_OF = [
    Clients(
        *("embeddings", {"input": TEXTS}, vectors),
        {
            "openai": embedded,  # which asks for base64
            "openai floats": lambda url: embedded(url, encoding_format="float"),
            "langchain": lambda url: langchain(
                *("OpenAIEmbeddings", url), model="embedding", check_embedding_ctx_length=False
            ).embed_documents(TEXTS),
            "llama-index": llama_index_embedding,
            "infinity": embedded_by_infinity,
        },
    ),
    Clients(
        *("rerank-short", {}, ranking),
        {
            "infinity": lambda url: ranked(
                infinity(url, "rerank", "RerankInput", "red", DOCUMENTS, model="reranker").results
            )
        },
    ),
    Clients("rerank", {"top_n": 2}, ranking, {"langchain jina": jina}),
    Clients(
        *("cohere-rerank", {"top_n": 2}, ranking),
        {
            "Client": lambda url: ranked(cohere(url, "Client").rerank(**RANK).results),
            "ClientV2": lambda url: ranked(cohere(url).rerank(**RANK).results),
            "langchain": langchain_cohere,
            "llama-index": lambda url: llama_index(url, "cohere_rerank", "CohereRerank", model="reranker", api_key=KEY),
        },
    ),
    Clients(
        *("tei-any-task", {}, lambda answer: [(row["index"], row["score"]) for row in answer[:2]]),
        {
            "llama-index": lambda url: llama_index(
                url, "tei_rerank", "TextEmbeddingInference", auth_token=f"Bearer {KEY}"
            )
        },
    ),
    Clients(
        *("cohere-embed", FLOATS, lambda answer: answer["embeddings"]["float"]),
        {"ClientV2": lambda url: embedded_by_cohere(url, "ClientV2")},
    ),
    Clients(
        *("cohere-embed-v1", FLOATS, lambda answer: answer["embeddings"]["float"]),
        {"Client": lambda url: embedded_by_cohere(url, "Client")},
    ),
    Clients(
        *("cohere-chat", CHAT, lambda answer: answer["message"]["content"][0]["text"]),
        {"ClientV2": lambda url: cohere(url).chat(model="counter", messages=ABOUT).message.content[0].text},
    ),
    Clients(
        *("tei-embed", {"inputs": TEXTS}, list),
        {
            "llama-index": llama_index_of_tei,
            "langchain": langchain_of_tei,
            "hugging face": lambda url: features(f"{url}/embed"),
            "hugging face, system": lambda url: features(f"{url}/models/embedding"),
            "hugging face, path of system": lambda url: features(f"{url}/models/embedding/embed"),
        },
    ),
    Clients(
        *("completions", FEW, lambda answer: answer["choices"][0]["text"]),
        {
            "openai": lambda url: openai(url).completions.create(prompt="a", **FEW).choices[0].text,
            "langchain": lambda url: langchain("OpenAI", url, **FEW).invoke("a"),
        },
    ),
    Clients(
        *("chat", CHAT, content),
        {
            "openai": lambda url: (
                openai(url).chat.completions.create(model="counter", **CHAT).choices[0].message.content
            ),
            "openai stream": streamed_chat,
            "node stream": node,
            "langchain": lambda url: langchain("ChatOpenAI", url, model="counter").invoke(PAIRS).content,
            "langchain stream": lambda url: "".join(
                chunk.content for chunk in langchain("ChatOpenAI", url, model="counter").stream(PAIRS)
            ),
        },
    ),
    Clients(
        *("hub-chat", CHAT, content),
        {
            "hugging face": lambda url: (
                hugging_face(f"{url}/models/counter").chat_completion(ABOUT).choices[0].message.content
            )
        },
    ),
    Clients(
        *("hub-generate", {"parameters": {"max_new_tokens": 2}}, lambda answer: answer[0]["generated_text"]),
        {"hugging face": lambda url: generated(url, False), "hugging face stream": lambda url: generated(url, True)},
    ),
    Clients(
        *("responses", RESPONSE, lambda answer: answer["output"][0]["content"][0]["text"]),
        {
            "openai": lambda url: openai(url).responses.create(model="counter", **RESPONSE).output_text,
            "openai stream": streamed_response,
        },
    ),
    Clients(
        *("messages", MESSAGE, lambda answer: answer["content"][0]["text"]),
        {
            "anthropic": lambda url: (
                anthropic(url).messages.create(model="counter", max_tokens=9, **MESSAGE).content[0].text
            ),
            "anthropic stream": streamed_message,
        },
    ),
    Clients(
        *("count-tokens", MESSAGE, lambda answer: answer["input_tokens"]),
        {"anthropic": lambda url: anthropic(url).messages.count_tokens(model="counter", **MESSAGE).input_tokens},
    ),
    Clients(
        *("speech", {}, bytes),
        {"openai": lambda url: openai(url).audio.speech.create(model="speaker", input="a", voice="default").content},
    ),
]


# --- objects and tools ------------------------------------------------------------------------------------------------


def by_instructor(url: str, mode: str, model: str) -> Any:
    import instructor

    wrapped = instructor.from_openai(openai(url), mode=instructor.Mode[mode])
    return wrapped.chat.completions.create(model=model, messages=ABOUT, response_model=Battery, max_retries=0)


def by_outlines(url: str, maker: str) -> Any:
    import outlines

    text = getattr(outlines, maker)(openai(url), "battery")(USER, Battery)
    return Battery.model_validate_json(text)


def by_langchain(url: str, method: str, model: str) -> Any:
    chat = langchain("ChatOpenAI", url, model=model, max_retries=0)
    return chat.with_structured_output(Battery, method=method).invoke(USER)


def by_litellm(url: str, provider: str) -> Any:
    import litellm

    options = {"api_base": f"{url}/v1", "api_key": KEY, "response_format": Battery}
    return Battery.model_validate_json(
        litellm.completion(f"{provider}/battery", ABOUT, **options).choices[0].message.content
    )


def by_llama_index(url: str) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    options = {"is_chat_model": True, "is_function_calling_model": True}
    model: Any = OpenAILike(model="battery_caller", api_base=f"{url}/v1", api_key=KEY, **options)
    return model.as_structured_llm(Battery).complete(USER).raw


def by_parse(url: str) -> Any:
    ask: Any = {"model": "battery", "messages": ABOUT, "response_format": Battery}
    return openai(url).chat.completions.parse(**ask).choices[0].message.parsed


def by_parsed_stream(url: str) -> Any:
    ask: Any = {"model": "battery", "messages": ABOUT, "response_format": Battery}
    with openai(url).chat.completions.stream(**ask) as stream:
        return stream.get_final_completion().choices[0].message.parsed


def by_tools_of_responses(url: str) -> Any:
    tool = {"type": "function", "name": "Battery", "parameters": Battery.model_json_schema(), "strict": True}
    options: Any = {"model": "battery_caller", "input": USER, "tools": [tool], "tool_choice": "required"}
    with openai(url).responses.stream(**options) as stream:
        (call,) = [item for item in stream.get_final_response().output if item.type == "function_call"]
    return Battery.model_validate_json(call.arguments)


def by_tools_of_messages(url: str) -> Any:
    tools = [{"name": "Battery", "input_schema": Battery.model_json_schema()}]
    options: Any = {"model": "battery_caller", "max_tokens": 200, "messages": ABOUT[1:], "tools": tools}
    with anthropic(url).messages.stream(**options, tool_choice={"type": "any"}) as stream:
        (call,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    return Battery.model_validate(call.input)


# What gives a Battery, with a grammar for it in Triton's request.
OBJECTS: dict[str, Callable[[str], Any]] = {
    "instructor TOOLS": lambda url: by_instructor(url, "TOOLS", "battery_caller"),
    "instructor JSON_SCHEMA": lambda url: by_instructor(url, "JSON_SCHEMA", "battery"),
    "outlines of OpenAI": lambda url: by_outlines(url, "from_openai"),
    "outlines of vLLM": lambda url: by_outlines(url, "from_vllm"),
    "langchain json_schema": lambda url: by_langchain(url, "json_schema", "battery"),
    "langchain function_calling": lambda url: by_langchain(url, "function_calling", "battery_caller"),
    "litellm openai": lambda url: by_litellm(url, "openai"),
    "litellm hosted_vllm": lambda url: by_litellm(url, "hosted_vllm"),
    "llama-index": by_llama_index,
    "openai parse": by_parse,
    "openai parsed stream": by_parsed_stream,
    "openai responses parse": lambda url: (
        openai(url).responses.parse(model="battery", input=USER, text_format=Battery).output_parsed
    ),
    "openai responses tools": by_tools_of_responses,
    "anthropic parse": lambda url: (
        anthropic(url)
        .messages.parse(model="battery", max_tokens=200, messages=ABOUT[1:], output_format=Battery)
        .parsed_output
    ),
    "anthropic tools": by_tools_of_messages,
}
