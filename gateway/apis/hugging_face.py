"""Hugging Face's Inference API, at the address of each system: POST /models/{model}.

A request has JSON with `inputs` and `parameters`, or is one file. The system decides how both are read, and what the
answer looks like. Encoders of texts answer as text-embeddings-inference does, whose requests are alike (tei.py).
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

from gateway.apis import completions, tei
from gateway.apis.completions import (
    ChatBody,
    CompletionsBody,
    CompletionsForm,
    ImagePart,
    Message,
    Sampling,
    StructuredOutputs,
    TextPart,
)
from gateway.edge import bodies
from gateway.edge.bodies import FILE_BODY, JSON, PositiveInt, json_response, media_type
from gateway.edge.errors import ApiError, shown, tei_form
from gateway.edge.routes import ApiRoute, api
from gateway.edge.streams import event
from gateway.text import encoders
from gateway.text.generation import Chunk, GenerationRequest, TokenLogprob, find, respond
from gateway.text.row_fields import ImageUrl, check_count, check_rows, is_image, read_image
from gateway.triton.context import Gateway, gateway_of
from gateway.triton.rows import Answers, infer_rows
from gateway.triton.served import System
from triton_transformers.protocol import IMAGE
from triton_transformers.tasks.command import ONE_FILE
from triton_transformers.tasks.task import Hub
from triton_transformers.tensors import Row

Parameters = dict[str, Any]
Chosen = TypeVar("Chosen", bound=msgspec.Struct)
CAPTION = "Describe the image."
NODE_CLIENT = "@huggingface/inference"  # begins the User-Agent of the client for JavaScript


class NoParameters(msgspec.Struct, forbid_unknown_fields=True):
    """The parameters of systems that have none."""


class TopK(msgspec.Struct, forbid_unknown_fields=True):
    top_k: PositiveInt = 5  # the API's default


class OnlyBest(msgspec.Struct, forbid_unknown_fields=True):
    top_k: Literal[1] = 1


class Joined(msgspec.Struct, forbid_unknown_fields=True):
    aggregation_strategy: Literal["simple"] = "simple"


class HubBody(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of all tasks. Some clients send a question and its image beside `inputs`."""

    inputs: Any = None
    parameters: Parameters = {}
    options: Parameters | None = None  # of caches and queues, which the gateway lacks
    stream: bool = False
    question: str | None = None
    image: str | None = None

    def given(self) -> Any:
        """Return the inputs: a file, a text, a list or an object. Raise ApiError if there are none."""
        if self.question is not None:
            return {"image": self.image or self.inputs, "question": self.question}
        if self.inputs is None:
            raise ApiError(400, "Missing required parameter: 'inputs'.", "inputs", "missing_required_parameter")
        return self.inputs

    def asked(self) -> Parameters:
        """Return the parameters that have values. Some clients also send those that nobody set, and the model."""
        return {name: value for name, value in self.parameters.items() if value is not None and name != "model"}

    def chosen(self, struct: type[Chosen]) -> Chosen:
        """Return the parameters of a system that has no others. Those that are off change nothing."""
        return bodies.convert({name: value for name, value in self.asked().items() if value is not False}, struct)

    def texts(self, gateway: Gateway) -> list[str]:
        """Return the inputs as texts. Raise ApiError if they are others, or empty."""
        inputs = self.given()
        texts = inputs if isinstance(inputs, list) else [inputs]
        if not all(isinstance(text, str) for text in texts):
            raise ApiError(400, "'inputs' must be a text, or a list of texts.", "inputs", "invalid_value")
        check_rows(gateway, texts, "inputs", is_list=isinstance(inputs, list))
        return texts


Ask = Callable[[Request, System, HubBody], Awaitable[Response]]


async def answer(request: Request) -> Response:
    """Answer for any system, and report the time and the number of characters in headers."""
    began = time.perf_counter()
    gateway = gateway_of(request)
    system = await gateway.served.find(request.path_params["model"])
    is_file = media_type(request.headers.get("content-type", "")) != JSON
    if ask := asker(system):
        body = HubBody(await request.body()) if is_file else await bodies.read(request, HubBody)
        inputs, response = body.inputs, await ask(request, system, body)
    elif is_file:
        raise ApiError(400, f"The model '{system.name}' takes texts, not a file.", "inputs", "unsupported_value")
    else:
        response = await tei.any_task(request)
        inputs = msgspec.json.decode(bytes((await tei.beginning(request)).inputs) or b"null")
    response.headers["x-compute-type"] = compute_type(system)
    response.headers["x-compute-time"] = f"{time.perf_counter() - began:.3f}"
    response.headers["x-compute-characters"] = str(count_characters(inputs))
    return response


