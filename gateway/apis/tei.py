"""The routes of text-embeddings-inference, at / and below /models/{model}: its requests name no model.

Hugging Face's InferenceClient sends its requests to the address itself, so that answers whatever the system does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.edge.bodies import PositiveInt, json_response
from gateway.edge.errors import ApiError, tei_form
from gateway.edge.routes import ApiRoute, Endpoint, api
from gateway.text import encoders
from gateway.text.row_fields import Input, TokenId, as_rows, check_rows, read_rows
from gateway.triton.context import Gateway, gateway_of, read, system_for
from gateway.triton.served import System
from triton_transformers.protocol import LOGITS
from triton_transformers.tensors import Row


class HubBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    options: dict[str, Any] | None = None  # of Hugging Face's caches and queues, which the gateway lacks


class PromptedBody(HubBody, kw_only=True):
    inputs: Input
    prompt_name: str | None = None
    truncate: bool = True


class EmbedBody(PromptedBody, kw_only=True):
    normalize: bool = True
    dimensions: PositiveInt | None = None


class Parameters(msgspec.Struct, forbid_unknown_fields=True):
    top_k: PositiveInt | None = None


class PredictBody(HubBody, kw_only=True):
    """A text, a pair of texts, or a list of lists with one text or two."""

    inputs: str | list[str | list[str]]
    parameters: Parameters | None = None  # of InferenceClient
    raw_scores: bool = False
    truncate: bool = True


class Sentences(msgspec.Struct, forbid_unknown_fields=True):
    source_sentence: str
    sentences: list[str]


class NoParameters(msgspec.Struct, forbid_unknown_fields=True):
    prompt_name: str | None = None


class SimilarityBody(HubBody, kw_only=True):
    inputs: Sentences
    parameters: NoParameters | None = None


class RerankBody(msgspec.Struct, forbid_unknown_fields=True):
    query: str
    texts: list[str]
    return_text: bool = False
    raw_scores: bool = False
    top_n: PositiveInt | None = None  # LiteLLM's


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    inputs: str | list[str]
    model: str | None = None
    add_special_tokens: bool = True


class DecodeBody(msgspec.Struct, forbid_unknown_fields=True):
    ids: list[TokenId | list[TokenId]]
    model: str | None = None
    skip_special_tokens: bool = True


class Beginning(msgspec.Struct):
    """The fields that tell the bodies of one address apart."""

    documents: msgspec.Raw = msgspec.Raw()
    inputs: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    texts: msgspec.Raw = msgspec.Raw()


Inputs = TypeVar("Inputs", bound=PromptedBody)
BEGINNING = msgspec.json.Decoder(Beginning)


async def read_inputs(
    request: Request, struct: type[Inputs], ability: str
) -> tuple[Gateway, Inputs, System, list[Row]]:
    """Return what `read` returns, and the rows of the inputs."""
    gateway, body, system = await read(request, struct, ability)
    rows = read_rows(gateway, system, body.inputs, "inputs")
    if not body.truncate:
        await encoders.check_lengths(gateway, system, rows, "inputs")
    return gateway, body, system, rows


async def embed(request: Request) -> Response:
    gateway, body, system, rows = await read_inputs(request, EmbedBody, "embedding")
    prompt = encoders.Prompt(body.prompt_name)
    vectors, _ = await encoders.embed(gateway, system, rows, prompt, body.dimensions, body.normalize)
    return json_response(await encoders.as_lists(vectors))


async def embed_all(request: Request) -> Response:
    """Return a vector for each token."""
    gateway, body, system, rows = await read_inputs(request, PromptedBody, "multi")
    vectors, _ = await encoders.token_vectors(gateway, system, rows, encoders.Prompt(body.prompt_name))
    return json_response(await encoders.as_lists(vectors))


async def embed_sparse(request: Request) -> Response:
    gateway, body, system, rows = await read_inputs(request, PromptedBody, "sparse")
    vectors, _ = await encoders.sparse(gateway, system, rows, encoders.Prompt(body.prompt_name))
    pairs = (zip(vector.indices, vector.values, strict=True) for vector in vectors)
    return json_response([[{"index": index, "value": value} for index, value in row] for row in pairs])


async def predict(request: Request) -> Response:
    """Return all labels of each text, the most probable first."""
    gateway, body, system = await read(request, PredictBody, "classify")
    if not (names := system.labels):
        message = f"The model '{system.name}' does not name its labels: assemble it again with `make models`."
        raise ApiError(400, message, "model", "model_not_supported")
    pairs, is_batch = sequences(body.inputs)
    check_rows(gateway, [first for first, _ in pairs], "inputs", is_list=is_batch)
    if not body.truncate:
        texts = [first if not second else b"" for first, second in pairs]  # nothing counts the tokens of pairs
        await encoders.check_lengths(gateway, system, texts, "inputs")
    rated = await encoders.classify(gateway, system, pairs, "inputs", body.raw_scores)
    values = rated.array(LOGITS if body.raw_scores else "scores").tolist()
    count = body.parameters.top_k if body.parameters else None
    answers = [
        [{"score": score, "label": name} for score, name in sorted(zip(row, names, strict=True), reverse=True)[:count]]
        for row in values
    ]
    # Hugging Face's own API, which has no path, returns a list for one text too.
    is_flat = request.scope["path"].endswith("/predict") and body.parameters is None and not is_batch
    return json_response(answers[0] if is_flat else answers)


def sequences(inputs: Any) -> tuple[list[tuple[str, str]], bool]:
    """Return texts with their second texts, and whether they are a batch: a list of texts is one text or one pair."""
    is_batch = isinstance(inputs, list) and any(isinstance(element, list) for element in inputs)
    batch = inputs if is_batch else [inputs]
    rows = [[row] if isinstance(row, str) else row for row in batch]
    if wrong := [number for number, row in enumerate(rows) if not 1 <= len(row) <= 2]:
        place = f"inputs[{wrong[0]}]" if is_batch else "inputs"
        raise ApiError(400, f"'{place}' must have one text or two.", place, "invalid_value")
    return [(row[0], row[1] if len(row) > 1 else "") for row in rows], is_batch


async def similarity(request: Request) -> Response:
    """Return the cosine of the first sentence with each of the others."""
    gateway, body, system = await read(request, SimilarityBody, "embedding")
    check_rows(gateway, [body.inputs.source_sentence], "inputs.source_sentence", is_list=False)
    check_rows(gateway, body.inputs.sentences, "inputs.sentences")
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    prompt = encoders.Prompt(body.parameters.prompt_name if body.parameters else None)
    (first, *others), _ = await encoders.embed(gateway, system, texts, prompt, normalize=True)
    return json_response([float(first @ other) for other in others])


async def rerank(request: Request) -> Response:
    request.scope["request_state"].error_form = tei_form
    gateway, body, system = await read(request, RerankBody, "rerank")
    scores = await encoders.rank(gateway, system, body.query, body.texts, "texts", is_raw=body.raw_scores)
    return json_response(
        [
            {"index": index, "score": scores.values[index]} | ({"text": body.texts[index]} if body.return_text else {})
            for index in scores.order[: body.top_n]
        ]
    )


async def tokenize(request: Request) -> Response:
    """Return the tokens of each text, with their places in it; a special token has none."""
    gateway, body, system = await read(request, TokenizeBody, "tokens")
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    check_rows(gateway, texts, "inputs", is_list=texts is body.inputs)
    rows = await encoders.tokenized(gateway, system, texts)
    if any(row.offsets is None for row in rows):
        message = f"The model '{system.name}' does not know the places of tokens: send 'prompt' instead of 'inputs'."
        raise ApiError(400, message, "inputs", "model_not_supported")

    def tokens(text: str, row: encoders.TokenizedRow) -> Iterator[dict[str, Any]]:
        before, after = row.special
        places = [*[None] * before, *(row.offsets or ()), *[None] * after]
        special_texts = iter(row.special_texts)
        for id, place in zip(row.ids, places, strict=True):
            start, stop = place or (None, None)
            word = text[start:stop] if place else next(special_texts)
            if place or body.add_special_tokens:
                yield {"id": id, "text": word, "special": place is None, "start": start, "stop": stop}

    return json_response([[*tokens(text, row)] for text, row in zip(texts, rows, strict=True)])


async def decode(request: Request) -> Response:
    """Return the text of each list of token ids."""
    gateway, body, system = await read(request, DecodeBody, "tokens")
    rows = as_rows(body.ids, "ids")
    check_rows(gateway, rows, "ids")
    texts = await encoders.tokenized(gateway, system, rows)
    return json_response([row.plain_text if body.skip_special_tokens else row.text for row in texts])


async def health(request: Request) -> Response:
    """Return nothing if the model is ready; otherwise `find` raises an error."""
    await gateway_of(request).served.find(request.path_params["model"])
    return Response()


async def beginning(request: Request) -> Beginning:
    try:
        return BEGINNING.decode(await request.body())
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return Beginning()  # whatever reads the body next reports the error


async def any_task(request: Request) -> Response:
    """Answer a request to the address itself, as its body and the system ask for. Metrics have the task's path."""
    body = await beginning(request)
    if bytes(body.query):
        path, answer = "/models/{model}/rerank", rerank
    elif bytes(body.inputs).startswith(b"{"):
        path, answer = "/similarity", similarity
    else:
        system = await system_for(request, body, *TASKS)
        request.path_params["model"] = system.name
        path, answer = next(task for ability, task in TASKS.items() if ability in system.abilities)
    request.scope["request_state"].route = path
    return await answer(request)


