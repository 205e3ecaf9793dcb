"""Each method of Hugging Face's clients for Python and JavaScript, before the stand-in for Triton."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conformance.apis.clients import hugging_face
from tests.conformance.apis.models import IMAGE
from tests.conformance.apis.run import KEY, difference
from tests.conformance.apis.world import World
from tests.support.openai_clients import CLIENTS, INSTALL
from tests.support.triton_stand_in import COUNTED, vector

pytestmark = pytest.mark.slow

SOUND = b"RIFF"


def file(content: bytes, kind: str) -> dict[str, str]:
    """Return a file as JSON, of which the program below makes one again."""
    return {"file": base64.b64encode(content).decode(), "type": kind}


@dataclass(frozen=True)
class Method:
    """A method of both clients: what each passes, and what it returns, if that of JavaScript differs."""

    name: str
    system: str
    arguments: tuple[Any, ...]
    answer: Any
    given: Any = None  # to the client for JavaScript; the first argument without it
    answer_of_node: Any = None

    @property
    def in_node(self) -> str:
        return re.sub(r"_(\w)", lambda found: found[1].upper(), self.name)


SEEN, HEARD = file(IMAGE, "image/png"), file(SOUND, "audio/wav")
BORN = "Marie Curie was born in Warsaw"
LABELS = {"candidate_labels": ["x", "y"]}
TABLE = {"a": ["1"]}
FOUND = [{"label": "x", "score": 0.9}]
READ = {"answer": "12.50", "score": 0.5, "start": 1, "end": 1}
ASKED = {"image": SEEN, "question": "What is it?"}
WHOLE = "".join(COUNTED)
BORN_IN = {"question": "Where?", "context": BORN}
METHODS = [
    Method("audio_classification", "audio-classification", (SOUND,), FOUND, given=HEARD),
    Method("automatic_speech_recognition", "automatic-speech-recognition", (SOUND,), {"text": "Hello"}, given=HEARD),
    Method("text_to_speech", "text-to-audio", ("a",), b"RIFF..."),
    Method("image_classification", "pets", (IMAGE,), lambda got: abs(got[0]["score"] - 0.83) < 1e-6, given=SEEN),
    Method("image_segmentation", "image-segmentation", (IMAGE,), [{"label": "x", "score": 0.9}], given=SEEN),
    Method("image_to_text", "image-to-text", (IMAGE,), {"generated_text": "a cat"}, given=SEEN),
    Method("object_detection", "object-detection", (IMAGE,), [{"label": "x", "box": {"xmin": 1}}], given=SEEN),
    Method(
        *("zero_shot_image_classification", "zero-shot-image-classification", (IMAGE, ["x", "y"]), FOUND),
        given={"image": SEEN},
    ),
    Method(
        *("document_question_answering", "document-question-answering", (IMAGE, "Total?"), [READ]),
        given={"image": SEEN, "question": "Total?"},
        answer_of_node=READ,
    ),
    Method(
        *("visual_question_answering", "seer", (IMAGE, "What is it?"), [{"answer": " ein zwei drei"}]),
        given=ASKED,
        answer_of_node={"answer": " ein zwei drei"},
    ),
    Method("feature_extraction", "embedding", ("abc",), lambda got: not difference([vector("abc")], [*map(list, got)])),
    Method("fill_mask", "mask", ("The [MASK].",), lambda got: got[0]["token_str"] == "capital"),
    Method("question_answering", "answers", ("Where?", BORN), {"answer": "Warsaw", "start": 24}, given=BORN_IN),
    Method(
        *("sentence_similarity", "embedding", ("abc", ["abc"]), [1]),
        given={"source_sentence": "abc", "sentences": ["abc"]},
    ),
    Method("summarization", "summarization", ("a",), {"summary_text": "b"}),
    Method("translation", "translation", ("a",), {"translation_text": "la pluie"}),
    Method(
        *("table_question_answering", "table-question-answering", (TABLE, "q"), {"answer": "36"}),
        given={"table": TABLE, "query": "q"},
    ),
    Method("text_classification", "classifier", ("good",), lambda got: got[0]["label"] == "positive"),
    Method("text_generation", "counter", ("a",), WHOLE, answer_of_node={"generated_text": WHOLE}),
    Method("token_classification", "names", (BORN,), lambda got: got[0]["word"] == "Marie Curie"),
    Method("zero_shot_classification", "zero-shot-classification", ("a", ["x", "y"]), [*FOUND, {"label": "y"}]),
]
PARAMETERS = {"zero_shot_image_classification": LABELS, "zero_shot_classification": LABELS}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
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


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_method_of_python_gets_the_answer(world: World, method: Method) -> None:
    client = hugging_face(f"{world.every.url}/models/{method.system}")
    answer = getattr(client, method.name)(*method.arguments)
    assert not (wrong := difference(method.answer, answer)), wrong


@pytest.fixture(scope="module")
def of_node(running: World) -> dict[str, Any]:
    """Return what each method of the client for JavaScript answers."""
    if not (shutil.which("node") and (CLIENTS / "node_modules/@huggingface").is_dir()):
        pytest.skip(f"npm's @huggingface/inference is missing: {INSTALL}")
    calls: dict[str, tuple[str, Any]] = {}
    for method in METHODS:
        parameters = {"parameters": PARAMETERS[method.name]} if method.name in PARAMETERS else {}
        calls[method.in_node] = method.system, {"inputs": method.given or method.arguments[0], **parameters}
    calls |= {"textToAudio": ("text-to-audio", {"inputs": "a"}), "textGenerationStream": ("counter", {"inputs": "a"})}
    calls |= {"chatCompletion": ("counter", CHAT), "chatCompletionStream": ("counter", CHAT)}
    given = json.dumps({name: (f"{running.every.url}/models/{system}", own) for name, (system, own) in calls.items()})
    command = ["node", "--input-type=module", "--eval", NODE, "--", KEY]
    done = subprocess.run(command, input=given, cwd=CLIENTS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.in_node)
def test_method_of_node_gets_the_same_answer(of_node: dict[str, Any], method: Method) -> None:
    expected = method.answer if method.answer_of_node is None else method.answer_of_node
    expected = base64.b64encode(expected).decode() if isinstance(expected, bytes) else expected
    assert not (wrong := difference(expected, of_node[method.in_node])), wrong


def test_streams_of_node_have_the_whole_text(of_node: dict[str, Any]) -> None:
    events = of_node["textGenerationStream"]
    assert ["".join(event["token"]["text"] for event in events), events[-1]["generated_text"]] == [WHOLE] * 2
    assert of_node["chatCompletion"]["choices"][0]["message"]["content"] == WHOLE
    pieces = (event["choices"][0]["delta"].get("content") or "" for event in of_node["chatCompletionStream"])
    assert "".join(pieces) == WHOLE
    assert base64.b64decode(of_node["textToAudio"]) == b"RIFF..."