async def fields_of(request: Request) -> dict[str, Any]:
    """Return the body's fields with the model of the address. Clients send another name, or their address."""
    return bodies.parse(await request.body()) | {"model": request.path_params["model"]}


async def text_completions(request: Request) -> Response:
    """Answer as /v1/completions. The client for JavaScript sends parameters of text-generation-inference here."""
    fields = await fields_of(request)
    if fields.pop("do_sample", None) is False:
        fields.setdefault("temperature", 0)
    if fields.pop("details", None):
        fields.setdefault("logprobs", 0)
    if fields.pop("return_full_text", None):
        fields.setdefault("echo", True)
    body = bodies.convert(fields, CompletionsBody)
    return await completions.answer_completions(request, body, TextCompletionsForm(body))


async def chat(request: Request) -> Response:
    """Answer as /v1/chat/completions."""
    fields = await fields_of(request)
    form = fields.get("response_format")
    if isinstance(form, dict) and "value" in form:
        fields |= {"response_format": None, "structured_outputs": structure(form)}
    return await completions.answer_chat(request, bodies.convert(fields, ChatBody))


def structure(form: dict[str, Any]) -> dict[str, Any]:
    """Return a grammar of text-generation-inference as OpenAI's API has it here."""
    return {"regex" if form.get("type") == "regex" else "json": form["value"]}


def count_characters(inputs: Any) -> int:
    """Return the number of characters of all texts."""
    if isinstance(inputs, dict | list):
        return sum(map(count_characters, inputs.values() if isinstance(inputs, dict) else inputs))
    return len(inputs) if isinstance(inputs, str) else 0


def compute_type(system: System) -> str:
    """Return gpu if a step of the system runs on one."""
    groups = [group.kind for config in system.parts.values() for group in config.instance_group]
    return "gpu" if ModelInstanceGroup.KIND_GPU in groups else "cpu"


def asker(system: System) -> Ask | None:
    """Return the function that answers for the system; None if its answers are those of TEI."""
    if system.is_pipeline:
        return ask_pipeline
    if system.kind == "generation":
        return generate
    if system.kind != "other":
        return None
    asks = {
        "image-classification": classify_image,
        "image-feature-extraction": embed_image,
        "token-classification": find_entities,
        "question-answering": find_answer,
        "fill-mask": fill_mask,
    }
    return asks.get(system.task_name)


def is_only_route(system: System) -> bool:
    """Return whether no other API answers for the system. All but /tokenize have routes that more clients know."""
    return system.abilities <= {"tokens"} and asker(system) is not None


# --- pipelines --------------------------------------------------------------------------------------------------------


async def ask_pipeline(request: Request, system: System, body: HubBody) -> Response:
    """Answer as the pipeline does. A list of texts, files or objects has several rows."""
    if body.stream:
        raise ApiError(400, f"The model '{system.name}' does not stream.", "stream", "unsupported_parameter")
    gateway, inputs, fields = gateway_of(request), body.given(), system.pipeline_fields
    hub = system.task.hub if system.task else Hub()
    first_kind = next(iter(fields.values()))
    parameters = {**hub.defaults} | parameters_of(hub, body.asked())
    seen = seen_image(inputs) if first_kind == "chat" and "images" in fields else None
    if seen:
        inputs, parameters = chat_about(seen), {"return_full_text": False} | parameters
        if seen.question:
            parameters.pop("top_k", None)  # at most this many answers; the model gives one
    is_chat = first_kind == "chat" and isinstance(inputs, list) and not all(isinstance(part, str) for part in inputs)
    is_batch = isinstance(inputs, list) and first_kind != "images" and not is_chat
    rows = [cells(system, fields, value) for value in (inputs if is_batch else [inputs])]
    check_count(gateway, len(rows), "inputs")
    if any(row.keys() != rows[0].keys() for row in rows):
        raise ApiError(400, "All 'inputs' must have the same fields.", "inputs", "invalid_value")
    # Clients send some fields as parameters, such as word_boxes.
    more = cells(system, fields, {name: parameters.pop(name) for name in fields.keys() & parameters.keys()})
    rows = [row | more | {"parameters": json.dumps(parameters)} for row in rows]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    texts = (await infer_rows(gateway, system, columns, ["outputs"])).texts("outputs")
    answers = [*map(hub.shape, map(msgspec.json.decode, texts))]
    if hub.file and not is_batch:
        return Response(base64.b64decode(answers[0][hub.file]), media_type="audio/wav")
    if seen and seen.question:
        return json_response([{"answer": text["generated_text"]} for text in answers[0]])
    if seen or (hub.describes and not is_batch):
        return json_response(description(request, answers[0]))
    if is_batch and hub.is_flat:
        return json_response([one for answer in answers for one in answer])
    return json_response(answers if is_batch or hub.is_nested else answers[0])


