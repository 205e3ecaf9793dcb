"""Multi-vector models (ColBERT, BGE-M3): a vector for each token of a text, and the score of a text for a query.

Queries and documents are tokenized differently: each has its own maximum length, a short query may be extended by mask
tokens, and some tokens of a document (punctuation) get no vector.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Encoding, Tokenizer

from serving.encoders import answers
from serving.text.long_texts import encode
from serving.text.token_ids import TokenIds
from serving.text.tokenization import PRESENT, Answers, Rows, Tokenization, is_set, row_texts
from serving.triton.parameters import version_file
from serving.triton.types import Array, BadRequest, InstanceArgs, ModelConfig, Tensors
from triton_transformers.protocol import TOKEN_COUNT, VECTOR_COUNT

# The file of a multi-vector model, beside its tokenizer.json.
MULTI_VECTOR = "multi_vector.json"
# Optional input: the query that each text is scored for.
QUERY = "query"
# Outputs: a vector for each token that has one, their number, and the score of the text for its query.
VECTORS, SCORE = "token_embeddings", "score"
# Outputs: the weight of each token of a text. The encoder's output has one for each position.
SPARSE, WEIGHTS = ("token", "token_id", "weight"), "token_weights"
# Tensor of a request that the model does not take: which tokens have a vector.
KEPT = "kept"
DOCUMENT = "document"
# The score of a text without vectors, as sentence-transformers has it: below that of every other text.
NO_VECTORS = -1e9


@dataclass(frozen=True)
class Role:
    """The way in which queries or documents are tokenized, and which of their tokens have vectors."""

    max_length: int
    skipped: Sequence[int] = ()  # tokens that have none
    only: Sequence[int] = ()  # tokens that alone have one
    skipped_first: int = 0  # positions at the beginning that have none
    # Extend texts to so many tokens with this one, before or after the text; the text's tokens may attend to them.
    extended_to: int = 0
    extension: int = 0
    extension_side: str = "right"
    attends: bool = False

    def kept(self, ids: Array, present: Array) -> Array:
        kept = present & ~np.isin(ids, self.skipped) if self.skipped else present.copy()
        if self.only:
            kept &= np.isin(ids, self.only)
        kept[: self.skipped_first] = False
        return kept


class MultiVectorTokenization(Tokenization):
    own_input = QUERY

    def __init__(self, config: ModelConfig, args: InstanceArgs, dtypes: dict[str, Any], padding: str) -> None:
        super().__init__(config, args, dtypes, padding)
        path = version_file(args, MULTI_VECTOR, "what `make models` writes")
        self.settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        roles: dict[str, dict[str, Any]] = self.settings["roles"]
        self.roles = {name: Role(**fields) for name, fields in roles.items()}

    @cached_property
    def shorter_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the role whose texts may have fewer tokens."""
        tokenizer = copy.deepcopy(self.tokenizer)
        length = min(role.max_length for role in self.roles.values())
        tokenizer.enable_truncation(**(tokenizer.truncation or {}) | {"max_length": length})
        return tokenizer

    def prepare(self, request: pb_utils.InferenceRequest) -> Rows:
        rows = super().prepare(request)
        names = self.prompts.known(self.chosen_names(request, len(rows.texts)))
        rows = rows._replace(roles=tuple(QUERY if name == QUERY else DOCUMENT for name in names))
        requested = request.requested_output_names()
        if SCORE not in requested:
            return rows
        if is_set(request, QUERY):
            return self.with_queries(rows, row_texts(request, QUERY, len(rows.texts)))
        if len(requested) == 1:
            raise BadRequest(f"output '{SCORE}' needs the input '{QUERY}': the query that each text is scored for")
        return rows

    def with_queries(self, rows: Rows, queries: list[str]) -> Rows:
        """Add the different queries as further texts, so that they run with the texts that they are compared with."""
        distinct = list(dict.fromkeys(queries))
        prompt = self.prompts.by_name.get(QUERY, "")
        texts = [*rows.texts, *(prompt + query for query in distinct)]
        return rows._replace(
            texts=texts,
            prompts=[*rows.prompts, *[prompt] * len(distinct)],
            shortened=self.shortened(texts),
            roles=rows.roles + (QUERY,) * len(distinct),
            queries=np.array([len(rows.texts) + distinct.index(query) for query in queries]),
        )

    def encodings(self, jobs: list[Rows]) -> list[Encoding]:
        encodings = super().encodings(jobs)
        texts = [text for rows in jobs for text in rows.shortened or rows.texts]
        roles = [self.roles[name] for rows in jobs for name in rows.roles]
        for number, (text, role) in enumerate(zip(texts, roles, strict=True)):
            if isinstance(text, TokenIds):  # exactly the tokens that the client wants
                continue
            if len(encodings[number]) > role.max_length:
                encodings[number] = encode(self.shorter_tokenizer, text)
            if len(encodings[number]) < role.extended_to:
                encodings[number].pad(role.extended_to, direction=role.extension_side, pad_id=role.extension)
        return encodings

    def complete(self, rows: Rows, encodings: list[Encoding], tensors: Tensors) -> None:
        super().complete(rows, encodings, tensors)
        ids, mask = tensors["input_ids"], tensors["attention_mask"]
        present = np.arange(ids.shape[1]) < np.array([len(encoding) for encoding in encodings])[:, None]
        count = mask.sum(axis=1, dtype=np.int32)[:, None]
        tensors[TOKEN_COUNT] = count if rows.queries is None else count[: len(rows.queries)] + count[rows.queries]
        roles = [self.roles[name] for name in rows.roles]
        for row, role in enumerate(roles):
            if role.attends:
                mask[row] = present[row]
        tensors[PRESENT] = present
        tensors[KEPT] = np.array([role.kept(*row) for role, *row in zip(roles, ids, present, strict=True)])


