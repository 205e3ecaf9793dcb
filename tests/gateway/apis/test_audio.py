"""Forms with sound, segments and words of speech, and windows of moderations. The rest is conformance/apis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from gateway.apis.moderations import windows_of
from gateway.edge.config import Limits
from gateway.edge.forms import MAX_FIELDS
from gateway.text.encoders import TokenizedRow
from tests.conformance.apis.models import SOUND, whisper
from tests.conformance.apis.run import BOUNDARY, multipart, read_request
from tests.support.gateway import Reply, RunningGateway, gateway_before
from tests.support.triton_stand_in import Model, TritonStandIn, read_rows, text_of, tokenized
from triton_transformers.tensors import Tensor

PATH = "/v1/audio/transcriptions"
HEARD = ("model", "whisper"), ("file", SOUND)
BOTH = [("timestamp_granularities[]", name) for name in ("word", "segment")]


def reader(name: str) -> Model:
    """Return a classifier that finds the word bad in the first 256 tokens, and returns the tokens of texts."""

    def answer(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        rows = read_rows(inputs["input_text"])
        texts = [row if isinstance(row, str) else text_of(row) for row in rows]
        scores = [[0.75, 0.25] if "bad" in text[:254] else [0.25, 0.75] for text in texts]
        labels = Tensor.from_texts("label", ["harm"] * len(texts), [len(texts), 1])
        yield [labels, Tensor.from_values("scores", "FP32", scores), tokenized(rows)]

    outputs: Any = {"label": ("STRING", [1]), "score": ("FP32", [1]), "scores": ("FP32", [2])}
    parameters = {"labels": '["harm", "safe"]', "activation": "softmax"}
    outputs |= {"tokenized": ("STRING", [1])}
    return Model(name, {"input_text": ("STRING", [1])}, outputs, answer, parameters=parameters)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningGateway, TritonStandIn]]:
    models = whisper("whisper", speech_model="whisper"), whisper("letters", speech_model="ctc"), reader("reader")
    with gateway_before(*models, limits=Limits(body=20_000)) as both:
        yield both


def send(gateway: RunningGateway, *fields: tuple[str, str | bytes]) -> Reply:
    return gateway.post(PATH, multipart(*fields), content_type=BOUNDARY)


def test_verbose_answer_has_segments_and_words(gateway, triton):
    answer = send(gateway, *HEARD, *BOTH, ("response_format", "verbose_json")).json
    segments = answer.pop("segments")
    assert [(one["id"], one["start"], one["end"], one["text"]) for one in segments] == [
        (0, 0.0, 1.5, " One."),
        (1, 61.25, 62.0, " Two."),
    ]
    assert answer == {
        "task": "transcribe",
        "language": "french",
        "duration": 62.0,
        "text": "One. Two.",
        "words": [{"start": 0.0, "end": 1.5, "word": "One."}, {"start": 61.25, "end": 61.5, "word": "Two."}],
    }
    assert sorted(str(read_request(one)["parameters"]["return_timestamps"]) for one in triton.received) == [
        "True",
        "word",
    ]


def test_segments_and_words_are_sampled_alike(gateway, triton):
    send(gateway, *HEARD, *BOTH, ("response_format", "verbose_json"), ("temperature", "0.5"))
    first, second = (read_request(one)["parameters"]["seed"] for one in triton.received)
    assert first == second


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ([*HEARD, ("file", SOUND)], 400, "file"),
        ([("model", "whisper"), ("model", "letters"), ("file", SOUND)], 400, "model"),
        ([("model", "whisper"), ("file", SOUND * 2000)], 413, None),
        ([("a", "b")] * (MAX_FIELDS + 1), 400, None),
    ],
)
def test_wrong_form_is_refused(gateway, fields, status, param):
    reply = send(gateway, *fields)
    assert (reply.status, reply.error["param"]) == (status, param), reply.body


MODEL = multipart(("model", "whisper"))


@pytest.mark.parametrize(
    ("body", "content_type", "reason"),
    [
        (b"", BOUNDARY, "not a valid form"),
        (b"--abc--\r\n", BOUNDARY, "not a valid form"),
        (MODEL.removesuffix(b"--\r\n"), BOUNDARY, "not a valid form"),
        (MODEL.replace(b'name="model"', b"name"), BOUNDARY, "not a valid form"),
        (b"--xyz\r\n" + b"A: b\r\n" * 3000 + b"\r\n--xyz--", BOUNDARY, "not a valid form"),
        (MODEL.replace(b'name="model"', b"name*=a; name*0=b"), BOUNDARY, "not a valid form"),
        (MODEL, "multipart/form-data; boundary*=a; boundary*0=b", "content type is malformed"),
    ],
    ids=["empty", "other boundary", "cut off", "no name", "long head", "two names", "two boundaries"],
)
def test_malformed_form_is_refused(gateway, body, content_type, reason):
    reply = gateway.post(PATH, body, content_type=content_type)
    assert (reply.status, reason in reply.error["message"]) == (400, True), reply.body


def test_systems_of_sound_are_listed(gateway):
    assert {model["id"] for model in gateway.get("/v1/models").json["data"]} >= {"whisper", "letters"}


def moderated(gateway: RunningGateway, value: Any) -> list[Any]:
    reply = gateway.post("/v1/moderations", {"model": "reader", "input": value})
    assert reply.status == 200, reply.body
    return reply.json["results"]


def test_long_texts_and_parts_are_moderated_whole(gateway):
    late, harmless = "a" * 300 + "bad" + "a" * 300, "a" * 600
    assert [one["category_scores"]["harm"] for one in moderated(gateway, [late, harmless])] == [0.75, 0.25]
    parts = [{"type": "text", "text": text} for text in (harmless, "bad")]
    assert [one["flagged"] for one in moderated(gateway, parts)] == [True]


def test_windows_overlap_and_cover_the_text():
    row = TokenizedRow(ids=[1, *range(10, 30), 2], special=(1, 1), max_length=10)
    windows = windows_of(row)
    assert windows[0] == [1, *range(10, 18), 2]
    assert windows[1][:3] == [1, 16, 17]
    assert windows[-1][-2:] == [29, 2]
    assert {id for window in windows for id in window} == {*row.ids}
    assert all(len(window) <= 10 for window in windows)
    assert windows_of(TokenizedRow(ids=row.ids, special=(1, 1), max_length=22)) == []
