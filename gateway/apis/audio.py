"""OpenAI's routes of sound: transcriptions and translations of speech, and speech of a text. Pipelines answer them."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gateway.edge import forms
from gateway.edge.bodies import FORM_BODY, json_response
from gateway.edge.errors import ApiError, about_request
from gateway.edge.routes import ApiRoute, api
from gateway.text.row_fields import check_rows
from gateway.triton.context import Gateway, gateway_of, read
from gateway.triton.rows import infer_rows, together
from gateway.triton.served import System
from triton_transformers.tensors import Row

OUTPUTS = "outputs"
GRANULARITIES = "timestamp_granularities[]"
# The kinds of models (the parameter `speech_model` of the configuration) -> the pieces of speech that they time.
TIMESTAMPS: Mapping[str, tuple[str, ...]] = {"whisper": ("segment", "word"), "ctc": ("word",)}
CHUNK_S = 30  # Whisper hears so much at once; it needs timestamps for longer sounds, or chunks
# Pipelines take seeds below this.
SEEDS = 1_000_000
# The fields of OpenAI's segments that no pipeline reports.
UNKNOWN = dict.fromkeys(("avg_logprob", "compression_ratio", "no_speech_prob"))
MAX_SPEECH = 4096  # characters: OpenAI's limit
# Input of the pipeline -> field of the request.
FIELDS = {"audio": "file"}
# The formats of subtitles -> the sign between seconds and milliseconds.
SUBTITLES = {"srt": ",", "vtt": "."}


class TranslationBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0


class TranscriptionBody(TranslationBody, forbid_unknown_fields=True):
    language: str = ""
    timestamp_granularities: list[Literal["segment", "word"]] = msgspec.field(name=GRANULARITIES, default=[])
    stream: bool = False


class SpeechBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    input: Annotated[str, msgspec.Meta(max_length=MAX_SPEECH)]
    voice: Literal["default"]
    response_format: Literal["wav"] = "wav"
    speed: float = 1
    stream_format: Literal["audio"] = "audio"


async def transcriptions(request: Request) -> Response:
    """Return the words of a sound as text."""
    body, file = await forms.read(request, TranscriptionBody, "file")
    if body.stream:
        raise ApiError(
            400, "The models do not stream transcriptions: leave 'stream' out.", "stream", "unsupported_parameter"
        )
    gateway = gateway_of(request)
    system = await gateway.served.find(body.model, "transcription")
    return await recognize(gateway, system, body, file, {})


async def translations(request: Request) -> Response:
    """Return the words of a sound as English text."""
    fields, file = await forms.read(request, TranslationBody, "file")
    gateway = gateway_of(request)
    system = await gateway.served.find(fields.model, "translation")
    body = TranscriptionBody(**msgspec.structs.asdict(fields))
    return await recognize(gateway, system, body, file, {"task": "translate"})


async def recognize(
    gateway: Gateway, system: System, body: TranscriptionBody, file: bytes, generation: dict[str, Any]
) -> Response:
    """Return the speech in the format of the request. `generation` has options of the model's text generation."""
    granularities = timestamps(system, body)
    parameters = call_parameters(system, body, generation)

    async def answer(granularity: str) -> Any:
        own = {"return_timestamps": "word" if granularity == "word" else True} if granularity else {}
        try:
            return await ask(gateway, system, audio=file, parameters=json.dumps(parameters | own))
        except ApiError as error:
            raise about_request(error, FIELDS, {}) from None

    answers = await together(map(answer, granularities))
    by_granularity = dict(zip(granularities, answers, strict=True))
    text = answers[0]["text"].strip()
    if body.response_format == "json":
        return json_response({"text": text})
    if body.response_format == "text":
        return PlainTextResponse(f"{text}\n")
    if body.response_format in SUBTITLES:
        return PlainTextResponse(subtitles(answers[0], body.response_format))
    spoken = next((chunk["language"] for chunk in answers[0]["chunks"] if chunk.get("language")), None)
    verbose = {
        "task": generation.get("task", "transcribe"),
        "language": "english" if "task" in generation else body.language or spoken,
        "duration": answers[0]["duration"],
        "text": text,
    }
    if "segment" in by_granularity:
        verbose["segments"] = [
            {"id": number, "seek": 0, **piece, "tokens": [], "temperature": body.temperature, **UNKNOWN}
            for number, piece in enumerate(pieces(by_granularity["segment"], "text"))
        ]
    if "word" in by_granularity:
        words = pieces(by_granularity["word"], "word")
        verbose["words"] = [{**piece, "word": piece["word"].strip()} for piece in words]
    return json_response(verbose)


