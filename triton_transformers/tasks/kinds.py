"""Systems: their names, and the abilities that follow from their tensors. The gateway's routes depend on these."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

# Names become folders, arguments on command lines, and parts of URLs.
NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
# The names of an output that is the vector of a text.
EMBEDDINGS = ("output__0", "sentence_embedding")
# The names of an output with a vector for each token.
TOKEN_VECTORS = ("token_embeddings", "last_hidden_state")
# The outputs that are a text's sparse vector.
SPARSE = ("token_id", "weight")

Shapes = Mapping[str, Sequence[int]]  # output -> its dimensions, without the batch


def kind(inputs: Collection[str], outputs: Shapes, max_batch: int) -> str:
    """Return the first of the system's abilities, or other."""
    return next(iter(abilities(inputs, outputs, max_batch)), "other")


def abilities(inputs: Collection[str], outputs: Shapes, max_batch: int) -> list[str]:
    """Return its abilities: embedding, sparse, multi (a vector for each token), rerank, classify, generation."""
    if "text_output" in outputs:
        return ["generation"]
    if not max_batch:
        return []
    scores = "query" in inputs and [*outputs.get("score", ())] == [1]
    if {"query", "text"} <= {*inputs}:
        return ["rerank"] if scores else []
    if "input_text" not in inputs:
        return []
    # Token classification has the start of each entity too.
    if {"label", "score", "scores"} <= outputs.keys() and "start" not in outputs:
        return ["classify"]
    able = {
        "embedding": embedding(outputs),
        "sparse": outputs.keys() >= {*SPARSE},
        "multi": token_vectors(outputs),
        "rerank": scores,
    }
    return [ability for ability, is_there in able.items() if is_there]


def embedding(outputs: Shapes) -> str:
    """Return the name of the output that is the vector of a text, or nothing."""
    return next((name for name in EMBEDDINGS if len(outputs.get(name, ())) == 1), "")


def token_vectors(outputs: Shapes) -> str:
    """Return the name of the output that has a vector for each token of a text, or nothing."""
    return next((name for name in TOKEN_VECTORS if len(outputs.get(name, ())) == 2), "")


def listed_names(path: Path) -> list[str] | None:
    """Return the names that a file lists; None if there is no such file, or if it has anything but names.

    A crash of the machine or a full disk may leave any bytes in it.
    """
    try:
        names = path.read_text(encoding="utf-8").split()
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
        return None
    return names if all(map(NAME.fullmatch, names)) else None
