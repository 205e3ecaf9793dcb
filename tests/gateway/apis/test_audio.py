"""OpenAI's routes of sound and of moderations, with a stand-in for Triton."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from gateway.apis.moderations import windows_of
from gateway.edge.config import Limits
from gateway.edge.forms import MAX_FIELDS
from gateway.text.encoders import TokenizedRow
from tests.support.gateway import Reply, RunningGateway, gateway_before
from tests.support.triton_stand_in import (
    Model,
    TritonStandIn,
    of_texts,
    read_rows,
    refusal,
    rows_of,
    text_of,
    tokenized,
)
from triton_transformers.tensors import Tensor

SOUND = b"RIFF\r\n--\x00\xff\r\n"
CHUNKS = {
    True: [("\u200b One.", 0.0, 1.5), (" Two.", 61.25, None)],
    "word": [(" One.", 0.0, 1.5), (" Two.", 61.25, 61.5)],
}


def pipeline(name: str, task: str, field: str, compute: Any, **parameters: str) -> Model:
    """Return a pipeline whose answer is `compute` of the field's content and the parameters."""

    def answer(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        (sent,) = inputs["parameters"].texts() if "parameters" in inputs else ["{}"]
        (content,) = rows_of(inputs[field])
        yield [Tensor.from_texts("outputs", [json.dumps(compute(content, json.loads(sent)))], [1, 1])]

    names = {"inputs", field, "parameters"}
    return Model(
        name,
        {name: ("STRING", [1]) for name in names},
        {"outputs": ("STRING", [1])},
        answer,
        parameters={"task": task, "fields": f"{field}={'audio' if field == 'audio' else 'text'}", **parameters},
        optional=tuple(names),
        settings={"backend": "pipeline"},
    )


def hear(content: bytes, parameters: dict[str, Any]) -> Any:
    """Answer as Whisper does."""
    if content != SOUND:
        raise refusal(400, "row 0 of 'audio': it is not a whole file", "audio")
    if parameters.get("generate_kwargs", {}).get("language") == "xx":
        raise refusal(400, "Unsupported language: xx", "language")
    answer: dict[str, Any] = {"text": " One. Two."}
    if stamps := parameters.get("return_timestamps"):
        more = {"language": "french"} if "return_language" in parameters else {}
        answer["chunks"] = [
            {"text": text.strip("\u200b"), "timestamp": [start, end], **more} for text, start, end in CHUNKS[stamps]
        ]
    return answer | ({"duration": 62.0} if "return_duration" in parameters else {})


def moderator(name: str, labels: list[str], activation: str) -> Model:
    """Return a classifier whose scores are the numbers of the text."""

    def compute(texts: list[str]) -> list[Tensor]:
        scores = [[float(number) for number in text.split()[: len(labels)]] for text in texts]
        names = Tensor.from_texts("label", [labels[0]] * len(texts), [len(texts), 1])
        best = Tensor.from_values("score", "FP32", [[max(row)] for row in scores])
        return [names, best, Tensor.from_values("scores", "FP32", scores)]

    outputs: Any = {"label": ("STRING", [1]), "score": ("FP32", [1]), "scores": ("FP32", [len(labels)])}
    return of_texts(name, outputs, compute, parameters={"labels": json.dumps(labels), "activation": activation})


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
    speech = {"audio": base64.b64encode(b"RIFF...").decode(), "sampling_rate": 16000}
    models = (
        pipeline("whisper", "automatic-speech-recognition", "audio", hear, speech_model="whisper"),
        pipeline("letters", "automatic-speech-recognition", "audio", hear, speech_model="ctc"),
        pipeline("untimed", "automatic-speech-recognition", "audio", hear, speech_model="whisper_without_timestamps"),
        pipeline("other", "automatic-speech-recognition", "audio", hear),
        pipeline("voice", "text-to-audio", "text", lambda text, _: speech),
        moderator("toxic", ["toxic", "Non-Toxic"], "softmax"),
        moderator("kinds", ["insult", "threat"], "sigmoid"),
        moderator("mood", ["glad", "sad"], "softmax"),
        reader("reader"),
    )
    with gateway_before(*models, limits=Limits(body=20_000)) as both:
        yield both


def form(*fields: tuple[str, str | bytes]) -> bytes:
    return (
        b"".join(
            b'--xyz\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
            % (
                name.encode(),
                b'; filename="a.wav"\r\nContent-Type: audio/wav' if name == "file" else b"",
                value if isinstance(value, bytes) else value.encode(),
            )
            for name, value in fields
        )
        + b"--xyz--\r\n"
    )


def send(gateway: RunningGateway, *fields: tuple[str, str | bytes], task: str = "transcriptions") -> Reply:
    return gateway.post(f"/v1/audio/{task}", form(*fields), content_type='multipart/form-data; boundary="xyz"')


def hear_with(gateway: RunningGateway, model: str = "whisper", task: str = "transcriptions", **fields: str) -> Reply:
    return send(gateway, ("model", model), ("file", SOUND), *fields.items(), task=task)


def sent_parameters(triton: TritonStandIn) -> list[Any]:
    return [json.loads(received.inputs["parameters"].texts()[0]) for received in triton.received]


# --- speech to text ---------------------------------------------------------------------------------------------------


def test_each_format_has_the_speech(gateway, triton):
    assert hear_with(gateway).json == {"text": "One. Two."}
    text = hear_with(gateway, response_format="text")
    assert (text.body, text.headers["content-type"]) == (b"One. Two.\n", "text/plain; charset=utf-8")
    assert sent_parameters(triton) == [{"return_timestamps": True}] * 2
    assert hear_with(gateway, response_format="srt").body.decode() == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne.\n\n2\n00:01:01,250 --> 00:01:02,000\nTwo.\n"
    )
    assert hear_with(gateway, response_format="vtt").body.decode() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne.\n\n00:01:01.250 --> 00:01:02.000\nTwo.\n"
    )


