"""Tell from its tensors what a system does, and so which of the gateway's routes answers for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

# The names of an output that is the vector of a text.
EMBEDDINGS = ("output__0", "sentence_embedding")
# The output with the number of tokens of each text.
TOKEN_COUNT = "token_count"

Shapes = Mapping[str, Sequence[int]]  # output -> its dimensions, without the batch


def kind(inputs: Collection[str], outputs: Shapes, max_batch: int) -> str:
    """Return embedding, rerank, classify, generation or other."""
    if "text_output" in outputs:
        return "generation"
    if max_batch and {"query", "text"} <= {*inputs} and [*outputs.get("score", ())] == [1]:
        return "rerank"
    # Token classification has the start of each entity too.
    if max_batch and "input_text" in inputs:
        if {"label", "score", "scores"} <= outputs.keys() and "start" not in outputs:
            return "classify"
        if embedding(outputs):
            return "embedding"
    return "other"


def embedding(outputs: Shapes) -> str:
    """Return the name of the output that is the vector of a text, or nothing."""
    return next((name for name in EMBEDDINGS if len(outputs.get(name, ())) == 1), "")
