"""Hugging Face's Inference API, at the address of each system."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

from tests.conformance.apis.models import IMAGE
from tests.conformance.apis.run import ABSENT, ALWAYS, Case, Given, Wrong
from tests.support.triton_stand_in import COUNTED

PATH = "/models/{model}"
CASES = [
    Case(
        *("hub-generate", PATH, {"inputs": "a"}, "tei", "tei", "counter"),
        triton={"text_input": ["a"], **ALWAYS, "temperature": [0], "max_new_tokens": [100]},
        answer=[{"generated_text": "".join(COUNTED)}],
    ),
    Case(
        *("hub-pipeline", PATH, {"inputs": "a"}, "tei"),
        system="summarization",
        triton={"text": ["a"], "parameters": {}},
        answer=[{"summary_text": "b"}],
    ),
]
ENCODED = base64.b64encode(IMAGE).decode()
SOUND = base64.b64encode(b"RIFF").decode()
LABELS = {"candidate_labels": ["x", "y"]}
NO_TEXT = {"text": ABSENT}
BORN = "Marie Curie was born in Warsaw"
QUESTION = {"question": "Where?", "context": BORN}
# The parameters that LangChain's HuggingFaceEndpoint sends, without typical_p, which is 0.95 by default.
LANGCHAIN = {
    **{"max_new_tokens": 2, "top_k": 10, "top_p": 0.95, "temperature": 0.8, "repetition_penalty": None},
    **{"truncate": None, "return_full_text": False, "stop": [], "seed": None, "do_sample": False, "watermark": False},
}


def ask(system: str, inputs: Any, triton: dict[str, Any] | None, answer: Any, **fields: Any) -> Given:
    return Given({"inputs": inputs, **fields}, triton, answer, system)


GIVEN = {
    "hub-pipeline": [
        ask(
            *("zero-shot-classification", "a", {"parameters": LABELS}),
            [{"label": "x", "score": 0.9}, {"label": "y", "score": 0.1}],
            parameters=LABELS,
        ),
        ask(
            *("zero-shot-image-classification", ENCODED, NO_TEXT | {"image": [ENCODED], "parameters": LABELS}),
            [{"label": "x", "score": 0.9}],
            parameters=LABELS,
        ),
        ask(
            *("automatic-speech-recognition", SOUND),
            NO_TEXT
            | {"audio": [SOUND], "parameters": {"return_timestamps": True, "generate_kwargs": {"num_beams": 2}}},
            {"text": "Hello"},
            parameters={"return_timestamps": True, "generation_parameters": {"num_beams": 2}},
        ),
        ask(
            *("table-question-answering", {"table": {"a": ["1"]}, "query": "q"}),
            NO_TEXT | {"table": [json.dumps({"a": ["1"]})], "query": ["q"]},
            {"aggregator": "NONE", "answer": "36"},
            parameters={"model": "m"},
        ),
        ask(
            *("text-classification", "a", {"parameters": {"top_k": None}}, [[{"label": "x", "score": 0.9}]]),
            options={"wait_for_model": True},
        ),
        ask("token-classification", "a", {"parameters": {"aggregation_strategy": "simple"}}, []),
        ask("keypoint-matching", [ENCODED] * 2, NO_TEXT | {"images": [json.dumps([ENCODED] * 2)]}, []),
        ask(
            "text-to-audio",
            "a",
            {"parameters": {"generate_kwargs": {"do_sample": True}}},
            b"RIFF...",
            parameters={"do_sample": True},
        ),
        ask(
            "summarization",
            "a",
            {"parameters": {"max_new_tokens": 5}},
            [{"summary_text": "b"}],
            parameters={"generate_parameters": {"max_new_tokens": 5}},
        ),
        ask("names", BORN, None, lambda got: (got[0]["entity_group"], got[0]["word"]) == ("PER", "Marie Curie")),
        ask("answers", QUESTION, None, {"answer": "Warsaw", "start": 24, "end": 30}),
        # The stand-in has a token for each character, of which the last one of the mask is taken for it.
        ask(
            "mask",
            "The [MASK].",
            None,
            [{"token": 7, "token_str": "capital", "sequence": "The [MASK\a."}],
            parameters={"top_k": 1},
        ),
        ask(
            "seer",
            {"image": ENCODED, "question": "What is it?"},
            None,
            [{"answer": " ein zwei drei", "score": math.exp(-1.5)}],
        ),
    ],
    "hub-generate": [
        Given({"parameters": {"max_new_tokens": 2}}, {"max_new_tokens": [2]}, [{"generated_text": " ein zwei"}]),
        *(
            Given(
                {"parameters": LANGCHAIN | {"typical_p": typical_p}},
                {"max_new_tokens": [2], "top_k": 10, "top_p": [0.95], "temperature": [0.8]},
                [{"generated_text": " ein zwei"}],
            )
            for typical_p in (None, 1.0)
        ),
    ],
}


def refused(system: str, fields: dict[str, Any], reason: str, status: int = 400) -> Wrong:
    return Wrong(fields, reason=reason, status=status, system=system)


WRONG = {
    "hub-pipeline": [
        refused("summarization", {"inputs": ABSENT, "parameters": {}}, "Missing required parameter: 'inputs'"),
        refused("summarization", {"inputs": 3}, "'inputs.text' must be a text"),
        refused("summarization", {"inputs": []}, "'inputs' must not be empty"),
        refused("summarization", {"stream": True}, "does not stream"),
        refused("summarization", {"parameters": {"generate_parameters": 1}}, "must be an object"),
        refused("table-question-answering", {"inputs": {"question": "q", "context": "c"}}, "takes table, query"),
        refused("zero-shot-image-classification", {"inputs": {"image": 1}}, "'inputs.image' must be image in base64"),
        refused("pets", {"inputs": ENCODED, "parameters": {"top_k": "x"}}, "top_k"),
        refused("pets", {"inputs": "a text"}, "'inputs' is not valid base64"),
        refused("answers", {"inputs": {}, "parameters": {"doc_stride": 9}}, "'doc_stride'"),
        refused("answers", {"inputs": {"question": "a"}}, "'inputs.context' must be a text"),
        refused("names", {"parameters": {"aggregation_strategy": "max"}}, "'aggregation_strategy'"),
        refused("counter", {"parameters": {"max_new_tokens": 0}}, "max_new_tokens"),
        refused("counter", {"inputs": ["a"]}, "'inputs' must be a text"),
        refused("counter", {"parameters": {"typical_p": 0.95}}, "'typical_p' is not supported here"),
    ]
}
