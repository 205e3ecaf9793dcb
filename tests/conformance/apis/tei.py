"""text-embeddings-inference, at / and below /models/{model}."""

from typing import Any

import numpy as np

from tests.conformance.apis.embeddings import DOCUMENTS
from tests.conformance.apis.run import ABSENT, Case, Exactly, Given, Wrong, neutral, wrong
from tests.support.triton_stand_in import ids_of, vector

RANKED = {"query": "red", "texts": DOCUMENTS}
SENTENCES = {"inputs": {"source_sentence": "abc", "sentences": ["abc", "b"]}}
SIMILARITIES = [1, float(np.dot(vector("abc"), vector("b")))]
ONE = {"input_text": ["a"]}
GOOD = [{"score": 0.75, "label": "positive"}, {"score": 0.25, "label": "negative"}]
RANKING = [Exactly({"index": index, "score": score}) for index, score in ((1, 1), (2, 1), (0, 0))]
TOKEN = {"id": 97, "text": "a", "special": False, "start": 0, "stop": 1}
FIRST = {"id": 1, "text": "[1]", "special": True, "start": None, "stop": None}
TOKENS = [FIRST, TOKEN, FIRST | {"id": 2, "text": "[2]"}]
TO_RANK = {"query": ["red"] * 3, "text": DOCUMENTS}


def both(id: str, path: str, system: str, body: dict[str, Any], **fields: Any) -> list[Case]:
    """Return the case of a path at / and that of the model's own address."""
    return [
        Case(f"tei-{id}", path, body, "tei", **fields),
        Case(f"tei-{id}-of-model", f"/models/{{model}}{path.rstrip('/')}", body, "tei", system=system, **fields),
    ]


def vectors(*texts: str) -> list[Any]:
    return [vector(text) for text in texts]


