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


def hears(model: str, fields: dict[str, Any], parameters: dict[str, Any], answer: Any = TEXT) -> Given:
    return Given({"model": model, **fields}, {"parameters": Exactly(parameters)}, answer)


SRT = b"1\n00:00:00,000 --> 00:00:01,500\nOne.\n\n2\n00:01:01,250 --> 00:01:02,000\nTwo.\n"
VTT = b"WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne.\n\n00:01:01.250 --> 00:01:02.000\nTwo.\n"
WORDS = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
DURATION = {"return_duration": True}
GIVEN = {
    "transcriptions": [
        Given({"response_format": "text"}, {}, b"One. Two.\n"),
        Given({"response_format": "srt"}, None, SRT),
        Given({"response_format": "vtt"}, None, VTT),
        hears(
            *("whisper", {"language": "fr", "prompt": "Ada", "temperature": "0.5"}),
            TIMED | {"prompt": "Ada", "generate_kwargs": {"language": "fr", "temperature": 0.5}},
        ),
        # Whisper without timestamps hears chunks.
        hears(*("untimed", {"language": "fr"}), {"generate_kwargs": {"language": "fr"}, "chunk_length_s": 30}),
        # Other models answer what they can.
        hears("heard", {}, {}),
        hears(
            *("letters", WORDS),
            DURATION | {"return_timestamps": "word"},
            Exactly({"task": "transcribe", "language": None, "duration": 62, "text": "One. Two.", "words": list}),
        ),
    ],
    "translations": [
        hears(
            *("whisper", {"response_format": "verbose_json"}),
            TIMED | DURATION | {"generate_kwargs": {"task": "translate"}},
            {"task": "translate", "language": "english"},
        ),
        hears("untimed", {}, {"generate_kwargs": {"task": "translate"}, "chunk_length_s": 30}),
    ],
    "speech": [Given({"speed": 1}, {}, b"RIFF...")],
}

WRONG = {
    "transcriptions": [
        Wrong({"language": "xx"}, "language", by_model=True),
        Wrong({"file": b"just a text"}, "file", by_model=True),
        *wrong("language", {"model": "letters", "language": "fr"}),
        *wrong("response_format", {"response_format": "mp3"}),
        *wrong("response_format", {"model": "letters", "response_format": "srt"}),
        *wrong("response_format", {"model": "heard", "response_format": "verbose_json"}),
        *wrong("response_format", {"model": "untimed", "response_format": "srt"}),
        *wrong("temperature", {"temperature": "2"}, {"temperature": "warm"}),
        *wrong("temperature", {"model": "letters", "temperature": "0.5"}),
        *wrong("stream", {"stream": "true"}),
        *wrong("include[]", {"include[]": "logprobs"}),
        *wrong("timestamp_granularities[]", {"timestamp_granularities[]": "word"}),
        *wrong("timestamp_granularities[]", {"model": "letters", "response_format": "verbose_json"}),
        *wrong("prompt", {"model": "letters", "prompt": "Ada"}),
        *wrong("model", {"model": "speaker"}, {"model": ABSENT}, {"model": b"\xff"}),
        *wrong("file", {"file": ABSENT}, {"file": b""}),
    ],
    "translations": [
        *wrong("language", {"language": "fr"}),
        Wrong({"model": "letters"}, "model", code="model_not_supported"),
    ],
    "speech": [
        *wrong("input", {"input": ""}),
        *wrong("voice", {"voice": "alloy"}),
        Wrong({"response_format": "mp3"}, "response_format", "'wav'"),
        *wrong("speed", {"speed": 2}),
        *wrong("stream_format", {"stream_format": "sse"}),
        *wrong("instructions", {"instructions": "Whisper."}),
        *wrong("model", {"model": "whisper"}),
    ],
}
