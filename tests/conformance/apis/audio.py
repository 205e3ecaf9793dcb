"""OpenAI's routes of sound."""

from __future__ import annotations

from typing import Any

from tests.conformance.apis.models import SOUND
from tests.conformance.apis.run import ABSENT, Case, Exactly, Given, Wrong, wrong

HEARD = {"model": "whisper", "file": SOUND}
SPEECH = {"model": "speaker", "input": "a", "voice": "default"}
TEXT = Exactly({"text": "One. Two."})
TIMED = {"return_timestamps": True}
CASES = [
    Case(
        *("transcriptions", "/v1/audio/transcriptions", HEARD),
        is_form=True,
        triton={"audio": [SOUND], "parameters": Exactly(TIMED)},
        answer=TEXT,
    ),
    Case(
        *("translations", "/v1/audio/translations", HEARD),
        is_form=True,
        triton={"audio": [SOUND], "parameters": Exactly(TIMED | {"generate_kwargs": {"task": "translate"}})},
        answer=TEXT,
    ),
    Case("speech", "/v1/audio/speech", SPEECH, triton={"text": ["a"]}, answer=b"RIFF..."),
]


def hears(case: str, model: str, fields: dict[str, Any], parameters: dict[str, Any], answer: Any = TEXT) -> Given:
    return Given(case, {"model": model, **fields}, {"parameters": Exactly(parameters)}, answer)


SRT = b"1\n00:00:00,000 --> 00:00:01,500\nOne.\n\n2\n00:01:01,250 --> 00:01:02,000\nTwo.\n"
VTT = b"WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne.\n\n00:01:01.250 --> 00:01:02.000\nTwo.\n"
WORDS = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
DURATION = {"return_duration": True}
GIVEN = [
    Given("transcriptions", {"response_format": "text"}, {}, b"One. Two.\n"),
    Given("transcriptions", {"response_format": "srt"}, None, SRT),
    Given("transcriptions", {"response_format": "vtt"}, None, VTT),
    hears(
        *("transcriptions", "whisper", {"language": "fr", "prompt": "Ada", "temperature": "0.5"}),
        TIMED | {"prompt": "Ada", "generate_kwargs": {"language": "fr", "temperature": 0.5}},
    ),
    hears(
        *("translations", "whisper", {"response_format": "verbose_json"}),
        TIMED | DURATION | {"generate_kwargs": {"task": "translate"}},
        {"task": "translate", "language": "english"},
    ),
    # Whisper without timestamps hears chunks.
    hears(
        *("transcriptions", "untimed", {"language": "fr"}),
        {"generate_kwargs": {"language": "fr"}, "chunk_length_s": 30},
    ),
    hears("translations", "untimed", {}, {"generate_kwargs": {"task": "translate"}, "chunk_length_s": 30}),
    # Other models answer what they can.
    hears("transcriptions", "heard", {}, {}),
    hears(
        *("transcriptions", "letters", WORDS),
        DURATION | {"return_timestamps": "word"},
        Exactly({"task": "transcribe", "language": None, "duration": 62, "text": "One. Two.", "words": list}),
    ),
    Given("speech", {"speed": 1}, {}, b"RIFF..."),
]
WRONG = [
    Wrong("transcriptions", {"language": "xx"}, "language", by_model=True),
    Wrong("transcriptions", {"file": b"just a text"}, "file", by_model=True),
    *wrong("transcriptions", "language", {"model": "letters", "language": "fr"}),
    *wrong("transcriptions", "response_format", {"response_format": "mp3"}),
    *wrong("transcriptions", "response_format", {"model": "letters", "response_format": "srt"}),
    *wrong("transcriptions", "response_format", {"model": "heard", "response_format": "verbose_json"}),
    *wrong("transcriptions", "response_format", {"model": "untimed", "response_format": "srt"}),
    *wrong("transcriptions", "temperature", {"temperature": "2"}, {"temperature": "warm"}),
    *wrong("transcriptions", "temperature", {"model": "letters", "temperature": "0.5"}),
    *wrong("transcriptions", "stream", {"stream": "true"}),
    *wrong("transcriptions", "include[]", {"include[]": "logprobs"}),
    *wrong("transcriptions", "timestamp_granularities[]", {"timestamp_granularities[]": "word"}),
    *wrong("transcriptions", "timestamp_granularities[]", {"model": "letters", "response_format": "verbose_json"}),
    *wrong("transcriptions", "prompt", {"model": "letters", "prompt": "Ada"}),
    *wrong("transcriptions", "model", {"model": "speaker"}, {"model": ABSENT}, {"model": b"\xff"}),
    *wrong("transcriptions", "file", {"file": ABSENT}, {"file": b""}),
    *wrong("translations", "language", {"language": "fr"}),
    Wrong("translations", {"model": "letters"}, "model", code="model_not_supported"),
    *wrong("speech", "input", {"input": ""}),
    *wrong("speech", "voice", {"voice": "alloy"}),
    Wrong("speech", {"response_format": "mp3"}, "response_format", "'wav'"),
    *wrong("speech", "speed", {"speed": 2}),
    *wrong("speech", "stream_format", {"stream_format": "sse"}),
    *wrong("speech", "instructions", {"instructions": "Whisper."}),
    *wrong("speech", "model", {"model": "whisper"}),
]