def timestamps(system: System, body: TranscriptionBody) -> list[str]:
    """Return what the answer has timestamps of, each a call of the pipeline. Raise ApiError if the model has none."""
    known = TIMESTAMPS.get(system.speech_model, ())
    asked: list[str] = list(dict.fromkeys(body.timestamp_granularities))
    if asked and body.response_format != "verbose_json":
        message = f"'{GRANULARITIES}' needs the 'response_format' verbose_json."
        raise ApiError(400, message, GRANULARITIES, "unsupported_value")
    if not asked and body.response_format in ("json", "text"):
        return ["segment" if "segment" in known else ""]
    for granularity in asked or ["segment"]:
        if granularity not in known:
            param = "response_format" if body.response_format in SUBTITLES or not known else GRANULARITIES
            remedy = f", or verbose_json with '{GRANULARITIES}': {known[0]}" if known else ""
            message = (
                f"The model '{system.name}' has no timestamps of {granularity}s: send the 'response_format' json or "
                f"text{remedy}."
            )
            raise ApiError(400, message, param, "unsupported_value")
    return asked or ["segment"]


def call_parameters(system: System, body: TranscriptionBody, generation: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the pipeline's call. Raise ApiError for those of a model that generates text."""
    own = {name: value for name in ("language", "prompt", "temperature") if (value := getattr(body, name))}
    if own and not system.is_whisper:
        name = next(iter(own))
        message = f"The model '{system.name}' takes no '{name}', as only Whisper does: leave it out."
        raise ApiError(400, message, name, "unsupported_parameter")
    parameters = {"prompt": own.pop("prompt")} if "prompt" in own else {}
    if options := own | generation:
        parameters["generate_kwargs"] = options
    if body.temperature and len({*body.timestamp_granularities}) > 1:  # two runs must sample the same text
        parameters["seed"] = random.randrange(SEEDS)
    if system.is_whisper and system.speech_model not in TIMESTAMPS:
        parameters["chunk_length_s"] = CHUNK_S
    if body.response_format not in ("json", "text"):
        parameters["return_duration"] = True
    is_language_open = not (body.language or "task" in generation)
    if body.response_format == "verbose_json" and system.speech_model == "whisper" and is_language_open:
        parameters["return_language"] = True
    return parameters


def pieces(answer: Any, name: str) -> list[dict[str, Any]]:
    """Return the chunks of an answer, each with its start, its end and its text as `name`."""
    found = []
    for chunk in answer["chunks"]:
        start, end = chunk["timestamp"]
        # A sound that is cut off has no end of its last chunk.
        found.append({"start": start or 0.0, "end": answer["duration"] if end is None else end, name: chunk["text"]})
    return found


def subtitles(answer: Any, form: str) -> str:
    blocks = [
        f"{clock(piece['start'], form)} --> {clock(piece['end'], form)}\n{piece['text'].strip()}\n"
        for piece in pieces(answer, "text")
    ]
    if form == "vtt":
        return "\n".join(["WEBVTT\n", *blocks])
    return "\n".join(f"{number}\n{block}" for number, block in enumerate(blocks, 1))


def clock(seconds: float, form: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, whole = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{whole:02}{SUBTITLES[form]}{thousandths:03}"


async def speech(request: Request) -> Response:
    """Return a text as sound, in a WAV file of 32-bit floats."""
    gateway, body, system = await read(request, SpeechBody, "speech")
    check_rows(gateway, [body.input], "input", is_list=False)
    if body.speed != 1:
        raise ApiError(400, "The models speak at a speed of 1: leave it out.", "speed", "unsupported_value")
    answer = await ask(gateway, system, text=body.input)
    return Response(base64.b64decode(answer["audio"]), media_type="audio/wav")


async def ask(gateway: Gateway, system: System, **row: Row) -> Any:
    """Return the pipeline's answer to a row of these fields."""
    answers = await infer_rows(gateway, system, {name: [value] for name, value in row.items()}, [OUTPUTS])
    return msgspec.json.decode(answers.texts(OUTPUTS)[0])


ROUTES = [
    ApiRoute("/v1/audio/transcriptions", transcriptions, "transcription", body=FORM_BODY),
    ApiRoute("/v1/audio/translations", translations, "translation", body=FORM_BODY),
    *api("/v1/audio/speech", speech, "speech"),
]
