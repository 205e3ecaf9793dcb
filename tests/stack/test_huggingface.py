"""Each method of Hugging Face's InferenceClient gets from the gateway what the system itself answers."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import soundfile
import transformers
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image

from export.recipes.pipeline import is_same
from gateway.edge.config import Config
from tests.stack.test_pipelines import SYSTEMS
from tests.support import page_systems
from tests.support.checkpoints import encoders, language, vision
from tests.support.checkpoints.vision_language import save_vision_language
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.openai_clients import CLIENTS, INSTALL
from tests.support.served_pipelines import PIPELINES, assemble_pipelines
from tests.support.stacks import TestStack
from tests.support.triton_stand_in import TritonStandIn
from triton_transformers.corpus import MIXED
from triton_transformers.tasks.media import png, wav

pytestmark = pytest.mark.slow

TEXT, OTHER = MIXED.texts[0], MIXED.texts[3]
IMAGE, SOUND = png(1, 64, 48), wav(1, 1.7)
LABELS = ["a cat", "rain"]
TABLE = {"name": ["Ada", "Grace"], "age": ["36", "85"]}
WORDS = [["Total", [10, 10, 90, 30]], ["12.50", [100, 10, 190, 30]]]
NEW_TOKENS = 8
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "names": lambda folder: encoders.save_bert(folder, "ForTokenClassification", **encoders.labels(encoders.ENTITIES)),
    "blanks": lambda folder: encoders.save_bert(folder, "ForMaskedLM"),
    "answers": lambda folder: encoders.save_bert(folder, "ForQuestionAnswering"),
    "features": lambda folder: encoders.save_bert(folder, "Model"),
    "moods": lambda folder: encoders.save_bert(folder, "ForSequenceClassification", **encoders.labels(encoders.MOODS)),
    "pets": vision.save_vit_classifier,
    "writes": language.save_gpt2,
    "sees": lambda folder: save_vision_language(folder, "llava"),
}
# The stack serves the pipelines of test_pipelines.py. A stand-in of Triton answers for these, as transformers does:
# loading one takes 10 seconds of CPU time, and tests/serving/pipelines/test_backend.py compares their answers.
RECORDED: dict[str, Any] = {
    "sounds": [{"score": 0.75, "label": "rain"}, {"score": 0.25, "label": "a cat"}],
    "speaks": {"audio": base64.b64encode(wav(2, 0.1)).decode(), "sampling_rate": 16000},
    "reads": [{"score": 0.5, "answer": "12.50", "start": 1, "end": 1}],
    "sorts": [{"score": 0.75, "label": "a cat"}, {"score": 0.25, "label": "rain"}],
    "translates": [{"translation_text": "la pluie"}],
    "summarizes": [{"summary_text": "rain"}],
}


class Served(NamedTuple):
    """The stack, and a stand-in of Triton with a gateway before it."""

    stack: TestStack
    triton: TritonStandIn
    gateway: RunningGateway

    def address(self, system: str) -> str:
        return f"{self.gateway.url if system in RECORDED else self.stack.gateway}/models/{system}"


@pytest.fixture(scope="module")
def served(stack: TestStack, tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("checkpoints")
    assemble_pipelines(stack, folder, SYSTEMS)
    stack.assemble(*({"SYSTEMS": name, "SOURCE": save(folder / name)} for name, save in CHECKPOINTS.items()))
    stack.serve(*SYSTEMS, *CHECKPOINTS, "writes_stream", "sees_stream")
    recorded = [page_systems.pipeline(name, PIPELINES[name], answer) for name, answer in RECORDED.items()]
    with (
        TritonStandIn(*recorded) as triton,
        running_gateway(Config(triton=triton.address, systems=(*RECORDED,))) as own,
    ):
        yield Served(stack, triton, own)


def client_of(served: Served, system: str) -> InferenceClient:
    return InferenceClient(model=served.address(system), token=served.stack.client_key)


def ask(served: Served, system: str, parameters: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return the answer of a pipeline, as Triton has it. The last request to the stand-in must be the same."""
    texts = {
        name: base64.b64encode(value).decode()
        if isinstance(value, bytes)
        else value
        if isinstance(value, str)
        else json.dumps(value)
        for name, value in fields.items()
    }
    columns = {name: [text] for name, text in (texts | {"parameters": json.dumps(parameters or {})}).items()}
    if system in RECORDED:
        assert {name: tensor.texts() for name, tensor in served.triton.received[-1].inputs.items()} == columns
        return RECORDED[system]
    return json.loads(served.stack.ask(system, **columns)["outputs"][0, 0])


