"""Who sends it: Locust users in a closed loop, over HTTP or gRPC."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import gevent
import gevent.event
from locust import FastHttpUser, User, task
from tritonclient.grpc import service_pb2_grpc

from loadtest.examples import Examples, Tensor
from loadtest.workload import Workload, grpc_request, http_request
from scripts.common.settings import Settings, UserError

DRAIN_S = 60.0


@dataclass(frozen=True)
class Job:
    """What the users are to do. Plain data, for a master sends it to its workers."""

    protocol: str
    url: str
    model: str
    requests: list[list[Tensor]]
    wait: tuple[float, float]
    seed: int

    @classmethod
    def of(cls, settings: Settings, workload: Workload, examples: Examples) -> Job:
        protocol = settings.choice("PROTOCOL", tuple(USERS))
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
    """What the users of one process share: the job, its requests, and a gate before each of them."""

    job: Job
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of the users, in the order in which they start
    gate: gevent.event.Event = field(default_factory=_open_gate)
    in_flight: int = 0

    def __post_init__(self) -> None:
        encode = USERS[self.job.protocol].encode
        # Through a master they come as plain lists.
        requests = [[Tensor(*tensor) for tensor in request] for request in self.job.requests]
        self.requests: Sequence = [encode(self.job.model, request) for request in requests]

    def new_random(self) -> random.Random:
        """One stream a user, the same in every run with the same seed."""
        return random.Random(f"{self.job.seed}/{next(self.numbers)}")

    def pause(self) -> None:
        """Close the gate, and wait until no request is in flight."""
        self.gate.clear()
        deadline = time.monotonic() + DRAIN_S
        while self.in_flight:
            if time.monotonic() > deadline:
                raise UserError(f"{self.in_flight} requests were not answered within {DRAIN_S:.0f} s")
            gevent.sleep(0.01)

    def resume(self) -> None:
        self.gate.set()


class TritonUser(User):
    """Asks for one example's answer, waits for it, thinks, asks again. `environment.traffic` says what and how."""

    abstract = True

    def __init__(self, environment) -> None:
        super().__init__(environment)
        self.traffic: Traffic = environment.traffic
        self.random = self.traffic.new_random()

    def wait_time(self) -> float:
        return self.random.uniform(*self.traffic.job.wait)

    @task
    def ask(self) -> None:
        self.traffic.gate.wait()
        self.traffic.in_flight += 1
        try:
            self.infer(self.random.choice(self.traffic.requests))
        finally:
            self.traffic.in_flight -= 1

    def infer(self, request) -> None:
        raise NotImplementedError

    @classmethod
    def encode(cls, model: str, tensors: list[Tensor]):
        raise NotImplementedError


class HttpTritonUser(TritonUser, FastHttpUser):
    """Binary tensors through Locust's fast client."""

    abstract = True

    @classmethod
    def encode(cls, model: str, tensors: list[Tensor]):
        return http_request(tensors)

    def infer(self, request) -> None:
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(request.header_length),
        }
        path = f"/v2/models/{self.traffic.job.model}/infer"
        with self.client.post(
            path, data=request.body, headers=headers, name=self.traffic.job.model, catch_response=True
        ) as response:
            if response.status_code == 200:
                header_length = int(response.headers.get("Inference-Header-Content-Length", 0))
                if not 0 < header_length < len(response.content):
                    response.failure("an answer without a binary tensor")
            elif response.status_code:
                response.failure(f"{response.status_code} {response.text[:200]}")


class GrpcTritonUser(TritonUser):
    abstract = True

    @classmethod
    def encode(cls, model: str, tensors: list[Tensor]):
        return grpc_request(model, tensors)

    def on_start(self) -> None:
        import grpc

        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        self.channel = grpc.insecure_channel(self.host, options=options)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def on_stop(self) -> None:
        self.channel.close()

    def infer(self, request) -> None:
        start = time.perf_counter()
        exception, length = None, 0
        try:
            answer = self.stub.ModelInfer(request, timeout=60)
            length = sum(map(len, answer.raw_output_contents))
            if not length:
                exception = ValueError("an answer without a binary tensor")
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


USERS = {"http": HttpTritonUser, "grpc": GrpcTritonUser}


def user_class(job: Job) -> type[TritonUser]:
    if job.protocol == "grpc":
        import grpc.experimental.gevent

        grpc.experimental.gevent.init_gevent()  # else one call blocks all users
    return type("Client", (USERS[job.protocol],), {"host": job.url, "abstract": False})
