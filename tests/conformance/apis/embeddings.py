"""Requests to encoders in the APIs of OpenAI, vLLM, Jina and Voyage, with texts and images."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from tests.conformance.apis.models import GIF, IMAGE, PART, URL
from tests.conformance.apis.openai_text import NOW, USER
from tests.conformance.apis.run import ABSENT, Begins, Case, Exactly, Given, Wrong, neutral, wrong
from tests.support.triton_stand_in import ids_of, vector

DOCUMENTS = ["nothing", "a red house", "red"]
TEXT = {"model": "embedding", "input": "a"}
RANKED = {"model": "reranker", "query": "red", "documents": DOCUMENTS}
LABELLED = {"model": "classifier", "input": "good"}
SCORED = {"model": "reranker", "text_1": "red house", "text_2": DOCUMENTS}
TO_EMBED = {"input_text": ["a"]}
TO_RANK = {"query": ["red"] * 3, "text": DOCUMENTS}
TO_SCORE = {"query": ["red house"] * 3, "text": DOCUMENTS}
PROMPT = {"model": "embedding", "prompt": "비 a"}
TO_TOKENIZE = {"input_text": ["비 a"], "outputs": ["tokenized"]}


def usage(tokens: int, **more: int) -> Any:
    return Exactly({"prompt_tokens": tokens, "total_tokens": tokens, **more})


def vectors(*expected: Any) -> dict[str, Any]:
    """Return an answer with these vectors, or those of these texts."""
    rows = [vector(one) if isinstance(one, str) else one for one in expected]
    return {"data": [{"index": index, "embedding": row} for index, row in enumerate(rows)]}


def in_base64(row: list[float]) -> str:
    return base64.b64encode(np.array(row, "<f4").tobytes()).decode()


def unit(row: list[float]) -> list[float]:
    return list(np.array(row) / np.linalg.norm(row))


def ranking(*places: tuple[int, float]) -> list[Any]:
    return [
        Exactly({"index": index, "relevance_score": score, "document": {"text": DOCUMENTS[index]}})
        for index, score in places
    ]


RANKING = ranking((1, 1), (2, 1), (0, 0))
CLASS = {"index": 0, "label": "positive", "probs": [0.25, 0.75], "num_classes": 2}
SCORES = [{"index": index, "object": "score", "score": score} for index, score in enumerate((0, 1, 0.5))]
CASES = [
    Case(
        *("embeddings", "/v1/embeddings", TEXT),
        many="input",
        triton=TO_EMBED,
        answer=Exactly(
            {
                "object": "list",
                "data": [Exactly({"object": "embedding", "index": 0, "embedding": vector("a")})],
                "model": "embedding",
                "usage": usage(3),
            }
        ),
    ),
    Case("embeddings-short", "/embeddings", TEXT, many="input", triton=TO_EMBED, answer=vectors("a")),
    Case(
        *("rerank", "/v1/rerank", RANKED),
        many="documents",
        triton=TO_RANK,
        answer=Exactly(
            {
                "id": Begins("rerank-"),
                "model": "reranker",
                "usage": usage(14),
                "results": RANKING,
                "data": RANKING,  # of Voyage
            }
        ),
    ),
    Case("rerank-short", "/rerank", RANKED, many="documents", triton=TO_RANK, answer={"results": RANKING}),
    Case(
        *("hub-rerank", "/models/{model}/rerank", RANKED, "tei"),
        system="reranker",
        many="documents",
        triton=TO_RANK,
        answer={"results": [{"index": 1, "document": "a red house"}, {"index": 2, "document": "red"}, {"index": 0}]},
    ),
    Case(
        *("classify", "/v1/classify", LABELLED),
        many="input",
        triton={"input_text": ["good"]},
        answer=Exactly(
            {
                "id": Begins("classify-"),
                "object": "list",
                "created": NOW,
                "model": "classifier",
                "data": [Exactly(CLASS)],
                "usage": usage(3, completion_tokens=0),
            }
        ),
    ),
    Case(
        "classify-short", "/classify", LABELLED, many="input", triton={"input_text": ["good"]}, answer={"data": [CLASS]}
    ),
    Case(
        *("moderations", "/v1/moderations", LABELLED),
        many="input",
        answer={"results": [{"flagged": True, "category_scores": {"negative": 0.25, "positive": 0.75}}]},
    ),
    Case(
        *("score", "/v1/score", SCORED),
        many="text_2",
        triton=TO_SCORE,
        answer=Exactly(
            {
                "id": Begins("score-"),
                "object": "list",
                "created": NOW,
                "model": "reranker",
                "data": SCORES,
                "usage": usage(17, completion_tokens=0),
            }
        ),
    ),
    Case("score-short", "/score", SCORED, many="text_2", triton=TO_SCORE, answer={"data": SCORES}),
    Case(*("pooling", "/pooling", TEXT), many="input", triton=TO_EMBED, answer={"data": [{"data": vector("a")}]}),
    Case(
        *("tokenize", "/tokenize", PROMPT),
        triton=TO_TOKENIZE,
        answer=Exactly({"count": 5, "max_model_len": 256, "tokens": ids_of("비 a"), "token_strs": None}),
    ),
    Case(
        *("detokenize", "/detokenize", {"model": "embedding", "tokens": ids_of("a")}),
        triton={"input_text": [ids_of("a")], "outputs": ["tokenized"]},
        answer={"prompt": "[1]a[2]"},
    ),
]
ELSEWHERE = {"image": "https://example.org/a.png"}
OF_IMAGE = [len(IMAGE), 0, 0, 0]
CLIP = {"model": "clip", "input": ABSENT}
CHUNKS = ["Berlin is a city. ", "Größe: ", "3.9 million."]
TO_CHUNKS = {"input_text": ["".join(CHUNKS)], "spans": [[[0, 18], [18, 25], [25, 37]]]}
MULTI = {"model": "per_token", "embedding_type": "multi", "input": ["two words", "one"]}
OF_TOKENS = [[[n, n] for n in range(1, 5)], [[n, n] for n in range(1, 4)]]
SEA = {"model": "m3", "input": ["the sea", "rain falls"]}
TO_SEA = {"input_text": SEA["input"]}
RAIN = {"model": "m3", "query": "rain falls", "documents": ["the sea", "rain falls", "rain"]}
TO_RAIN = {"query": ABSENT, "text": ABSENT}
CUT = {"query": "red house", "documents": ["a red house", "red"]}
TOXIC = {"model": "toxic"}
TEXTS = [{"type": "text", "text": text} for text in ("0.25 0.5", "0.375 0")]


def user(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content]}]}


BY_VECTORS = Given(
    RAIN,
    TO_RAIN
    | {
        "query": [RAIN["query"]] * 3,
        "input_text": RAIN["documents"],
        "outputs": lambda names: {*names} == {"score", "token_count"},
    },
    {"results": [{"index": index, "relevance_score": score} for index, score in ((1, 2), (2, 1), (0, 0))]},
)
GIVEN = {
    "embeddings": [
        Given({}, {"outputs": ["output__0", "token_count"]}),  # no others, which would cost time
        Given({"encoding_format": "base64"}, {}, {"data": [{"embedding": in_base64(vector("a"))}]}),
        Given({"model": "uncounted"}, {}, {"usage": None}),
        Given({"input": "abc", "dimensions": 2}, {"input_text": ["abc"]}, vectors(unit(vector("abc")[:2]))),
        Given({"dimensions": 4}, {}),
        *(
            Given({"model": "prompted", **fields}, {"prompt_name": [names]})
            for fields, names in (
                ({"task": "retrieval.query"}, "retrieval.query|query|"),
                ({"task": "retrieval.passage"}, "retrieval.passage|document|"),
                ({"task": "classification"}, "classification|"),
                ({"input_type": "passage"}, "passage|document|"),
                ({"input_type": "query"}, "query|"),
                ({"input_type": "query", "prompt_name": "web"}, "web"),
            )
        ),
        *neutral(
            *({"task": "retrieval.query"}, {"task": "retrieval.passage"}, {"task": "classification"}),
            *({"input_type": "query"}, {"input_type": "passage"}),
            *({"user": "me"}, {"dimensions": None}, {"dimensions": 0}, {"metadata": {}}, {"stream": False}),
        ),
        *(
            Given({"input": [ids_of(one) for one in texts]}, {"input_text": [*map(ids_of, texts)]}, vectors(*texts))
            for texts in (["two words"], ["two words", "비", "안녕 \U0001f600 é"])
        ),
        Given({"input": ids_of("abc")}, {"input_text": [ids_of("abc")]}, vectors("abc")),
        Given({"input": ["a", ids_of("a")]}, {"input_text": ["a", ids_of("a")]}, vectors("a", "a")),
        Given(
            {"model": "sparse", "embedding_type": "sparse", "input": ["abc", "b"]},
            {"input_text": ["abc", "b"]},
            {
                "data": [
                    {"embedding": {"indices": [97, 98, 99], "values": [97 / 8, 98 / 8, 99 / 8]}},
                    {"embedding": {"indices": [98], "values": [98 / 8]}},
                ]
            },
        ),
        Given(MULTI, {"input_text": MULTI["input"]}, vectors(*OF_TOKENS)),
        Given(
            MULTI | {"encoding_format": "base64"},
            {"input_text": MULTI["input"]},
            {"data": [{"embedding": [*map(in_base64, rows)]} for rows in OF_TOKENS]},
        ),
        Given(
            SEA | {"embedding_type": "dense"},
            TO_SEA | {"outputs": ["sentence_embedding", "token_count"]},
            vectors(*SEA["input"]),
        ),
        Given(
            SEA | {"embedding_type": "sparse"},
            TO_SEA | {"outputs": lambda names: {*names} == {"token_id", "weight", "token_count"}},
            {"data": [{"embedding": {"indices": [len(text)], "values": [0.5]}} for text in SEA["input"]]},
        ),
        Given(
            SEA | {"embedding_type": "multi"},
            TO_SEA | {"outputs": lambda names: {*names} == {"token_embeddings", "vector_count", "token_count"}},
            vectors([[3, 1]], [[4, 1], [5, 1]]),
        ),
        Given(
            {"model": "chunked", "input": CHUNKS, "late_chunking": True},
            TO_CHUNKS,
            vectors(*CHUNKS) | {"usage": {"prompt_tokens": len("".join(CHUNKS).split()) + 2}},
        ),
        Given(
            {"model": "chunked", "input": CHUNKS, "late_chunking": True, "dimensions": 2},
            TO_CHUNKS,
            vectors(*(unit(vector(chunk)[:2]) for chunk in CHUNKS)),
        ),
        Given({"model": "long"}, {}, vectors([3, 4, 0, 0])),
        Given({"model": "long", "normalized": True, "output_dimension": 2}, {}, vectors([0.6, 0.8])),
        # --- images
        Given(
            CLIP | {"input": ["a", URL, "b c", PART, {"type": "text", "text": "d"}, {"image": URL}]},
            None,
            vectors("a", OF_IMAGE, "b c", OF_IMAGE, "d", OF_IMAGE) | {"usage": {"prompt_tokens": 3 + 4 + 3}},
        ),
        *(
            Given(CLIP | fields, {"input_text": ABSENT, "image_bytes": [IMAGE]}, vectors(OF_IMAGE))
            for fields in (
                *({"input": URL}, {"input": [URL]}, {"input": [URL], "modality": "image"}),  # the last is Infinity's
                *(user(PART), user({"image": URL}, {"type": "text", "text": ""})),  # vLLM's
            )
        ),
        Given(CLIP | {"messages": [{"role": "user", "content": "a"}]}, {}, vectors("a")),
        Given({"input": [URL]}, {"input_text": [URL]}, vectors(URL)),  # for a model of texts it is one
    ],
    "rerank-short": [BY_VECTORS],
    "rerank": [
        BY_VECTORS,
        # --- rerank and classify
        Given({"top_n": 2}, {}, {"results": RANKING[:2]}),
        Given({"top_n": 100}, {}, {"results": RANKING}),
        Given(
            {"return_documents": False},
            {},
            {"results": [Exactly({"index": i, "relevance_score": s}) for i, s in ((1, 1), (2, 1), (0, 0))]},
        ),
        Given(
            {"documents": [{"text": "a"}, "red"]},
            {"query": ["red"] * 2, "text": ["a", "red"]},
            {"results": [{"document": {"text": "red"}}, {"document": {"text": "a"}}]},
        ),
        Given({"model": "instructed", "instruction": "Find houses"}, {"prompt": ["Find houses"] * 3}),
        Given(
            CUT | {"top_k": 1, "truncation": True},
            {"query": ["red house"] * 2, "text": CUT["documents"]},
            {"data": [{"index": 0, "relevance_score": 1, "document": {"text": "a red house"}}]},
        ),
        Given(
            CUT | {"max_tokens_per_doc": 5, "top_n": 1},
            None,
            {"results": [{"index": 0, "relevance_score": 0.5, "document": {"text": "a red house"}}]},
        ),
    ],
    "cohere-rerank": [
        BY_VECTORS,
        Given(
            CUT | {"max_tokens_per_doc": 5, "top_n": 1},
            None,
            {"results": [Exactly({"index": 0, "relevance_score": 0.5})]},
        ),
        Given(
            CUT | {"return_documents": True, "top_n": 1},
            None,
            {"results": [{"index": 0, "document": {"text": "a red house"}}]},
        ),
    ],
    "classify": [
        Given(
            {"input": ["good", "bad", "so good"]},
            {"input_text": ["good", "bad", "so good"]},
            {
                "data": [
                    CLASS,
                    Exactly({"index": 1, "label": "negative", "probs": [0.75, 0.25], "num_classes": 2}),
                    CLASS | {"index": 2},
                ]
            },
        ),
        Given({"model": "pairs", "input": [["a", "b"], "c"]}, {"input_text": ["a", "c"], "text_pair": ["b", ""]}),
    ],
    "score": [
        # --- vLLM
        Given(
            {"text_1": ["red", "blue"], "text_2": ["red", "red"]},
            {"query": ["red", "blue"], "text": ["red", "red"]},
            {"data": [{"score": 1}, {"score": 0}]},
        ),
        Given(
            {"model": "embedding", "text_1": "abc", "text_2": ["abc", "b"]},
            None,
            {"data": [{"score": 1}, {"score": float(np.dot(vector("abc"), vector("b")))}]},
        ),
    ],
    "pooling": [
        Given(
            {"model": "per_token", "input": ["a", "b"]},
            {"input_text": ["a", "b"]},
            {"data": [{"data": [[n, n] for n in range(1, 4)]}] * 2},
        ),
        Given(
            {"model": "classifier", "input": ["a", "b"]},
            {"input_text": ["a", "b"]},
            {"data": [{"data": [0.75, 0.25]}] * 2},
        ),
        Given({"model": "classifier", "encoding_format": "base64"}, {}, {"data": [{"data": in_base64([0.75, 0.25])}]}),
    ],
    "tokenize": [
        Given({"add_special_tokens": False}, {}, {"tokens": ids_of("비 a")[1:-1]}),
        *(
            Given({"model": model, **fields}, {"input_text": ABSENT, "text_input": ["비 a"]}, {"tokens": tokens})
            for model in ("counter", "counter_stream")
            for fields, tokens in (({}, ids_of("비 a")), ({"add_special_tokens": False}, ids_of("비 a")[1:-1]))
        ),
        Given({"model": "counter", "prompt": ABSENT, "messages": USER}, {"input_text": ABSENT, "messages": USER}),
    ],
    "detokenize": [
        *(
            Given(
                {"model": model, "tokens": ids_of("비 a")},
                {"input_text": ABSENT, "text_input": [ids_of("비 a")]},
                {"prompt": "[1]비 a[2]"},
            )
            for model in ("counter", "counter_stream")
        ),
        Given({"tokens": []}, None, {"prompt": ""}),
    ],
    "moderations": [
        # --- moderations: a label that means nothing harmful flags nothing
        Given(
            TOXIC | {"input": ["0.75 0.25", "0.25 0.75"]},
            None,
            {
                "results": [
                    {"flagged": True, "categories": Exactly(toxic=True), "category_scores": Exactly(toxic=0.75)},
                    {"flagged": False, "categories": Exactly(toxic=False)},
                ]
            },
        ),
        Given(
            {"model": "kinds", "input": "0.75 0.75"},
            None,
            {"results": [{"categories": {"insult": True, "threat": True}}]},
        ),
        Given(
            {"model": "kinds", "input": TEXTS},
            None,
            {"results": [{"flagged": False, "category_scores": {"insult": 0.375, "threat": 0.5}}]},
        ),
    ],
}


LATE = {"model": "chunked", "input": ["a"], "late_chunking": True}
EMPTY = "so none of the {} texts was answered. Leave empty strings out."
WRONG = {
    "embeddings": [
        *wrong("input", *({"input": value} for value in ("", [], 3, None, {"text": "a"}, ["a", 1], [[1, 2], 3]))),
        *wrong("input[1]", *({"input": value} for value in (["a", ""], ["a", 1.5], ["a", None], [[1], []]))),
        *wrong("input[0]", {"input": [-1]}),
        *wrong("input[0][0]", {"input": [[2**31]]}),
        *wrong("input", {"input": [1, 2], "model": "uncounted"}),
        *wrong("embedding_type", *({"embedding_type": name} for name in ("sparse", "multi", "other"))),
        *wrong("embedding_type", {"model": "sparse"}),
        *wrong("encoding_format", {"model": "sparse", "embedding_type": "sparse", "encoding_format": "base64"}),
        Wrong({"encoding_format": "hex"}, "encoding_format", "invalid enum value 'hex', use 'float' or 'base64'."),
        *wrong("dimensions", {"model": "per_token", "embedding_type": "multi", "dimensions": 1}),
        *wrong("dimensions", *({"dimensions": value} for value in (-1, 5, 10**30, 2.5, True))),
        *wrong("output_dimension", {"output_dimension": 5}),
        *wrong("model", *({"model": value} for value in (3, None, "classifier"))),
        *(Wrong({name: ABSENT}, name, code="missing_required_parameter") for name in ("input", "model")),
        *wrong("prompt_name", {"prompt_name": "query"}),
        *wrong("task", {"task": "quary"}),
        *wrong("input_type", {"input_type": "search_query"}),
        *wrong("n", {"n": 2}),
        *wrong("stream", {"stream": True}),
        *wrong("late_chunking", LATE | {"model": "embedding"}, {"model": "m3", "late_chunking": True}),
        *wrong("dimensions", LATE | {"dimensions": 9}),
        *wrong("input", LATE | {"input": [[1, 2]]}),
        *wrong("normalized", {"model": "sparse", "embedding_type": "sparse", "normalized": True}),
        *(
            Wrong({"input": texts}, reason=f"{places} {EMPTY.format(len(texts))}")
            for texts, places in (
                (["a", ""], "'input[1]' is an empty string,"),
                (["", "a", ""], "'input[0]', 'input[2]' are empty strings,"),
                ([""] * 12, "'input[9]' and 2 others are empty strings,"),
            )
        ),
        *(
            Wrong({"model": name}, "model", status=404, code="model_not_found")
            for name in ("nothing", "a/b/c", "../embedding", "", "encoder_stream", "안녕", "\x00", "x" * 10_000)
        ),
        *(
            Wrong(CLIP | fields, param, reason)
            for fields, param, reason in (
                ({"input": [ELSEWHERE]}, "input[0]", "the gateway fetches none"),
                ({"input": ["a", {"image": GIF}]}, "input[1]", "is image/gif"),
                ({"input": [GIF]}, "input[0]", "is image/gif"),
                ({"input": ["a cat"], "modality": "image"}, "input[0]", "must be an image as a data URL"),
                ({"input": [URL] * 13}, "input", "at most 12 are possible"),
                ({}, "input", "either 'input' or 'messages'"),
                (user({"text": "a"}, {"image": URL}), "messages", "one text or one image"),
                ({"model": "embedding", "input": [{"image": URL}]}, "input", "takes texts, not images"),
                ({"model": "embedding", "input": "a", "modality": "image"}, "input", "takes texts, not images"),
            )
        ),
    ],
    "rerank": [
        *wrong("query", {"query": ""}, {"query": None}),
        *wrong("documents", {"documents": []}, {"documents": "a"}),
        *wrong("documents[1]", *({"documents": ["a", value]} for value in ("", {"text": ""}, 3))),
        *wrong("documents[1].text", {"documents": ["a", {}]}),
        *wrong("top_n", {"top_n": 0}),
        *wrong("max_tokens_per_doc", {"model": "instructed", "max_tokens_per_doc": 5}),
        *wrong("model", {"model": "classifier"}),
        *wrong("instruction", *({"model": model, "instruction": "Find it."} for model in ("reranker", "m3"))),
    ],
    "classify": [
        *wrong("input", *({"input": value} for value in ("", [], [["a", "b"]]))),
        *wrong("input[0]", {"input": [["a", "b", "c"]]}, {"input": [1]}),
        *wrong("input[1]", {"input": ["a", ""]}),
    ],
    "score": [
        *wrong("text_1", {"text_1": ""}, {"text_1": []}, {"text_1": ["a", "b"]}),
        *wrong("text_2[1]", {"text_2": ["a", ""]}),
        *wrong("model", {"model": "classifier"}),
    ],
    "pooling": [*wrong("dimensions", {"model": "classifier", "dimensions": 1})],
    "tokenize": [
        *wrong("prompt", {"prompt": ABSENT}, {"messages": USER}, {"prompt": ""}),
        *wrong("model", {"prompt": ABSENT, "messages": USER}, {"model": "instructed"}),
        *wrong("messages", {"model": "counter", "prompt": ABSENT, "messages": []}),
        *wrong("return_token_strs", {"return_token_strs": True}),
    ],
    "detokenize": [*wrong("tokens[0]", {"tokens": [-1]}, {"tokens": ["a"]})],
    "moderations": [
        Wrong({"model": "mood"}, "model", "glad, sad", code="model_not_supported"),
        Wrong(TOXIC | {"input": [PART]}, "input", "images"),
    ],
}
