"""OpenAI's embeddings, and the routes of vLLM beside them. Jina's and Infinity's clients use some of these, too."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.apis import tei
from gateway.apis.completions import Message, conversation
from gateway.edge import bodies
from gateway.edge.bodies import PositiveInt, json_response
from gateway.edge.errors import ApiError, tei_form
from gateway.edge.routes import ApiRoute, api
from gateway.text import encoders
from gateway.text.row_fields import Input, Part, TokenId, check_rows, read_rows, texts_only
from gateway.text.tool_fields import ToolUse
from gateway.triton.context import Gateway, gateway_of, read
from gateway.triton.served import System
from triton_transformers.protocol import SPAN_VECTORS

JinaTask = Literal[
    "retrieval.query", "retrieval.passage", "text-matching", "classification", "clustering", "separation", "code.query",
    "code.passage",
]  # fmt: skip


class PartsMessage(msgspec.Struct):
    """A message of vLLM's clients, with the text or the image to embed."""

    content: str | list[Part]
    role: str = "user"


class EmbeddingsBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    input: str | list[str | TokenId | list[TokenId] | Part] | None = None
    messages: list[PartsMessage] | None = None  # vLLM's, in place of `input`
    modality: Literal["text", "image"] = "text"  # Infinity's
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=0)] = 0  # 0, Infinity's default: all
    output_dimension: PositiveInt | None = None  # Voyage's
    normalized: bool = False  # Jina's
    embedding_type: Literal["dense", "sparse", "multi"] = "dense"  # of ours
    prompt_name: str | None = None  # TEI's
    late_chunking: bool = False  # Jina's
    task: JinaTask | None = None
    input_type: Literal["query", "document", "passage"] | None = None  # Voyage's and NVIDIA's


class Document(msgspec.Struct):
    text: str


class RerankBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    query: str
    documents: list[str | Document]
    top_n: PositiveInt | None = None
    top_k: PositiveInt | None = None  # Voyage's
    return_documents: bool = True
    max_tokens_per_doc: PositiveInt | None = None
    instruction: str | None = None  # of ours


class ClassifyBody(msgspec.Struct, forbid_unknown_fields=True):
    """Texts, or pairs of texts as in TEI."""

    model: str
    input: str | list[str | tuple[str, str]]


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    text_1: str | list[str]
    text_2: str | list[str]


class PoolingBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    input: Input
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: PositiveInt | None = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    tokens: list[TokenId]


ABILITIES = {"dense": "embedding", "sparse": "sparse", "multi": "multi"}


async def embeddings(request: Request) -> Response:
    """Return the vectors of texts: one for each, a sparse one, or one for each token."""
    gateway, body, system = await read(request, EmbeddingsBody, *ABILITIES.values())
    check_type(system, body)
    rows = read_rows(gateway, system, *embedded_field(body), only_images=body.modality == "image")
    prompt = encoders.Prompt(body.prompt_name, body.task or body.input_type)
    dimensions = body.dimensions or body.output_dimension
    if not body.dimensions:
        encoders.check_dimensions(body.output_dimension, system.width, "output_dimension")
    vectors: encoders.ManyVectors
    if body.late_chunking:
        texts = texts_only(rows, "input")
        vectors, tokens = await encoders.embed_chunks(gateway, system, texts, prompt, dimensions, body.normalized)
    elif body.embedding_type == "dense":
        vectors, tokens = await encoders.embed(gateway, system, rows, prompt, dimensions, body.normalized)
    elif body.embedding_type == "multi":
        vectors, tokens = await encoders.token_vectors(gateway, system, rows, prompt)
    else:
        vectors, tokens = await encoders.sparse(gateway, system, rows, prompt)
    data = await items(vectors, "embedding", body.encoding_format == "base64")
    return json_response({"object": "list", "data": data, "model": body.model, "usage": usage(tokens)})


def embedded_field(body: EmbeddingsBody) -> tuple[Any, str]:
    """Return the value to embed, and the name of its field: of messages, their only part."""
    if (body.input is None) == (body.messages is None):
        raise ApiError(400, "Send either 'input' or 'messages'.", "input", "missing_required_parameter")
    if body.input is not None:
        return body.input, "input"
    contents = [message.content for message in body.messages or ()]
    parts = [part for content in contents for part in ([Part(text=content)] if isinstance(content, str) else content)]
    if len(parts := [part for part in parts if part.text != ""]) != 1:
        message = "'messages' must have one text or one image, because each has a vector of its own: use 'input'."
        raise ApiError(400, message, "messages", "unsupported_value")
    return parts, "messages"


