"""OpenAI's Python client, unchanged, on the routes of sound and of moderations of a real stack."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import transformers

from loadtest.bench.speech_rates import RATE, save_whisper, sound, wav
from tests.serving.pipelines.test_graph import WHISPER
from tests.support.checkpoints import encoders
from tests.support.openai_clients import NEEDS_CLIENTS
from tests.support.served_pipelines import assemble_pipelines
from tests.support.stacks import TestStack

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), NEEDS_CLIENTS]

SYSTEMS = ("whisper", "untimed", "hears", "speaks", "moderator")
SHORT, LONG = wav(sound(0)), wav(np.concatenate([sound(number) for number in (7, 6, 5)]))  # 4 and 39 seconds


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    whisper = save_whisper(folder / "whisper", 3700, spread=0.3, **WHISPER)
    # Random weights end no text before the limit of generation_config.json.
    options = json.loads((whisper / "generation_config.json").read_text()) | {"max_length": 24}
    (whisper / "generation_config.json").write_text(json.dumps(options))
    untimed = shutil.copytree(whisper, folder / "untimed")
    del options["no_timestamps_token_id"]
    (untimed / "generation_config.json").write_text(json.dumps(options))
    return {
        "whisper": whisper,
        "untimed": untimed,
        "moderator": encoders.save_bert(
            folder / "moderator", "ForSequenceClassification", **encoders.labels(["toxic", "non-toxic", "threat"])
        ),
    }


@pytest.fixture(scope="module")
def served(stack: TestStack, checkpoints, tmp_path_factory) -> TestStack:
    assemble_pipelines(stack, tmp_path_factory.mktemp("pipelines"), ("hears", "speaks"))
    stack.assemble(*({"SYSTEMS": name, "SOURCE": source} for name, source in checkpoints.items()))
    return stack.serve(*SYSTEMS)


@pytest.fixture(scope="module")
def client(openai, served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.gateway}/v1", api_key=served.client_key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def recognize(checkpoints) -> Any:
    """Return transformers' own pipeline of the Whisper."""
    return transformers.pipeline("automatic-speech-recognition", model=str(checkpoints["whisper"]))


@pytest.mark.parametrize("file", [SHORT, LONG], ids=["short", "long"])
def test_whisper_transcribes_in_each_format(client, recognize, file):
    samples = soundfile.read(io.BytesIO(file), dtype="float32")[0]
    expected = recognize(samples.copy(), return_timestamps=True, return_language=True)
    text = expected["text"].strip()

    def ask(form: str, **options: Any) -> Any:
        return client.audio.transcriptions.create(
            model="whisper", file=("a.wav", file), response_format=form, **options
        )

    assert text
    assert ask("json").text == text
    assert ask("text") == f"{text}\n"
    assert ask("srt").count(" --> ") == ask("vtt").count(" --> ") == len(expected["chunks"])
    assert ask("vtt").startswith("WEBVTT\n\n00:")
    verbose = ask("verbose_json", timestamp_granularities=["segment", "word"])
    assert (verbose.text, verbose.task) == (text, "transcribe")
    assert verbose.duration == pytest.approx(len(samples) / RATE)
    assert verbose.language == expected["chunks"][0]["language"]
    assert [(one.start, one.text) for one in verbose.segments] == [
        (chunk["timestamp"][0], chunk["text"]) for chunk in expected["chunks"]
    ]
    words = recognize(samples.copy(), return_timestamps="word")["chunks"]
    assert [one.word for one in verbose.words] == [word["text"].strip() for word in words]


@pytest.mark.parametrize("file", [SHORT, LONG], ids=["short", "long"])
def test_whisper_without_timestamps_transcribes(client, checkpoints, file):
    pipe = transformers.pipeline("automatic-speech-recognition", model=str(checkpoints["untimed"]))
    samples = soundfile.read(io.BytesIO(file), dtype="float32")[0]
    text = client.audio.transcriptions.create(model="untimed", file=file).text
    assert text == pipe(samples, chunk_length_s=30)["text"].strip()


def test_whisper_translates_with_a_prompt(client, recognize):
    options = {"return_timestamps": True, "generate_kwargs": {"task": "translate"}}
    samples = soundfile.read(io.BytesIO(SHORT), dtype="float32")[0]
    answer = client.audio.translations.create(model="whisper", file=SHORT, response_format="verbose_json")
    assert (answer.text, answer.language) == (recognize(samples.copy(), **options)["text"].strip(), "english")
    ids = recognize.tokenizer.get_prompt_ids("Ada", return_tensors="pt")
    expected = recognize(samples, **options | {"generate_kwargs": {"task": "translate", "prompt_ids": ids}})
    assert client.audio.translations.create(model="whisper", file=SHORT, prompt="Ada").text == expected["text"].strip()
    # Only the end of a long prompt counts.
    assert client.audio.translations.create(model="whisper", file=SHORT, prompt="Ada " * 1000).text


def test_ctc_transcribes_with_words(client):
    answer = client.audio.transcriptions.create(
        model="hears", file=SHORT, response_format="verbose_json", timestamp_granularities=["word"]
    )
    assert " ".join(word.word for word in answer.words).split() == answer.text.split()
    assert answer.duration == 4
    assert client.audio.transcriptions.create(model="hears", file=SHORT).text == answer.text


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"file": b"Not a sound."}, "file"),
        ({"language": "xx"}, "language"),
    ],
)
def test_wrong_transcriptions_raise_the_clients_error(openai, client, options, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.audio.transcriptions.create(**{"model": "whisper", "file": SHORT} | options)
    assert error.value.param == param


def test_text_is_spoken(client):
    answer = client.audio.speech.create(model="speaks", input="a dog", voice="default")
    samples, rate = soundfile.read(io.BytesIO(answer.content))
    assert (answer.response.headers["content-type"], rate) == ("audio/wav", 16000)
    assert samples.any()


def test_texts_are_moderated(client, served):
    texts = ["Which battery fits?", "The parcel arrives."]
    results = client.moderations.create(model="moderator", input=texts).results
    scores = served.ask("moderator", input_text=texts)["scores"]
    for result, row in zip(results, scores, strict=True):
        assert result.category_scores.to_dict() == pytest.approx({"toxic": row[0], "threat": row[2]}, abs=1e-4)
        assert result.flagged == (max(row[0], row[2]) > 0.5)
    long = " ".join(texts * 200)
    (result,) = client.moderations.create(model="moderator", input=long).results
    scores = served.ask("moderator", input_text=[long])["scores"][0]  # of the beginning alone
    found = result.category_scores.to_dict()
    assert found["toxic"] >= scores[0] - 1e-4
    assert found["threat"] >= scores[2] - 1e-4