def test_verbose_answer_has_segments_and_words(gateway, triton):
    both = [("timestamp_granularities[]", name) for name in ("word", "segment")]
    fields = [("model", "whisper"), ("file", SOUND), ("response_format", "verbose_json"), *both]
    answer = send(gateway, *fields).json
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
    assert sorted(str(sent["return_timestamps"]) for sent in sent_parameters(triton)) == ["True", "word"]


def test_options_reach_whisper(gateway, triton):
    hear_with(gateway, language="fr", prompt="Ada", temperature="0.5")
    hear_with(gateway, task="translations", response_format="verbose_json")
    assert sent_parameters(triton) == [
        {"prompt": "Ada", "generate_kwargs": {"language": "fr", "temperature": 0.5}, "return_timestamps": True},
        {"generate_kwargs": {"task": "translate"}, "return_duration": True, "return_timestamps": True},
    ]


def test_segments_and_words_are_sampled_alike(gateway, triton):
    both = [("timestamp_granularities[]", name) for name in ("word", "segment")]
    fields = [("model", "whisper"), ("file", SOUND), ("response_format", "verbose_json"), *both]
    send(gateway, *fields, ("temperature", "0.5"))
    first, second = sent_parameters(triton)
    assert first["seed"] == second["seed"]


def test_whisper_without_timestamps_hears_chunks(gateway, triton):
    assert hear_with(gateway, "untimed", language="fr").json == {"text": "One. Two."}
    assert hear_with(gateway, "untimed", task="translations").json == {"text": "One. Two."}
    assert sent_parameters(triton) == [
        {"generate_kwargs": {"language": "fr"}, "chunk_length_s": 30},
        {"generate_kwargs": {"task": "translate"}, "chunk_length_s": 30},
    ]


def test_other_models_answer_what_they_can(gateway, triton):
    assert hear_with(gateway, "other").json == {"text": "One. Two."}
    words = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    answer = hear_with(gateway, "letters", **words).json
    assert (answer["language"], len(answer["words"]), "segments" in answer) == (None, 2, False)
    assert sent_parameters(triton) == [{}, {"return_duration": True, "return_timestamps": "word"}]


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        ("whisper", {"language": "xx"}, "language"),
        ("whisper", {"response_format": "mp3"}, "response_format"),
        ("whisper", {"temperature": "2"}, "temperature"),
        ("whisper", {"temperature": "warm"}, "temperature"),
        ("whisper", {"stream": "true"}, "stream"),
        ("whisper", {"include[]": "logprobs"}, "include[]"),
        ("whisper", {"colour": "red"}, "colour"),
        ("whisper", {"timestamp_granularities[]": "word"}, "timestamp_granularities[]"),
        ("letters", {"language": "fr"}, "language"),
        ("letters", {"prompt": "Ada"}, "prompt"),
        ("letters", {"temperature": "0.5"}, "temperature"),
        ("letters", {"response_format": "srt"}, "response_format"),
        ("letters", {"response_format": "verbose_json"}, "timestamp_granularities[]"),
        ("other", {"response_format": "verbose_json"}, "response_format"),
        ("untimed", {"response_format": "srt"}, "response_format"),
        ("voice", {}, "model"),
    ],
)
def test_impossible_field_is_refused_by_name(gateway, model, fields, param):
    reply = hear_with(gateway, model, **fields)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body


def test_translations_take_whisper_and_no_language(gateway):
    assert hear_with(gateway, task="translations", language="fr").error["param"] == "language"
    assert hear_with(gateway, "letters", task="translations").error["code"] == "model_not_supported"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ([("model", "whisper")], 400, "file"),
        ([("model", "whisper"), ("file", b"")], 400, "file"),
        ([("model", "whisper"), ("file", SOUND), ("file", SOUND)], 400, "file"),
        ([("model", "whisper"), ("file", b"just a text")], 400, "file"),
        ([("file", SOUND)], 400, "model"),
        ([("model", "absent"), ("file", SOUND)], 404, "model"),
        ([("model", "whisper"), ("model", "letters"), ("file", SOUND)], 400, "model"),
        ([("model", b"\xff"), ("file", SOUND)], 400, "model"),
        ([("model", "whisper"), ("file", SOUND * 2000)], 413, None),
        ([("a", "b")] * (MAX_FIELDS + 1), 400, None),
    ],
)
def test_wrong_form_is_refused(gateway, fields, status, param):
    reply = send(gateway, *fields)
    assert (reply.status, reply.error["param"]) == (status, param), reply.body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--abc--\r\n",
        form(("model", "whisper")).removesuffix(b"--\r\n"),
        form(("", "whisper")).replace(b'name=""', b"name"),
        b"--xyz\r\n" + b"A: b\r\n" * 3000 + b"\r\n--xyz--",
        form(("model", "whisper")).replace(b'name="model"', b"name*=a; name*0=b"),
    ],
    ids=["empty", "other boundary", "cut off", "no name", "long head", "two names"],
)
def test_malformed_form_is_refused(gateway, body):
    reply = gateway.post("/v1/audio/transcriptions", body, content_type="multipart/form-data; boundary=xyz")
    assert (reply.status, "not a valid form" in reply.error["message"]) == (400, True), reply.body