def check_type(system: System, body: EmbeddingsBody) -> None:
    """Raise ApiError if the system has no vectors of this type, or an option of the request does not fit the type."""
    types = [name for name, ability in ABILITIES.items() if ability in system.abilities]
    if body.embedding_type not in types:
        message = f"The model '{body.model}' has other vectors: send 'embedding_type': '{types[0]}'."
        raise ApiError(400, message, "embedding_type", "unsupported_value")
    for name in ("dimensions", "output_dimension", "normalized"):
        if getattr(body, name) and body.embedding_type != "dense":
            message = f"Only dense vectors can be {'normalized' if name == 'normalized' else 'shortened'}."
            raise ApiError(400, message, name, "unsupported_parameter")
    if body.encoding_format == "base64" and body.embedding_type == "sparse":
        raise ApiError(400, "Sparse vectors are sent as numbers: leave it out.", "encoding_format", "unsupported_value")
    if body.late_chunking and SPAN_VECTORS not in system.outputs:
        message = f"The model '{body.model}' has no late chunking: choose one that takes the mean of its tokens."
        raise ApiError(400, message, "late_chunking", "unsupported_parameter")
    if body.late_chunking and body.embedding_type != "dense":
        raise ApiError(400, "Only dense vectors have late chunking.", "late_chunking", "unsupported_parameter")


def listed(prefix: str, model: str, data: Sequence[Any], tokens: int | None) -> Response:
    """Return a list as vLLM does, whose id begins with the prefix."""
    head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": model}
    return json_response(head | {"data": data, "usage": usage(tokens, completion_tokens=0)})


def usage(tokens: int | None, **others: int) -> dict[str, int] | None:
    """Return the number of tokens in OpenAI's form, None if the model does not report it."""
    return None if tokens is None else {"prompt_tokens": tokens, "total_tokens": tokens, **others}


async def items(vectors: encoders.ManyVectors, field: str, in_base64: bool) -> list[msgspec.Raw]:
    """Return the elements of an answer's list. In each, the vector or the vectors are in `field`."""

    def encoded(vector: Any) -> Any:
        if isinstance(vector, encoders.SparseVector):
            return vector
        if not in_base64:
            return vector.tolist()
        # msgspec encodes bytes in base64.
        return vector.tobytes() if vector.ndim == 1 else [row.tobytes() for row in vector]

    kind = "embedding" if field == "embedding" else "pooling"
    return [
        msgspec.Raw(msgspec.json.encode({"object": kind, "index": number, field: encoded(vector)}))
        async for start, few in encoders.in_turns(vectors)
        for number, vector in enumerate(few, start)
    ]


async def pooling(request: Request) -> Response:
    """Return for each text its vector, a vector for each token, or the probabilities of the model's labels."""
    gateway, body, system = await read(request, PoolingBody, "embedding", "multi", "classify")
    rows = read_rows(gateway, system, body.input, "input")
    vectors: encoders.ManyVectors
    if body.dimensions is not None and "embedding" not in system.abilities:
        raise ApiError(400, f"The model '{body.model}' has no vectors to shorten.", "dimensions")
    if "embedding" in system.abilities:
        vectors, tokens = await encoders.embed(gateway, system, rows, dimensions=body.dimensions)
    elif "multi" in system.abilities:
        vectors, tokens = await encoders.token_vectors(gateway, system, rows)
    else:
        answers = await encoders.classify(gateway, system, [(row, "") for row in texts_only(rows, "input")], "input")
        vectors, tokens = answers.array("scores").astype("<f4", copy=False), answers.tokens
    data = await items(vectors, "data", body.encoding_format == "base64")
    return listed("pool", body.model, data, tokens)


async def rerank(request: Request) -> Response:
    """Return the documents in the order of their relevance to the query.

    A body of TEI has `texts` instead. At a model's own address, where Infinity's clients may be, documents are texts.
    """
    beginning, is_own = await tei.beginning(request), "model" in request.path_params
    if bytes(beginning.texts) or (is_own and not bytes(beginning.documents)):
        return await tei.rerank(request)
    gateway, body, system = await read(request, RerankBody, "rerank")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    scores = await encoders.rank(
        gateway, system, body.query, texts, "documents", body.instruction, body.max_tokens_per_doc
    )
    results = [
        {"index": index, "relevance_score": scores.values[index]}
        | ({"document": texts[index] if is_own else {"text": texts[index]}} if body.return_documents else {})
        for index in scores.order[: body.top_n or body.top_k]
    ]
    answer = {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model, "usage": usage(scores.tokens)}
    return json_response(answer | {"results": results, "data": results})  # Voyage's clients read `data`


