"""Locust users that send requests to the model under test.

In a closed loop each sends a request, waits for the response, thinks, and sends the next. In an open loop they are a
pool that sends the requests as they arrive (arrivals.py).
"""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import gevent
import gevent.event
import grpc
from gevent import socket, ssl
from locust import FastHttpUser, User, task
from locust.env import Environment
from tritonclient.grpc import service_pb2_grpc

from loadtest.load.arrivals import GIVEN_UP, PATIENCE_S, POISSON, Arrivals
from loadtest.load.examples import ROUTES, Examples, HttpRequest, gateway_request, grpc_request, http_request
from loadtest.load.workload import Workload
from triton_transformers.settings import Settings, UserError
from triton_transformers.tensors import Tensor

# How long to wait for a response. One at a time, a text waits until those of all other users are generated.
TIMEOUT_S, SLOW_TIMEOUT_S = 60.0, 600.0
NO_TENSOR = "the response has no binary tensor"
# The gateway's certificate is for clients elsewhere: it may name another host, or be self-signed.
TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
TLS.check_hostname, TLS.verify_mode = False, ssl.CERT_NONE
# Shorter than the gateway keeps an idle connection (KEEP_ALIVE_S), which it could close under the next request.
IDLE_S = 60.0
CONTENT_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
TOKENS = re.compile(rb'"completion_tokens": *(\d+)')
# The kind of systems whose answers the gateway streams.
STREAMS = "generation"
# The context of a request holds the delay between its arrival and its sending, its amount, and the times of a text that
# was streamed (arrivals.Sample).
LATE_MS, AMOUNT, FIRST_TOKEN_MS, OUTPUT_TOKEN_MS = "late_ms", "amount", "first_token_ms", "output_token_ms"


@dataclass(frozen=True)
class Job:
    """The work of the users, as plain data, because a master sends it to its workers."""

    protocol: str
    url: str
    model: str
    requests: list[list[Tensor]]
    wait: tuple[float, float]
    seed: int
    timeout_s: float = TIMEOUT_S
    rate: float = 0.0  # requests that arrive per second, of all users together; 0: a closed loop
    arrivals: str = POISSON
    kind: str = ""  # of the system, if its requests go through the gateway
    key: str = field(default="", repr=False)  # for the gateway
    outputs: tuple[str, ...] = ()  # to ask Triton for; none: all
    amounts: tuple[float, ...] = ()  # of each request's unit; none: 1 each

    @classmethod
    def from_settings(cls, settings: Settings, workload: Workload, examples: Examples) -> Job:
        protocol = settings.protocol
        ports = {"http": "TRITON_HTTP_PORT", "grpc": "TRITON_GRPC_PORT", "openai": "GATEWAY_PORT"}
        url = settings.url(ports[protocol])
        if protocol == "grpc":
            url = url.removeprefix("http://")
        elif protocol == "openai":
            check_gateway(settings, examples.kind)
        timeout_s = SLOW_TIMEOUT_S if examples.generates or examples.may_be_slow else TIMEOUT_S
        return cls(
            protocol,
            url,
            settings.system,
            examples.requests,
            workload.wait,
            settings.seed,
            timeout_s,
            workload.rate,
            settings.arrivals,
            *((examples.kind, settings.plain_api_key()) if protocol == "openai" else ("", "")),
            examples.outputs,
            examples.amounts,
        )


def check_gateway(settings: Settings, kind: str) -> None:
    """Raise UserError if no request for a system of this kind can go through the gateway."""
    if kind not in ROUTES:
        raise UserError(
            f"PROTOCOL=openai: OpenAI's API has no route for SYSTEM={settings.system}, only for systems that embed, "
            "classify or rank texts or generate them: set PROTOCOL=http"
        )


class Gate:
    """Holds the users of a closed loop before each request while it is closed."""

    def __init__(self) -> None:
        self.event = gevent.event.Event()
        self.event.set()
        self.in_flight = 0

    def wait(self) -> float:
        """Return once the caller may send a request, with the time from which its latency counts."""
        self.event.wait()
        self.in_flight += 1
        return time.perf_counter()

    def done(self) -> None:
        """Count a request as answered."""
        self.in_flight -= 1

    def open(self) -> None:
        self.event.set()

    def close(self) -> None:
        self.event.clear()


