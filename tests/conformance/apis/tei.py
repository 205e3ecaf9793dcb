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
GIVEN = {
    "tei-embed": [
        *neutral({"truncate": True}, {"normalize": False}),
        Given({"inputs": ["abc", "b"]}, {"input_text": ["abc", "b"]}, vectors("abc", "b")),
        Given({"inputs": ids_of("abc")}, {"input_text": [ids_of("abc")]}, vectors("abc")),
        Given({"inputs": "a" * 254, "truncate": False}),
    ],
    "tei-embed-all": [
        Given({"inputs": ["one", "two words"]}, None, [[[n, n] for n in range(1, 4)], [[n, n] for n in range(1, 5)]])
    ],
    "tei-predict": [
        Given({"inputs": ["good"]}, {}, GOOD),
        Given({"parameters": {"top_k": 1}}, {}, [GOOD[:1]]),
        Given({"inputs": [["good"], ["bad"]]}, {"input_text": ["good", "bad"]}, lambda got: got[0] == GOOD),
    ],
    "tei-predict-of-model": [
        Given({"inputs": ["good", "bad"]}, {"input_text": ["good"], "text_pair": ["bad"]}, system="pairs"),
        Given(
            {"raw_scores": True},
            {"model": "logit_classifier_encoder"},
            [{"score": 2, "label": "positive"}, {"score": -3, "label": "negative"}],
            system="logit_classifier",
        ),
    ],
    AT_MODEL: [
        Given(
            {"texts": ["b"], "raw_scores": True},
            {"query": ["red"], "text": ["b"]},
            [{"index": 0, "score": -3}],
            system="logit_reranker",
        ),
        *(
            Given({"inputs": text, "query": ABSENT, "texts": ABSENT, **more}, None, answer, system)
            for system, text, more, answer in (
                ("embedding", "abc", {}, vectors("abc")),
                ("sparse", "b", {}, [[{"index": 98, "value": 98 / 8}]]),
                ("classifier", "good", {"parameters": {"top_k": 1}}, [GOOD[:1]]),  # Hugging Face's client reads a batch
            )
        ),
    ],
    "rerank-short": [
        Given(OF_TEI, {}, RANKING),
        Given(OF_TEI | {"return_text": True}, {}, [{"text": DOCUMENTS[index]} for index in (1, 2, 0)]),
        Given(OF_TEI | {"top_n": 1, "raw_scores": False}, {}, RANKING[:1]),  # as litellm asks
    ],
    "tei-any-task": [Given(SENTENCES | {"query": ABSENT, "texts": ABSENT, "parameters": {}}, None, SIMILARITIES)],
    "tei-tokenize": [Given({"inputs": ["a"], "add_special_tokens": False}, {}, [[TOKEN]])],
    "tokenize": [Given({"prompt": ABSENT, "inputs": "a"}, ONE, [TOKENS])],
    "tei-decode": [Given({"ids": [ids_of("a"), [98]], "skip_special_tokens": False}, None, ["[1]a[2]", "b"])],
}

SEVERAL = (
    "/ is answered by embedding, classifier, sparse, per_token. Name one in the address, such as /models/embedding."
)
TOO_LONG = "'inputs' must have at most 256 tokens. Given: 257."
WRONG = {
    "tei-embed": [
        *wrong("inputs", {"inputs": ""}),
        *wrong("inputs[1]", {"inputs": ["a", ""]}),
        Wrong({"inputs": ["a", "a" * 255], "truncate": False}, reason=TOO_LONG, status=413, by_model=True),
        *wrong("truncation_direction", {"truncation_direction": "Left"}),
        *wrong("dimensions", {"dimensions": 5}),
    ],
    "tei-embed-all": [*wrong("truncate", {"truncate": False})],
    "tei-predict": [
        *wrong("truncate", {"truncate": False}),
        *wrong("raw_scores", {"raw_scores": True}),
        *wrong("inputs", {"inputs": ["a", "b", "c"]}),
        *wrong("inputs[1]", {"inputs": [["a"], []]}),
        Wrong({"inputs": ["a", "b"]}, reason="takes texts, not pairs"),
    ],
    "tei-any-task": [
        *wrong("raw_scores", {"raw_scores": True}),
        Wrong({"query": ABSENT, "texts": ABSENT}, reason=SEVERAL),
    ],
    "tei-similarity": [*wrong("inputs.sentences", {"inputs": {"source_sentence": "a", "sentences": []}})],
    "tei-tokenize": [*wrong("inputs[1]", {"inputs": ["a", ""]})],
    "tei-decode": [*wrong("ids", {"ids": []})],
    AT_MODEL: [Wrong({"query": ABSENT, "texts": ABSENT}, reason="inputs", system="embedding")],
}
