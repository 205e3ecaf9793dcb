"""POST /v1/rerank and /v1/classify, in the shapes of vLLM; that of rerank is also Jina's, and nearly Cohere's."""

from __future__ import annotations

import time
import uuid
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway import fields
from gateway.api_error import ApiError
from gateway.context import gateway_of
from gateway.json_response import json_response
from gateway.rows import check_texts, infer_rows, joined, token_count


class Document(msgspec.Struct):
    text: str


class RerankBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    query: str
    documents: list[str | Document]
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool = True


class ClassifyBody(msgspec.Struct, forbid_unknown_fields=True):
    """Texts, or pairs of texts as in TEI."""

    model: str
    input: str | list[str | tuple[str, str]]


RERANK_DECODER = msgspec.json.Decoder(RerankBody)
CLASSIFY_DECODER = msgspec.json.Decoder(ClassifyBody)


async def rerank(request: Request) -> Response:
    """Return the documents in the order of their relevance to the query."""
    gateway = gateway_of(request)
    body = await fields.read(request, RERANK_DECODER)
    system = await gateway.served.find(body.model, "rerank")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    if not body.query:
        raise ApiError(400, "'query' must not be an empty string.", "query")
    check_texts(gateway, texts, "documents")
    columns = {"query": [body.query] * len(texts), "text": texts}
    parts = await infer_rows(gateway, system, columns, ["score"])
    scores = joined(parts, "score")[:, 0].tolist()
    tokens = token_count(parts)
    gateway.counters.tokens(tokens or 0)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": texts[index]}} if body.return_documents else {})
        for index in order
    ]
    return json_response(
        {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": body.model,
            "usage": None if tokens is None else {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": results,
        }
    )


async def classify(request: Request) -> Response:
    """Return the best label of each text, and the probabilities of all labels in the model's order."""
    gateway = gateway_of(request)
    body = await fields.read(request, CLASSIFY_DECODER)
    system = await gateway.served.find(body.model, "classify")
    rows = [body.input] if isinstance(body.input, str) else body.input
    pairs = [(row, "") if isinstance(row, str) else row for row in rows]
    columns = {"input_text": [first for first, _ in pairs]}
    check_texts(gateway, columns["input_text"], "input", is_list=rows is body.input)
    if any(not isinstance(row, str) for row in rows):
        if "text_pair" not in system.inputs:
            raise ApiError(400, f"The model '{body.model}' takes texts, not pairs of texts.", "input")
        columns["text_pair"] = [second for _, second in pairs]
    parts = await infer_rows(gateway, system, columns, ["label", "scores"])
    labels = [label for part in parts for label in part["label"].texts()]
    probs = joined(parts, "scores").tolist()
    tokens = token_count(parts)
    gateway.counters.tokens(tokens or 0)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return json_response(
        {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model,
            "data": [
                {"index": index, "label": label, "probs": row, "num_classes": len(row)}
                for index, (label, row) in enumerate(zip(labels, probs, strict=True))
            ],
            "usage": None if tokens is None else usage,
        }
    )