def test_malformed_boundary_is_refused(gateway):
    body = form(("model", "whisper"))
    reply = gateway.post(
        "/v1/audio/transcriptions", body, content_type="multipart/form-data; boundary*=a; boundary*0=b"
    )
    assert (reply.status, "content type is malformed" in reply.error["message"]) == (400, True), reply.body


def test_json_in_place_of_a_form_gets_415(gateway):
    reply = gateway.post("/v1/audio/transcriptions", {"model": "whisper"})
    assert (reply.status, "multipart/form-data" in reply.error["message"]) == (415, True)


# --- text to speech ---------------------------------------------------------------------------------------------------


def test_speech_is_a_wav_file(gateway):
    reply = gateway.post("/v1/audio/speech", {"model": "voice", "input": "Hi", "voice": "default", "speed": 1})
    assert (reply.status, reply.headers["content-type"], reply.body) == (200, "audio/wav", b"RIFF...")


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("input", ""),
        ("voice", "alloy"),
        ("response_format", "mp3"),
        ("speed", 2),
        ("stream_format", "sse"),
        ("instructions", "Whisper."),
        ("model", "whisper"),
    ],
)
def test_speech_refuses_by_name(gateway, param, value):
    reply = gateway.post("/v1/audio/speech", {"model": "voice", "input": "Hi", "voice": "default", param: value})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert param != "response_format" or "'wav'" in reply.error["message"]


def test_systems_of_sound_are_listed(gateway):
    names = {model["id"] for model in gateway.get("/v1/models").json["data"]}
    assert names >= {"whisper", "letters", "other", "voice"}


# --- moderations ------------------------------------------------------------------------------------------------------


def moderated(gateway: RunningGateway, model: str, value: Any) -> list[Any]:
    reply = gateway.post("/v1/moderations", {"model": model, "input": value})
    assert reply.status == 200, reply.body
    return reply.json["results"]


def test_harmless_label_flags_nothing(gateway):
    harmful, harmless = moderated(gateway, "toxic", ["0.75 0.25", "0.25 0.75"])
    assert (harmful["flagged"], harmful["categories"], harmful["category_scores"]) == (
        True,
        {"toxic": True},
        {"toxic": 0.75},
    )
    assert (harmless["flagged"], harmless["categories"]) == (False, {"toxic": False})


def test_several_labels_may_be_flagged(gateway):
    (result,) = moderated(gateway, "kinds", "0.75 0.75")
    assert result["categories"] == {"insult": True, "threat": True}
    (result,) = moderated(gateway, "kinds", [{"type": "text", "text": "0.25 0.5"}, {"type": "text", "text": "0.375 0"}])
    assert (result["flagged"], result["category_scores"]) == (False, {"insult": 0.375, "threat": 0.5})


def test_long_texts_and_parts_are_moderated_whole(gateway):
    late, harmless = "a" * 300 + "bad" + "a" * 300, "a" * 600
    assert [one["category_scores"]["harm"] for one in moderated(gateway, "reader", [late, harmless])] == [0.75, 0.25]
    parts = [{"type": "text", "text": text} for text in (harmless, "bad")]
    assert [one["flagged"] for one in moderated(gateway, "reader", parts)] == [True]


def test_windows_overlap_and_cover_the_text():
    row = TokenizedRow(ids=[1, *range(10, 30), 2], special=(1, 1), max_length=10)
    windows = windows_of(row)
    assert windows[0] == [1, *range(10, 18), 2]
    assert windows[1][:3] == [1, 16, 17]
    assert windows[-1][-2:] == [29, 2]
    assert {id for window in windows for id in window} == {*row.ids}
    assert all(len(window) <= 10 for window in windows)
    assert windows_of(TokenizedRow(ids=row.ids, special=(1, 1), max_length=22)) == []


def test_moderations_refuse_other_classifiers_and_images(gateway):
    reply = gateway.post("/v1/moderations", {"model": "mood", "input": "0.5 0.5"})
    assert (reply.status, reply.error["code"]) == (400, "model_not_supported")
    assert "glad, sad" in reply.error["message"]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    reply = gateway.post("/v1/moderations", {"model": "toxic", "input": [image]})
    assert (reply.status, reply.error["param"], "images" in reply.error["message"]) == (400, "input", True)