class MultiVectorAnswers(Answers):
    def __init__(self, tokenization: MultiVectorTokenization) -> None:
        self.tokenizer = tokenization.tokenizer
        self.takes_mean = bool(tokenization.settings.get("mean"))
        self.unweighted = tokenization.settings.get("unweighted", ())

    def encoder_outputs(self, outputs: list[Any]) -> list[Any]:
        own = [tensor for tensor in outputs if tensor["name"] not in (VECTOR_COUNT, SCORE, *SPARSE)]
        if any(tensor["name"] in SPARSE for tensor in outputs):
            own.append({"name": WEIGHTS, "data_type": "TYPE_FP32", "dims": [-1]})
        return own

    def needed(self, names: list[str], rows: Rows) -> list[str]:
        sources = {
            VECTOR_COUNT: "",
            SCORE: VECTORS if rows.queries is not None else "",
            **dict.fromkeys(SPARSE, WEIGHTS),
        }
        return list(dict.fromkeys(filter(None, (sources.get(name, name) for name in names))))

    def finished(self, names: list[str], rows: Rows, tokens: Tensors, outputs: Tensors) -> Tensors:
        count = len(rows.texts) if rows.queries is None else len(rows.queries)
        kept = tokens[KEPT]
        result = {name: outputs[name][:count] for name in names if name in outputs}
        vectors = [row[own] for row, own in zip(outputs[VECTORS], kept, strict=True)] if VECTORS in outputs else []
        if VECTORS in result:
            result[VECTORS] = padded(vectors[:count])
        if VECTOR_COUNT in names:
            result[VECTOR_COUNT] = kept[:count].sum(axis=1, dtype=np.int32)[:, None]
        if SCORE in names and rows.queries is not None:
            result[SCORE] = self.scores(vectors, rows.queries)
        if WEIGHTS in outputs:
            ids = tokens["input_ids"]
            sparse = [self.weights(*row) for row in zip(ids, outputs[WEIGHTS], tokens[PRESENT], strict=True)]
            result |= answers.sparse_tensors(sparse[:count], self.tokenizer)
        return result

    def scores(self, vectors: list[Array], queries: Array) -> Array:
        """Return the score of each text for the query in this row of the vectors."""
        scores = np.empty((len(queries), 1), np.float32)
        for query in np.unique(queries):
            texts = np.flatnonzero(queries == query)
            scores[texts, 0] = max_similarities(vectors[query], [vectors[text] for text in texts])
            if self.takes_mean:
                scores[texts, 0] /= max(1, len(vectors[query]))
        return scores

    def weights(self, ids: Array, weights: Array, present: Array) -> tuple[Array, Array]:
        """Return the tokens of a text, and the largest weight of each, the largest first."""
        weighted = present & (weights > 0) & ~np.isin(ids, self.unweighted)
        distinct, position = np.unique(ids[weighted], return_inverse=True)
        largest = np.zeros(len(distinct), np.float32)
        np.maximum.at(largest, position, weights[weighted])
        order = np.argsort(-largest, kind="stable")
        return distinct[order], largest[order]


def padded(vectors: list[Array]) -> Array:
    """Return the vectors of each text in one tensor; those of shorter texts end in zeros."""
    tensor = np.zeros((len(vectors), max(map(len, vectors)), vectors[0].shape[1]), vectors[0].dtype)
    for row, own in zip(tensor, vectors, strict=True):
        row[: len(own)] = own
    return tensor


def max_similarities(query: Array, texts: list[Array]) -> Array:
    """Return for each text the sum, over the query's vectors, of the largest product with a vector of the text."""
    scores = np.full(len(texts), NO_VECTORS, np.float32)
    some = [number for number, text in enumerate(texts) if len(text)]
    if some:
        products = query @ np.concatenate([texts[number] for number in some]).T
        starts = np.cumsum([0, *(len(texts[number]) for number in some[:-1])])
        scores[some] = np.maximum.reduceat(products, starts, axis=1).sum(axis=0)
    return scores
