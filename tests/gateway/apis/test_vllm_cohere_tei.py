"""The routes of vLLM, Cohere and text-embeddings-inference, with a stand-in for Triton."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gateway.edge.config import Config, Limits
from tests.support.gateway import Reply, RunningGateway, gateway_before, running_gateway
from tests.support.page_systems import pipeline
from tests.support.triton_stand_in import (
    Model,
    TritonStandIn,
    classifier,
    embedding,
    generator,
    ids_of,
    reranker,
    sparse,
    token_encoder,
    vector,
)
from triton_transformers.tensors import Tensor

ONE_OF_EACH_KIND = ("embedding", "reranker", "classifier", "sparse", "per_token", "counter", "streaming", "speaker")
DOCUMENTS = ["nothing", "a red house", "red"]
SCORES = [0.0, 1.0, 0.5]
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonStandIn]:
    pairs, prompted = classifier("pairs"), embedding("prompted")
    pairs.inputs["text_pair"] = prompted.inputs["prompt_name"] = ("STRING", [1])
    generators = generator(), generator("streaming", streams=True)
    speaker, labels = pipeline("speaker", "text-to-audio", {"audio": "", "sampling_rate": 16000}), classifier()
    labels.parameters["activation"] = "sigmoid"  # so that it moderates
    models = embedding(), reranker(), labels, sparse(), token_encoder(), *generators, pairs, prompted, speaker
    with TritonStandIn(*models) as stand_in:
        yield stand_in


def gateway_serving(triton: TritonStandIn, *systems: str, **fields: Any) -> Any:
    return running_gateway(
        Config(triton=triton.address, systems=systems, limits=Limits(texts=10, body=50_000), **fields)
    )


@pytest.fixture(scope="module")
def gateway(triton: TritonStandIn) -> Iterator[RunningGateway]:
    """Run a gateway before one system of each kind, so that requests need not name one."""
    with gateway_serving(triton, *ONE_OF_EACH_KIND) as running:
        yield running


@pytest.fixture(scope="module")
def crowded(triton: TritonStandIn) -> Iterator[RunningGateway]:
    """Run a gateway before several systems of a kind."""
    with gateway_serving(triton, *triton.models) as running:
        yield running


@pytest.fixture(autouse=True)
def forget_requests(triton: TritonStandIn) -> None:
    triton.received.clear()


def answer(gateway: RunningGateway, path: str, **body: Any) -> Any:
    reply = gateway.post(path, body)
    assert reply.status == 200, reply.body
    return reply.json


def message(reply: Reply) -> str:
    """Return the message of an error, in the form of any API."""
    error = reply.json.get("error", reply.json)
    return str(error["message"] if isinstance(error, dict) else error)


# --- every route ------------------------------------------------------------------------------------------------------


def test_errors_of_a_shared_path_have_the_form_of_the_body(gateway: RunningGateway) -> None:
    wrong = {"query": "a", "colour": "red"}
    expected = {"error": "Unknown parameter: 'colour'.", "error_type": "Validation"}
    assert gateway.post("/rerank", wrong | {"texts": ["b"]}).json == expected
    assert gateway.post("/rerank", wrong | {"documents": ["b"]}).error["param"] == "colour"


CLIENTS = {
    "cohere": {"x_fern_sdk_name": "cohere"},
    "anthropic": {"anthropic_version": "2023-06-01"},
    "hugging_face": {"user_agent": "unknown/None; hf_hub/2.4.0; python/3.12"},
}


@pytest.mark.parametrize(
    ("path", "client", "keys"),
    [
        ("/v2/nothing", None, {"message"}),
        ("/v1/nothing", "cohere", {"message"}),
        ("/v1/messages/batches", None, {"type", "error"}),
        ("/v1/nothing", "anthropic", {"type", "error"}),
        ("/models/embedding/nothing", None, {"error", "error_type"}),
        ("/nothing", "hugging_face", {"error", "error_type"}),
        ("/v1/nothing", None, {"error"}),
        ("/v1/models/nobody", "cohere", {"message"}),
        ("/v1/models/nobody", "anthropic", {"type", "error"}),
    ],
)
def test_unknown_path_has_the_form_of_the_clients_api(gateway: RunningGateway, path, client, keys) -> None:
    reply = gateway.get(path, **CLIENTS.get(client, {}))
    assert (reply.status, reply.json.keys()) == (404, keys)


def test_models_are_listed_in_the_form_of_the_client(gateway: RunningGateway) -> None:
    listed = gateway.get("/v1/models", **CLIENTS["anthropic"]).json
    assert (listed["has_more"], listed["first_id"], len(listed["data"])) == (False, "embedding", 8)
    first = gateway.get("/v1/models/embedding", **CLIENTS["anthropic"]).json
    assert first == listed["data"][0]
    assert first.pop("created_at").endswith("Z")
    assert first == {"type": "model", "id": "embedding", "display_name": "embedding", "lifecycle": "active"}
    models = gateway.get("/v1/models", **CLIENTS["cohere"]).json["models"]
    assert models[:2] == [
        {"name": "embedding", "endpoints": ["embed"]},
        {"name": "reranker", "endpoints": ["rerank"]},
    ]
    (chat, _) = gateway.get("/v1/models?endpoint=chat", **CLIENTS["cohere"]).json["models"]
    assert chat == gateway.get("/v1/models/counter", **CLIENTS["cohere"]).json


# --- vLLM -------------------------------------------------------------------------------------------------------------


def test_score_pairs_texts(gateway: RunningGateway) -> None:
    scored = answer(gateway, "/score", model="reranker", text_1="red house", text_2=DOCUMENTS)
    assert scored.pop("id").startswith("score-")
    assert scored.pop("created") > 1_700_000_000
    assert scored == {
        "object": "list",
        "model": "reranker",
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(SCORES)],
        "usage": {"prompt_tokens": 17, "total_tokens": 17, "completion_tokens": 0},
    }
    scored = answer(gateway, "/v1/score", model="reranker", text_1=["red", "blue"], text_2=["red", "red"])
    assert [item["score"] for item in scored["data"]] == [1.0, 0.0]
    # The score of an embedding model is the cosine.
    scored = answer(gateway, "/score", model="embedding", text_1="abc", text_2=["abc", "b"])
    expected = float(np.dot(vector("abc"), vector("b")))
    assert [item["score"] for item in scored["data"]] == pytest.approx([1.0, expected])


def test_pooling_returns_what_the_model_has(gateway: RunningGateway) -> None:
    def pooled(model: str, **fields: Any) -> Any:
        return [item["data"] for item in answer(gateway, "/pooling", model=model, input=["a", "b"], **fields)["data"]]

    assert pooled("embedding") == [pytest.approx(vector("a")), pytest.approx(vector("b"))]
    assert pooled("per_token") == [[[n, n] for n in range(1, 4)]] * 2
    assert pooled("classifier") == [[0.75, 0.25]] * 2
    (encoded, _) = pooled("classifier", encoding_format="base64")
    assert np.frombuffer(base64.b64decode(encoded), "f").tolist() == [0.75, 0.25]


@pytest.mark.parametrize("model", ["embedding", "counter", "streaming"])
def test_tokenize_returns_the_ids_and_detokenize_the_text(gateway: RunningGateway, model: str) -> None:
    tokens = answer(gateway, "/tokenize", model=model, prompt="비 a")
    assert tokens == {"count": 5, "max_model_len": 256, "tokens": ids_of("비 a"), "token_strs": None}
    without = answer(gateway, "/tokenize", model=model, prompt="비 a", add_special_tokens=False)
    assert without["tokens"] == ids_of("비 a")[1:-1]
    assert answer(gateway, "/detokenize", model=model, tokens=tokens["tokens"]) == {"prompt": "[1]비 a[2]"}
    assert answer(gateway, "/detokenize", model=model, tokens=[]) == {"prompt": ""}


def test_step_of_an_ensemble_tokenizes() -> None:
    """Ask the step itself: from an ensemble, Triton would ask it for its other outputs, too."""
    whole, encoder = embedding(), embedding("encoder")
    del whole.outputs["tokenized"]
    steps = [{"model_name": "encoder", "model_version": -1}]
    whole.settings = {"platform": "ensemble", "ensemble_scheduling": {"step": steps}}
    with gateway_before(whole, encoder) as (gateway, triton):
        assert answer(gateway, "/tokenize", model="embedding", prompt="a")["tokens"] == ids_of("a")
        assert [(received.model, received.outputs) for received in triton.received] == [("encoder", ["tokenized"])]


def test_chat_is_tokenized_by_the_model(gateway: RunningGateway, triton: TritonStandIn) -> None:
    answer(gateway, "/tokenize", model="counter", messages=MESSAGES)
    assert list(triton.received[0].inputs) == ["messages"]


def test_completions_take_token_ids(gateway: RunningGateway) -> None:
    def complete(prompt: Any) -> Any:
        return answer(gateway, "/v1/completions", model="counter", prompt=prompt, max_tokens=2, echo=True)["choices"]

    assert complete(ids_of("one")) == complete("one")
    assert complete([ids_of("one"), ids_of("b")]) == complete(["one", "b"])


def test_vectors_are_normalized_where_jinas_clients_ask_for_that() -> None:
    long = embedding("long")
    long.answer = lambda inputs: [[Tensor.from_values("output__0", "FP32", [[3.0, 4.0, 0, 0]])]]
    with gateway_before(long) as (gateway, _):
        for fields, expected in (({}, [3, 4, 0, 0]), ({"normalized": True, "output_dimension": 2}, [0.6, 0.8])):
            (item,) = answer(gateway, "/v1/embeddings", model="long", input="a", **fields)["data"]
            assert item["embedding"] == pytest.approx(expected)


# --- rerank for clients of several APIs -------------------------------------------------------------------------------

RANKED = {"model": "cutter", "query": "red house", "documents": ["a red house", "red"]}
TEXTS = [{"index": 0, "score": 1.0, "text": "a red house"}]


@pytest.mark.parametrize(
    ("path", "body", "place", "expected"),
    [
        ("/v1/rerank", RANKED | {"top_k": 1, "truncation": True}, "data", [(0, 1.0, {"text": "a red house"})]),
        ("/v1/rerank", RANKED | {"max_tokens_per_doc": 5, "top_n": 1}, "results", [(0, 0.5, {"text": "a red house"})]),
        ("/v2/rerank", RANKED | {"max_tokens_per_doc": 5, "top_n": 1}, "results", [(0, 0.5, None)]),
        ("/v2/rerank", RANKED | {"return_documents": True, "top_n": 1}, "results", [(0, 1.0, {"text": "a red house"})]),
        ("/models/cutter/rerank", RANKED | {"model": "any"}, "results", [(0, 1.0, "a red house"), (1, 0.5, "red")]),
    ],
)
def test_each_client_reranks_with_its_fields(ranking: RunningGateway, path, body, place, expected) -> None:
    results = answer(ranking, path, **body)[place]
    assert [(one["index"], one["relevance_score"], one.get("document")) for one in results] == expected


@pytest.fixture(scope="module")
def ranking() -> Iterator[RunningGateway]:
    with gateway_before(reranker("cutter", tokenizes=True)) as (gateway, _):
        yield gateway


# --- Cohere -----------------------------------------------------------------------------------------------------------


def test_cohere_v2_embeds_in_each_type(gateway: RunningGateway) -> None:
    types = ["float", "base64", "binary", "ubinary"]
    contents = [{"content": [{"type": "text", "text": text}]} for text in ("abc", "b")]
    embedded = answer(gateway, "/v2/embed", model="embedding", inputs=contents, embedding_types=types)
    assert embedded.pop("id").startswith("embed-")
    expected = np.array([vector("abc"), vector("b")], "<f4")
    bits = np.packbits(expected > 0, axis=1)
    embeddings = embedded.pop("embeddings")
    assert np.array(embeddings.pop("float")) == pytest.approx(expected)
    assert [base64.b64decode(row) for row in embeddings.pop("base64")] == [row.tobytes() for row in expected]
    assert embeddings == {"ubinary": bits.tolist(), "binary": (bits.astype(int) - 128).tolist()}
    assert embedded == {
        "texts": ["abc", "b"],
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 6}},
        "response_type": "embeddings_by_type",
    }
    embedded = answer(gateway, "/v2/embed", model="embedding", texts=["abc"], output_dimension=2)
    (row,) = embedded["embeddings"]["float"]
    assert row == pytest.approx([value / math.hypot(*vector("abc")[:2]) for value in vector("abc")[:2]])


def test_cohere_v1_embeds_in_lists_unless_types_are_named(
    gateway: RunningGateway, crowded: RunningGateway, triton: TritonStandIn
) -> None:
    plain = answer(gateway, "/v1/embed", model="embedding", texts=["abc"], input_type="search_query", truncate="END")
    assert (plain["response_type"], plain["embeddings"]) == ("embeddings_floats", [pytest.approx(vector("abc"))])
    typed = answer(gateway, "/v1/embed", model="embedding", texts=["abc"], embedding_types=["float"])
    assert typed["response_type"] == "embeddings_by_type"
    assert typed["embeddings"] == {"float": [pytest.approx(vector("abc"))]}
    # The input type is the prompt's name.
    triton.received.clear()
    answer(crowded, "/v2/embed", model="prompted", texts=["a", "b"], input_type="search_query")
    assert triton.received[0].inputs["prompt_name"].texts() == ["search_query|query|"] * 2


def test_cohere_v2_reranks(gateway: RunningGateway) -> None:
    ranked = answer(gateway, "/v2/rerank", model="reranker", query="red house", documents=DOCUMENTS, top_n=2)
    assert ranked["results"] == [{"index": 1, "relevance_score": 1.0}, {"index": 2, "relevance_score": 0.5}]
    assert ranked["meta"]["billed_units"] == {"input_tokens": 17}


# --- text-embeddings-inference ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/embed", "/models/embedding/embed", "/models/embedding"])
def test_tei_embeds(gateway: RunningGateway, path: str) -> None:
    assert answer(gateway, path, inputs="abc", truncate=True) == [pytest.approx(vector("abc"))]
    assert answer(gateway, path, inputs=["abc", "b"]) == [pytest.approx(vector("abc")), pytest.approx(vector("b"))]
    assert answer(gateway, path, inputs=ids_of("abc"), normalize=False) == [pytest.approx(vector("abc"))]


def test_tei_embeds_sparsely_and_each_token(gateway: RunningGateway) -> None:
    assert answer(gateway, "/embed_sparse", inputs=["b"]) == [[{"index": 98, "value": 98 / 8}]]
    assert answer(gateway, "/models/sparse", inputs="b") == [[{"index": 98, "value": 98 / 8}]]
    assert answer(gateway, "/embed_all", inputs=["one", "two words"]) == [
        [[n, n] for n in range(1, 4)],
        [[n, n] for n in range(1, 5)],
    ]


def test_tei_predicts(gateway: RunningGateway, crowded: RunningGateway, triton: TritonStandIn) -> None:
    good = [{"score": 0.75, "label": "positive"}, {"score": 0.25, "label": "negative"}]
    assert answer(gateway, "/predict", inputs="good") == good
    assert answer(gateway, "/predict", inputs=["good"]) == good
    assert answer(gateway, "/predict", inputs=[["good"], ["bad"]])[0] == good
    # Hugging Face's InferenceClient reads the answer as that of a batch.
    assert answer(gateway, "/models/classifier", inputs="good", parameters={"top_k": 1}) == [good[:1]]
    triton.received.clear()
    answer(crowded, "/models/pairs/predict", inputs=["good", "bad"])
    assert triton.received[0].inputs["text_pair"].texts() == ["bad"]


def test_tei_reranks(gateway: RunningGateway) -> None:
    ranked = answer(gateway, "/rerank", query="red house", texts=DOCUMENTS, return_text=True)
    assert ranked == [{"index": index, "score": SCORES[index], "text": DOCUMENTS[index]} for index in (1, 2, 0)]
    assert answer(gateway, "/", query="red house", texts=DOCUMENTS)[0] == {"index": 1, "score": 1.0}


def test_tei_reranks_as_many_as_litellm_asks_for(gateway: RunningGateway) -> None:
    assert len(answer(gateway, "/rerank", query="red", texts=DOCUMENTS, top_n=1, raw_scores=False)) == 1


def with_logits(whole: Model) -> list[Model]:
    """Return the ensemble, and its step that has the logits."""
    step = Model(f"{whole.name}_encoder", whole.inputs, {"logits": ("FP32", [2])}, lambda inputs: [[LOGITS]])
    whole.settings = {"platform": "ensemble", "ensemble_scheduling": {"step": [{"model_name": step.name}]}}
    return [whole, step]


LOGITS = Tensor.from_values("logits", "FP32", [[-3.0, 2.0]])


def test_raw_scores_are_the_logits() -> None:
    models = [*with_logits(classifier()), *with_logits(reranker())]
    with gateway_before(*models) as (gateway, _):
        rated = answer(gateway, "/predict", inputs="a", raw_scores=True)
        assert rated == [{"score": 2.0, "label": "positive"}, {"score": -3.0, "label": "negative"}]
        assert answer(gateway, "/rerank", query="a", texts=["b"], raw_scores=True) == [{"index": 0, "score": -3.0}]


def test_tei_refuses_to_cut_if_it_is_asked_to(gateway: RunningGateway) -> None:
    assert answer(gateway, "/embed", inputs="a" * 254, truncate=False)
    reply = gateway.post("/embed", {"inputs": ["a", "a" * 255], "truncate": False})
    expected = {"error": "'inputs' must have at most 256 tokens. Given: 257.", "error_type": "Validation"}
    assert (reply.status, reply.json) == (413, expected)


@pytest.mark.parametrize("path", ["/tokenize", "/models/embedding/tokenize"])
def test_tei_shows_the_place_of_each_token(gateway: RunningGateway, path: str) -> None:
    fields = {"model": "embedding"} if path == "/tokenize" else {}
    first, *_, last = rows = answer(gateway, path, inputs="비 a", **fields)[0]
    assert first == {"id": 1, "text": "[1]", "special": True, "start": None, "stop": None}
    assert last == first | {"id": 2, "text": "[2]"}
    assert rows[1] == {"id": ord("비"), "text": "비", "special": False, "start": 0, "stop": 1}
    assert answer(gateway, path, inputs=["비 a"], add_special_tokens=False, **fields) == [rows[1:-1]]


def test_tei_decodes_ids(gateway: RunningGateway) -> None:
    path = "/models/embedding/decode"
    assert answer(gateway, path, ids=ids_of("a")) == ["a"]
    assert answer(gateway, path, ids=[ids_of("a"), [98]], skip_special_tokens=False) == ["[1]a[2]", "b"]


def test_health_of_a_model(triton: TritonStandIn) -> None:
    with gateway_serving(triton, "embedding", "loads") as gateway:
        statuses = [gateway.get(f"/models/{name}/health").status for name in ("embedding", "loads", "nobody")]
        assert statuses == [200, 503, 404]


def test_tei_compares_sentences(gateway: RunningGateway) -> None:
    inputs = {"source_sentence": "abc", "sentences": ["abc", "b"]}
    expected = pytest.approx([1.0, float(np.dot(vector("abc"), vector("b")))])
    assert answer(gateway, "/similarity", inputs=inputs) == expected
    assert answer(gateway, "/", inputs=inputs, parameters={}) == expected


def test_info_names_the_kind_and_the_limits(gateway: RunningGateway) -> None:
    info = gateway.get("/models/embedding/info").json
    assert (info["model_id"], info["model_type"], info["max_input_length"]) == ("embedding", {"embedding": {}}, 256)
    assert info["max_client_batch_size"] == 10
    assert gateway.get("/models/reranker/info").json["model_type"] == {"reranker": {}}
    assert gateway.get("/models/classifier/info").json["model_type"] == {"classifier": {}}


def test_request_without_a_name_is_for_the_only_system(crowded: RunningGateway, triton: TritonStandIn) -> None:
    reply = crowded.post("/embed", {"inputs": "a"})
    expected = "/embed is answered by embedding, prompted. Name one in the address, such as /models/embedding/embed."
    assert (reply.status, reply.json["error"]) == (400, expected)
    with gateway_serving(triton, "embedding") as gateway:
        reply = gateway.post("/predict", {"inputs": "a"})
    expected = "No served system answers /predict: the page at / lists them."
    assert (reply.status, reply.json["error"]) == (404, expected)


def test_request_without_a_name_waits_for_the_system_that_loads(triton: TritonStandIn, monkeypatch: Any) -> None:
    monkeypatch.setattr("gateway.edge.outages.LIMIT_S", 0.1)
    with gateway_serving(triton, "embedding", "loads") as gateway:
        reply = gateway.post("/predict", {"inputs": "a"})
        assert (reply.status, reply.json["error_type"]) == (503, "Unhealthy")


def test_classifier_without_names_of_labels_is_refused() -> None:
    old: Model = classifier()
    old.parameters = {}
    with gateway_before(old) as (gateway, _):
        reply = gateway.post("/predict", {"inputs": "a"})
        assert (reply.status, "`make models`" in reply.json["error"]) == (400, True)


# --- refusals ---------------------------------------------------------------------------------------------------------

SCORE = {"model": "reranker", "text_1": "a", "text_2": "b"}
EMBED = {"model": "embedding", "texts": ["a"]}
RERANK = {"model": "reranker", "query": "red", "documents": DOCUMENTS}
SEVERAL = (
    "/ is answered by embedding, classifier, sparse, per_token. Name one in the address, such as /models/embedding."
)


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        *(("/score", "text_1", SCORE | fields) for fields in ({"text_1": ""}, {"text_1": []})),
        ("/score", "text_2[1]", SCORE | {"text_2": ["a", ""]}),
        ("/score", "text_1", SCORE | {"text_1": ["a", "b"], "text_2": ["a"] * 3}),
        ("/score", "model", SCORE | {"model": "classifier"}),
        ("/pooling", "dimensions", {"model": "classifier", "input": "a", "dimensions": 1}),
        ("/tokenize", "prompt", {"model": "embedding"}),
        ("/tokenize", "prompt", {"model": "embedding", "prompt": "a", "messages": MESSAGES}),
        ("/tokenize", "prompt", {"model": "embedding", "prompt": ""}),
        ("/tokenize", "model", {"model": "embedding", "messages": MESSAGES}),
        ("/tokenize", "messages", {"model": "counter", "messages": []}),
        ("/tokenize", "model", {"model": "reranker", "prompt": "a"}),
        ("/tokenize", "return_token_strs", {"model": "embedding", "prompt": "a", "return_token_strs": True}),
        *(("/detokenize", "tokens[0]", {"model": "embedding", "tokens": [token]}) for token in (-1, "a")),
        *(("/v2/embed", "'texts'", EMBED | fields) for fields in ({"texts": None}, {"inputs": []})),
        ("/v2/embed", "'images'", EMBED | {"images": ["data:image/png;base64,"]}),
        ("/v2/embed", "'embedding_types[0]'", EMBED | {"embedding_types": ["int8"]}),
        *(("/v2/embed", "'truncate'", EMBED | {"truncate": value}) for value in ("NONE", "START")),
        ("/v2/embed", "'max_tokens'", EMBED | {"max_tokens": 5}),
        ("/v2/embed", "'input_type'", EMBED | {"input_type": "video"}),
        ("/v2/embed", "'dimensions'", EMBED | {"output_dimension": 5}),
        ("/v2/rerank", "'max_tokens_per_doc'", RERANK | {"max_tokens_per_doc": 5}),
        ("/v2/rerank", "'query'", RERANK | {"query": ""}),
        ("/embed", "'inputs'", {"inputs": ""}),
        ("/embed", "'inputs[1]'", {"inputs": ["a", ""]}),
        ("/embed_all", "'truncate'", {"inputs": "a", "truncate": False}),
        ("/predict", "'truncate'", {"inputs": "a", "truncate": False}),
        ("/tokenize", "inputs[1]", {"model": "embedding", "inputs": ["a", ""]}),
        ("/models/embedding/decode", "'ids'", {"ids": []}),
        (
            "/v1/embeddings",
            "normalized",
            {"model": "sparse", "input": "a", "embedding_type": "sparse", "normalized": True},
        ),
        ("/embed", "'truncation_direction'", {"inputs": "a", "truncation_direction": "Left"}),
        ("/embed", "'dimensions'", {"inputs": "a", "dimensions": 5}),
        ("/predict", "'raw_scores'", {"inputs": "a", "raw_scores": True}),
        ("/predict", "'inputs'", {"inputs": ["a", "b", "c"]}),
        ("/predict", "'inputs[1]'", {"inputs": [["a"], []]}),
        ("/predict", "takes texts, not pairs", {"inputs": ["a", "b"]}),
        ("/models/reranker/rerank", "'raw_scores'", {"query": "a", "texts": ["b"], "raw_scores": True}),
        ("/similarity", "'inputs.sentences'", {"inputs": {"source_sentence": "a", "sentences": []}}),
        ("/", SEVERAL, {}),
        ("/models/embedding", "inputs", {}),
    ],
)
def test_wrong_field_is_named(
    gateway: RunningGateway, triton: TritonStandIn, path: str, name: str, body: dict[str, Any]
) -> None:
    reply = gateway.post(path, body)
    assert reply.status == 400, reply.body
    error = reply.json.get("error")
    assert error["param"] == name if isinstance(error, dict) else name in message(reply)
    assert not triton.received