def parameters_of(hub: Hub, asked: Parameters) -> Parameters:
    """Return the parameters of a request with the pipeline's names."""
    generation: Parameters = {}
    for name in ("generate_parameters", "generation_parameters", *([hub.options] if hub.options else [])):
        own = asked.pop(name, {})
        if not isinstance(own, dict):
            raise ApiError(400, f"'parameters.{name}' must be an object.", f"parameters.{name}", "invalid_value")
        generation |= own
    if hub.own is not None:
        generation |= {name: asked.pop(name) for name in asked.keys() - hub.own}
    if not generation:
        return asked
    return asked | ({hub.options: generation} if hub.options else generation)


def cells(system: System, fields: dict[str, str], value: Any) -> dict[str, Row]:
    """Return a row of the inputs as the pipeline's fields. A value that is no object is the first field."""
    names = f"The model '{system.name}' takes {', '.join(fields)}"
    if not isinstance(value, dict):
        value = {next(iter(fields)): value}
    if unknown := value.keys() - fields.keys():
        raise ApiError(400, f"{names}.", f"inputs.{shown(min(unknown))}", "invalid_value")
    row: dict[str, Row] = {}
    for name, cell in value.items():
        kind = fields[name]
        if isinstance(cell, bytes) and kind not in ONE_FILE:
            raise ApiError(400, f"{names} as JSON, not a file.", "inputs", "unsupported_value")
        if isinstance(cell, bytes) or (isinstance(cell, str) and kind not in ("json", "images")):
            row[name] = cell
        elif kind in ONE_FILE or kind == "text":
            wanted = "a text" if kind == "text" else f"{kind} in base64"
            raise ApiError(400, f"'inputs.{name}' must be {wanted}.", f"inputs.{name}", "invalid_value")
        else:
            row[name] = json.dumps(cell)
    return row


# --- images and questions about them ----------------------------------------------------------------------------------


class SeenImage(NamedTuple):
    """An image in base64, and the question about it, or none for a description."""

    image: str
    question: str = ""


def seen_image(inputs: Any) -> SeenImage | None:
    """Return the image that the inputs are, or that they ask about; None if they are others."""
    if isinstance(inputs, bytes):
        return SeenImage(base64.b64encode(inputs).decode())
    if isinstance(inputs, str) and is_image(inputs):
        return SeenImage(inputs)
    if not isinstance(inputs, dict) or inputs.keys() != {"image", "question"}:
        return None
    if not all(isinstance(value, str) for value in inputs.values()):
        raise ApiError(400, "'inputs' must have an image in base64 and a question.", "inputs", "invalid_value")
    return SeenImage(**inputs)


def chat_about(seen: SeenImage) -> list[dict[str, Any]]:
    """Return the chat as transformers has it."""
    text = {"type": "text", "text": seen.question or CAPTION}
    return [{"role": "user", "content": [{"type": "image", "image": seen.image}, text]}]


def description(request: Request, texts: list[dict[str, Any]]) -> Any:
    """Return the description of an image. The client for JavaScript takes no list, and the one for Python only a list.

    The clients send the same requests, except for their names.
    """
    return texts[0] if request.headers.get("user-agent", "").startswith(NODE_CLIENT) else texts


async def classify_image(request: Request, system: System, body: HubBody) -> Response:
    top_k = body.chosen(TopK).top_k
    answers = await infer_image(request, system, body, ["label", "score", "scores"])
    best = [(answers.array("score").item(), answers.texts("label")[0])]
    # Systems that `make models` assembled earlier name only the best label.
    pairs = zip(answers.array("scores").ravel().tolist(), system.labels, strict=True) if system.labels else best
    return json_response([{"label": label, "score": score} for score, label in sorted(pairs, reverse=True)[:top_k]])


async def embed_image(request: Request, system: System, body: HubBody) -> Response:
    body.chosen(NoParameters)
    output = system.config.output[0].name
    return json_response((await infer_image(request, system, body, [output])).array(output).tolist())