async def score(request: Request) -> Response:
    """Return the score of each pair: one text with each of the others, or two lists element by element."""
    gateway, body, system = await read(request, ScoreBody, "rerank", "embedding")
    firsts, seconds = paired(gateway, body)
    if "rerank" in system.abilities:
        values, _, tokens = await encoders.score(gateway, system, firsts, seconds)
    else:
        values, tokens = await cosines(gateway, system, firsts, seconds)
    data = [{"object": "score", "index": index, "score": value} for index, value in enumerate(values)]
    return listed("score", body.model, data, tokens)


def paired(gateway: Gateway, body: ScoreBody) -> tuple[list[str], list[str]]:
    firsts, seconds = ([texts] if isinstance(texts, str) else texts for texts in (body.text_1, body.text_2))
    check_rows(gateway, firsts, "text_1", not isinstance(body.text_1, str))
    check_rows(gateway, seconds, "text_2", not isinstance(body.text_2, str))
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        message = f"'text_1' has {len(firsts)} texts and 'text_2' {len(seconds)}: send one, or as many."
        raise ApiError(400, message, "text_1", "invalid_value")
    return firsts, seconds


async def cosines(
    gateway: Gateway, system: System, firsts: Sequence[str], seconds: Sequence[str]
) -> tuple[list[float], int | None]:
    texts = list(dict.fromkeys([*firsts, *seconds]))
    vectors, tokens = await encoders.embed(gateway, system, texts, normalize=True)
    by_text = dict(zip(texts, vectors, strict=True))
    return [float(by_text[first] @ by_text[second]) for first, second in zip(firsts, seconds, strict=True)], tokens


async def classify(request: Request) -> Response:
    """Return the best label of each text, and the probabilities of all labels in the model's order."""
    gateway, body, system = await read(request, ClassifyBody, "classify")
    rows = [body.input] if isinstance(body.input, str) else body.input
    pairs = [(row, "") if isinstance(row, str) else row for row in rows]
    check_rows(gateway, [first for first, _ in pairs], "input", is_list=rows is body.input)
    answers = await encoders.classify(gateway, system, pairs, "input")
    rated = zip(answers.texts("label"), answers.array("scores").tolist(), strict=True)
    data = [
        {"index": index, "label": label, "probs": row, "num_classes": len(row)}
        for index, (label, row) in enumerate(rated)
    ]
    return listed("classify", body.model, data, answers.tokens)


async def tokenize(request: Request) -> Response:
    """Return the token ids of a text of any length, or of a chat."""
    if bytes((await tei.beginning(request)).inputs):
        return await tei.tokenize(request)
    body = await bodies.read(request, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Send either 'prompt' or 'messages'.", "prompt", "missing_required_parameter")
    gateway = gateway_of(request)
    system = await gateway.served.find(body.model, "tokens" if body.messages is None else "chat")
    if body.messages is not None:
        (row,) = await encoders.tokenized(gateway, system, [conversation(body.messages, ToolUse(system))], "messages")
    else:
        check_rows(gateway, [body.prompt or ""], "prompt", is_list=False)
        (row,) = await encoders.tokenized(gateway, system, [body.prompt or ""])
    before, after = (0, 0) if body.add_special_tokens else row.special
    ids = row.ids[before : len(row.ids) - after]
    return json_response({"count": len(ids), "max_model_len": row.max_length, "tokens": ids, "token_strs": None})


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    gateway, body, system = await read(request, DetokenizeBody, "tokens")
    if not body.tokens:
        return json_response({"prompt": ""})
    (row,) = await encoders.tokenized(gateway, system, [body.tokens])
    return json_response({"prompt": row.text})


ROUTES = [
    *api("/v1/embeddings /embeddings", embeddings, "embedding sparse multi"),
    *api("/v1/rerank /rerank", rerank, "rerank"),
    *api("/v1/classify /classify", classify, "classify"),
    *api("/v1/score /score", score, "rerank embedding"),
    *api("/pooling", pooling, "embedding multi classify"),
    *api("/tokenize", tokenize, "tokens"),
    *api("/detokenize", detokenize, "tokens"),
    ApiRoute("/models/{model}/rerank", rerank, error_form=tei_form),
]
