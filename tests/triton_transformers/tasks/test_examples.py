"""Examples for the pipeline of each task, and what `make smoke` and `make loadtest` do with them."""

from __future__ import annotations

import base64
import io
import json
import wave
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from loadtest.load.examples import Examples
from loadtest.load.locust_users import SLOW_TIMEOUT_S, Job
from loadtest.load.workload import Workload
from loadtest.measure.windows import Plan
from loadtest.reports.report import print_table, rows
from scripts.stack.smoke import attempt
from serving.pipelines.inputs import Inputs
from tests.support.measured_windows import comparison, window
from tests.support.python_backend import parameters
from triton_transformers.settings import Settings
from triton_transformers.tasks.examples import TRAITS, Traits
from triton_transformers.tasks.requests import TEXTS
from triton_transformers.tasks.table import PIPELINE_TASKS


def config(task: str, **more: Any) -> dict[str, Any]:
    """Return the configuration of a pipeline, as its recipe writes it."""
    own = PIPELINE_TASKS[task]
    texts = {
        "task": task,
        "fields": ",".join(f"{name}={kind}" for name, kind in own.fields.items()),
        "required_parameters": ",".join(own.required),
        "field_parameters": ",".join(own.field_parameters),
        TRAITS: Traits(task, **more).as_parameter() or "{}",
    }
    return {"name": "m", "backend": "pipeline", "max_batch_size": 16, "input": [], **parameters(**texts)}


def decode(kind: str, data: bytes, where: str, name: str) -> Future[Any]:
    decoded: Future[Any] = Future()
    decoded.set_result(data)
    return decoded


@pytest.mark.parametrize("task", PIPELINE_TASKS)
def test_each_task_takes_its_examples(task):
    """The examples of a load differ in size, too, and the backend accepts all of them."""
    served = config(task, frames=4, parameters={"src_lang": "en", "tgt_lang": "fr"} if task == "translation" else {})
    traits = Traits.from_config(served)
    rows = traits.rows(4, TEXTS)
    sizes = {len(value) for row in rows for name, value in row.fields.items() if name not in ("question", "query")}
    assert len(sizes) > 1
    sent = [row.fields | {"parameters": json.dumps(traits.quick).encode()} for row in rows]
    accepted = Inputs(served, decode).rows({name: [row[name] for row in sent] for name in sent[0]})
    assert len(accepted) == 4
    assert all(json.loads(row.parameters).items() >= traits.parameters.items() for row in accepted)


# --- make smoke -------------------------------------------------------------------------------------------------------

BOX = {"score": 0.9, "label": "cat", "box": {"xmin": 1, "ymin": 2, "xmax": 3, "ymax": 4}}