# For each ability of a system, the path and the route of requests to the system's own address.
TASKS = {
    "embedding": ("/embed", embed),
    "classify": ("/predict", predict),
    "sparse": ("/embed_sparse", embed_sparse),
    "multi": ("/embed_all", embed_all),
}


async def info(request: Request) -> Response:
    """Return the facts that TEI's clients ask for about a model; null for those that the gateway does not know."""
    gateway = gateway_of(request)
    system = await system_for(request, None, "embedding", "sparse", "multi", "rerank", "classify")
    longest = (await encoders.tokenized(gateway, system, ["a"]))[0].max_length if system.can(["tokens"]) else None
    kind: Literal["reranker", "classifier", "embedding"] = "embedding"
    if system.can(["rerank", "classify"]):
        kind = "reranker" if "rerank" in system.abilities else "classifier"
    return json_response(
        {
            "model_id": system.name,
            "model_sha": None,
            "model_dtype": None,
            "model_type": {kind: {}},
            "max_concurrent_requests": gateway.config.limits.in_flight,
            "max_input_length": longest,
            "max_batch_tokens": None,
            "max_client_batch_size": gateway.config.limits.texts,
            "auto_truncate": True,
            "version": "triton-transformers",
        }
    )


def both(path: str, endpoint: Endpoint, abilities: str = "", method: str = "POST") -> list[ApiRoute]:
    """Return the routes of a path: for the only system of its kind, and for a named one."""
    return api(f"{path} /models/{{model}}{path}", endpoint, abilities, tei_form, method)


ROUTES = [
    *both("/embed", embed, "embedding"),
    *both("/embed_sparse", embed_sparse, "sparse"),
    *both("/embed_all", embed_all, "multi"),
    *both("/predict", predict, "classify"),
    *both("/similarity", similarity, "embedding"),
    # The page shows /tokenize and /detokenize.
    ApiRoute("/models/{model}/tokenize", tokenize, "tokens", tei_form, is_shown=False),
    ApiRoute("/decode", decode, "tokens", tei_form, is_shown=False),
    ApiRoute("/models/{model}/decode", decode, "tokens", tei_form, is_shown=False),
    *both("/info", info, method="GET"),
    ApiRoute("/models/{model}/health", health, error_form=tei_form, method="GET"),
    *api("/", any_task, "", tei_form),
]
