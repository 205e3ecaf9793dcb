"""One stand-in for Triton with a model of each kind, and gateways before it: one with keys, a full and a hasty one."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gateway.edge.config import Config, Limits
from tests.conformance.apis.models import IMAGE, chunked, m3, moderator, whisper
from tests.conformance.apis.run import ABSENT, KEY, Case
from tests.support import page_systems
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.triton_stand_in import (
    COUNTED,
    GENERATION_INPUTS,
    Failure,
    Model,
    TritonStandIn,
    classifier,
    embedding,
    generator,
    refusal,
    reranker,
    sparse,
    text_image,
    token_encoder,
)
from triton_transformers.errors import INVALID_VALUE, NO_CHAT_TEMPLATE, UNKNOWN_ADAPTER
from triton_transformers.tensors import Tensor

INPUTS = GENERATION_INPUTS | {"sampling_parameters": ("STRING", [1])}
SEES = INPUTS | {"images": ("STRING", [-1])}
SPEECH = {"audio": base64.b64encode(b"RIFF...").decode(), "sampling_rate": 16000}
BATTERY = '<tool_call>\n{"name": "Battery", "arguments": {"size": "AA", "full": true}}\n</tool_call>'
WORDS = [" ein", " zwei", " drei"]
# What a model of the family hermes generates when it thinks, and calls two tools.
CALLS = [
    *("<think>", "Let me", " see.", "</think>", "\n\n", "I ask.", "\n<tool_call>\n"),
    *('{"name": "weather", "arguments": {"city": ', '"Oslo"}}', "\n</tool_call>"),
    '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
]
# The answers of pipelines, by their task.
PIPELINES: dict[str, Any] = {
    "zero-shot-classification": {"sequence": "a", "labels": ["x", "y"], "scores": [0.9, 0.1]},
    "zero-shot-image-classification": [{"label": "x", "score": 0.9}],
    "automatic-speech-recognition": {"text": "Hello"},
    "text-to-audio": SPEECH,
    "table-question-answering": {"answer": "36", "coordinates": [[0, 1]], "cells": ["36"]},
    "text-classification": [{"label": "x", "score": 0.9}],
    "summarization": [{"summary_text": "b"}],
    "token-classification": [],
    "image-text-to-text": [{"generated_text": "a cat"}],
    "image-to-text": [{"generated_text": "a cat"}],
    "keypoint-matching": [],
    "audio-classification": [{"label": "x", "score": 0.9}],
    "image-segmentation": [{"label": "x", "score": 0.9, "mask": base64.b64encode(IMAGE).decode()}],
    "object-detection": [{"label": "x", "score": 0.9, "box": {"xmin": 1, "ymin": 2, "xmax": 3, "ymax": 4}}],
    "document-question-answering": [{"score": 0.5, "answer": "12.50", "start": 1, "end": 1}],
    "translation": [{"translation_text": "la pluie"}],
}


def with_parameters(model: Model, **parameters: str) -> Model:
    model.parameters |= parameters
    return model


def with_input(model: Model, name: str) -> Model:
    model.inputs[name] = ("STRING", [1])
    return model


def generators(name: str, pieces: list[str] = COUNTED, **parameters: str) -> list[Model]:
    """Return a model that continues texts, and the one that streams for it."""
    models = generator(name, SEES, pieces=pieces), generator(f"{name}_stream", INPUTS, True, pieces)
    return [with_parameters(model, **parameters) for model in models]


def failing(name: str, failure: Failure, after: int = 0) -> Model:
    """Return a generator that streams some pieces and fails."""
    model = generator(name, SEES, streams=True)
    answer = model.answer

    def fail(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        yield from list(answer(inputs))[:after]
        raise failure

    model.answer = fail
    return model


def with_logits(name: str, whole: Model) -> list[Model]:
    """Return the model as an ensemble, and its step that has the logits."""
    logits = Tensor.from_values("logits", "FP32", [[-3.0, 2.0]])
    step = Model(f"{name}_encoder", whole.inputs, {"logits": ("FP32", [2])}, lambda inputs: [[logits]])
    whole.name = name
    whole.settings = {"platform": "ensemble", "ensemble_scheduling": {"step": [{"model_name": step.name}]}}
    return [whole, step]


def unnormalized() -> Model:
    model = embedding("long")
    model.answer = lambda inputs: [[Tensor.from_values("output__0", "FP32", [[3.0, 4.0, 0, 0]])]]
    return model


def one_of_each() -> list[Model]:
    """Return one model for each ability, so that requests that name no model find theirs."""
    labels = with_parameters(classifier(), activation="sigmoid")  # so that it moderates
    return [
        *(embedding(), reranker(tokenizes=True), labels, sparse(), token_encoder()),
        *(page_systems.pipeline("speaker", "text-to-audio", SPEECH), whisper("whisper", speech_model="whisper")),
        *(*generators("agent", CALLS, tool_parser="hermes", reasoning="think"),),
        *(generator(inputs=INPUTS), generator("counter_stream", INPUTS, streams=True)),
        page_systems.pipeline("summarization", "summarization", PIPELINES["summarization"]),
    ]


def others() -> list[Model]:
    """Return models that differ from those in an ability."""
    greedy = {name: GENERATION_INPUTS[name] for name in ("text_input", "max_new_tokens")}
    removed = refusal(400, "the adapter 'tone' was removed", "lora_name", code=UNKNOWN_ADAPTER)
    damaged = refusal(400, "input 'images': row 1 is not a whole file", "images", code=INVALID_VALUE, index=1)
    return [
        *page_systems.models(),
        *(page_systems.pipeline(task, task, answer) for task, answer in PIPELINES.items()),
        *generators("silent", [""]),
        *generators("battery", ['{"size": "AA",', ' "full": true}']),
        *generators("battery_caller", [BATTERY], tool_parser="hermes"),
        *(generator("seer", SEES, pieces=WORDS), generator("sees", SEES)),
        *generators("adapted", adapters="legal tone"),
        *generators("thinker", reasoning="think"),
        *generators("tuned", sampling='{"temperature": 0.5, "top_p": 0.75, "top_k": 20}'),
        with_parameters(generator("front", INPUTS), engine_model="counter_stream"),
        with_parameters(generator("orphan", INPUTS), engine_model="missing"),
        *(generator("greedy", greedy), generator("streamer", {"text_input": ("STRING", [-1])}, streams=True)),
        failing("picky", refusal(400, "this engine does not have 'top_k'", "top_k")),
        failing("plain", refusal(400, "the model takes prompts", code=NO_CHAT_TEMPLATE)),
        with_parameters(failing("late", removed), adapters="tone"),
        failing("damaged", damaged),
        *(m3(), chunked(), text_image(), unnormalized(), embedding("uncounted", counts=False)),
        *(with_input(embedding("prompted"), "prompt_name"), with_input(classifier("pairs"), "text_pair")),
        with_input(reranker("instructed"), "prompt"),
        *with_logits("logit_classifier", classifier()),
        *with_logits("logit_reranker", reranker()),
        *(whisper("letters", speech_model="ctc"), whisper("heard")),
        whisper("untimed", speech_model="whisper_without_timestamps"),
        moderator("toxic", ["toxic", "Non-Toxic"], "softmax"),
        moderator("kinds", ["insult", "threat"], "sigmoid"),
        moderator("mood", ["glad", "sad"], "softmax"),
    ]


@dataclasses.dataclass
class World:
    """The stand-in and the gateways. Its faults concern every model, from one of the pieces of an answer on."""

    triton: TritonStandIn
    gateway: RunningGateway  # before one model of each ability
    every: RunningGateway  # before all models
    full: RunningGateway  # which has all the requests that it may have
    hasty: RunningGateway  # whose requests have a third of a second
    fault: tuple[int, Callable[[Model], None]] | None = None

    def gateway_of(self, case: Case, fields: dict[str, Any]) -> RunningGateway:
        """Return the gateway that has the system of the request: the one that it names, or the only one."""
        return self.every if case.system or (case.body | fields).get("model", ABSENT) is not ABSENT else self.gateway

    @contextlib.contextmanager
    def _faulty(self, piece: int, fault: Callable[[Model], None]) -> Iterator[None]:
        self.fault = piece, fault
        try:
            yield
        finally:
            self.fault = None
            for model in self.triton.models.values():
                model.gate.set()

    def fails(self, status: int, sentence: str, *fields: str, code: str = "", piece: int = 0) -> Any:
        """Let the models fail with this error of a backend."""

        def fail(model: Model) -> None:
            raise refusal(status, sentence, *fields, code=code)

        return self._faulty(piece, fail)

    def holds(self, piece: int = 0) -> Any:
        """Let the models hold back their answers."""
        return self._faulty(piece, lambda model: model.gate.clear())

    def is_idle(self) -> bool:
        """Return whether nothing runs in Triton, and no gateway keeps a slot."""
        gateways = self.gateway, self.every, self.full, self.hasty
        return not self.triton.running and not any(gateway.app.counters.running for gateway in gateways)

    def add_fault(self, model: Model) -> None:
        answer = model.answer

        def answer_with_fault(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
            for number, tensors in enumerate(answer(inputs)):
                if self.fault and number == self.fault[0]:
                    self.fault[1](model)
                yield tensors

        model.answer = answer_with_fault


@contextlib.contextmanager
def running_world() -> Iterator[World]:
    one, more = one_of_each(), others()
    with TritonStandIn(*more, *one) as triton, contextlib.ExitStack() as stack:
        keys = (hashlib.sha256(KEY.encode()).digest(),)

        def gateway(models: Iterable[str], **limits: Any) -> RunningGateway:
            bounds = Limits(**{"texts": 12, "body": 50_000, **limits})
            config = Config(triton=triton.address, systems=tuple(models), keys=keys, limits=bounds)
            return stack.enter_context(running_gateway(config))

        names = [model.name for model in one]
        world = World(
            triton, gateway(names), gateway(triton.models), gateway(names, in_flight=0), gateway(names, timeout=0.3)
        )
        for model in triton.models.values():
            world.add_fault(model)
        yield world
