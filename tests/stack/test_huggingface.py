"""Hugging Face's InferenceClient gets from the gateway what real systems answer; conformance/apis has all methods."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image

from export.recipes.pipeline import is_same
from tests.stack.test_pipelines import SYSTEMS
from tests.support.checkpoints import encoders, language, vision
from tests.support.checkpoints.vision_language import save_vision_language
from tests.support.served_pipelines import assemble_pipelines
from tests.support.stacks import TestStack
from triton_transformers.corpus import MIXED
from triton_transformers.tasks.media import png, wav

pytestmark = pytest.mark.slow

TEXT, OTHER = MIXED.texts[0], MIXED.texts[3]
IMAGE, SOUND = png(1, 64, 48), wav(1, 1.7)
LABELS = ["a cat", "rain"]
TABLE = {"name": ["Ada", "Grace"], "age": ["36", "85"]}
NEW_TOKENS = 8
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "names": lambda folder: encoders.save_bert(folder, "ForTokenClassification", **encoders.labels(encoders.ENTITIES)),
    "blanks": lambda folder: encoders.save_bert(folder, "ForMaskedLM"),
    "answers": lambda folder: encoders.save_bert(folder, "ForQuestionAnswering"),
    "features": lambda folder: encoders.save_bert(folder, "Model"),
    "pets": vision.save_vit_classifier,
    "writes": language.save_gpt2,
    "sees": lambda folder: save_vision_language(folder, "llava"),
}


@pytest.fixture(scope="module")
def served(stack: TestStack, tmp_path_factory) -> TestStack:
    folder = tmp_path_factory.mktemp("checkpoints")
    assemble_pipelines(stack, folder, SYSTEMS)
    stack.assemble(*({"SYSTEMS": name, "SOURCE": save(folder / name)} for name, save in CHECKPOINTS.items()))
    return stack.serve(*SYSTEMS, *CHECKPOINTS, "writes_stream", "sees_stream")


def client_of(served: TestStack, system: str) -> InferenceClient:
    return InferenceClient(model=f"{served.gateway}/models/{system}", token=served.client_key)


def ask(served: TestStack, system: str, parameters: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return the answer of a pipeline, as Triton has it."""
    texts = {
        name: base64.b64encode(value).decode()
        if isinstance(value, bytes)
        else value
        if isinstance(value, str)
        else json.dumps(value)
        for name, value in fields.items()
    }
    columns = {name: [text] for name, text in (texts | {"parameters": json.dumps(parameters or {})}).items()}
    return json.loads(served.ask(system, **columns)["outputs"][0, 0])


