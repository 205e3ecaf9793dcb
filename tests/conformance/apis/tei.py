"""text-embeddings-inference, at / and below /models/{model}."""

from typing import Any

from tests.conformance.apis.run import Case
from tests.support.triton_stand_in import ids_of

RANKED = {"query": "red", "texts": ["nothing", "a red house", "red"]}
SENTENCES = {"inputs": {"source_sentence": "a", "sentences": ["a"]}}


def both(id: str, path: str, system: str, body: dict[str, Any], **fields: Any) -> list[Case]:
    """Return the case of a path at / and that of the model's own address."""
    return [
        Case(f"tei-{id}", path, body, "tei", **fields),
        Case(f"tei-{id}-of-model", f"/models/{{model}}{path.rstrip('/')}", body, "tei", system=system, **fields),
    ]


CASES = [
    *both("embed", "/embed", "embedding", {"inputs": "a"}, many="inputs"),
    *both("embed-sparse", "/embed_sparse", "sparse", {"inputs": "a"}, many="inputs"),
    *both("embed-all", "/embed_all", "per_token", {"inputs": "a"}, many="inputs"),
    *both("predict", "/predict", "classifier", {"inputs": "good"}),
    *both("similarity", "/similarity", "embedding", SENTENCES),
    *both("any-task", "/", "reranker", RANKED, many="texts"),
    Case("tei-tokenize", "/models/{model}/tokenize", {"inputs": "a"}, "tei", system="embedding"),
    *both("decode", "/decode", "embedding", {"ids": ids_of("a")})[1:],
    Case("tei-decode", "/decode", {"model": "embedding", "ids": ids_of("a")}, "tei"),
]