class Traffic:
    """The state that the users of one process share: the job, its encoded requests, and what lets them send one.

    Users are numbered across all workers, so each has the random stream that it has in one process.
    """

    def __init__(self, job: Job, worker: int = 0, workers: int = 1) -> None:
        self.job = job
        self.workers = workers
        self.numbers = itertools.count(worker, workers)  # of the users, in the order in which they start
        self.gate: Gate | Arrivals = Gate()
        self.name = f"{job.seed}/{worker}"
        self.choices = random.Random(self.name)  # chooses the texts of an open loop
        if job.rate:
            stream = random.Random(f"{job.seed}/arrivals/{worker}")
            # Constant arrivals of the workers alternate.
            self.gate = Arrivals(job.rate / workers, job.arrivals, stream, phase=(worker + 1) / workers)
        encode = USERS[job.protocol].encode
        # JSON from a master has turned each Tensor into a list.
        requests = [[Tensor(*tensor) for tensor in request] for request in job.requests]
        self.requests = [encode(job, request) for request in requests]
        self.amounts = job.amounts or (1.0,) * len(requests)

    def new_random(self) -> random.Random:
        """Return the next user's random stream, which is the same in every run with the same seed."""
        return random.Random(f"{self.job.seed}/{next(self.numbers)}")

    def pause(self) -> None:
        """Close the gate, and wait until no request is in flight."""
        self.gate.close()
        limit_s = self.job.timeout_s + (PATIENCE_S if self.job.rate else 0)
        deadline = time.monotonic() + limit_s
        while self.gate.in_flight:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self.gate.in_flight} requests had no response within {limit_s:.0f} s: "
                    "`make logs` shows what the server does"
                )
            gevent.sleep(0.01)

    def resume(self) -> None:
        self.gate.open()

    def set_rate(self, rate: float, pattern: int = 0) -> None:
        """Set the requests per second of all workers together, of which this one sends an equal share.

        With the same pattern the same texts arrive in the same order and rhythm, faster at a higher rate.
        """
        if not isinstance(self.gate, Arrivals):
            raise TypeError("a closed loop has no rate")
        self.choices.seed(f"{self.name}/texts/{pattern}")
        self.gate.stream.seed(f"{self.name}/arrivals/{pattern}")
        self.gate.set_rate(rate / self.workers)


class TritonUser(User):
    """A user of the model under test; user_class() adds the traffic."""

    abstract = True
    kind: str  # of its requests, in Locust's statistics
    traffic: Traffic

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.random = self.traffic.new_random()
        self.sending: dict[str, float] = {}

    def wait_time(self) -> float:
        return self.random.uniform(*self.traffic.job.wait)

    def context(self) -> dict[str, float]:
        """Return what Locust's events carry about the request that this user is sending."""
        return self.sending

    @task
    def send(self) -> None:
        since = self.traffic.gate.wait()
        late_s = time.perf_counter() - since
        self.sending = {LATE_MS: late_s * 1000}
        try:
            if self.traffic.job.rate and late_s > PATIENCE_S:
                self.report(since, TimeoutError(GIVEN_UP))
            else:
                choices = self.traffic.choices if self.traffic.job.rate else self.random
                number = choices.randrange(len(self.traffic.requests))
                self.sending[AMOUNT] = self.traffic.amounts[number]
                self.infer(self.traffic.requests[number], since)
        finally:
            self.traffic.gate.done()

    def infer(self, request: Any, since: float) -> None:
        """Send a request that `encode` returned, and report its outcome to Locust, with its latency since then."""
        raise NotImplementedError

    def report(self, since: float, exception: Exception | None, length: int = 0) -> None:
        self.environment.events.request.fire(
            request_type=self.kind,
            name=self.traffic.job.model,
            response_time=(time.perf_counter() - since) * 1000,
            response_length=length,
            exception=exception,
            context=self.context(),
        )

    @staticmethod
    def encode(job: Job, tensors: list[Tensor]) -> Any:
        raise NotImplementedError


class HttpTritonUser(TritonUser, FastHttpUser):
    """Sends binary tensors through Locust's fast HTTP client."""

    abstract = True
    kind = "POST"

    @staticmethod
    def encode(job: Job, tensors: list[Tensor]) -> HttpRequest:
        return http_request(tensors, job.outputs)

    def infer(self, request: HttpRequest, since: float) -> None:
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(request.header_length),
        }
        with self.client.post(
            f"/v2/models/{self.traffic.job.model}/infer",
            data=request.body,  # type: ignore[arg-type]  # Locust sends bytes as they are
            headers=headers,
            name=self.traffic.job.model,
            catch_response=True,
        ) as response:
            response.request_meta["response_time"] = (time.perf_counter() - since) * 1000
            if response.status_code == 200:
                header_length = int(response.headers.get("Inference-Header-Content-Length", 0))
                if not 0 < header_length < len(response.content):
                    response.failure(NO_TENSOR)
            elif response.status_code:
                response.failure(f"{response.status_code} {response.text[:200]}")


def answer_defect(kind: str, content: bytes) -> str:
    """Return what is wrong with an answer of the gateway for a system of this kind, or nothing."""
    answers = ROUTES[kind].answers
    if kind == STREAMS:
        is_whole = b"data: [DONE]" in content and b'"error":' not in content
        return "" if is_whole else f"the stream failed: {content[-200:].decode(errors='replace')}"
    try:
        body = json.loads(content)
    except ValueError:
        return "the response is not JSON"
    return "" if isinstance(body, dict) and body.get(answers) else f"the response has no {answers}"


