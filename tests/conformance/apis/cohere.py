"""Cohere's chats, embeddings and reranking; its v1 reranking is Jina's (embeddings.py)."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

from tests.conformance.apis.embeddings import ELSEWHERE, OF_IMAGE
from tests.conformance.apis.models import IMAGE, PART, URL
from tests.conformance.apis.openai_text import CITY, TOOLS, called
from tests.conformance.apis.run import ABSENT, ALWAYS, Begins, Case, Exactly, Given, Wrong, neutral, wrong
from tests.conformance.apis.world import CALLS
from tests.support.triton_stand_in import COUNTED, vector

USER = {"role": "user", "content": "a"}
CHAT = {"model": "counter", "messages": [USER]}
TEXTS = {"model": "embedding", "texts": ["a"]}
RANKED = {"model": "reranker", "query": "red", "documents": ["nothing", "a red house", "red"]}
TO_CHAT = {"messages": [USER], **ALWAYS}
TO_EMBED = {"input_text": ["a"]}
V1_TOOLS = [
    {"name": "weather", "parameter_definitions": {"city": {"type": "str", "description": "A city", "required": True}}}
]
CITY_OF_V1 = {"type": "object", "properties": {"city": {"type": "string", "description": "A city"}}}
CALL = {"name": "weather", "parameters": {"city": "Oslo"}}
OUTPUT = {"call": CALL, "outputs": [{"sky": "clear"}]}
AGENT = {"model": "agent", "tools": TOOLS}
OPTIONS = {"k": 5, "p": 0.25, "temperature": 0.5, "stop_sequences": ["x"], "max_tokens": 2, "safety_mode": "STRICT"}
OPTIONS |= {"response_format": {"type": "json_object", "schema": CITY}, "documents": []}
TO_OPTIONS = {"top_k": 5, "top_p": [0.25], "temperature": [0.5], "stop": ["x"], "max_new_tokens": [2]}
TO_OPTIONS |= {"structured_outputs": {"json": CITY}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def usage(new: int) -> dict[str, Any]:
    counts = {"input_tokens": 1, "output_tokens": new}
    return {"billed_units": counts, "tokens": counts}


CASES = [
    Case(
        *("cohere-chat", "/v2/chat", CHAT, "cohere", "cohere v2"),
        prompt="messages",
        triton=TO_CHAT,
        answer={
            "message": {"role": "assistant", "content": [text("".join(COUNTED))]},
            "finish_reason": "COMPLETE",
            "usage": usage(6),
        },
    ),
    Case(
        *("cohere-chat-v1", "/v1/chat", {"model": "counter", "message": "a"}, "cohere", "cohere v1"),
        triton=TO_CHAT,
        answer={
            "text": "".join(COUNTED),
            "finish_reason": "COMPLETE",
            "chat_history": [{"role": "USER", "message": "a"}, {"role": "CHATBOT", "message": "".join(COUNTED)}],
        },
    ),
    Case(
        *("cohere-embed", "/v2/embed", TEXTS, "cohere"),
        many="texts",
        triton=TO_EMBED,
        answer=Exactly(
            {
                "id": Begins("embed-"),
                "embeddings": Exactly({"float": [vector("a")]}),
                "texts": ["a"],
                "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 3}},
                "response_type": "embeddings_by_type",
            }
        ),
    ),
    Case(
        *("cohere-embed-v1", "/v1/embed", TEXTS, "cohere"),
        many="texts",
        triton=TO_EMBED,
        answer={"response_type": "embeddings_floats", "embeddings": [vector("a")]},
    ),
    Case(
        *("cohere-rerank", "/v2/rerank", RANKED, "cohere"),
        many="documents",
        triton={"query": ["red"] * 3, "text": RANKED["documents"]},
        answer={
            "results": [
                Exactly({"index": index, "relevance_score": score}) for index, score in ((1, 1), (2, 1), (0, 0))
            ],
            "meta": {"billed_units": {"input_tokens": 14}},
        },
    ),
]
ABC = np.array([vector("abc"), vector("b")], "<f4")
BITS = np.packbits(ABC > 0, axis=1).astype(int)
BY_TYPE = Exactly(
    {
        "float": [row for row in ABC.tolist()],
        "base64": [base64.b64encode(row.tobytes()).decode() for row in ABC],
        "ubinary": BITS.tolist(),
        "binary": (BITS - 128).tolist(),
    }
)
SHORT = [value / math.hypot(*vector("a")[:2]) for value in vector("a")[:2]]
CLIP = {"model": "clip", "texts": ABSENT}
TO_IMAGE = {"input_text": ABSENT, "image_bytes": [IMAGE]}
GIVEN = {
    "cohere-chat": [
        Given(OPTIONS, TO_OPTIONS),
        Given(
            AGENT,
            {"tools": TOOLS},
            {
                "message": {
                    "content": [{"type": "thinking", "thinking": "Let me see."}, text("I ask.")],
                    "tool_calls": [called("weather", '{"city": "Oslo"}'), called("time", "{}")],
                },
                "finish_reason": "TOOL_CALL",
                "usage": usage(len(CALLS)),
            },
        ),
        Given(
            AGENT
            | {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_plan": "I ask.", "tool_calls": [called("time", "{}", id="1")]},
                    {
                        "role": "tool",
                        "tool_call_id": "1",
                        "content": [{"type": "document", "document": {"data": {"sky": "clear"}}}],
                    },
                    {
                        "role": "assistant",
                        "content": [{"type": "thinking", "thinking": "Hm."}, text("Clear.")],
                        "citations": None,
                    },
                    USER,
                ]
            },
            {
                "tools": TOOLS,
                "messages": [
                    USER,
                    {"role": "assistant", "content": "I ask.", "tool_calls": [called("time", {}, id="1")]},
                    {"role": "tool", "tool_call_id": "1", "name": "time", "content": '{"sky": "clear"}'},
                    {"role": "assistant", "content": "Clear.", "reasoning_content": "Hm."},
                    USER,
                ],
            },
        ),
    ],
    "cohere-chat-v1": [
        Given(OPTIONS, TO_OPTIONS),
        Given(
            {"model": "agent", "preamble": "Be brief.", "tools": V1_TOOLS},
            {
                "messages": [{"role": "system", "content": "Be brief."}, USER],
                "tools": [{"function": {"name": "weather", "parameters": CITY_OF_V1}}],
            },
            {
                "text": "I ask.",
                "finish_reason": "COMPLETE",
                "tool_calls": [CALL, {"name": "time", "parameters": {}}],
                "chat_history": [{"role": "USER"}, {"role": "CHATBOT"}],
            },
        ),
        *(
            Given(
                {"model": "agent", "tools": V1_TOOLS, "tool_results": [OUTPUT], **asked},
                {
                    "tools": list,
                    "messages": [
                        USER,
                        {"tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
                        {"role": "tool", "content": '[{"sky": "clear"}]'},
                    ],
                },
            )
            for asked in (
                {"message": "a"},
                {
                    "message": "",
                    "chat_history": [
                        {"role": "USER", "message": "a"},
                        {"role": "CHATBOT", "message": "", "tool_calls": [CALL]},
                    ],
                },
            )
        ),
    ],
    "cohere-embed": [
        Given(
            {
                "texts": ABSENT,
                "inputs": [{"content": [text("abc")]}, {"content": [text("b")]}],
                "embedding_types": [*BY_TYPE],
            },
            {"input_text": ["abc", "b"]},
            {"embeddings": BY_TYPE, "texts": ["abc", "b"]},
        ),
        Given({"output_dimension": 2}, {}, {"embeddings": {"float": [SHORT]}}),
        Given(
            {"model": "prompted", "texts": ["a", "b"], "input_type": "search_query"},
            {"input_text": ["a", "b"], "prompt_name": ["search_query|query|"] * 2},
        ),
        *(
            Given(CLIP | fields, TO_IMAGE, {"embeddings": {"float": [OF_IMAGE]}, "texts": []})
            for fields in ({"images": [URL], "input_type": "image"}, {"inputs": [{"content": [PART]}]})
        ),
    ],
    "cohere-embed-v1": [
        Given(
            {"embedding_types": ["float"]},
            {},
            {"response_type": "embeddings_by_type", "embeddings": Exactly({"float": [vector("a")]})},
        ),
        *neutral({"input_type": "search_query", "truncate": "END"}),
    ],
    "cohere-rerank": [Given({"top_n": 2}, {}, {"results": [{"index": 1}, {"index": 2}]})],
}

WRONG = {
    "cohere-chat": [
        Wrong({"k": -5}, "k"),
        Wrong({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        Wrong({"documents": ["a"]}, "documents"),
        Wrong({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type"),
        Wrong({"messages": [{"role": "chatbot", "content": "a"}]}, "messages[0].role"),
    ],
    "cohere-chat-v1": [
        Wrong({"message": "a", "connectors": [{"id": "web-search"}]}, "connectors"),
        Wrong({"message": "a", "chat_history": [{"role": "user", "message": "a"}]}, "chat_history[0].role"),
    ],
    "cohere-embed": [
        *wrong("texts", {"texts": None}, {"inputs": []}),
        *wrong("images", {"images": ["data:image/png;base64,"]}),
        *wrong("embedding_types[0]", {"embedding_types": ["int8"]}),
        *wrong("truncate", {"truncate": "NONE"}, {"truncate": "START"}),
        *wrong("max_tokens", {"max_tokens": 5}),
        *wrong("input_type", {"input_type": "video"}),
        *wrong("output_dimension", {"output_dimension": 5}),
        *(
            Wrong(CLIP | fields, reason=reason)
            for fields, reason in (
                ({"images": [ELSEWHERE["image"]]}, "the gateway fetches none"),
                ({"images": [URL], "texts": ["a"]}, "one of 'texts', 'images' and 'inputs'"),
                ({"inputs": [{"content": [{"text": "a"}, {"image": URL}]}]}, "only texts or one image"),
            )
        ),
    ],
    "cohere-rerank": [
        *wrong("max_tokens_per_doc", {"model": "instructed", "max_tokens_per_doc": 5}),
        *wrong("query", {"query": ""}),
    ],
}
