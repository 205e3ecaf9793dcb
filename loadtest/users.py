"""Locust users in a closed loop: each sends a request, waits for the response, thinks, and sends the next."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gevent
import gevent.event
import grpc
from locust import FastHttpUser, User, task
from locust.env import Environment
from tritonclient.grpc import service_pb2_grpc

from loadtest.encoding import HttpRequest, grpc_request, http_request
from loadtest.examples import Examples, Tensor
from loadtest.workload import Workload
from scripts.common.settings import Settings, UserError

DRAIN_S = 60.0
NO_TENSOR = "the response has no binary tensor"


@dataclass(frozen=True)
class Job:
    """The work of the users, as plain data, because a master sends it to its workers."""

    protocol: str
    url: str
    model: str
    requests: list[list[Tensor]]
    wait: tuple[float, float]
    seed: int

    @classmethod
    def from_settings(cls, settings: Settings, workload: Workload, examples: Examples) -> Job:
        protocol = settings.choice("PROTOCOL")
        if protocol == "grpc":
            url = settings.url("TRITON_GRPC_PORT").removeprefix("http://")
        else:
            url = settings.url("TRITON_HTTP_PORT")
        return cls(protocol, url, settings["SYSTEM"], examples.requests, workload.wait, settings.integer("SEED"))


def _open_gate() -> gevent.event.Event:
    gate = gevent.event.Event()
    gate.set()
    return gate


@dataclass
class Traffic:
    """The state that the users of one process share: the job, its encoded requests, and a gate before each request."""

    job: Job
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of the users, in the order in which they start
    gate: gevent.event.Event = field(default_factory=_open_gate)
    in_flight: int = 0

    def __post_init__(self) -> None:
        encode = USERS[self.job.protocol].encode
        # JSON from a master has turned each Tensor into a list.
        requests = [[Tensor(*tensor) for tensor in request] for request in self.job.requests]
        self.requests = [encode(self.job.model, request) for request in requests]

    def new_random(self) -> random.Random:
        """Return the next user's random stream, which is the same in every run with the same seed."""
        return random.Random(f"{self.job.seed}/{next(self.numbers)}")

    def pause(self) -> None:
        """Close the gate, and wait until no request is in flight."""
        self.gate.clear()
        deadline = time.monotonic() + DRAIN_S
        while self.in_flight:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self.in_flight} requests had no response within {DRAIN_S:.0f} s: "
                    "`make logs` shows what the server does"
                )
            gevent.sleep(0.01)

    def resume(self) -> None:
        self.gate.set()


class TritonUser(User):
    """A user of the model under test; user_class() adds the traffic."""

    abstract = True
    traffic: Traffic

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.random = self.traffic.new_random()

    def wait_time(self) -> float:
        return self.random.uniform(*self.traffic.job.wait)

    @task
    def send(self) -> None:
        self.traffic.gate.wait()
        self.traffic.in_flight += 1
        try:
            self.infer(self.random.choice(self.traffic.requests))
        finally:
            self.traffic.in_flight -= 1

    def infer(self, request: Any) -> None:
        """Send a request that `encode` returned, and report its outcome to Locust."""
        raise NotImplementedError

    @staticmethod
    def encode(model: str, tensors: list[Tensor]) -> Any:
        raise NotImplementedError


class HttpTritonUser(TritonUser, FastHttpUser):
    """Sends binary tensors through Locust's fast HTTP client."""

    abstract = True

    @staticmethod
    def encode(model: str, tensors: list[Tensor]) -> HttpRequest:
        return http_request(tensors)

    def infer(self, request: HttpRequest) -> None:
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(request.header_length),
        }
        model = self.traffic.job.model
        with self.client.post(
            f"/v2/models/{model}/infer",
            data=request.body,  # type: ignore[arg-type]  # Locust sends bytes as they are
            headers=headers,
            name=model,
            catch_response=True,
        ) as response:
            if response.status_code == 200:
                header_length = int(response.headers.get("Inference-Header-Content-Length", 0))
                if not 0 < header_length < len(response.content):
                    response.failure(NO_TENSOR)
            elif response.status_code:
                response.failure(f"{response.status_code} {response.text[:200]}")


class GrpcTritonUser(TritonUser):
    abstract = True

    @staticmethod
    def encode(model: str, tensors: list[Tensor]) -> Any:
        return grpc_request(model, tensors)

    def on_start(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        self.channel = grpc.insecure_channel(self.host, options=options)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def on_stop(self) -> None:
        self.channel.close()

    def infer(self, request: Any) -> None:
        start = time.perf_counter()
        exception: Exception | None = None
        length = 0
        try:
            response = self.stub.ModelInfer(request, timeout=60)
            length = sum(map(len, response.raw_output_contents))
            if not length:
                exception = ValueError(NO_TENSOR)
        except Exception as error:
            exception = error
        self.environment.events.request.fire(
            request_type="gRPC",
            name=self.traffic.job.model,
            response_time=(time.perf_counter() - start) * 1000,
            response_length=length,
            exception=exception,
            context={},
        )


USERS: dict[str, type[TritonUser]] = {"http": HttpTritonUser, "grpc": GrpcTritonUser}


def user_class(traffic: Traffic) -> type[TritonUser]:
    """Return the class of which Locust starts the users of this process."""
    job = traffic.job
    if job.protocol == "grpc":
        import grpc.experimental.gevent

        grpc.experimental.gevent.init_gevent()  # without it one call blocks all users
    return type("Client", (USERS[job.protocol],), {"host": job.url, "traffic": traffic, "abstract": False})