class TooManyRequestsError(ValueError):
    """The gateway refused a request, because it has enough to do."""


class GatewayUser(TritonUser):
    """Sends JSON to the gateway, as clients of OpenAI's API do, but speaks HTTP by itself.

    That takes a third of the CPU time of Locust's client, which would be missing in the answers of a server on the same
    machine. A refused client and the next one with a new connection take 0.15 ms instead of 0.44 ms.
    """

    abstract = True
    kind = "POST"
    connection: socket.socket | None = None
    used_at = 0.0
    tokens_at: tuple[float, float] = (0.0, 0.0)  # when the first and the last token of a stream came

    @staticmethod
    def encode(job: Job, tensors: list[Tensor]) -> bytes:
        body = gateway_request(job.model, job.kind, tensors, streams=job.kind == STREAMS)
        head = (
            f"POST {ROUTES[job.kind].path} HTTP/1.1\r\nHost: {urlsplit(job.url).netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        if job.key:
            head += f"Authorization: Bearer {job.key}\r\n"
        return f"{head}\r\n".encode() + body

    def infer(self, request: bytes, since: float) -> None:
        body = b""
        exception: Exception | None = None
        try:
            status, body = self.exchange(request)
            if status != 200:
                kind = TooManyRequestsError if status == HTTPStatus.TOO_MANY_REQUESTS else ValueError
                exception = kind(f"{status} {body[:200].decode(errors='replace')}")
            elif reason := answer_defect(self.traffic.job.kind, body):
                exception = ValueError(reason)
            elif tokens := TOKENS.findall(body):
                first, last = self.tokens_at
                self.sending[FIRST_TOKEN_MS] = (first - since) * 1000
                if (later := int(tokens[-1]) - 1) > 0:
                    self.sending[OUTPUT_TOKEN_MS] = (last - first) * 1000 / later
        except OSError as error:
            exception = error
        if exception:
            # The next arrival is of another client. From a refused connection the gateway reads no further request for
            # half a second.
            self.disconnect()
        self.report(since, exception, len(body))

    def exchange(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and the body of its response."""
        if time.monotonic() - self.used_at > IDLE_S:
            self.disconnect()
        if self.connection is None:
            url = urlsplit(str(self.host))  # of the job, unless the user of Locust's page set another one
            self.connection = socket.create_connection((url.hostname, url.port), self.traffic.job.timeout_s)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if url.scheme == "https":
                self.connection = TLS.wrap_socket(self.connection, server_hostname=url.hostname)
        self.connection.sendall(request)
        received = b""
        self.tokens_at = (0.0, 0.0)
        while part := self.connection.recv(65_536):
            received += part
            if b'"choices":' in part:
                now = time.perf_counter()
                self.tokens_at = (self.tokens_at[0] or now, now)
            head, end, body = received.partition(b"\r\n\r\n")
            length = CONTENT_LENGTH.search(head)  # a stream has none, but chunks, of which the last one is empty
            if end and (len(body) >= int(length[1]) if length else body.endswith(b"\r\n0\r\n\r\n")):
                self.used_at = time.monotonic()
                if CLOSES.search(head):
                    self.disconnect()
                return int(head[9:12]), body
        raise ConnectionError("the gateway closed the connection")

    def on_stop(self) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        if self.connection:
            self.connection.close()
            self.connection = None


class GrpcTritonUser(TritonUser):
    """Sends binary tensors over gRPC."""

    abstract = True
    kind = "gRPC"

    @staticmethod
    def encode(job: Job, tensors: list[Tensor]) -> Any:
        return grpc_request(job.model, tensors, job.outputs)

    def on_start(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        options.append(("grpc.max_receive_message_length", -1))  # an estimated depth is megabytes of JSON
        self.channel = grpc.insecure_channel(self.host, options=options)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def on_stop(self) -> None:
        self.channel.close()

    def infer(self, request: Any, since: float) -> None:
        exception: Exception | None = None
        length = 0
        try:
            response = self.stub.ModelInfer(request, timeout=self.traffic.job.timeout_s)
            length = sum(map(len, response.raw_output_contents))
            if not length:
                exception = ValueError(NO_TENSOR)
        except Exception as error:
            exception = error
        self.report(since, exception, length)


USERS: dict[str, type[TritonUser]] = {
    "http": HttpTritonUser,
    "grpc": GrpcTritonUser,
    "openai": GatewayUser,
}


def user_class(traffic: Traffic) -> type[TritonUser]:
    """Return the class of which Locust starts the users of this process."""
    job = traffic.job
    if job.protocol == "grpc":
        import grpc.experimental.gevent

        grpc.experimental.gevent.init_gevent()  # without it one call blocks all users
    attributes = {"host": job.url, "traffic": traffic, "abstract": False, "network_timeout": job.timeout_s}
    return type("Client", (USERS[job.protocol],), attributes)