CASES = [
    *both("embed", "/embed", "embedding", {"inputs": "a"}, many="inputs", triton=ONE, answer=vectors("a")),
    *both(
        *("embed-sparse", "/embed_sparse", "sparse", {"inputs": "a"}),
        many="inputs",
        triton=ONE,
        answer=[[{"index": 97, "value": 97 / 8}]],
    ),
    *both(
        *("embed-all", "/embed_all", "per_token", {"inputs": "a"}),
        many="inputs",
        triton=ONE,
        answer=[[[n, n] for n in range(1, 4)]],
    ),
    *both("predict", "/predict", "classifier", {"inputs": "good"}, triton={"input_text": ["good"]}, answer=GOOD),
    *both("similarity", "/similarity", "embedding", SENTENCES, triton=None, answer=SIMILARITIES),
    *both("any-task", "/", "reranker", RANKED, many="texts", triton=TO_RANK, answer=RANKING),
    Case(
        *("tei-tokenize", "/models/{model}/tokenize", {"inputs": "a"}, "tei"),
        system="embedding",
        triton=ONE,
        answer=[TOKENS],
    ),
    *both("decode", "/decode", "embedding", {"ids": ids_of("a")}, triton={"input_text": [ids_of("a")]}, answer=["a"])[
        1:
    ],
    Case("tei-decode", "/decode", {"model": "embedding", "ids": ids_of("a")}, "tei"),
]
OF_TEI = {"model": ABSENT, "documents": ABSENT, "texts": DOCUMENTS}  # at an address that it shares with Jina
AT_MODEL = "tei-any-task-of-model"  # the system's own address
GIVEN = [
    *neutral("tei-embed", {"truncate": True}, {"normalize": False}),
    Given("tei-embed", {"inputs": ["abc", "b"]}, {"input_text": ["abc", "b"]}, vectors("abc", "b")),
    Given("tei-embed", {"inputs": ids_of("abc")}, {"input_text": [ids_of("abc")]}, vectors("abc")),
    Given("tei-embed", {"inputs": "a" * 254, "truncate": False}),
    Given(
        "tei-embed-all",
        {"inputs": ["one", "two words"]},
        None,
        [[[n, n] for n in range(1, 4)], [[n, n] for n in range(1, 5)]],
    ),
    Given("tei-predict", {"inputs": ["good"]}, {}, GOOD),
    Given("tei-predict", {"parameters": {"top_k": 1}}, {}, [GOOD[:1]]),
    Given("tei-predict", {"inputs": [["good"], ["bad"]]}, {"input_text": ["good", "bad"]}, lambda got: got[0] == GOOD),
    Given(
        "tei-predict-of-model",
        {"inputs": ["good", "bad"]},
        {"input_text": ["good"], "text_pair": ["bad"]},
        system="pairs",
    ),
    Given(
        "tei-predict-of-model",
        {"raw_scores": True},
        {"model": "logit_classifier_encoder"},
        [{"score": 2, "label": "positive"}, {"score": -3, "label": "negative"}],
        system="logit_classifier",
    ),
    Given(
        AT_MODEL,
        {"texts": ["b"], "raw_scores": True},
        {"query": ["red"], "text": ["b"]},
        [{"index": 0, "score": -3}],
        system="logit_reranker",
    ),
    Given("rerank-short", OF_TEI, {}, RANKING),
    Given("rerank-short", OF_TEI | {"return_text": True}, {}, [{"text": DOCUMENTS[index]} for index in (1, 2, 0)]),
    Given("rerank-short", OF_TEI | {"top_n": 1, "raw_scores": False}, {}, RANKING[:1]),  # as litellm asks
    Given("tei-any-task", SENTENCES | {"query": ABSENT, "texts": ABSENT, "parameters": {}}, None, SIMILARITIES),
    *(
        Given(AT_MODEL, {"inputs": text, "query": ABSENT, "texts": ABSENT, **more}, None, answer, system)
        for system, text, more, answer in (
            ("embedding", "abc", {}, vectors("abc")),
            ("sparse", "b", {}, [[{"index": 98, "value": 98 / 8}]]),
            ("classifier", "good", {"parameters": {"top_k": 1}}, [GOOD[:1]]),  # Hugging Face's client reads a batch
        )
    ),
    Given("tei-tokenize", {"inputs": ["a"], "add_special_tokens": False}, {}, [[TOKEN]]),
    Given("tokenize", {"prompt": ABSENT, "inputs": "a"}, ONE, [TOKENS]),
    Given("tei-decode", {"ids": [ids_of("a"), [98]], "skip_special_tokens": False}, None, ["[1]a[2]", "b"]),
]
SEVERAL = (
    "/ is answered by embedding, classifier, sparse, per_token. Name one in the address, such as /models/embedding."
)
TOO_LONG = "'inputs' must have at most 256 tokens. Given: 257."
WRONG = [
    *wrong("tei-embed", "inputs", {"inputs": ""}),
    *wrong("tei-embed", "inputs[1]", {"inputs": ["a", ""]}),
    Wrong("tei-embed", {"inputs": ["a", "a" * 255], "truncate": False}, reason=TOO_LONG, status=413, by_model=True),
    *wrong("tei-embed", "truncation_direction", {"truncation_direction": "Left"}),
    *wrong("tei-embed", "dimensions", {"dimensions": 5}),
    *wrong("tei-embed-all", "truncate", {"truncate": False}),
    *wrong("tei-predict", "truncate", {"truncate": False}),
    *wrong("tei-predict", "raw_scores", {"raw_scores": True}),
    *wrong("tei-predict", "inputs", {"inputs": ["a", "b", "c"]}),
    *wrong("tei-predict", "inputs[1]", {"inputs": [["a"], []]}),
    Wrong("tei-predict", {"inputs": ["a", "b"]}, reason="takes texts, not pairs"),
    *wrong("tei-any-task", "raw_scores", {"raw_scores": True}),
    *wrong("tei-similarity", "inputs.sentences", {"inputs": {"source_sentence": "a", "sentences": []}}),
    *wrong("tei-tokenize", "inputs[1]", {"inputs": ["a", ""]}),
    *wrong("tei-decode", "ids", {"ids": []}),
    Wrong("tei-any-task", {"query": ABSENT, "texts": ABSENT}, reason=SEVERAL),
    Wrong(AT_MODEL, {"query": ABSENT, "texts": ABSENT}, reason="inputs", system="embedding"),
]
