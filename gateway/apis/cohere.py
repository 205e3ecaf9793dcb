"""Cohere's embeddings (v1 and v2) and reranking (v2); its v1 reranking is Jina's (vllm.py)."""

from __future__ import annotations

import uuid
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from gateway.edge.bodies import PositiveInt, json_response
from gateway.edge.errors import ApiError, cohere_form
from gateway.edge.routes import api
from gateway.text import encoders
from gateway.text.row_fields import Part, read_rows
from gateway.triton.context import Gateway, read
from gateway.triton.served import System
from triton_transformers.tensors import Row

InputType = Literal["search_document", "search_query", "classification", "clustering", "image"]
EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class EmbedInput(msgspec.Struct):
    """Texts, which are joined, or one image."""

    content: list[Part]

    def row(self, where: str) -> Row:
        if len(self.content) == 1:
            return self.content[0].row(f"{where}.content[0]")
        if any(part.text is None for part in self.content):
            message = f"'{where}' must have only texts or one image: no model here reads them together."
            raise ApiError(400, message, where, "unsupported_value")
        return "\n".join(part.text or "" for part in self.content)


class EmbedBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    texts: list[str] | None = None
    images: list[str] = []
    inputs: list[EmbedInput] | None = None
    input_type: InputType | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: PositiveInt | None = None

    def rows(self, gateway: Gateway, system: System) -> list[Row]:
        fields: dict[str, Any] = {"texts": self.texts, "images": self.images or None, "inputs": self.inputs}
        given = [(name, values) for name, values in fields.items() if values is not None]
        if len(given) != 1:
            raise ApiError(400, "Send one of 'texts', 'images' and 'inputs'.", "texts", "missing_required_parameter")
        ((name, values),) = given
        rows = [value.row(f"inputs[{i}]") if isinstance(value, EmbedInput) else value for i, value in enumerate(values)]
        return read_rows(gateway, system, rows, name, only_images=name == "images")


class RerankBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    query: str
    documents: list[str]
    top_n: PositiveInt | None = None
    return_documents: bool = False
    max_tokens_per_doc: PositiveInt | None = None


async def embed_v1(request: Request) -> Response:
    """Return lists of numbers, unless the request names types."""
    body, answer = await embedded(request)
    if body.embedding_types is None:
        answer |= {"embeddings": answer["embeddings"]["float"], "response_type": "embeddings_floats"}
    return json_response(answer)


async def embed_v2(request: Request) -> Response:
    return json_response((await embedded(request))[1])


async def embedded(request: Request) -> tuple[EmbedBody, dict[str, Any]]:
    """Return the body and the answer in the form of v2."""
    gateway, body, system = await read(request, EmbedBody, "embedding")
    rows = body.rows(gateway, system)
    prompt = encoders.Prompt(purpose=body.input_type)
    encoders.check_dimensions(body.output_dimension, system.width, "output_dimension")
    vectors, tokens = await encoders.embed(gateway, system, rows, prompt, body.output_dimension)
    types = body.embedding_types or ["float"]
    return body, {
        "id": f"embed-{uuid.uuid4().hex}",
        "texts": [row for row in rows if isinstance(row, str)],
        "embeddings": {name: await encoded(vectors, name) for name in types},
        "meta": meta(tokens),
        "response_type": "embeddings_by_type",
    }


async def encoded(vectors: encoders.Vectors, name: EmbeddingType) -> list[Any]:
    if name == "float":
        return await encoders.as_lists(vectors)
    if name == "base64":
        return [vector.tobytes() for vector in vectors]
    # A bit for each number: whether it is positive. Signed bytes are the same ones less 128.
    bits = np.packbits(vectors > 0, axis=1)
    return await encoders.as_lists(bits if name == "ubinary" else (bits.astype(np.int16) - 128))


async def rerank(request: Request) -> Response:
    gateway, body, system = await read(request, RerankBody, "rerank")
    limit, texts = body.max_tokens_per_doc, body.documents
    scores = await encoders.rank(gateway, system, body.query, texts, "documents", max_tokens=limit)
    results = [
        {"index": index, "relevance_score": scores.values[index]}
        | ({"document": {"text": texts[index]}} if body.return_documents else {})
        for index in scores.order[: body.top_n]
    ]
    return json_response({"id": f"rerank-{uuid.uuid4().hex}", "results": results, "meta": meta(scores.tokens)})


def meta(tokens: int | None) -> dict[str, Any]:
    # Clients of v1 require the object.
    units = {} if tokens is None else {"input_tokens": tokens}
    return {"api_version": {"version": "2"}, "billed_units": units}


ROUTES = [
    *api("/v2/embed", embed_v2, "embedding", cohere_form),
    *api("/v1/embed", embed_v1, "embedding", cohere_form),
    *api("/v2/rerank", rerank, "rerank", cohere_form),
]
