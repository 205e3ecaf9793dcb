"""POST /v1/embeddings, as OpenAI's API has it, and the name of a model's prompt, as TEI has it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from gateway import fields
from gateway.api_error import ApiError
from gateway.context import gateway_of
from gateway.json_response import json_response
from gateway.rows import check_texts, infer_rows, joined, token_count


class EmbeddingsBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    prompt_name: str | None = None


# The gateway serves other requests each time it has encoded this many rows: 2,048 rows of 384 numbers take 0.3 s.
ROWS_AT_ONCE = 64
DECODER = msgspec.json.Decoder(EmbeddingsBody)


async def embeddings(request: Request) -> Response:
    gateway = gateway_of(request)
    body = await fields.read(request, DECODER)
    system = await gateway.served.find(body.model, "embedding")
    texts = _texts(body)
    check_texts(gateway, texts, "input", is_list=not isinstance(body.input, str))
    _check_dimensions(body.dimensions, system.width)
    columns = {"input_text": texts}
    if body.prompt_name is not None:
        if "prompt_name" not in system.inputs:
            raise ApiError(400, f"The model '{body.model}' has no prompts.", "prompt_name", "unsupported_parameter")
        columns["prompt_name"] = [body.prompt_name] * len(texts)
    parts = await infer_rows(gateway, system, columns, [system.embedding])
    vectors = joined(parts, system.embedding).astype("<f4", copy=False)
    if body.dimensions is not None:
        _check_dimensions(body.dimensions, vectors.shape[1])
        vectors = shortened(vectors, body.dimensions)
    tokens = token_count(parts)
    gateway.counters.tokens(tokens or 0)
    return json_response(
        {
            "object": "list",
            "data": await _encoded(vectors, body.encoding_format == "base64"),
            "model": body.model,
            "usage": None if tokens is None else {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


async def _encoded(vectors: npt.NDArray[Any], in_base64: bool) -> list[msgspec.Raw]:
    encoded: list[msgspec.Raw] = []
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        some = vectors[start : start + ROWS_AT_ONCE]
        # msgspec encodes bytes in base64.
        rows = [vector.tobytes() for vector in some] if in_base64 else some.tolist()
        items = ({"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows, start))
        encoded += [msgspec.Raw(msgspec.json.encode(item)) for item in items]
    return encoded


def _texts(body: EmbeddingsBody) -> list[str]:
    if isinstance(body.input, str):
        return [body.input]
    texts = [item for item in body.input if isinstance(item, str)]
    if len(texts) != len(body.input):
        message = (
            f"The model '{body.model}' takes texts, not token ids. Send the texts themselves; in LangChain set "
            "check_embedding_ctx_length=False."
        )
        raise ApiError(400, message, "input", "unsupported_value")
    return texts


def _check_dimensions(dimensions: int | None, width: int) -> None:
    """Raise ApiError if the vectors have fewer dimensions; a width of -1 is unknown."""
    if dimensions is not None and dimensions > width >= 0:
        message = f"'dimensions' is {dimensions}, but the model's vectors have {width} dimensions."
        raise ApiError(400, message, "dimensions", "invalid_value")


def shortened(vectors: npt.NDArray[Any], dimensions: int) -> npt.NDArray[Any]:
    """Return the beginning of each vector, with length 1 again."""
    short = vectors[:, :dimensions]
    lengths = np.linalg.norm(short, axis=1, keepdims=True)
    return np.divide(short, lengths, out=np.zeros_like(short), where=lengths > 0)
