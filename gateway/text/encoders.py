"""Get vectors, scores, labels and tokens of texts from encoders, for all APIs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gateway.edge.errors import ApiError, not_ready
from gateway.text.row_fields import check_rows
from gateway.triton.context import Gateway
from gateway.triton.rows import Answers, Columns, counted, infer_rows, together
from gateway.triton.served import System
from triton_transformers.protocol import IMAGE, LOGITS, SPAN_VECTORS, TOKEN_COUNT, TOKENIZED, VECTOR_COUNT
from triton_transformers.tensors import Row, Tensor

Vectors = npt.NDArray[Any]  # [rows, dimensions]
# The gateway serves other requests each time it has encoded this many rows: 2,048 rows of 384 numbers take 0.3 s.
ROWS_AT_ONCE = 64
# The input with the characters of each chunk of a text.
SPANS = "spans"
SCORE = "score"


class Prompt(NamedTuple):
    """The model's prompt for its texts: its name, or what the vectors are for, in the words of an API."""

    name: str | None = None
    purpose: str | None = None


NO_PROMPT = Prompt()


class Scores(NamedTuple):
    """The score of each text, the numbers of the texts from the best to the worst, and how many tokens they have."""

    values: list[float]
    order: list[int]
    tokens: int | None


class SparseVector(msgspec.Struct):
    """The ids of tokens and their weights."""

    indices: list[int]
    values: list[float]


ManyVectors = Vectors | Sequence[Vectors] | Sequence[SparseVector]


class TokenizedRow(msgspec.Struct):
    """A row in the other form: the ids of a text, or the text of ids (serving/text/token_ids.py)."""

    ids: list[int] = []
    special: tuple[int, int] = (0, 0)  # the special tokens before and after the text
    max_length: int | None = None
    offsets: list[tuple[int, int]] | None = None  # the characters of each token but the special ones
    special_texts: list[str] = []
    text: str = ""
    plain_text: str = ""  # without special tokens


TOKENIZED_ROW = msgspec.json.Decoder(TokenizedRow)


# --- vectors ----------------------------------------------------------------------------------------------------------


# Each function returns the vectors of the rows, and the number of their tokens, None if the model does not report it.


async def embed(
    gateway: Gateway,
    system: System,
    rows: Sequence[Row],
    prompt: Prompt = NO_PROMPT,
    dimensions: int | None = None,
    normalize: bool = False,
) -> tuple[Vectors, int | None]:
    """Return one vector for each row: its first dimensions, if their number is given."""
    check_dimensions(dimensions, system.width)
    answers, numbers = await infer_halves(gateway, system, rows, prompt)
    vectors = answers.array(system.embedding).astype("<f4", copy=False)
    if numbers:
        vectors = vectors[np.argsort(numbers)]
    return shaped(vectors, dimensions, normalize), answers.tokens


async def infer_halves(
    gateway: Gateway, system: System, rows: Sequence[Row], prompt: Prompt
) -> tuple[Answers, list[int]]:
    """Return the vectors of texts and then those of images, and the number of each row; none if all are texts."""
    images = [number for number, row in enumerate(rows) if isinstance(row, bytes)]
    texts = [number for number, row in enumerate(rows) if not isinstance(row, bytes)]
    if not images:
        return await infer_rows(gateway, system, prompted(system, rows, prompt), [system.embedding]), []
    halves: list[Columns] = [{IMAGE: [rows[i] for i in images]}]
    if texts:
        halves.insert(0, prompted(system, [rows[i] for i in texts], prompt))
    answers = await together(infer_rows(gateway, system, columns, [system.embedding]) for columns in halves)
    return Answers([part for half in answers for part in half.parts]), [*texts, *images]


async def sparse(
    gateway: Gateway, system: System, rows: Sequence[Row], prompt: Prompt = NO_PROMPT
) -> tuple[list[SparseVector], int | None]:
    answers = await infer_rows(gateway, system, prompted(system, rows, prompt), ["token_id", "weight"])
    pairs = zip(answers.arrays("token_id"), answers.arrays("weight"), strict=True)
    vectors = [SparseVector(ids[ids >= 0].tolist(), weights[ids >= 0].tolist()) for ids, weights in pairs]
    return vectors, answers.tokens


