"""Late chunking: one vector for each span of a text, from one run over the whole text.

Each span's vector is the mean of its tokens' vectors, which the whole text shaped, and passes through the layers that
the model has after its pooling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Encoding

from serving.text.token_ids import TokenIds
from serving.text.tokenization import Answers, Rows, Tokenization, is_set
from serving.triton import responses
from serving.triton.types import Array, BadRequest, ConfigError, ModelConfig, Tensors
from triton_transformers.protocol import SPAN_VECTORS

# Optional input: the characters of each text's spans.
SPANS = "spans"
# The output of a request with spans, and the encoder's output that it is made of.
HIDDEN = "last_hidden_state"
# Tensor of a request that the model does not take: [texts, spans, 2], the tokens [start, end) of each span.
TOKENS = "span_tokens"


class SpanTokenization(Tokenization):
    own_input = SPANS

    def prepare(self, request: pb_utils.InferenceRequest) -> Rows:
        rows = super().prepare(request)
        if not is_set(request, SPANS):
            return rows
        if any(isinstance(text, TokenIds) for text in rows.texts):
            raise BadRequest(f"input '{SPANS}' needs texts, and this request has token ids", SPANS)
        spans = responses.input_tensor(request, SPANS).copy()
        if spans.ndim != 3 or spans.shape[::2] != (len(rows.texts), 2):
            raise BadRequest(
                f"input '{SPANS}' must have shape [{len(rows.texts)}, spans, 2]: the first character of each span of "
                f"each text, and the one after its last, not {list(spans.shape)}",
                SPANS,
            )
        return rows._replace(spans=spans)

    def encodings(self, jobs: list[Rows]) -> list[Encoding]:
        if all(rows.spans is None for rows in jobs):
            return super().encodings(jobs)
        # Only this way reports the position of each token in the text.
        return self.encode_slowly([row for rows in jobs for row in rows.texts])

    def complete(self, rows: Rows, encodings: list[Encoding], tensors: Tensors) -> None:
        super().complete(rows, encodings, tensors)
        if rows.spans is not None:
            tensors[TOKENS] = np.array(
                [
                    token_spans(row, encoding, spans + len(prompt) * (spans >= 0))
                    for row, (encoding, spans, prompt) in enumerate(
                        zip(encodings, rows.spans, rows.prompts, strict=True)
                    )
                ]
            ).reshape(rows.spans.shape)


def token_spans(row: int, encoding: Encoding, spans: Array) -> Array:
    """Return the tokens [start, end) of each span: those whose last character is in it.

    So a token belongs to one of two adjacent spans, and one that begins with the space before a word to the word's.
    """
    offsets = np.array(encoding.offsets).reshape(-1, 2)
    last = np.where(np.array(encoding.special_tokens_mask, bool), -1, offsets[:, 1] - 1)
    tokens = np.full(spans.shape, -1)
    for number, (start, end) in enumerate(spans):
        if start == end == -1:  # fills up the spans of a text that has fewer than others
            continue
        inside = np.flatnonzero((last >= start) & (last < end))
        if start < 0 or not len(inside):
            raise BadRequest(
                f"input '{SPANS}': span {number} of text {row} has no token: it is empty, has only spaces, or lies "
                f"outside the text or beyond the {len(encoding)} tokens that the model reads of it",
                SPANS,
            )
        tokens[number] = inside[0], inside[-1] + 1
    return tokens


class SpanAnswers(Answers):
    def __init__(self, config: ModelConfig) -> None:
        dims = {tensor["name"]: tensor["dims"] for tensor in config["output"]}
        if SPAN_VECTORS not in dims:
            raise ConfigError(f"a model with the input '{SPANS}' needs the output '{SPAN_VECTORS}'")
        self.width = int(dims[SPAN_VECTORS][-1])

    def use_head(self, head: Callable[[Array], Array] | None) -> None:
        if head is None:
            raise ConfigError(f"input '{SPANS}': the layers after the pooling are missing: run `make models` again")
        self.head = head

    def encoder_outputs(self, outputs: list[Any]) -> list[Any]:
        own = [tensor for tensor in outputs if tensor["name"] != SPAN_VECTORS]
        return [*own, {"name": HIDDEN, "data_type": "TYPE_FP32", "dims": [-1, -1]}]

    def needed(self, names: list[str], rows: Rows) -> list[str]:
        own = [name for name in names if name != SPAN_VECTORS]
        return [*own, HIDDEN] if SPAN_VECTORS in names and rows.spans is not None else own

    def finished(self, names: list[str], rows: Rows, tokens: Tensors, outputs: Tensors) -> Tensors:
        result = {name: array for name, array in outputs.items() if name in names}
        if SPAN_VECTORS in names:
            result[SPAN_VECTORS] = self.vectors(tokens.get(TOKENS), outputs, len(rows.texts))
        return result

    def vectors(self, spans: Array | None, outputs: Tensors, count: int) -> Array:
        """Return a vector for each span; those that fill up a text's spans are zero."""
        if spans is None:
            return np.zeros((count, 0, self.width), np.float32)
        vectors = np.zeros((*spans.shape[:2], self.width), np.float32)
        places = np.argwhere(spans[:, :, 0] >= 0)
        if len(places):
            means = [outputs[HIDDEN][row, slice(*spans[row, span])].mean(axis=0) for row, span in places]
            vectors[tuple(places.T)] = self.head(np.stack(means).astype(np.float32))
        return vectors
