"""`make down` under load: every request that a server has accepted gets its answer."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from gateway.triton.inference import request_message
from tests.support.stacks import TestStack
from triton_transformers.tensors import Tensor

CLIENTS = 4  # on each route
ROUTES = ("gateway", "http", "grpc")
# An ensemble of two slow steps, whose vector holds the number that the text is. The second step writes down which
# requests it has answered.
FIRST = """import time

import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.15)
        texts = [pb.get_input_tensor_by_name(request, "input_text").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("text", text)]) for text in texts]
"""
SECOND = """import os
import time

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        self.answered = os.open({answered!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def execute(self, requests):
        time.sleep(0.15)
        texts = [pb.get_input_tensor_by_name(request, "text").as_numpy() for request in requests]
        os.write(self.answered, b"".join(text[0, 0] + b"\\n" for text in texts))
        return [pb.InferenceResponse([pb.Tensor("vector", text.astype(np.float32))]) for text in texts]
"""
STEP = """backend: "python"
max_batch_size: 8
input [ {{ name: "{source}" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "{target}" data_type: TYPE_{type} dims: [ 1 ] }} ]
dynamic_batching {{ }}
instance_group [ {{ kind: KIND_CPU }} ]
"""
CHAIN = """platform: "ensemble"
max_batch_size: 8
input [ { name: "input_text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "first" model_version: -1
    input_map { key: "input_text" value: "input_text" } output_map { key: "text" value: "text" } },
  { model_name: "second" model_version: -1
    input_map { key: "text" value: "text" } output_map { key: "vector" value: "output__0" } }
] }
"""


def add_chain(folder: Path, answered: Path) -> None:
    models = {
        "first": (STEP.format(source="input_text", target="text", type="STRING"), FIRST),
        "second": (STEP.format(source="text", target="vector", type="FP32"), SECOND.format(answered=str(answered))),
        "chain": (CHAIN, ""),
    }
    for name, (config, code) in models.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        if code:
            (folder / name / "1/model.py").write_text(code)


@dataclass
class Load:
    """Clients that keep their connections and send one request after the other, each with its own number."""

    stack: TestStack
    numbers: Iterator[int] = field(default_factory=itertools.count)
    answered: dict[int, str] = field(default_factory=dict)  # number -> route
    errors: dict[int, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        routes = [getattr(self, name) for name in ROUTES]
        self.threads = [threading.Thread(target=self.run, args=[route]) for route in routes * CLIENTS]
        self.in_flight: set[int] = set()

    def run(self, connect: Callable[[], Callable[[int], int]]) -> None:
        send = None
        while not self.ended.is_set():
            number = next(self.numbers)
            self.in_flight.add(number)
            try:
                send = send or connect()
                answer = send(number)
            except (OSError, http.client.HTTPException, grpc.RpcError, RefusedError) as error:
                self.errors[number] = f"{connect.__name__}: {error!r}"
                send = None
                self.ended.wait(0.05)
            else:
                self.answered[number] = connect.__name__
                if answer != number:
                    self.wrong.append(f"{number} got the answer to {answer}")
            self.in_flight.discard(number)

    def gateway(self) -> Callable[[int], int]:
        def body(number: int) -> object:
            return {"model": "chain", "input": str(number)}

        return self.over_http("GATEWAY_PORT", "/v1/embeddings", body, lambda answer: answer["data"][0]["embedding"])

    def http(self) -> Callable[[int], int]:
        def body(number: int) -> object:
            return {"inputs": [{"name": "input_text", "shape": [1, 1], "datatype": "BYTES", "data": [str(number)]}]}

        return self.over_http(
            "TRITON_HTTP_PORT", "/v2/models/chain/infer", body, lambda answer: answer["outputs"][0]["data"]
        )

    def over_http(
        self, port: str, path: str, body: Callable[[int], object], output: Callable[[dict], list]
    ) -> Callable[[int], int]:
        connection = http.client.HTTPConnection("127.0.0.1", int(self.stack.environment[port]), timeout=120)
        connection.connect()

        def send(number: int) -> int:
            connection.request("POST", path, json.dumps(body(number)), {"content-type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise RefusedError(content)
            return int(output(json.loads(content))[0])

        return send

    def grpc(self) -> Callable[[int], int]:
        channel = grpc.insecure_channel(f"127.0.0.1:{self.stack.environment['TRITON_GRPC_PORT']}")
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def send(number: int) -> int:
            message = request_message("chain", [Tensor.from_texts("input_text", [str(number)], [1, 1])], ())
            return int(np.frombuffer(stub.ModelInfer(message, timeout=120).raw_output_contents[0], "<f4")[0])

        return send


class RefusedError(Exception):
    """A status of 400 or more: the request was not accepted."""


@pytest.fixture
def stack(new_stack) -> TestStack:
    """Start a server that the test stops."""
    stack = new_stack()
    add_chain(stack.folder / "models", stack.folder / "answered")
    done = stack.make("up", SYSTEMS="chain")
    assert done.returncode == 0, done.stdout + done.stderr
    return stack


def test_down_under_load_answers_every_accepted_request(stack):
    load = Load(stack)
    for thread in load.threads:
        thread.start()
    try:
        stack.wait(
            lambda: min(Counter(load.answered.values())[route] for route in ROUTES) > 20, "answers on each route"
        )
        sent_before = {*load.in_flight}
        down = stack.start_make("down", SYSTEMS="chain")
        assert down.wait(300) == 0, down.stdout.read()
    finally:
        load.ended.set()
        for thread in load.threads:
            thread.join()
    computed = {int(number) for number in (stack.folder / "answered").read_text().split()}
    assert not load.wrong
    assert load.errors, "clients sent nothing after the end of the servers"
    lost = (sent_before | computed) - load.answered.keys()
    assert not lost, [load.errors[number] for number in lost]