async def token_vectors(
    gateway: Gateway, system: System, rows: Sequence[Row], prompt: Prompt = NO_PROMPT
) -> tuple[list[Vectors], int | None]:
    """Return the vectors of each row's tokens, without those of the padding."""
    outputs = [system.token_vectors, *({VECTOR_COUNT} & system.outputs)]
    answers = await infer_rows(gateway, system, prompted(system, rows, prompt), outputs)
    arrays = answers.arrays(system.token_vectors)
    counts = answers.token_counts or [len(array) for array in arrays]
    if VECTOR_COUNT in outputs:
        counts = answers.array(VECTOR_COUNT).ravel().tolist()
    return [array[:count].astype("<f4") for array, count in zip(arrays, counts, strict=True)], answers.tokens


async def embed_chunks(
    gateway: Gateway, system: System, chunks: Sequence[str], prompt: Prompt, dimensions: int | None, normalize: bool
) -> tuple[Vectors, int | None]:
    """Return a vector for each chunk of a text, from one run over the whole text."""
    check_dimensions(dimensions, system.width)
    ends = np.cumsum([len(chunk) for chunk in chunks])
    spans = np.stack([[0, *ends[:-1]], ends], axis=1)
    columns = prompted(system, ["".join(chunks)], prompt)
    tensors = [Tensor.from_texts(name, rows, [1, 1]) for name, rows in columns.items()]
    tensors.append(Tensor.from_values(SPANS, "INT64", spans[None]))
    outputs = [SPAN_VECTORS, *({TOKEN_COUNT} & system.outputs)]
    answers = counted(gateway, [await gateway.infer(system, tensors, outputs)])
    return shaped(answers.array(SPAN_VECTORS)[0].astype("<f4", copy=False), dimensions, normalize), answers.tokens


def prompted(system: System, rows: Sequence[Row], prompt: Prompt) -> Columns:
    """Return the inputs of the rows, with the name of the model's prompt for them."""
    name = prompt.name if prompt.name is not None else prompt_for(system, prompt.purpose)
    if name is None:
        return {"input_text": rows}
    if "prompt_name" not in system.inputs:
        raise ApiError(400, f"The model '{system.name}' has no prompts.", "prompt_name", "unsupported_parameter")
    return {"input_text": rows, "prompt_name": [name] * len(rows)}


def prompt_for(system: System, purpose: str | None) -> str | None:
    """Return the prompts that fit the purpose of a client's texts: of its name, of the library's, or the default one.

    Each API has names of its own: search_query, retrieval.query, query; search_document, retrieval.passage, document.
    """
    if purpose is None or "prompt_name" not in system.inputs:
        return None
    is_document = any(word in purpose for word in ("document", "passage"))
    kind = "query" if "query" in purpose else "document" if is_document else ""
    return "|".join(dict.fromkeys([purpose, kind, ""]))


def check_dimensions(dimensions: int | None, width: int, field: str = "dimensions") -> None:
    """Raise ApiError if the vectors have fewer dimensions; a width of -1 is unknown."""
    if dimensions is not None and dimensions > width >= 0:
        message = f"'{field}' is {dimensions}, but the model's vectors have {width} dimensions."
        raise ApiError(400, message, field, "invalid_value")


def shaped(vectors: Vectors, dimensions: int | None, normalize: bool) -> Vectors:
    """Return the vectors, or the beginning of each with length 1 again."""
    if dimensions is not None:
        check_dimensions(dimensions, vectors.shape[1])
        vectors = vectors[:, :dimensions]
    return normalized(vectors) if normalize or dimensions is not None else vectors


def normalized(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)