def png_of(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


# System -> what a client calls, and the fields and parameters with which Triton gives the same answer.
CALLS: dict[str, tuple[Callable[[InferenceClient], Any], dict[str, Any], dict[str, Any]]] = {
    "sounds": (lambda client: client.audio_classification(SOUND, top_k=2), {"audio": SOUND}, {"top_k": 2}),
    "hears": (lambda client: client.automatic_speech_recognition(SOUND), {"audio": SOUND}, {}),
    "counts": (
        lambda client: client.table_question_answering(TABLE, "How old is Ada?") | {"aggregator": None},
        {"table": TABLE, "query": "How old is Ada?"},
        {},
    ),
    "reads": (
        lambda client: client.document_question_answering(IMAGE, "What is the total?", word_boxes=WORDS),
        {"image": IMAGE, "question": "What is the total?", "word_boxes": WORDS},
        {},
    ),
    "sorts": (
        lambda client: client.zero_shot_image_classification(IMAGE, LABELS),
        {"image": IMAGE},
        {"candidate_labels": LABELS},
    ),
    "segments": (lambda client: client.image_segmentation(IMAGE), {"image": IMAGE}, {}),
    "finds": (lambda client: client.object_detection(IMAGE, threshold=0.05), {"image": IMAGE}, {"threshold": 0.05}),
    "translates": (
        lambda client: [client.translation(TEXT, generate_parameters={"max_new_tokens": NEW_TOKENS})],
        {"text": TEXT},
        {"max_new_tokens": NEW_TOKENS},
    ),
    "summarizes": (
        lambda client: [client.summarization(TEXT, generate_parameters={"max_new_tokens": NEW_TOKENS})],
        {"text": TEXT},
        {"max_new_tokens": NEW_TOKENS},
    ),
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


def test_client_hears_the_sound(served):
    files = (
        client_of(served, "speaks").text_to_speech(TEXT),
        base64.b64decode(ask(served, "speaks", text=TEXT)["audio"]),
    )
    (sound, rate), (expected, expected_rate) = (soundfile.read(io.BytesIO(file)) for file in files)
    assert rate == expected_rate
    assert np.allclose(sound, expected, atol=1e-4)


def test_client_sorts_a_text_into_labels(served):
    found = client_of(served, "judges").zero_shot_classification(TEXT, LABELS)
    expected = ask(served, "judges", {"candidate_labels": LABELS}, text=TEXT)
    assert [one.label for one in found] == expected["labels"]
    assert np.allclose([one.score for one in found], expected["scores"], atol=1e-5)


def test_client_classifies_images(served):
    scores = served.stack.ask("pets", image_bytes=[base64.b64encode(IMAGE).decode()])["scores"][0]
    for options in ({"top_k": 2}, {}):  # the client sends base64 with parameters, and the file itself without
        found = client_of(served, "pets").image_classification(IMAGE, **options)[:2]
        assert np.allclose([one.score for one in found], sorted(scores, reverse=True)[:2], atol=1e-3)
    assert len({one.label for one in found}) == 2


def test_client_gets_vectors(served):
    vectors = client_of(served, "features").feature_extraction(TEXT)
    assert np.allclose(vectors, served.stack.ask("features", input_text=[TEXT])["last_hidden_state"], atol=1e-4)
    (similarity,) = client_of(served, "embedding").sentence_similarity(TEXT, [OTHER])
    first, second = served.stack.ask("embedding", input_text=[TEXT, OTHER])["output__0"]
    assert np.isclose(similarity, first @ second / np.linalg.norm(first) / np.linalg.norm(second), atol=1e-4)


def test_client_finds_entities_words_and_answers(served, tmp_path):
    expected = served.stack.ask("names", input_text=[TEXT])
    entities = client_of(served, "names").token_classification(TEXT)
    assert [one.entity_group for one in entities] == expected["label"][0].tolist()
    assert all(one.word == TEXT[one.start : one.end] for one in entities)
    blank = f"{TEXT} [MASK]"
    words = client_of(served, "blanks").fill_mask(blank, top_k=3)
    assert [one.token_str for one in words] == served.stack.ask("blanks", input_text=[blank])["token"][0, :3].tolist()
    assert all(isinstance(one.token, int) for one in words)
    library: Any = transformers.pipeline("fill-mask", model=str(CHECKPOINTS["blanks"](tmp_path)), device="cpu")
    assert [one.sequence for one in words] == [one["sequence"] for one in library(blank, top_k=3)]
    found = client_of(served, "answers").question_answering("Which battery fits?", TEXT)
    expected = served.stack.ask("answers", question=["Which battery fits?"], context=[TEXT])
    assert (found.answer, found.start) == (expected["answer"][0, 0], expected["start"][0, 0])


def test_client_generates(served):
    client = client_of(served, "writes")
    options = {"model": "writes", "prompt": TEXT, "temperature": 0, "max_tokens": NEW_TOKENS}
    (choice,) = served.stack.post("/v1/completions", **options)["choices"]
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
        answer = served.stack.post(
            "/v1/chat/completions", model="sees", messages=messages, temperature=0, max_tokens=100
        )
        return answer["choices"][0]["message"]["content"]

    (found,) = client.visual_question_answering(IMAGE, "What is it?")
    assert found.answer == seen("What is it?")
    assert 0 < found.score < 1
    assert client.image_to_text(IMAGE).generated_text == seen("Describe the image.")


def file(content: bytes, kind: str) -> dict[str, str]:
    """Return a file as JSON, of which the program below makes one again."""
    return {"file": base64.b64encode(content).decode(), "type": kind}


def samples(sound: bytes) -> list[float]:
    return soundfile.read(io.BytesIO(sound))[0].tolist()


SEEN, HEARD = file(IMAGE, "image/png"), file(SOUND, "audio/wav")
FEW = {"parameters": {"max_new_tokens": NEW_TOKENS, "temperature": 0}}
SHORT = {"parameters": {"generate_parameters": {"max_new_tokens": NEW_TOKENS}}}
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": NEW_TOKENS, "temperature": 0}
CHOSEN = {"parameters": {"candidate_labels": LABELS}}
Call = Callable[[InferenceClient], Any]
# Method of the client for JavaScript -> a system, what the method takes, and what Python's client answers.
NODE_CALLS: dict[str, tuple[str, dict[str, Any], Call]] = {
    "audioClassification": ("sounds", {"inputs": HEARD}, lambda client: client.audio_classification(SOUND)),
    "automaticSpeechRecognition": ("hears", {"inputs": HEARD}, CALLS["hears"][0]),
    "textToSpeech": ("speaks", {"inputs": TEXT}, lambda client: samples(client.text_to_speech(TEXT))),
    "textToAudio": ("speaks", {"inputs": TEXT}, lambda client: samples(client.text_to_speech(TEXT))),
    "imageClassification": ("pets", {"inputs": SEEN}, lambda client: client.image_classification(IMAGE)),
    "imageSegmentation": (
        "segments",
        {"inputs": SEEN},
        lambda client: [{**part, "mask": png_of(part.mask)} for part in client.image_segmentation(IMAGE)],
    ),
    "imageToText": ("sees", {"inputs": SEEN}, lambda client: client.image_to_text(IMAGE)),
    "objectDetection": (
        "finds",
        {"inputs": SEEN},
        lambda client: client.object_detection(IMAGE),
    ),
    "zeroShotImageClassification": ("sorts", {"inputs": {"image": SEEN}, **CHOSEN}, CALLS["sorts"][0]),
    "documentQuestionAnswering": (
        "reads",
        {"inputs": {"image": SEEN, "question": "What is the total?"}, "parameters": {"word_boxes": WORDS}},
        lambda client: CALLS["reads"][0](client)[0],
    ),
    "visualQuestionAnswering": (
        "sees",
        {"inputs": {"image": SEEN, "question": "What is it?"}},
        lambda client: client.visual_question_answering(IMAGE, "What is it?")[0],
    ),
    "featureExtraction": (
        "features",
        {"inputs": TEXT},
        lambda client: client.feature_extraction(TEXT).tolist(),
    ),
    "fillMask": ("blanks", {"inputs": f"{TEXT} [MASK]"}, lambda client: client.fill_mask(f"{TEXT} [MASK]")),
    "questionAnswering": (
        "answers",
        {"inputs": {"question": "Which battery fits?", "context": TEXT}},
        lambda client: client.question_answering("Which battery fits?", TEXT),
    ),
    "sentenceSimilarity": (
        "embedding",
        {"inputs": {"source_sentence": TEXT, "sentences": [OTHER]}},
        lambda client: client.sentence_similarity(TEXT, [OTHER]),
    ),
    "summarization": ("summarizes", {"inputs": TEXT, **SHORT}, lambda client: CALLS["summarizes"][0](client)[0]),
    "tableQuestionAnswering": (
        "counts",
        {"inputs": {"table": TABLE, "query": "How old is Ada?"}},
        lambda client: client.table_question_answering(TABLE, "How old is Ada?"),
    ),
    "textClassification": ("moods", {"inputs": TEXT}, lambda client: client.text_classification(TEXT)),
    "textGeneration": (
        "writes",
        {"inputs": TEXT, **FEW},
        lambda client: {"generated_text": client.text_generation(TEXT, max_new_tokens=NEW_TOKENS)},
    ),
    "textGenerationStream": (
        "writes",
        {"inputs": TEXT, "parameters": {"max_new_tokens": NEW_TOKENS, "do_sample": False}},
        lambda client: [client.text_generation(TEXT, max_new_tokens=NEW_TOKENS)] * 2,
    ),
    "tokenClassification": ("names", {"inputs": TEXT}, lambda client: client.token_classification(TEXT)),
    "translation": ("translates", {"inputs": TEXT, **SHORT}, lambda client: CALLS["translates"][0](client)[0]),
    "zeroShotClassification": (
        "judges",
        {"inputs": TEXT, **CHOSEN},
        lambda client: client.zero_shot_classification(TEXT, LABELS),
    ),
    "chatCompletion": ("sees", CHAT, lambda client: client.chat_completion(**CHAT).choices[0].message.content),
    "chatCompletionStream": ("sees", CHAT, lambda client: client.chat_completion(**CHAT).choices[0].message.content),
}
# Method -> the part of its answer that is compared.
PARTS: dict[str, Callable[[Any], Any]] = {
    "textToSpeech": lambda answer: samples(base64.b64decode(answer)),
    "textToAudio": lambda answer: samples(base64.b64decode(answer)),
    "textGenerationStream": lambda events: [
        "".join(event["token"]["text"] for event in events),
        events[-1]["generated_text"],
    ],
    "chatCompletion": lambda answer: answer["choices"][0]["message"]["content"],
    "chatCompletionStream": lambda events: "".join(
        event["choices"][0]["delta"].get("content") or "" for event in events
    ),
}
NODE = """
import { readFileSync } from "node:fs";
import { InferenceClient } from "@huggingface/inference";
const [key] = process.argv.slice(1);
const revived = (_, value) => value?.file ? new Blob([Buffer.from(value.file, "base64")], value) : value;
const answers = {};
for (const [method, [endpointUrl, given]] of Object.entries(JSON.parse(readFileSync(0), revived))) {
  const client = new InferenceClient(key, { endpointUrl });
  try {
    let answer = client[method](given);
    if (answer[Symbol.asyncIterator]) answer = (async (events) => {
      const all = [];
      for await (const event of events) all.push(event);
      return all;
    })(answer);
    answer = await answer;
    answers[method] = answer instanceof Blob ? Buffer.from(await answer.arrayBuffer()).toString("base64") : answer;
  } catch (error) {
    answers[method] = { error: `${error}` };
  }
}
console.log(JSON.stringify(answers));
"""


@pytest.fixture(scope="module")
def node_answers(served) -> dict[str, Any]:
    """Return what each method of the client for JavaScript answers."""
    if not (shutil.which("node") and (CLIENTS / "node_modules/@huggingface").is_dir()):
        pytest.skip(f"npm's @huggingface/inference is missing: {INSTALL}")
    command = ["node", "--input-type=module", "--eval", NODE, "--", served.stack.client_key]
    given = json.dumps({method: (served.address(system), sent) for method, (system, sent, _) in NODE_CALLS.items()})
    done = subprocess.run(command, input=given, cwd=CLIENTS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("method", NODE_CALLS)
def test_nodes_client_gets_the_same_answer(served, node_answers, method):
    system, _, call = NODE_CALLS[method]
    answer, expected = node_answers[method], call(client_of(served, system))
    assert not (isinstance(answer, dict) and "error" in answer), answer
    compared = PARTS[method](answer) if method in PARTS else answer
    assert is_same(known(compared), known(expected), 1e-4), (compared, expected)


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