class Detector:
    """Stands in for Triton: answers with a box as wide as the image, or with what `answer` makes of it."""

    def __init__(self, answer=lambda box, rows: json.dumps([box])) -> None:
        self.answer = answer

    def composing(self, name: str) -> dict[str, Any]:
        return {name: config("object-detection")}

    def infer(self, name: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        files = next(tensor["data"] for tensor in request["inputs"] if tensor["name"] == "image")
        widths = [Image.open(io.BytesIO(base64.b64decode(file)), formats=["PNG"]).width for file in files]
        data = [self.answer(BOX | {"box": BOX["box"] | {"xmax": width}}, len(files)) for width in widths]
        return {"outputs": [{"name": "outputs", "shape": [len(data), 1], "data": data}]}


WRONG = [
    (lambda box, rows: json.dumps([box]), ""),
    (lambda box, rows: "[]", ""),
    (lambda box, rows: json.dumps([box | {"score": 0.9 + 1e-4 * rows}]), ""),
    (lambda box, rows: "<html>", "the answer is not JSON: <html>"),
    (lambda box, rows: json.dumps([box] * rows), "example 1 of 5 (input image) is answered differently in one request"),
    (lambda box, rows: json.dumps([box | {"score": 0.9 / rows}]), "outputs differs by 0.8 of its largest value"),
]


@pytest.mark.parametrize(("answer", "error"), WRONG)
def test_smoke_finds_an_answer_that_no_detector_gives(answer, error):
    found = attempt(Detector(answer), "finder", "exact")
    assert error in found
    assert bool(found) == bool(error)


# --- make loadtest ----------------------------------------------------------------------------------------------------


def fields(examples: Examples, name: str) -> list[bytes]:
    return [tensor.data[4:] for request in examples.requests for tensor in request if tensor.name == name]


def test_load_sends_sounds_of_mixed_lengths_and_counts_their_seconds():
    examples = Examples.from_config(config("automatic-speech-recognition"), ["text"])
    lengths = []
    for file in fields(examples, "audio"):
        with wave.open(io.BytesIO(file)) as sound:
            lengths.append(sound.getnframes() / sound.getframerate())
    assert len(set(lengths)) > 5
    assert (examples.noun, examples.unit, list(examples.amounts)) == ("sounds", "seconds of sound", lengths)
    settings = Settings.load()
    job = Job.from_settings(settings, Workload.from_settings(settings), examples)
    assert (job.amounts, job.timeout_s) == (examples.amounts, SLOW_TIMEOUT_S)
    plan = Plan("m", 2, None, 0, 16, None, may_be_slow=True)
    assert (plan.window_requests, plan.minimum_window_s) == (128, 10)


LOADS = [
    ("document-question-answering", "pages", "pages", 1, ["image", "question", "word_boxes"]),
    ("keypoint-matching", "pairs of images", "images", 2, ["images"]),
    ("table-question-answering", "tables", "", 1, ["table", "query"]),
    ("zero-shot-classification", "texts", "", 1, ["text", "parameters"]),
]


@pytest.mark.parametrize(("task", "noun", "unit", "amount", "names"), LOADS, ids=[row[0] for row in LOADS])
def test_load_has_the_fields_and_the_unit_of_the_task(monkeypatch, task, noun, unit, amount, names):
    texts = ["Who?", "It rains and rains.", "Dogs."]
    monkeypatch.setattr("triton_transformers.tasks.examples.photograph", lambda *_: torch.zeros(2, 2).numpy())
    monkeypatch.setattr("triton_transformers.tasks.examples.jpeg", lambda _: b"JPEG")
    examples = Examples.from_config(config(task), texts)
    assert (examples.noun, examples.unit, {*examples.amounts}) == (noun, unit, {amount})
    assert all([tensor.name for tensor in request] == names for request in examples.requests)


def test_report_has_the_seconds_of_sound_per_second():
    windows = [window(mode, number, 100) for number in (1, 2) for mode in ("none", "dynamic")]
    for each in windows:
        each.samples = [sample._replace(amount=2.5) for sample in each.samples]
    measured = comparison(Settings.load(), windows, noun="sounds")
    measured.examples = Examples("sounds", [], unit="seconds of sound")
    measured.is_pipeline, measured.configs = True, {"m": config("automatic-speech-recognition")}
    results = measured.results()
    assert ["seconds of sound/s", "250.0", "250.0"] in rows(results)
    printed: list[str] = []
    print_table(results, SimpleNamespace(print=lambda *text: printed.extend(map(str, text))))
    assert "each row of a batch alone, because together their answers would change" in " ".join(printed)


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "dtype"), [("GPU", torch.float16), ("CPU", torch.bfloat16)])
def test_pipeline_opens_on_the_device_of_its_instance_in_the_precision_of_its_weights(
    monkeypatch, tmp_path, place, dtype
):
    from safetensors.torch import save_file

    from serving.engines import pretrained

    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/config.json").write_text("{}")
    save_file({"weight": torch.zeros(4, dtype=torch.float16)}, tmp_path / "m/1/model.safetensors")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    args = {
        "model_repository": str(tmp_path / "m"),
        "model_version": "1",
        "model_instance_kind": place,
        "model_instance_device_id": "1",
    }
    planned = pretrained.plan(config("object-detection"), args)
    assert planned.dtype is dtype
    assert planned.device == (torch.device("cuda", 1) if place == "GPU" else torch.device("cpu"))