async def in_turns(rows: ManyVectors) -> AsyncIterator[tuple[int, Any]]:
    """Yield the rows a few at a time, each with the number of the first; other requests are served between."""
    for start in range(0, len(rows), ROWS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        yield start, rows[start : start + ROWS_AT_ONCE]


async def as_lists(rows: ManyVectors) -> list[msgspec.Raw]:
    """Return each row as the JSON of its numbers."""
    return [msgspec.Raw(msgspec.json.encode(row.tolist())) async for _, few in in_turns(rows) for row in few]


# --- scores and labels ------------------------------------------------------------------------------------------------


async def rank(
    gateway: Gateway,
    system: System,
    query: str,
    texts: Sequence[str],
    param: str,
    instruction: str | None = None,
    max_tokens: int | None = None,
    is_raw: bool = False,
) -> Scores:
    """Return how well the texts, which are the field `param`, answer the query: of each its first `max_tokens`."""
    if not query:
        raise ApiError(400, "'query' must not be an empty string.", "query")
    check_rows(gateway, texts, param)
    if max_tokens is not None:
        texts = await cut(gateway, system, texts, max_tokens)
    return await score(gateway, system, [query] * len(texts), texts, instruction, is_raw)


async def score(
    gateway: Gateway,
    system: System,
    queries: Sequence[str],
    texts: Sequence[str],
    instruction: str | None = None,
    is_raw: bool = False,
) -> Scores:
    columns: Columns = {"query": queries, "text" if "text" in system.inputs else "input_text": texts}
    if instruction is not None:
        if not {"prompt", "text"} <= system.inputs:  # of texts with a vector for each token, it is the text's prompt
            message = f"The model '{system.name}' takes no instruction."
            raise ApiError(400, message, "instruction", "unsupported_parameter")
        columns = {**columns, "prompt": [instruction] * len(texts)}
    answers = await (
        infer_logits(gateway, system, columns) if is_raw else infer_rows(gateway, system, columns, [SCORE])
    )
    values = answers.array(LOGITS if is_raw else SCORE)[:, 0].tolist()
    return Scores(values, sorted(range(len(texts)), key=lambda index: -values[index]), answers.tokens)


async def classify(
    gateway: Gateway, system: System, pairs: Sequence[tuple[Row, str]], param: str, is_raw: bool = False
) -> Answers:
    """Return the best `label` and the `scores` of all labels for texts, each with a second one or an empty one.

    If it is raw, return the `logits` alone.
    """
    columns = {"input_text": [first for first, _ in pairs]}
    if any(second for _, second in pairs):
        if "text_pair" not in system.inputs:
            raise ApiError(400, f"The model '{system.name}' takes texts, not pairs of texts.", param)
        columns["text_pair"] = [second for _, second in pairs]
    if is_raw:
        return await infer_logits(gateway, system, columns)
    return await infer_rows(gateway, system, columns, ["label", "scores"])


async def infer_logits(gateway: Gateway, system: System, columns: Columns) -> Answers:
    """Return what the model computes before it makes probabilities or scores of it."""
    model = await gateway.served.lookup(system.logits_model) if system.logits_model else None
    if model is None:
        message = f"The model '{system.name}' has no raw scores: leave out 'raw_scores'."
        raise ApiError(400, message, "raw_scores", "unsupported_value")
    return await infer_rows(gateway, model, columns, [LOGITS])


# --- tokens -----------------------------------------------------------------------------------------------------------


async def tokenized(
    gateway: Gateway, system: System, rows: Sequence[Row], source: str = "text_input", options: Sequence[Tensor] = ()
) -> list[TokenizedRow]:
    """Return texts as token ids, and token ids as texts. A generating model takes them as its input `source`."""
    if system.max_batch:
        name = system.tokenizing_model
        if (tokenizing := await gateway.served.lookup(name)) is None:
            raise not_ready(name)
        columns = {"query": rows, "text": [""] * len(rows)} if "text" in system.inputs else {"input_text": rows}
        texts = (await infer_rows(gateway, tokenizing, columns, [TOKENIZED])).texts(TOKENIZED)
    else:
        async with aclosing(
            gateway.responses(system, [Tensor.from_texts(source, rows), *options], [TOKENIZED])
        ) as responses:
            parts = [outputs async for outputs in responses if TOKENIZED in outputs]
        texts = Answers(parts).texts(TOKENIZED)
    return [TOKENIZED_ROW.decode(text) for text in texts]


async def cut(gateway: Gateway, system: System, texts: Sequence[str], max_tokens: int) -> list[str]:
    """Return the beginning of each text that has this many tokens."""
    rows = await tokenized(gateway, system, texts) if system.can(["tokens"]) else []
    places = [row.offsets for row in rows if row.offsets is not None]
    if len(places) < len(texts):
        message = f"The model '{system.name}' does not know the tokens of a text: leave out 'max_tokens_per_doc'."
        raise ApiError(400, message, "max_tokens_per_doc", "unsupported_parameter")
    return [
        text[: offsets[max_tokens - 1][1]] if len(offsets) > max_tokens else text
        for text, offsets in zip(texts, places, strict=True)
    ]


async def check_lengths(gateway: Gateway, system: System, rows: Sequence[Row], param: str) -> None:
    """Raise ApiError as text-embeddings-inference does for a text that would be cut."""
    if not system.can(["tokens"]) or not all(isinstance(row, str) for row in rows):
        message = f"The model '{system.name}' cuts these inputs if they are too long: leave out 'truncate'."
        raise ApiError(400, message, "truncate", "unsupported_value")
    for row in await tokenized(gateway, system, rows):
        if row.max_length is not None and len(row.ids) > row.max_length:
            message = f"'{param}' must have at most {row.max_length} tokens. Given: {len(row.ids)}."
            raise ApiError(413, message, param, "context_length_exceeded")
