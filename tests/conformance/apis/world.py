"""One stand-in for Triton with a model of each kind, and gateways before it: one with keys, a full and a hasty one."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gateway.edge.config import Config, Limits
from tests.conformance.apis.run import KEY
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.page_systems import pipeline
from tests.support.triton_stand_in import (
    GENERATION_INPUTS,
    Model,
    TritonStandIn,
    classifier,
    embedding,
    generator,
    refusal,
    reranker,
    sparse,
    token_encoder,
)
from triton_transformers.tensors import Tensor

INPUTS = GENERATION_INPUTS | {"sampling_parameters": ("STRING", [1])}


def models() -> list[Model]:
    """Return one model for each ability, so that requests that name no model find theirs."""
    speech = pipeline("speaker", "text-to-audio", {"audio": "", "sampling_rate": 16000})
    ears = pipeline("whisper", "automatic-speech-recognition", {"text": " One.", "chunks": []})
    ears.parameters["speech_model"] = "whisper"
    labels = classifier()
    labels.parameters["activation"] = "sigmoid"  # so that it moderates
    agents = [generator("agent", INPUTS), generator("agent_stream", INPUTS, streams=True)]
    for agent in agents:
        agent.parameters |= {"tool_parser": "hermes", "reasoning": "think"}
    return [
        *(embedding(), reranker(tokenizes=True), labels, sparse(), token_encoder(), speech, ears, *agents),
        *(generator(inputs=INPUTS), generator("counter_stream", INPUTS, streams=True)),
        pipeline("summarization", "summarization", [{"summary_text": "b"}]),
    ]


@dataclasses.dataclass
class World:
    """The stand-in and the gateways. Its faults concern every model, from one of the pieces of an answer on."""

    triton: TritonStandIn
    gateway: RunningGateway
    full: RunningGateway  # which has all the requests that it may have
    hasty: RunningGateway  # whose requests have a third of a second
    fault: tuple[int, Callable[[Model], None]] | None = None

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
        gateways = self.gateway, self.full, self.hasty
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
    with TritonStandIn(*models()) as triton, contextlib.ExitStack() as stack:
        keys = (hashlib.sha256(KEY.encode()).digest(),)

        def gateway(**limits: Any) -> RunningGateway:
            bounds = Limits(**{"texts": 10, "body": 50_000, **limits})
            config = Config(triton=triton.address, systems=tuple(triton.models), keys=keys, limits=bounds)
            return stack.enter_context(running_gateway(config))

        world = World(triton, gateway(), gateway(in_flight=0), gateway(timeout=0.3))
        for model in triton.models.values():
            world.add_fault(model)
        yield world