async def infer_image(request: Request, system: System, body: HubBody, outputs: Sequence[str]) -> Answers:
    image = body.given()
    if not isinstance(image, str | bytes):
        raise ApiError(400, "'inputs' must be an image in base64.", "inputs", "invalid_value")
    file = read_image(image, "inputs", is_base64=True) if isinstance(image, str) else image
    return await infer_rows(gateway_of(request), system, {IMAGE: [file]}, outputs)


# --- encoders of texts ------------------------------------------------------------------------------------------------


async def find_entities(request: Request, system: System, body: HubBody) -> Response:
    body.chosen(Joined)
    texts = body.texts(gateway_of(request))
    answers = await infer_rows(gateway_of(request), system, {"input_text": texts}, ["label", "score", "start", "end"])
    found = [
        [
            {"entity_group": label, "score": score, "word": text[start:end], "start": start, "end": end}
            for label, score, start, end in row
            if start >= 0
        ]
        for text, row in zip(texts, rows_of(answers, "label", "score", "start", "end"), strict=True)
    ]
    return json_response(found if isinstance(body.inputs, list) else found[0])


async def find_answer(request: Request, system: System, body: HubBody) -> Response:
    body.chosen(OnlyBest)
    inputs, names = body.given(), ("question", "context")
    for name in names:
        if not isinstance(inputs, dict) or not isinstance(inputs.get(name), str):
            raise ApiError(400, f"'inputs.{name}' must be a text.", f"inputs.{name}", "missing_required_parameter")
        check_rows(gateway_of(request), [inputs[name]], f"inputs.{name}", is_list=False)
    outputs = ["answer", "score", "start", "end"]
    answers = await infer_rows(gateway_of(request), system, {name: [inputs[name]] for name in names}, outputs)
    ((found,),) = rows_of(answers, *outputs)
    return json_response(dict(zip(outputs, found, strict=True)))


async def fill_mask(request: Request, system: System, body: HubBody) -> Response:
    top_k = body.chosen(TopK).top_k
    gateway = gateway_of(request)
    texts = body.texts(gateway)
    outputs = ["token", "token_id", "score"]
    answers = await infer_rows(gateway, system, {"input_text": texts}, outputs)
    words = [row[:top_k] for row in rows_of(answers, *outputs)]
    *tokenized, masked = await encoders.tokenized(gateway, system, [*texts, system.mask_token])
    before, after = masked.special
    own = [row.ids[before : len(row.ids) - after] for row in (*tokenized, masked)]
    hole = own.pop()[-1]
    sequences = [
        [int(word[1]) if id == hole else id for id in ids] for ids, row in zip(own, words, strict=True) for word in row
    ]
    texts_of = iter(await encoders.tokenized(gateway, system, sequences))
    filled = [
        [{"score": score, "token": id, "token_str": token, "sequence": next(texts_of).text} for token, id, score in row]
        for row in words
    ]
    return json_response(filled if isinstance(body.inputs, list) else filled[0])


def rows_of(answers: Answers, *names: str) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the elements of each row, which have a value of each output."""
    for part in answers.parts:
        columns = [
            np.array(part[name].texts(), object).reshape(part[name].shape)
            if part[name].datatype == "BYTES"
            else part[name].array()
            for name in names
        ]
        for row in zip(*columns, strict=True):
            yield [*zip(*(column.tolist() for column in row), strict=True)]


# --- generation -------------------------------------------------------------------------------------------------------


class Grammar(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json", "regex"]
    value: dict[str, Any] | str


class TextParameters(Sampling, kw_only=True, forbid_unknown_fields=True):
    """The parameters of text-generation-inference."""

    max_new_tokens: PositiveInt = 100
    do_sample: bool = False
    return_full_text: bool = False
    details: bool = False
    grammar: Grammar | None = None
    adapter_id: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of the model. Without a request for chance, the best token is next."""
        options = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        options["max_new_tokens"] = self.max_new_tokens
        if not self.do_sample and self.temperature is self.top_p is self.top_k is None:
            options["temperature"] = 0
        if self.grammar:
            grammar = bodies.convert(structure(msgspec.to_builtins(self.grammar)), StructuredOutputs)
            options["structured_outputs"] = grammar.option()
        if self.details:
            options["logprobs"] = 0
        return {name: value for name, value in options.items() if value is not None}


