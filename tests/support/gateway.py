"""The gateway in a thread of the test's process, on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import uvicorn

from gateway.app import build
from gateway.edge.admission import Admission
from gateway.edge.config import Config
from gateway.edge.server import listen, server
from tests.support.triton_stand_in import Model, TritonStandIn
from triton_transformers.settings import Settings

TIMEOUT_S = 40


@dataclass(frozen=True)
class Reply:
    """A response of the gateway."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Return the fields of OpenAI's error body."""
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error


@dataclass(frozen=True)
class RunningGateway:
    """A running gateway and requests to it."""

    port: int
    server: uvicorn.Server
    app: Admission
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """Send a JSON body; bytes are sent as they are. `x_y` is the header x-y."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, {"content_type": "application/json", **headers})

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        with self.sent(method, path, body, headers) as response:
            return response()

    def refuses_connections(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) != 0

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"the condition does not hold after {TIMEOUT_S} s"
            time.sleep(0.005)

    @contextlib.contextmanager
    def sent(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Iterator[Callable[[], Reply]]:
        """Send a request; yield a function that waits for its response. At the end of the block the client leaves."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        names = {name.replace("_", "-"): value for name, value in (headers or {}).items()}
        if isinstance(body, dict):
            body = json.dumps(body)
            names.setdefault("content-type", "application/json")

        def reply() -> Reply:
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

        with contextlib.closing(connection):
            connection.request(method, path, body, names)
            yield reply


@contextlib.contextmanager
def running_gateway(config: Config, settings: Settings | None = None) -> Iterator[RunningGateway]:
    """Run the gateway with this configuration on a free port until the end of the block."""
    config = replace(config, port=0)
    listener = listen(config)
    app = build(config, settings)
    instance = server(app, config)
    loop_factory = instance.config.get_loop_factory()
    run = asyncio.Runner(loop_factory=loop_factory).run
    thread = threading.Thread(target=run, args=[instance.serve([listener])])
    thread.start()
    try:
        _wait_until_started(instance, thread)
        yield RunningGateway(listener.getsockname()[1], instance, app, thread)
    finally:
        instance.should_exit = True
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


@contextlib.contextmanager
def gateway_before(*models: Model, **fields: Any) -> Iterator[tuple[RunningGateway, TritonStandIn]]:
    """Run a gateway with these fields of its configuration before a Triton that has the models, its systems."""
    with (
        TritonStandIn(*models) as triton,
        running_gateway(Config(triton=triton.address, systems=tuple(triton.models), **fields)) as gateway,
    ):
        yield gateway, triton


def _wait_until_started(instance: uvicorn.Server, thread: threading.Thread) -> None:
    while not instance.started:
        assert thread.is_alive(), "the gateway did not start"
        thread.join(0.01)
