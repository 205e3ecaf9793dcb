"""Bad requests on every public input: no server fails, crashes or reveals its paths, and others get right answers."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import math
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from scripts.stack.local.supervisor import Supervisor
from tests.conformance.apis.rows import good_bodies
from tests.support import fuzz
from tests.support.checkpoints import language
from tests.support.embedding import embed
from tests.support.stacks import TestStack, filled_stack, stacks
from tests.support.triton_clients import address, connect, ids_input
from triton_transformers.settings import ROOT

# Requests over each protocol, and the seed that chooses them.
REQUESTS = int(os.environ.get("FUZZ") or 1_000)
SEED = int(os.environ.get("FUZZ_SEED") or 18)
# Requests that are sent at once, each on a connection of its own.
BATCH = 16
# Each good client rests between two requests: most of the machine's time is for the bad ones.
PAUSE_S = 0.03
TIMEOUT_S = 300
# The small models wait this long for a batch, so that a bad and a good request that arrive together share one.
QUEUE_DELAY_US = 20_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200 + REQUESTS // 10)]

# TRITON-FAULTS.md#bad-requests
TRITON_DEPTH, GATEWAY_DEPTH = 10_000, 40_000
# Answers of Triton's own front ends that are failures by their status only: port, status, message.
# Later releases answer wrong JSON with 400.
WRONG_JSON = (
    rb"failed to parse the request JSON|parameter key .* was not|"
    rb"((Unable to parse .*|failed to get request params\.): )?(attempt to|Shape does not)"
)
KNOWN = {
    ("TRITON_HTTP_PORT", 500): rb'{"error":"(%b) ' % WRONG_JSON,
    ("TRITON_HTTP_PORT", 501): rb'{"error":"HTTP end point doesn.t support models with decoupled transaction policy',
    ("TRITON_GRPC_PORT", "INTERNAL"): rb"Unable to parse request$",  # no protobuf message
    ("TRITON_GRPC_PORT", "UNAVAILABLE"): rb"This protocol is restricted, expecting header",
}
# The answer to a text that is shorter than it claims, and to the other requests of its batch.
FAILED_BATCH = b"incomplete string data for inference input"
# Statuses of a server that does not listen, and of one that does not answer.
REFUSED, TIMEOUT = "connection refused", "no answer in time"
GRPC_FAILURES = {"UNKNOWN", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "ABORTED", "DEADLINE_EXCEEDED"}
# No answer may contain a stack trace or a path of the server.
LEAKS = re.compile(rb"Traceback|\bAt:(\\n|\n)|/\w+\.py\b|\.py\(\d|\.cc:\d|/tmp/|" + re.escape(str(ROOT)).encode())
# Models of all types of tensors, and the steps of ensembles.
MODELS = ("alltypes", "fixed", "lookup", "tokens", "tokenizer", "encoder", "embedding", "mood", "chat", "chat_stream")
# The names of the conformance suite's models, and of systems that can do the same.
SYSTEMS = {"embedding": "embedding", "reranker": "reranker", "classifier": "mood", "pairs": "mood"}
SYSTEMS |= {"counter": "chat", "counter_stream": "chat_stream"}
BODIES: list[tuple[str, Any]] = [
    *good_bodies(SYSTEMS),
    ("/try/mood", {"inputs": {"input_text": "a", "text_pair": "b"}}),
    *((path, None) for path in ("/v1/models", "/models/mood/info", "/", "/health", "/page.js", "/reports/latest")),
]


@pytest.fixture(scope="module")
def served(encoder_checkpoints) -> Iterator[TestStack]:
    """Serve systems of the tasks that the gateway has on a stack that may crash, with low limits."""
    with stacks(functools.partial(filled_stack, QUEUE_DELAY_US)) as create:
        stack = create()
        chat = language.save_gpt2(stack.folder / "chat", context=64)
        stack.assemble(
            {"SYSTEMS": "chat", "SOURCE": chat, "TASK": "text-generation", "FORMAT": "openvino-fp32"},
            *({"SYSTEMS": name, "SOURCE": source} for name, source in encoder_checkpoints.items()),
        )
        stack.environment |= {"API_KEYS": fuzz.KEY, "GATEWAY_BODY": "100k", "GRAFANA_HOME": "none"}
        yield stack.serve(*encoder_checkpoints, "chat", "chat_stream", "alltypes", "fixed", "lookup", "tokens")


@pytest.fixture(scope="module")
def makers(served) -> dict[str, Callable[[Random], fuzz.Request]]:
    configs = {model: served.triton.config(model) for model in MODELS}
    return {
        "http": lambda rng: fuzz.triton_http(rng, configs, TRITON_DEPTH),
        "grpc": lambda rng: fuzz.triton_grpc(rng, configs),
        "gateway": lambda rng: fuzz.gateway_http(rng, BODIES, GATEWAY_DEPTH),
    }


class GoodClients:
    """Clients that repeat a good request until the end of the block, each in a thread, and compare all answers."""

    def __init__(self, stack: TestStack) -> None:
        self.triton = connect(stack, grpcclient)
        self.url = f"http://127.0.0.1:{stack.environment['GATEWAY_PORT']}/v1/"
        self.clients: dict[str, Callable[[], Any]] = {
            "embedding over HTTP": lambda: embed(stack, *fuzz.TEXTS),
            "lookup over gRPC": lambda: self.triton.infer("lookup", [ids_input(grpcclient)]).as_numpy("row"),
            "embedding of the gateway": lambda: [
                row["embedding"] for row in self.ask_gateway("embeddings", "embedding")
            ],
            "mood of the gateway": lambda: [row["probs"] for row in self.ask_gateway("classify", "mood")],
        }
        self.expected = {name: client() for name, client in self.clients.items()}
        self.answers: Counter[str] = Counter()
        self.ended = threading.Event()
        self.pool = ThreadPoolExecutor(len(self.clients))
        self.loops: dict[str, Future[None]] = {}

    def __enter__(self) -> GoodClients:
        self.loops = {name: self.pool.submit(self.repeat, name) for name in self.clients}
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.pool.shutdown()
        self.triton.close()

    def repeat(self, name: str) -> None:
        while not self.ended.wait(PAUSE_S):
            self.ask(name)
            self.answers[name] += 1

    def ask(self, name: str) -> None:
        try:
            answer = self.clients[name]()
        except (urllib.error.HTTPError, InferenceServerException) as error:
            message = error.read() if isinstance(error, urllib.error.HTTPError) else str(error).encode()
            assert FAILED_BATCH in message, message
            self.ask(name)
        else:
            np.testing.assert_allclose(answer, self.expected[name], atol=1e-4)

    def ask_gateway(self, route: str, model: str) -> list[dict[str, Any]]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {fuzz.KEY}"}
        body = json.dumps({"model": model, "input": fuzz.TEXTS}).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + route, body, headers), timeout=TIMEOUT_S) as got:
            return json.load(got)["data"]

    def complaints(self) -> list[str]:
        failures = {name: loop.exception() for name, loop in self.loops.items() if loop.done()}
        return [f"good request, {name}: {failure!r}" for name, failure in failures.items() if failure]


class BadClient:
    """A client that sends any bytes, and returns the status and the content of the answer."""

    def __init__(self, stack: TestStack) -> None:
        self.stack = stack
        self.channel = grpc.insecure_channel(address(stack, grpcclient))

    def send(self, request: fuzz.Request) -> tuple[int | str | None, bytes]:
        return self.over_grpc(request) if request.to == "TRITON_GRPC_PORT" else self.over_http(request)

    def over_http(self, request: fuzz.Request) -> tuple[int | str | None, bytes]:
        """Return None as the status if the server closes the connection without an answer."""
        address = "127.0.0.1", int(self.stack.environment[request.to])
        try:
            with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
                connection.sendall(request.data)
                if request.leaves:
                    return None, b""
                if not request.framed:
                    with contextlib.suppress(OSError):  # the server was quicker
                        connection.shutdown(socket.SHUT_WR)
                response = http.client.HTTPResponse(connection, method=request.method)
                response.begin()
                return response.status, response.read()
        except ConnectionRefusedError:
            return REFUSED, b""
        except TimeoutError:
            return TIMEOUT, b""
        except (OSError, http.client.HTTPException):
            return None, b""

    def over_grpc(self, request: fuzz.Request) -> tuple[str, bytes]:
        try:
            if request.method.endswith("StreamInfer"):
                call = self.channel.stream_stream(request.method)
                return "OK", b"".join(call(iter([request.data]), TIMEOUT_S))
            return "OK", self.channel.unary_unary(request.method)(request.data, TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code().name, (error.details() or "").encode()


def fault(request: fuzz.Request, status: int | str | None, content: bytes) -> str:
    """Return what is wrong with the answer, or nothing."""
    if status is None:
        return "" if request.leaves or not request.framed else "no answer"
    if leak := LEAKS.search(content):
        return f"the answer has {leak[0]!r}"
    failed = status in (GRPC_FAILURES | {REFUSED, TIMEOUT}) if isinstance(status, str) else status >= 500
    known = re.match(KNOWN.get((request.to, status), b"$."), content)
    return f"status {status}" if failed and not known else ""


def processes(stack: TestStack) -> set[psutil.Process]:
    """Return every living process of the stack. A restarted one is not equal to the one before."""
    supervisor = psutil.Process(Supervisor(stack.folder / "state").rpc.getPID())
    return {process for process in supervisor.children(recursive=True) if process.status() != psutil.STATUS_ZOMBIE}


class Attack:
    """Batches of bad requests, beside good ones."""

    def __init__(self, stack: TestStack, good: GoodClients) -> None:
        self.stack, self.good, self.client = stack, good, BadClient(stack)
        self.pool = ThreadPoolExecutor(BATCH)
        self.before = processes(stack)
        self.statuses: Counter[int | str | None] = Counter()

    def __enter__(self) -> Attack:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()
        self.client.channel.close()

    def send(self, batch: list[fuzz.Request]) -> list[str]:
        """Send the requests at once; return what went wrong."""
        faults = []
        for request, (status, content) in zip(batch, self.pool.map(self.client.send, batch), strict=True):
            self.statuses[status] += 1
            if reason := fault(request, status, content):
                faults.append(f"{reason}: {content[:500]!r} to {request}")
        ended = [process.pid for process in self.before if not process.is_running()]
        return [
            *faults,
            *self.good.complaints(),
            *(f"process {pid} ended" for pid in ended),
            *(self.exits() if ended else ()),
        ]

    def exits(self) -> list[str]:
        """Return supervisord's lines about exits, such as `terminated by SIGSEGV`."""
        log = (self.stack.folder / "state/log/supervisord.log").read_text()
        return [line for line in log.splitlines() if " exited: " in line]


@pytest.mark.parametrize("protocol", ["http", "grpc", "gateway"])
def test_bad_requests_harm_nobody(served, makers, protocol):
    """Send bad requests in batches while clients with good ones, which may share Triton's batches, go on beside."""
    print(f"{protocol}: {REQUESTS} requests, FUZZ_SEED={SEED}")
    rng, batch, findings = Random(SEED), [], []
    processes_before, start = processes(served), time.monotonic()
    with GoodClients(served) as good, Attack(served, good) as attack:
        for _ in range(math.ceil(REQUESTS / BATCH)):
            before, batch = batch, [makers[protocol](Random(rng.getrandbits(64))) for _ in range(BATCH)]
            if findings := attack.send(batch):
                findings += ["The batch:", *map(repr, batch), "The batch before:", *map(repr, before)]
                break
        seconds = time.monotonic() - start
    findings += good.complaints()
    assert not findings, "\n".join(findings)
    assert processes(served) == processes_before
    assert set(good.answers) == set(good.clients), f"good answers: {dict(good.answers)}"
    print(f"{protocol}: {attack.statuses.total()} answers in {seconds:.0f} s: {dict(attack.statuses)}")
    print(f"{protocol}: beside them {dict(good.answers)} good answers")
