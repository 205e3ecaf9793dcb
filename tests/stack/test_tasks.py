"""Every task in every format: the answers equal those of transformers' own pipeline."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from export.recipes.text.references import find_answer
from tests.support.batches import batches_of
from tests.support.checkpoints import encoders, vision
from tests.support.neuron import on_neuron
from tests.support.stacks import SHORT, TestStack, bring_up
from triton_transformers.corpus import MIXED
from triton_transformers.errors import ERROR_STATUS, decode
from triton_transformers.triton import TritonError

pytestmark = pytest.mark.slow

TEXTS = MIXED.texts[:24]
# PROFILE=neuron serves a system for each kind of answer: each loads PyTorch. `make models` compares them all.
ON_NEURON = ("mood", "entities", "sentences", "splade", "questions")
TASKS = {"captions": "sentence-similarity"}  # of the systems whose files name no single task


on_cpu = pytest.mark.parametrize("served", ["cpu"], indirect=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, encoder_checkpoints) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    savers = {
        "topics": (
            encoders.save_roberta,
            "ForSequenceClassification",
            encoders.labels(encoders.MOODS) | {"problem_type": "multi_label_classification"},
        ),
        "entities": (encoders.save_roberta, "ForTokenClassification", encoders.labels(encoders.ENTITIES)),
        "features": (encoders.save_distilbert, "Model", {}),
        "blanks": (encoders.save_bert, "ForMaskedLM", {}),
        "questions": (encoders.save_bert, "ForQuestionAnswering", {}),
    }
    saved = {name: save(folder / name, head, **config) for name, (save, head, config) in savers.items()}
    saved |= {"splade": encoders.save_sparse_encoder(folder / "splade"), "captions": vision.save_clip(folder / "clip")}
    prompts = {"prompts": encoders.PROMPTS, "default_prompt_name": "passage"}
    sentences = encoders.save_sentence_transformer(folder / "sentences", **prompts)
    return saved | encoder_checkpoints | {"sentences": sentences}


@pytest.fixture(scope="module", params=["cpu", "neuron"])
def served(stack, new_stack, checkpoints, request) -> TestStack:
    """Serve every task as ONNX, and one as PyTorch, too; then some on a stack of PROFILE=neuron."""
    systems = [{"SYSTEMS": name, "SOURCE": source, "TASK": TASKS.get(name, "")} for name, source in checkpoints.items()]
    if request.param == "cpu":
        stack.assemble(*systems, {"SYSTEMS": "mood_python", "SOURCE": checkpoints["mood"], "FORMAT": "python"})
        return stack.serve(*checkpoints, "mood_python")
    stack.serve()  # memory cannot hold the systems of both
    stack = on_neuron(new_stack())
    stack.environment["NEURON_BATCHES"] = "8"  # test_neuron_embedding.py compiles for several
    # Models share no core.
    stack.assemble(*(one | {"NEURON_CORES": f"{core}:{core}"} for core, one in enumerate(systems)))
    stack.environment["SYSTEMS"] = " ".join(ON_NEURON)
    return bring_up(stack)


def pipeline(task: str, folder: Path, **settings):
    return transformers.pipeline(task, model=str(folder), device="cpu", **settings)


def test_text_classification_equals_pipeline(served, checkpoints):
    check_labels(served.ask("mood", input_text=TEXTS), checkpoints["mood"], "softmax")


@on_cpu
def test_independent_labels_equal_pipeline(served, checkpoints):
    check_labels(served.ask("topics", input_text=TEXTS), checkpoints["topics"], "sigmoid")


def check_labels(answer: dict[str, np.ndarray], source: Path, activation: str) -> None:
    classify = pipeline("text-classification", source, top_k=None, function_to_apply=activation)
    expected = classify(TEXTS, truncation=True)
    for row, best in enumerate(expected):
        scores = {label["label"]: label["score"] for label in best}
        np.testing.assert_allclose(answer["scores"][row], [scores[name] for name in encoders.MOODS], atol=1e-4)
        assert answer["label"][row, 0] == best[0]["label"]
        assert answer["score"][row, 0] == pytest.approx(best[0]["score"], abs=1e-4)
    # The texts differ in their scores; they may have one label.
    assert len(np.unique(answer["score"].round(4))) > 1


def test_token_classification_equals_pipeline(served, checkpoints):
    answer = served.ask("entities", input_text=TEXTS)
    classify = pipeline("token-classification", checkpoints["entities"], aggregation_strategy="simple")
    classify.tokenizer.model_max_length = encoders.POSITIONS
    count = 0
    for row, text in enumerate(TEXTS):
        expected = classify(text)
        columns = (answer[name][row] for name in ("label", "start", "end", "score"))
        entities = [entity for entity in zip(*columns, strict=True) if entity[0]]
        assert [entity[:3] for entity in entities] == [(e["entity_group"], e["start"], e["end"]) for e in expected]
        np.testing.assert_allclose([entity[3] for entity in entities], [e["score"] for e in expected], atol=1e-4)
        count += len(entities)
    assert count > len(TEXTS)


@on_cpu
def test_feature_extraction_equals_pipeline(served, checkpoints):
    extract = pipeline("feature-extraction", checkpoints["features"])
    for text in TEXTS[:6]:
        answer = served.ask("features", input_text=[text])
        expected = extract(text, truncation=True)
        np.testing.assert_allclose(answer["last_hidden_state"], expected, atol=1e-4)


@pytest.fixture(scope="module")
def sentence_transformer(checkpoints):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(checkpoints["sentences"]), device="cpu")


@pytest.mark.parametrize("choice", [{}, {"prompt_name": "query"}, {"prompt": "Find a city: "}, {"prompt": ""}])
def test_sentence_similarity_equals_sentence_transformers(served, sentence_transformer, choice):
    answer = served.ask("sentences", input_text=TEXTS, **{name: [value] * len(TEXTS) for name, value in choice.items()})
    expected = sentence_transformer.encode(TEXTS, **choice)
    np.testing.assert_allclose(answer["sentence_embedding"], expected, atol=1e-4)


def test_sparse_embedding_equals_sparse_encoder(served, checkpoints):
    from sentence_transformers import SparseEncoder

    answer = served.ask("splade", input_text=TEXTS)
    library = SparseEncoder(str(checkpoints["splade"]), device="cpu")
    for row, expected in enumerate(library.encode(TEXTS, convert_to_sparse_tensor=False).numpy()):
        is_token = answer["token_id"][row] >= 0
        vector = np.zeros_like(expected)
        vector[answer["token_id"][row][is_token]] = answer["weight"][row][is_token]
        np.testing.assert_allclose(vector, expected, atol=1e-4)
        assert answer["token"][row][0] == library.tokenizer.convert_ids_to_tokens(int(expected.argmax()))


@on_cpu
@torch.inference_mode()
def test_text_half_of_clip_equals_get_text_features(served, checkpoints):
    answer = served.ask("captions", input_text=TEXTS)
    clip = transformers.CLIPModel.from_pretrained(checkpoints["captions"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints["captions"])
    for row, text in enumerate(TEXTS):
        expected = clip.get_text_features(**tokenizer(text, truncation=True, return_tensors="pt")).pooler_output
        np.testing.assert_allclose(answer["sentence_embedding"][row], expected[0].numpy(), atol=1e-4)


@on_cpu
def test_format_python_answers_like_onnx(served):
    answer = served.ask("mood_python", input_text=TEXTS, text_pair=TEXTS[::-1])
    for name, expected in served.ask("mood", input_text=TEXTS, text_pair=TEXTS[::-1]).items():
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(answer[name], expected, atol=1e-4)
        else:
            assert answer[name].tolist() == expected.tolist()


@on_cpu
@pytest.mark.slowest
def test_load_test_measures_sparse_vectors(served):
    done = served.make("loadtest", SYSTEM="splade", **(SHORT | {"USERS": 8}))
    assert "texts per batch (" in done.stdout, done.stdout + done.stderr
    results = served.results()
    # On a busy machine, Triton may run no batch of a tiny model. Nothing else may fail the command.
    assert (done.returncode == 0) == results["passed"], done.stderr
    if not results["passed"]:
        (complaint,) = results["complaints"]
        assert results["unproven"] and complaint.startswith(results["unproven"])
    assert results["system"] == "splade"
    modes = results["modes"]
    assert min(mode["requests"] for mode in modes.values()) > 0
    assert [mode["failures"] for mode in modes.values()] == [0] * len(modes)


def test_smoke_sends_each_task_a_request(served):
    done = served.make("smoke")
    assert done.returncode == 0, done.stdout + done.stderr


def test_concurrent_requests_get_their_own_prompts(served, sentence_transformer):
    """Triton batches only requests that set the same optional inputs."""
    choices = [{}, {"prompt_name": "query"}, {"prompt": "Find a city: "}]
    expected = [sentence_transformer.encode(TEXTS, **choice) for choice in choices]
    cases = [(choice, text) for choice in range(len(choices)) for text in range(len(TEXTS))]

    def embedding(case: tuple[int, int]) -> np.ndarray:
        choice = {name: [value] for name, value in choices[case[0]].items()}
        return served.ask("sentences", input_text=[TEXTS[case[1]]], **choice)["sentence_embedding"][0]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(embedding, cases))
    for (choice, text), answer in zip(cases, answers, strict=True):
        np.testing.assert_allclose(answer, expected[choice][text], atol=1e-4)


@on_cpu
def test_fill_mask_equals_pipeline(served, checkpoints):
    texts = [f"{text[:20]} [MASK] rain" for text in TEXTS]
    answer = served.ask("blanks", input_text=texts)
    for row, expected in enumerate(pipeline("fill-mask", checkpoints["blanks"])(texts)):
        assert answer["token"][row].tolist() == [token["token_str"] for token in expected]
        np.testing.assert_allclose(answer["score"][row], [token["score"] for token in expected], atol=1e-4)


@on_cpu
@pytest.mark.parametrize("text", ["no mask", "[MASK] and [MASK]", "word " * 100 + "[MASK]"])
def test_fill_mask_requires_exactly_one_mask(served, text):
    with pytest.raises(TritonError, match=r"each text must have \[MASK\] exactly once") as error:
        served.ask("blanks", input_text=[text])
    assert error.value.status == 400


@on_cpu
def test_step_of_an_ensemble_answers_a_typed_error(served):
    texts = {"name": "input_text", "shape": [1, 1], "datatype": "BYTES", "data": ["no mask"]}
    with pytest.raises(TritonError) as error:
        served.triton.infer("blanks", {"inputs": [texts], "parameters": {ERROR_STATUS: True}})
    typed = decode(str(error.value))
    assert typed
    assert (typed.status, list(typed.fields)) == (400, ["input_text"])


@on_cpu
def test_text_ranking_equals_cross_encoder(served, checkpoints):
    from sentence_transformers import CrossEncoder

    queries = [TEXTS[0]] * len(TEXTS)
    answer = served.ask("reranker", query=queries, text=TEXTS)
    expected = CrossEncoder(str(checkpoints["reranker"]), device="cpu").predict(list(zip(queries, TEXTS, strict=True)))
    np.testing.assert_allclose(answer["score"].ravel(), expected, atol=1e-4)
    with ThreadPoolExecutor(24) as pool:
        together = pool.map(lambda text: served.ask("reranker", query=TEXTS[:1], text=[text])["score"], TEXTS)
    np.testing.assert_allclose(np.concatenate(list(together)).ravel(), expected, atol=1e-4)


def test_classifier_takes_a_second_text(served, checkpoints):
    answer = served.ask("mood", input_text=TEXTS, text_pair=TEXTS[::-1])
    pairs = [{"text": first, "text_pair": second} for first, second in zip(TEXTS, TEXTS[::-1], strict=True)]
    expected = pipeline("text-classification", checkpoints["mood"])(pairs, truncation=True)
    assert answer["label"].ravel().tolist() == [best["label"] for best in expected]
    np.testing.assert_allclose(answer["score"].ravel(), [best["score"] for best in expected], atol=1e-4)


def test_question_answering_equals_the_pipelines_rule(served, checkpoints):
    """Most contexts are longer than the model's maximum of 64 tokens, some of them many times."""
    questions, contexts = ["Which one?"] * len(TEXTS), TEXTS
    answer = served.ask("questions", question=questions, context=contexts)
    network = transformers.AutoModelForQuestionAnswering.from_pretrained(checkpoints["questions"]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints["questions"])
    for row, context in enumerate(contexts):
        expected = find_answer(network, tokenizer, questions[row], context, encoders.POSITIONS)
        span = answer["start"][row, 0], answer["end"][row, 0]
        assert (answer["answer"][row, 0], *span) == (expected.text, expected.start, expected.end)
        assert answer["score"][row, 0] == pytest.approx(expected.score, abs=1e-4)


def test_batched_answers_equal_single_ones(served):
    """Send texts of many lengths at once, which Triton batches."""
    alone = [served.ask("mood", input_text=[text])["scores"] for text in TEXTS]
    with batches_of(served, "mood_encoder", len(TEXTS)), ThreadPoolExecutor(len(TEXTS)) as pool:
        before = served.triton.statistics()["mood_encoder"]
        together = list(pool.map(lambda text: served.ask("mood", input_text=[text])["scores"], TEXTS * 4))
        assert served.executions("mood_encoder", 4 * len(TEXTS), before) == 4
    for i, scores in enumerate(together):
        np.testing.assert_allclose(scores, alone[i % len(TEXTS)], atol=1e-5)
