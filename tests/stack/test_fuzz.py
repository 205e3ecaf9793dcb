"""Bad requests on every public input: no server fails, crashes or tells its paths, and others get right answers."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from scripts.common.settings import ROOT
from scripts.stack.local.supervisor import Supervisor
from tests.support import fuzz
from tests.support.checkpoints import encoders, language
from tests.support.clients import address, connect, ids_input
from tests.support.embedding import embed
from tests.support.stacks import TestStack, bring_up

# `make fuzz` sends more. The seed chooses the requests.
EXAMPLES = int(os.environ.get("FUZZ") or 1000)
SEED = int(os.environ.get("FUZZ_SEED") or 18)
TIMEOUT_S = 300
# The small models wait this long for a batch, so that a bad and a good request that arrive together share one.
QUEUE_DELAY_US = 20_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200 + EXAMPLES)]

# Triton 2.51 parses JSON by recursion without a limit: values nested 200,000 deep crash it.
TRITON_DEPTH, GATEWAY_DEPTH = 10_000, 40_000
# Answers of Triton's own front ends that are failures by their status only: port, status, message.
# Later releases answer wrong JSON with 400.
WRONG_JSON = (
    rb"failed to parse the request JSON|parameter key .* was not|(Unable to parse .*: )?(attempt to|Shape does not)"
)
KNOWN = {
    ("TRITON_HTTP_PORT", 500): rb'{"error":"(%b) ' % WRONG_JSON,
    ("TRITON_HTTP_PORT", 501): rb'{"error":"HTTP end point doesn.t support models with decoupled transaction policy',
    ("TRITON_GRPC_PORT", "INTERNAL"): rb"Unable to parse request$",  # no protobuf message
    ("TRITON_GRPC_PORT", "UNAVAILABLE"): rb"This protocol is restricted, expecting header",
}
# If the last text of a request is shorter than it claims, Triton 2.51 fails the batch that the request is in.
FAILED_BATCH = b"incomplete string data for inference input"
GRPC_FAILURES = {"UNKNOWN", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "ABORTED", "DEADLINE_EXCEEDED"}
# No answer may contain a stack trace or a path of the server.
LEAKS = re.compile(rb"Traceback|\bAt:(\\n|\n)|/\w+\.py\b|\.py\(\d|\.cc:\d|/tmp/|" + re.escape(str(ROOT)).encode())
# Models of all types of tensors, and the steps of ensembles.
MODELS = ("alltypes", "fixed", "lookup", "tokens", "tokenizer", "encoder", "embedding", "mood", "chat", "chat_stream")
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which battery fits?"}]
COMPLETION = {"prompt": "I am going", "max_tokens": 3, "temperature": 0.5, "seed": 1, "stop": ["."], "echo": True}
BODIES: list[tuple[str, Any]] = [
    ("/v1/embeddings", {"model": "embedding", "input": fuzz.TEXTS, "encoding_format": "base64", "dimensions": 8}),
    ("/v1/embeddings", {"model": "embedding", "input": "a", "user": "x", "prompt_name": None}),
    ("/v1/classify", {"model": "mood", "input": ["a", ["a", "b"]]}),
    ("/v1/rerank", {"model": "reranker", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/v1/completions", {"model": "chat", **COMPLETION}),
    ("/v1/completions", {"model": "chat", **COMPLETION, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"model": "chat", "messages": CHAT, "max_completion_tokens": 3, "top_p": 0.5}),
    ("/try/mood", {"inputs": {"input_text": "a", "text_pair": "b"}}),
    *((path, None) for path in ("/v1/models", "/v1/models/mood", "/", "/health", "/page.js", "/reports/latest")),
]


@pytest.fixture(scope="module")
def served(new_stack) -> TestStack:
    stack = new_stack()
    folder = stack.folder / "checkpoints"
    sources = {
        "chat": language.save_gpt2(folder / "chat", context=64),
        "reranker": encoders.save_cross_encoder(folder / "reranker"),
        "mood": encoders.save_bert(folder / "mood", "ForSequenceClassification", **encoders.labels(encoders.MOODS)),
    }
    formats = {"chat": {"TASK": "text-generation", "FORMAT": "openvino-fp32"}}
    stack.assemble(*({"SYSTEMS": name, "SOURCE": source} | formats.get(name, {}) for name, source in sources.items()))
    stack.environment |= {
        "SYSTEMS": " ".join(["embedding", *sources, "chat_stream", "alltypes", "fixed", "lookup", "tokens"]),
        "API_KEYS": fuzz.KEY,
        "GATEWAY_BODY": "100k",
    }
    for model in ("lookup", "tokens"):
        path = stack.folder / "models" / model / "config.pbtxt"
        path.write_text(path.read_text().replace("microseconds: 200000", f"microseconds: {QUEUE_DELAY_US}"))
    return bring_up(stack)


@pytest.fixture(scope="module")
def requests(served) -> dict[str, st.SearchStrategy[fuzz.Request]]:
    configs = fuzz.Configs((model, served.triton.config(model)) for model in MODELS)
    return {
        "http": fuzz.triton_http(configs, TRITON_DEPTH),
        "grpc": fuzz.triton_grpc(configs),
        "gateway": fuzz.gateway_http(BODIES, GATEWAY_DEPTH),
    }


class GoodClients:
    """Clients that take turns with good requests, each on a connection of its own, and compare all their answers."""

    def __init__(self, stack: TestStack) -> None:
        self.triton = connect(stack, grpcclient)
        self.url = f"http://127.0.0.1:{stack.environment['GATEWAY_PORT']}/v1/"
        clients: list[Callable[[], Any]] = [
            lambda: embed(stack, *fuzz.TEXTS),
            lambda: self.triton.infer("lookup", [ids_input(grpcclient)]).as_numpy("row"),
            lambda: [row["embedding"] for row in self.ask_gateway("embeddings", "embedding")],
            lambda: [row["probs"] for row in self.ask_gateway("classify", "mood")],
        ]
        self.turns = itertools.cycle([(client, client()) for client in clients])

    def ask_gateway(self, route: str, model: str) -> list[dict[str, Any]]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {fuzz.KEY}"}
        body = json.dumps({"model": model, "input": fuzz.TEXTS}).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + route, body, headers), timeout=TIMEOUT_S) as got:
            return json.load(got)["data"]

    def take_turn(self) -> None:
        client, expected = next(self.turns)
        try:
            answer = client()
        except (urllib.error.HTTPError, InferenceServerException) as error:
            message = error.read() if isinstance(error, urllib.error.HTTPError) else str(error).encode()
            assert FAILED_BATCH in message, message
            answer = client()
        np.testing.assert_allclose(answer, expected, atol=1e-4)


class BadClient:
    """A client that sends any bytes, and returns the status and the content of the answer."""

    def __init__(self, stack: TestStack) -> None:
        self.stack = stack
        self.channel = grpc.insecure_channel(address(stack, grpcclient))

    def send(self, request: fuzz.Request) -> tuple[int | str | None, bytes]:
        return self.over_grpc(request) if request.to == "TRITON_GRPC_PORT" else self.over_http(request)

    def over_http(self, request: fuzz.Request) -> tuple[int | None, bytes]:
        """Return None as the status if the server closes the connection without an answer."""
        port = int(self.stack.environment[request.to])
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
            try:
                connection.sendall(request.data)
                if request.leaves:
                    return None, b""
                if not request.framed:
                    with contextlib.suppress(OSError):  # the server was quicker
                        connection.shutdown(socket.SHUT_WR)
                response = http.client.HTTPResponse(connection, method=request.method)
                response.begin()
                return response.status, response.read()
            except (ConnectionError, http.client.HTTPException):
                return None, b""

    def over_grpc(self, request: fuzz.Request) -> tuple[str, bytes]:
        timeout = 0.003 if request.leaves else TIMEOUT_S
        try:
            if request.method.endswith("StreamInfer"):
                call = self.channel.stream_stream(request.method)
                return "OK", b"".join(call(iter([request.data]), timeout))
            return "OK", self.channel.unary_unary(request.method)(request.data, timeout)
        except grpc.RpcError as error:
            return error.code().name, (error.details() or "").encode()


def fault(request: fuzz.Request, status: int | str | None, content: bytes) -> str:
    """Return what is wrong with the answer, or nothing."""
    if status is None:
        return "" if request.leaves or not request.framed else "no answer"
    if leak := LEAKS.search(content):
        return f"the answer has {leak[0]!r}"
    failed = status in GRPC_FAILURES if isinstance(status, str) else status >= 500
    known = re.match(KNOWN.get((request.to, status), b"$."), content)
    left = request.leaves and status == "DEADLINE_EXCEEDED"
    return f"status {status}" if failed and not known and not left else ""


def processes(stack: TestStack) -> set[psutil.Process]:
    """Return every living process of the stack. A restarted one is not equal to the one before."""
    supervisor = psutil.Process(Supervisor(stack.folder / "state").rpc.getPID())
    return {process for process in supervisor.children(recursive=True) if process.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture
def good_clients(served) -> Iterator[GoodClients]:
    clients = GoodClients(served)
    yield clients
    clients.triton.close()


@pytest.mark.parametrize("protocol", ["http", "grpc", "gateway"])
def test_bad_requests_harm_nobody(served, requests, good_clients, protocol):
    """Send bad requests one by one, each beside a good one that may share its batch."""
    print(f"{protocol}: {EXAMPLES} requests, FUZZ_SEED={SEED}")
    before, client, statuses, start = processes(served), BadClient(served), Counter(), time.monotonic()
    with ThreadPoolExecutor(1) as beside:

        @seed(SEED)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(requests[protocol])
        def attack(request: fuzz.Request) -> None:
            good = beside.submit(good_clients.take_turn)
            status, content = client.send(request)
            good.result()
            statuses[status] += 1
            wrong = fault(request, status, content)
            assert not wrong, f"{wrong}: {content[:500]!r}"
            assert all(process.is_running() for process in before), "a process ended"

        attack()
    client.channel.close()
    assert processes(served) == before
    print(f"{protocol}: {statuses.total()} answers in {time.monotonic() - start:.0f} s: {dict(statuses)}")