async def generate(request: Request, system: System, body: HubBody) -> Response:
    """Continue a text, or describe an image, or answer a question about it."""
    inputs, parameters = body.given(), body.chosen(TextParameters)
    gateway, options = gateway_of(request), parameters.options()
    model = ":".join(filter(None, [system.name, parameters.adapter_id]))
    if seen := seen_image(inputs):
        url = seen.image if is_image(seen.image) else f"data:image/png;base64,{seen.image}"
        message = Message("user", [ImagePart(ImageUrl(url)), TextPart(seen.question or CAPTION)])
        chat = await completions.chat_request(gateway, ChatBody(model=model, messages=[message], stream=body.stream))
        if seen.question:
            options["logprobs"] = 0  # the score is the product of the probabilities
        generation = dataclasses.replace(chat, options=options, streams=body.stream)
    elif isinstance(inputs, str):
        check_rows(gateway, [inputs], "inputs", is_list=False)
        found = await find(gateway.served, model, "text_input", body.stream)
        generation = GenerationRequest(
            system=found,
            source="text_input",
            rows=[inputs],
            options=options,
            fields={"text_input": "inputs", "structured_outputs": "grammar", "logprobs": "details"},
            model=model,
            streams=body.stream,
            echo=parameters.return_full_text,
        )
    else:
        raise ApiError(400, "'inputs' must be a text, or an image with a question.", "inputs", "invalid_value")
    form = TextForm(request, seen, parameters.details)
    return await respond(request, generation, form, body.stream)


class TextEvents:
    """Write the events of one text as text-generation-inference does, one for each response of the model."""

    def __init__(self) -> None:
        self.text, self.count, self.index = "", 0, 0

    def fields(self, chunk: Chunk) -> dict[str, Any]:
        self.index += 1
        self.text += chunk.content
        self.count += chunk.new_tokens or 0
        last = [token_of(token) for token in chunk.logprobs or ()][-1:]
        token = (last[0] if last else {"id": None, "logprob": None}) | {"text": chunk.content, "special": False}
        more: dict[str, Any] = {"generated_text": None, "details": None}
        if chunk.finish_reason:
            ended = {"finish_reason": reason(chunk), "generated_tokens": self.count}
            more = {"generated_text": self.text, "details": ended | {"input_length": chunk.prompt_tokens}}
        return {"index": self.index, "token": token} | more


class TextForm:
    """The form of text-generation-inference's answers, and of those about an image."""

    end = b""

    def __init__(self, request: Request, seen: SeenImage | None, has_details: bool) -> None:
        self.request = request
        self.seen = seen
        self.has_details = has_details

    def whole(self, choices: Sequence[Chunk]) -> Any:
        if self.seen and self.seen.question:
            return [{"answer": chunk.content, "score": probability(chunk)} for chunk in choices]
        texts = [
            {"generated_text": chunk.content} | ({"details": details(chunk)} if self.has_details else {})
            for chunk in choices
        ]
        return description(self.request, texts) if self.seen else texts

    async def events(self, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[bytes, None]:
        text = TextEvents()
        async with aclosing(chunks):
            async for chunk in chunks:
                yield event(text.fields(chunk))

    def failure(self, error: ApiError) -> bytes:
        return event(tei_form(error))


class TextCompletionsForm(CompletionsForm):
    """The form of completions, whose events also have the fields that the client for JavaScript documents.

    That client passes the events on as they are.
    """

    def __init__(self, body: CompletionsBody) -> None:
        super().__init__(body)
        self.texts: defaultdict[int, TextEvents] = defaultdict(TextEvents)  # by choice

    def pieces(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        yield self.choice(chunk)

    def event_fields(self, chunk: Chunk) -> dict[str, Any]:
        return self.texts[chunk.choice].fields(chunk)


def probability(chunk: Chunk) -> float | None:
    """Return the probability of the text's tokens, or None if there are none.

    The model reports none for the token that ends the text.
    """
    return math.exp(sum(token.logprob or 0.0 for token in chunk.logprobs)) if chunk.logprobs else None


def details(chunk: Chunk) -> dict[str, Any]:
    tokens = [token_of(token) for token in chunk.logprobs or ()]
    counts = {"finish_reason": reason(chunk), "generated_tokens": chunk.new_tokens}
    return counts | {"prefill": [], "tokens": tokens}


def token_of(token: TokenLogprob) -> dict[str, Any]:
    return {"id": token.id, "text": token.token, "logprob": token.logprob, "special": False}


def reason(chunk: Chunk) -> str:
    return "length" if chunk.finish_reason == "length" else "stop_sequence" if chunk.stop_reason else "eos_token"


ROUTES = [
    ApiRoute("/models/{model}", answer, error_form=tei_form, body=FILE_BODY, answers_for=is_only_route),
    *api("/models/{model}/v1/completions", text_completions),
    *api("/models/{model}/v1/chat/completions /models/{model}/chat/completions", chat),
]
