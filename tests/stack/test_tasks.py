"""A row of each kind of answer on a real Triton: clients at once get what the library of the checkpoint answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.conformance.tasks.rows import CAPTIONS, ROWS, SIZES, Columns, image
from tests.conformance.tasks.run import Tensors, check, expect, png, single, tensors
from tests.support.batches import one_batch
from tests.support.neuron import on_neuron
from tests.support.stacks import SHORT, UNSURE, TestStack, bring_up
from triton_transformers.corpus import MIXED
from triton_transformers.errors import ERROR_STATUS, decode
from triton_transformers.tasks.command import first_command
from triton_transformers.triton import TritonError

pytestmark = pytest.mark.slow

SERVED = {row.name: row for row in ROWS if row.on_triton}
CLIENTS = 16
TEXTS = [text for text in MIXED.texts if len(text) < 60][:CLIENTS]
QUERY = "Which battery fits?"
WITH_QUERY: Columns = {"input_text": TEXTS, "query": [QUERY] * len(TEXTS)}
# A decorator of its own: if another name shared it, pytest would not group the tests by the fixture.
on_cpu = pytest.mark.parametrize("served", ["cpu"], indirect=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: row.save(folder / name) for name, row in SERVED.items()}


@pytest.fixture(scope="module", params=["cpu", "neuron"])
def served(stack, new_stack, checkpoints, request) -> TestStack:
    """Serve all rows as ONNX, and one as PyTorch, too; then some on a stack of PROFILE=neuron."""
    systems = [
        {"SYSTEMS": name, "SOURCE": checkpoints[name], "TASK": row.task if row.is_chosen else ""}
        for name, row in SERVED.items()
        if request.param == "cpu" or row.on_neuron
    ]
    names = [system["SYSTEMS"] for system in systems]
    if request.param == "cpu":
        stack.assemble(*systems, systems[0] | {"SYSTEMS": "mood_python", "FORMAT": "python"})
        return stack.serve(*names, "mood_python")
    stack.serve()  # memory cannot hold the systems of both
    stack = on_neuron(new_stack())
    stack.environment["NEURON_BATCHES"] = "8"  # test_neuron_embedding.py compiles for several
    # Models share no core.
    stack.assemble(*(one | {"NEURON_CORES": f"{core}:{core}"} for core, one in enumerate(systems)))
    stack.environment["SYSTEMS"] = " ".join(names)
    return bring_up(stack)


def ask(stack: TestStack, system: str, sent: Tensors, *outputs: str) -> Tensors:
    """Return all outputs, or those of these names."""
    inputs = [httpclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)) for name, array in sent.items()]
    for tensor in inputs:
        tensor.set_data_from_numpy(sent[tensor.name()])
    client = httpclient.InferenceServerClient(stack.http.removeprefix("http://"), network_timeout=300)
    result = client.infer(system, inputs, outputs=[httpclient.InferRequestedOutput(name) for name in outputs] or None)
    return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}


def at_once(stack: TestStack, system: str, requests: Sequence[Columns]) -> list[Tensors | InferenceServerException]:
    """Return the answers to requests of as many clients, or their errors."""

    def answer(columns: Columns) -> Tensors | InferenceServerException:
        try:
            return ask(stack, system, tensors(columns))
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(len(requests)) as clients:
        return list(clients.map(answer, requests))


def check_row(stack: TestStack, checkpoints: dict[str, Path], system: str) -> None:
    row = SERVED[system.removesuffix("_python")]
    requests = [one for columns in row.requests for one in single(columns)]
    library = row.reference(checkpoints[row.name])
    for start in range(0, len(requests), CLIENTS):
        some = requests[start : start + CLIENTS]
        for given, columns in zip(at_once(stack, system, some), some, strict=True):
            check(given, expect(library, columns))


@on_cpu
@pytest.mark.parametrize("system", [*SERVED, "mood_python"])
def test_clients_at_once_get_the_librarys_answers(served, checkpoints, system):
    check_row(served, checkpoints, system)


@pytest.mark.parametrize("served", ["neuron"], indirect=True)
@pytest.mark.parametrize("system", [row.name for row in SERVED.values() if row.on_neuron])
def test_clients_at_once_get_the_librarys_answers_from_neuron(served, checkpoints, system):
    check_row(served, checkpoints, system)


@on_cpu
@pytest.mark.parametrize(
    ("system", "columns", "reason"), [(row.name, *wrong) for row in SERVED.values() for wrong in row.wrong]
)
def test_wrong_request_gets_400_with_the_reason(served, system, columns, reason):
    (refusal,) = at_once(served, system, [columns])
    assert refusal.status() == "400"
    assert reason in refusal.message()


def test_smoke_sends_each_task_a_request(served):
    done = served.make("smoke")
    assert done.returncode == 0, done.stdout + done.stderr


@on_cpu
@pytest.mark.parametrize("system", SERVED)
def test_command_of_make_add_gets_an_answer(served, system, tmp_path):
    (tmp_path / "image.jpg").write_bytes(png(image(0)))
    done = served.paste(first_command(system, served.folder / "models", "cpu", served.gateway, True), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    json.loads(done.stdout)


@on_cpu
def test_step_of_an_ensemble_answers_a_typed_error(served):
    texts = {"name": "input_text", "shape": [1, 1], "datatype": "BYTES", "data": ["no mask"]}
    with pytest.raises(TritonError) as error:
        served.triton.infer("blanks", {"inputs": [texts], "parameters": {ERROR_STATUS: True}})
    typed = decode(str(error.value))
    assert typed
    assert (typed.status, list(typed.fields)) == (400, ["input_text"])


def check_batch(stack: TestStack, checkpoints: dict[str, Path], system: str, model: str, columns: Columns) -> None:
    requests = single(columns)
    library = SERVED[system].reference(checkpoints[system])
    with one_batch(stack, model, len(requests)):
        answers = at_once(stack, system, requests)
    for given, one in zip(answers, requests, strict=True):
        check(given, expect(library, one))


def test_texts_of_many_lengths_share_a_batch(served, checkpoints):
    check_batch(served, checkpoints, "mood", "mood_encoder", {"input_text": TEXTS})


@on_cpu
def test_texts_of_many_vectors_share_a_batch(served, checkpoints):
    check_batch(served, checkpoints, "stanford", "stanford", WITH_QUERY)


@on_cpu
def test_texts_share_a_batch_although_images_come_between_them(served, checkpoints):
    texts = single({"input_text": CAPTIONS})
    images = single({"image_bytes": [image(row % len(SIZES)) for row in range(len(texts))]})
    damaged: list[Columns] = [{"image_bytes": [png(image(row))[:300]]} for row in (0, 4)]
    requests = [*texts, *images, *damaged]
    with one_batch(served, "clip_text_encoder", len(texts)):
        answers = at_once(served, "clip", requests)
    library = SERVED["clip"].reference(checkpoints["clip"])
    for given, columns in zip(answers, [*texts, *images], strict=False):
        check(given, expect(library, columns))
    for refusal in answers[-len(damaged) :]:
        assert refusal.status() == "400"
        assert "input 'image_bytes': row 0 is not a whole" in refusal.message()


@on_cpu
def test_gateway_takes_texts_and_images_in_one_list(served, checkpoints):
    url = f"data:image/png;base64,{base64.b64encode(png(image(0))).decode()}"
    body = {"model": "clip", "input": [CAPTIONS[0], url, {"image": url}, CAPTIONS[1]]}
    vectors = [item["embedding"] for item in served.post("/v1/embeddings", **body)["data"]]
    library = SERVED["clip"].reference(checkpoints["clip"])
    sent = [{"input_text": CAPTIONS[0]}, {"image": image(0)}, {"image": image(0)}, {"input_text": CAPTIONS[1]}]
    np.testing.assert_allclose(vectors, [library(**one)["sentence_embedding"] for one in sent], atol=1e-4)


@on_cpu
def test_system_of_texts_and_images_is_unloaded_with_its_halves(served):
    served.serve(*SERVED.keys() - {"siglip"}, "mood_python")
    loaded = {model for model, (state, _) in served.triton.index().items() if state == "READY"}
    assert not {model for model in loaded if model.startswith("siglip")}
    assert {"clip", "clip_text_encoder", "clip_image_model"} < loaded


# --- vectors of tokens ------------------------------------------------------------------------------------------------


@on_cpu
def test_gateway_ranks_by_the_scores_of_the_library(served, checkpoints):
    library = SERVED["stanford"].reference(checkpoints["stanford"])
    scores = np.concatenate([answer["score"] for answer in expect(library, WITH_QUERY)])
    ranked = served.post("/v1/rerank", model="stanford", query=QUERY, documents=TEXTS)["results"]
    assert [result["index"] for result in ranked] == np.argsort(-scores, kind="stable").tolist()
    np.testing.assert_allclose([result["relevance_score"] for result in ranked], np.sort(scores)[::-1], rtol=1e-3)
    with pytest.raises(InferenceServerException, match="output 'score' needs the input 'query'"):
        ask(served, "stanford", tensors({"input_text": ["a"]}), "score")


@on_cpu
def test_bge_m3_answers_what_is_asked_for_from_one_run(served):
    names = ["sentence_embedding", "token_id", "weight", "token_embeddings", "vector_count"]
    sent = tensors({"input_text": TEXTS})
    before = served.triton.statistics()["m3"]
    answer = ask(served, "m3", sent, *names)
    assert served.executions("m3", len(TEXTS), before) == 1
    for name in names:
        ((own, value),) = ask(served, "m3", sent, name).items()
        assert own == name
        np.testing.assert_array_equal(value, answer[name])
    types = {name: served.post("/v1/embeddings", model="m3", input=TEXTS, **fields)["data"] for name, fields in {
        "dense": {}, "sparse": {"embedding_type": "sparse"}, "multi": {"embedding_type": "multi"},
    }.items()}  # fmt: skip
    for row, count in enumerate(answer["vector_count"][:, 0]):
        dense, sparse, multi = (types[name][row]["embedding"] for name in ("dense", "sparse", "multi"))
        np.testing.assert_allclose(dense, answer["sentence_embedding"][row], atol=1e-6)
        assert sparse["indices"] == [id for id in answer["token_id"][row].tolist() if id >= 0]
        np.testing.assert_allclose(multi, answer["token_embeddings"][row, :count], atol=1e-6)


@on_cpu
def test_late_chunking_gives_each_chunk_a_vector_of_its_context(served):
    chunks = [f"{TEXTS[0]} ", TEXTS[1]]
    ends = [len(chunks[0]), len("".join(chunks))]
    sent = tensors({"input_text": ["".join(chunks)]}) | {"spans": np.array([[[0, ends[0]], ends]])}
    (vectors,) = ask(served, "sentences", sent, "span_embeddings")["span_embeddings"]
    data = served.post("/v1/embeddings", model="sentences", input=chunks, late_chunking=True)["data"]
    np.testing.assert_allclose([item["embedding"] for item in data], vectors, atol=1e-6)
    alone = ask(served, "sentences", tensors({"input_text": chunks}), "sentence_embedding")["sentence_embedding"]
    assert ((alone * vectors).sum(axis=1) < 0.999).all()  # the other chunk changes both
    # Without spans, the answer has none.
    without = ask(served, "sentences", tensors({"input_text": ["a"]}), "span_embeddings")
    assert without["span_embeddings"].shape == (1, 0, 32)


@on_cpu
@pytest.mark.slowest
def test_load_test_measures_sparse_vectors(served):
    done = served.make("loadtest", SYSTEM="splade", **(SHORT | {"USERS": 8}))
    assert "texts per batch (" in done.stdout, done.stdout + done.stderr
    results = served.results()
    # On a busy machine, Triton may run no batch of a tiny model.
    assert {cause["code"] for cause in results["verdict"]["causes"]} <= UNSURE | {"NO_BATCHES"}, done.stdout
    assert results["system"] == "splade"
    modes = results["modes"]
    assert min(mode["requests"] for mode in modes.values()) > 0
    assert [mode["failures"] for mode in modes.values()] == [0] * len(modes)