def png_of(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


# System -> what a client calls, and the fields and parameters with which Triton gives the same answer.
CALLS: dict[str, tuple[Callable[[InferenceClient], Any], dict[str, Any], dict[str, Any]]] = {
    "hears": (lambda client: client.automatic_speech_recognition(SOUND), {"audio": SOUND}, {}),
    "counts": (
        lambda client: client.table_question_answering(TABLE, "How old is Ada?") | {"aggregator": None},
        {"table": TABLE, "query": "How old is Ada?"},
        {},
    ),
    "segments": (lambda client: client.image_segmentation(IMAGE), {"image": IMAGE}, {}),
    "finds": (lambda client: client.object_detection(IMAGE, threshold=0.05), {"image": IMAGE}, {"threshold": 0.05}),
}


@pytest.mark.parametrize("system", CALLS)
def test_client_gets_the_answer_of_the_pipeline(served, system):
    call, fields, parameters = CALLS[system]
    answer = call(client_of(served, system))
    if system == "segments":
        answer = [{**part, "mask": png_of(part.mask)} for part in answer]
    assert is_same(*(known(one) for one in (answer, ask(served, system, parameters, **fields))), 1e-4)


def known(answer: Any) -> Any:
    """Return the answer without the fields that have no value. The client adds those that an answer lacks."""
    if isinstance(answer, dict):
        return {name: known(value) for name, value in answer.items() if value is not None}
    return [*map(known, answer)] if isinstance(answer, list) else answer


def test_client_sorts_a_text_into_labels(served):
    found = client_of(served, "judges").zero_shot_classification(TEXT, LABELS)
    expected = ask(served, "judges", {"candidate_labels": LABELS}, text=TEXT)
    assert [one.label for one in found] == expected["labels"]
    assert np.allclose([one.score for one in found], expected["scores"], atol=1e-5)


def test_client_classifies_images(served):
    scores = served.ask("pets", image_bytes=[base64.b64encode(IMAGE).decode()])["scores"][0]
    for options in ({"top_k": 2}, {}):  # the client sends base64 with parameters, and the file itself without
        found = client_of(served, "pets").image_classification(IMAGE, **options)[:2]
        assert np.allclose([one.score for one in found], sorted(scores, reverse=True)[:2], atol=1e-3)
    assert len({one.label for one in found}) == 2


def test_client_gets_vectors(served):
    vectors = client_of(served, "features").feature_extraction(TEXT)
    assert np.allclose(vectors, served.ask("features", input_text=[TEXT])["last_hidden_state"], atol=1e-4)
    (similarity,) = client_of(served, "embedding").sentence_similarity(TEXT, [OTHER])
    first, second = served.ask("embedding", input_text=[TEXT, OTHER])["output__0"]
    assert np.isclose(similarity, first @ second / np.linalg.norm(first) / np.linalg.norm(second), atol=1e-4)


def test_client_finds_entities_words_and_answers(served, tmp_path):
    expected = served.ask("names", input_text=[TEXT])
    entities = client_of(served, "names").token_classification(TEXT)
    assert [one.entity_group for one in entities] == expected["label"][0].tolist()
    assert all(one.word == TEXT[one.start : one.end] for one in entities)
    blank = f"{TEXT} [MASK]"
    words = client_of(served, "blanks").fill_mask(blank, top_k=3)
    assert [one.token_str for one in words] == served.ask("blanks", input_text=[blank])["token"][0, :3].tolist()
    assert all(isinstance(one.token, int) for one in words)
    library: Any = transformers.pipeline("fill-mask", model=str(CHECKPOINTS["blanks"](tmp_path)), device="cpu")
    assert [one.sequence for one in words] == [one["sequence"] for one in library(blank, top_k=3)]
    found = client_of(served, "answers").question_answering("Which battery fits?", TEXT)
    expected = served.ask("answers", question=["Which battery fits?"], context=[TEXT])
    assert (found.answer, found.start) == (expected["answer"][0, 0], expected["start"][0, 0])


def test_client_generates(served):
    client = client_of(served, "writes")
    options = {"model": "writes", "prompt": TEXT, "temperature": 0, "max_tokens": NEW_TOKENS}
    (choice,) = served.post("/v1/completions", **options)["choices"]
    assert client.text_generation(TEXT, max_new_tokens=NEW_TOKENS) == choice["text"]
    assert "".join(client.text_generation(TEXT, max_new_tokens=NEW_TOKENS, stream=True)) == choice["text"]
    *_, last = client.text_generation(TEXT, max_new_tokens=NEW_TOKENS, stream=True, details=True)
    assert (last.generated_text, last.details.generated_tokens) == (choice["text"], NEW_TOKENS)
    whole = client.text_generation(TEXT, max_new_tokens=NEW_TOKENS, details=True, return_full_text=True)
    assert (whole.generated_text, len(whole.details.tokens)) == (TEXT + choice["text"], NEW_TOKENS)
    assert whole.details.finish_reason == "length"


def test_client_asks_about_images(served):
    client = client_of(served, "sees")
    chat = {"role": "user", "content": "Hi"}
    answer = client.chat_completion([chat], max_tokens=NEW_TOKENS, temperature=0).choices[0].message.content
    pieces = client.chat_completion([chat], max_tokens=NEW_TOKENS, temperature=0, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer
    url = f"data:image/png;base64,{base64.b64encode(IMAGE).decode()}"

    def seen(question: str) -> str:
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        answer = served.post("/v1/chat/completions", model="sees", messages=messages, temperature=0, max_tokens=100)
        return answer["choices"][0]["message"]["content"]

    (found,) = client.visual_question_answering(IMAGE, "What is it?")
    assert found.answer == seen("What is it?")
    assert 0 < found.score < 1
    assert client.image_to_text(IMAGE).generated_text == seen("Describe the image.")


@pytest.mark.parametrize(
    ("system", "call", "status", "reason"),
    [
        ("nobody", lambda client: client.translation(TEXT), 404, "does not exist"),
        ("segments", lambda client: client.image_segmentation(SOUND), 400, "not a whole JPEG, PNG or WebP file"),
        ("hears", lambda client: client.automatic_speech_recognition(IMAGE), 400, "not a whole file"),
        ("judges", lambda client: client.translation(TEXT), 400, "the parameter 'candidate_labels' is missing"),
        ("counts", lambda client: client.question_answering("How old?", TEXT), 400, "takes table, query"),
    ],
)
def test_client_gets_the_reason_of_an_error(served, system, call, status, reason):
    with pytest.raises(HfHubHTTPError, match=reason) as error:
        call(client_of(served, system))
    assert error.value.response.status_code == status
