"""Pipelines on the real server: 16 clients with files of mixed sizes get transformers' own answers, bad files a 400."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from export.recipes.pipeline import is_same
from scripts.stack.smoke import attempt
from tests.serving.pipelines.test_backend import examples_of, natural
from tests.serving.pipelines.test_media import PLAYLIST, bomb
from tests.support.generation import send_concurrently
from tests.support.served_pipelines import PIPELINES, assemble_pipelines
from tests.support.stacks import TestStack
from triton_transformers.tasks.command import first_command
from triton_transformers.tasks.media import png, wav
from triton_transformers.tasks.requests import Examples
from triton_transformers.tasks.table import PIPELINE_TASKS
from triton_transformers.triton import Triton, TritonError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

# One for each kind of input, and one that TASK chooses. Two of them batch, the others do not.
SYSTEMS = ("finds", "segments", "hears", "watches", "judges", "counts")
CLIENTS = 16


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def served(stack: TestStack, weights) -> TestStack:
    printed = assemble_pipelines(stack, weights, SYSTEMS)
    assert re.search(
        r"judges: zero-shot-classification \(pipeline\) of \S+, assembled in \d+ s; up to 16 rows", printed
    )
    assert re.search(r"counts: table-.*?rows run alone, because the pipeline cannot batch them", printed)
    return stack.serve(*SYSTEMS)


def ask(stack: TestStack, system: str, fields: dict[str, bytes], parameters: dict[str, Any]) -> Any:
    texts = {
        name: base64.b64encode(data).decode()
        if PIPELINE_TASKS[PIPELINES[system]].fields.get(name) in ("image", "audio", "video")
        else data.decode()
        for name, data in fields.items()
    }
    output = stack.ask(system, **{name: [text] for name, text in texts.items()}, parameters=[json.dumps(parameters)])
    return json.loads(output["outputs"][0, 0])


@pytest.mark.parametrize("system", SYSTEMS)
def test_clients_get_the_answers_of_transformers(served, weights, system, tmp_path):
    task = PIPELINES[system]
    pipe = transformers.pipeline(task, model=str(weights / system), device="cpu")
    examples, options = examples_of(pipe, task)
    expected = []
    for number, fields in enumerate(examples):
        folder = tmp_path / str(number)
        folder.mkdir()
        expected.append(json.loads(json.dumps(pipe(natural(pipe, task, fields, folder), **options), default=as_json)))
    sent = send_concurrently(2 * CLIENTS, lambda i: ask(served, system, examples[i % len(examples)], options))
    assert is_same(sent, [expected[i % len(examples)] for i in range(2 * CLIENTS)], 1e-4)


def as_json(value: Any) -> Any:
    from serving.pipelines.outputs import plain

    return plain(value)


@pytest.mark.parametrize("system", SYSTEMS)
def test_smoke_accepts_the_answers(served, system):
    examples = Examples.read(served.folder / "models" / system)
    assert attempt(Triton(served.http), system, "exact", examples) == ""
    spoiled = replace(examples, outputs=examples.outputs[::-1])
    assert "than its assembly saw it" in attempt(Triton(served.http), system, "exact", spoiled)


BAD = [
    ("segments", {"image": png(0, 64, 48)[:200]}, "it is not a whole JPEG, PNG or WebP file"),
    ("segments", {"image": bomb(20_000)}, "it has 20000 x 20000 pixels, too many for max_pixels"),
    ("segments", {"image": wav(0, 1, 8000)}, "it is not a whole JPEG, PNG or WebP file"),
    ("hears", {"audio": PLAYLIST}, "it is not a whole file of the kinds"),
    ("hears", {"audio": b"/etc/passwd"}, "it is not a whole file of the kinds"),
    ("watches", {"video": png(0, 64, 48)}, "it is not a whole file of the kinds"),
]


@pytest.mark.parametrize(("system", "fields", "reason"), BAD)
def test_bad_file_gets_400_and_its_neighbours_answers(served, system, fields, reason, tmp_path):
    pipe = transformers.pipeline(PIPELINES[system], model=str(served.folder / "models" / system / "1"), device="cpu")
    good = examples_of(pipe, PIPELINES[system])[0][0]
    expected = ask(served, system, good, {})

    def send(number: int) -> Any:
        if number % 2:
            return ask(served, system, good, {})
        with pytest.raises(TritonError) as error:
            ask(served, system, fields, {})
        return str(error.value)

    answers = send_concurrently(8, send)
    assert is_same(answers[1::2], [expected] * 4, 1e-4)
    assert all(reason in answer for answer in answers[::2])


@pytest.mark.parametrize("system", SYSTEMS)
def test_printed_command_gets_an_answer(served, system, tmp_path):
    pipe = transformers.pipeline(PIPELINES[system], model=str(served.folder / "models" / system / "1"), device="cpu")
    fields = examples_of(pipe, PIPELINES[system])[0][0]
    for name, kind in (("image.jpg", "image"), ("speech.wav", "audio"), ("clip.mp4", "video")):
        (tmp_path / name).write_bytes(fields.get(kind, b""))
    command = first_command(system, served.folder / "models", "cpu", served.gateway, True)
    done = served.paste(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    json.loads(done.stdout)
