"""A small client of Triton's API: readiness, the model repository, model control, inference.

The watchdog and the health check use it too, so only a load over gRPC needs more than the standard library.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from triton_transformers.http import answers, opener
from triton_transformers.protocol import ENGINE, FIRST_CORE, called_models
from triton_transformers.triton_messages import is_restricted, reason

if TYPE_CHECKING:  # the image of Triton has no python-dotenv
    from triton_transformers.settings import Settings

ADMIN_HEADER = "triton-admin-key"
GRPC_ADMIN_HEADER = f"triton-grpc-protocol-{ADMIN_HEADER}"
LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
# The parameter of a generating model with the maximum number of texts that run together, and what a model without it
# has: its backend's default, which is this or the batch size of a compiled model.
TEXT_LIMIT, DEFAULT_TEXT_LIMIT = "max_batch", 32
UNLOAD_S = 60
LOAD_S = 600

# A model's configuration, as Triton's JSON has it.
Config = dict[str, Any]


class TritonError(Exception):
    """An error that Triton answered, or the reason why it did not answer (then without a status)."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class TimedOutError(TritonError):
    """Triton did not answer within the time that the caller gave it: a slow load is no crash."""


def called(config: Config) -> list[str]:
    """Return the models that a model calls."""
    steps = (step["model_name"] for step in config.get("ensemble_scheduling", {}).get("step", []))
    parameters = {name: value.get("string_value", "") for name, value in config.get("parameters", {}).items()}
    return called_models(steps, parameters)


def generates(config: Config) -> bool:
    """Return whether the model continues texts and batches them itself."""
    names = {tensor["name"] for tensor in config.get("input", [])}
    return not config.get("max_batch_size") and "max_new_tokens" in names and not is_front(config)


def is_front(config: Config) -> bool:
    """Return whether another model generates the texts of this one."""
    return ENGINE in config.get("parameters", {})


def text_limit(config: Config) -> int:
    """Return how many texts of a generating model run together at most."""
    return int(config.get("parameters", {}).get(TEXT_LIMIT, {}).get("string_value", DEFAULT_TEXT_LIMIT))


def batching(config: Config, engine: str = "") -> str:
    """Return how a model batches, as `make status` and the gateway's page show it.

    transformers, as the engine of a model that generates, runs each batch to its end; the other engines are continuous.
    """
    if "ensemble_scheduling" in config:
        return "by its steps"
    if is_front(config):
        return f"by {config['parameters'][ENGINE]['string_value']}"
    if generates(config):
        from triton_transformers.engines import BY_NAME  # dataclasses take too long for the health check

        texts = text_limit(config)
        own = BY_NAME.get(engine.partition(" ")[0])
        kind = "static" if own and not own.is_continuous else "continuous"
        return "one at a time" if texts == 1 else f"{kind}, up to {texts}"
    if "dynamic_batching" in config:
        return f"dynamic, up to {config['max_batch_size']}"
    return "sequences" if "sequence_batching" in config else "off"


def metrics_page(metrics_url: str) -> str:
    """Return a server's metrics as text, or nothing if the page cannot be read."""
    try:
        with opener.open(f"{metrics_url}/metrics", timeout=10) as page:
            return cast(str, page.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException):
        return ""


def engines(metrics_url: str) -> dict[str, str]:
    """Return model -> engine and precision, such as "openvino bf16", for each model whose backend reports them.

    Leave out the engines of older versions, and those that are no longer in use. If the page cannot be read, return
    none.
    """
    lines = metrics_page(metrics_url).splitlines()
    samples = [re.fullmatch(r"transformers_engine\{(.*)\} ([\d.e+-]+)", line) for line in lines]
    labels = [dict(re.findall(r'(\w+)="([^"]*)"', s[1])) for s in samples if s and float(s[2])]
    labels.sort(key=lambda own: int(own["version"]))
    return {own["model"]: f"{own['engine']} {own['precision']}" for own in labels}


class Triton:
    """A client of the Triton at `url`. Model control needs the server's admin key.

    With `grpc_url`, it loads models over gRPC. A load over HTTP holds one of Triton's HTTP threads until it is done,
    and the clients on that thread wait: of 13 connections on two cores 10 did, for the 13 seconds of a load.
    """

    def __init__(self, url: str, admin_key: str = "", grpc_url: str = "") -> None:
        self.url = url.rstrip("/")
        self.admin_key = admin_key
        self.grpc_address = urlsplit(grpc_url).netloc

    @classmethod
    def from_settings(cls, settings: Settings) -> Triton:
        """Return a client of the stack's server that may load models."""
        return cls(settings.url("TRITON_HTTP_PORT"), settings.triton_admin_key, settings.url("TRITON_GRPC_PORT"))

    @property
    def name(self) -> str:
        """Return the address in a form that a file name can hold."""
        return re.sub(r"\W+", "-", self.url.partition("://")[2])

    def live(self) -> bool:
        return answers(f"{self.url}/v2/health/live")

    def metadata(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.call("/v2"))

    def index(self) -> dict[str, tuple[str, str]]:
        """Return model -> (state, reason) of its newest version, for each model that was loaded and not unloaded."""
        entries = self.call("/v2/repository/index", {})
        index = {e["name"]: (e["state"], e.get("reason", "")) for e in entries if "state" in e}
        return {model: state for model, state in index.items() if state != ("UNAVAILABLE", "unloaded")}

    def models_in(self, state: str) -> list[str]:
        return [model for model, (model_state, _) in self.index().items() if model_state == state]

    def config(self, model: str) -> Config:
        return cast(Config, self.call(f"/v2/models/{model}/config"))

    def load(self, model: str, config: Config | None = None, timeout: float = LOAD_S) -> None:
        """Load or reload the model, with `config` in place of its config.pbtxt if given.

        Triton loads the new model beside the old one. If the old one owns accelerator cores, that fails: unload it
        first, and load it again if the new one does not load.
        """
        try:
            self._load(model, config, timeout)
        except TritonError as error:
            before = self._with_cores(model) if error.status else None
            if not before:
                raise
            self.unload(model)
            try:
                self._load(model, config, timeout)
            except TritonError:
                self._load(model, before, timeout)
                raise

    def unload(self, model: str, timeout: float = UNLOAD_S) -> None:
        """Unload the model and wait until it is gone. Its ensembles are gone too, until it is loaded again."""
        self.call(f"/v2/repository/models/{model}/unload", {})
        deadline = time.monotonic() + timeout
        while self.index().get(model, ("", ""))[0] == "UNLOADING":
            if time.monotonic() > deadline:
                raise TritonError(f"'{model}' is not unloaded within {timeout:g} s: it still has requests in flight")
            time.sleep(0.1)

    def _load(self, model: str, config: Config | None, timeout: float) -> None:
        parameters = {} if config is None else {"config": json.dumps(config)}
        if accepts_connections(self.grpc_address):
            self._load_over_grpc(model, parameters, timeout)
        else:
            self.call(f"/v2/repository/models/{model}/load", {"parameters": parameters}, timeout)

    def _load_over_grpc(self, model: str, parameters: dict[str, str], timeout: float) -> None:
        import grpc  # takes a tenth of a second

        message = field(2, model.encode())
        for name, value in parameters.items():
            message += field(3, field(1, name.encode()) + field(2, field(3, value.encode())))
        statuses = {
            grpc.StatusCode.INVALID_ARGUMENT: 400,
            grpc.StatusCode.NOT_FOUND: 404,
            grpc.StatusCode.INTERNAL: 500,
            grpc.StatusCode.UNKNOWN: 500,
        }
        with grpc.insecure_channel(self.grpc_address, [("grpc.enable_http_proxy", 0)]) as channel:
            try:
                channel.unary_unary(LOAD)(message, timeout, ((GRPC_ADMIN_HEADER, self.admin_key),))
            except grpc.RpcError as error:
                text = reason(error.details() or "")
                if is_restricted(text):
                    raise TritonError(text, 403) from None
                if status := statuses.get(error.code()):
                    raise TritonError(text, status) from None
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise TimedOutError(f"{self.grpc_address} does not answer: timed out") from None
                raise TritonError(f"{self.grpc_address} does not answer: {text}") from None

    def _with_cores(self, model: str) -> Config | None:
        """Return the model's configuration if it is loaded and owns accelerator cores."""
        try:
            config = self.config(model)
        except TritonError:
            return None
        return config if FIRST_CORE in config.get("parameters", {}) else None

    def composing(self, system: str) -> dict[str, Config]:
        """Return the configuration of each of the system's models by name, each before those that it calls."""
        configs = {system: self.config(system)}
        for model in called(configs[system]):
            if model not in configs:
                configs |= self.composing(model)
        return configs

    def statistics(self) -> dict[str, dict[str, Any]]:
        return {entry["name"]: entry for entry in self.call("/v2/models/stats")["model_stats"]}

    def infer(self, model: str, request: dict[str, Any], timeout: float = 30) -> dict[str, Any]:
        return cast(dict[str, Any], self.call(f"/v2/models/{model}/infer", request, timeout))

    def stream(self, model: str, fields: dict[str, Any], timeout: float = 30) -> list[dict[str, Any]]:
        """Return all the answers of a model that streams them. Raise TritonError if one of them is an error."""
        events = self.call(f"/v2/models/{model}/generate_stream", fields, timeout, read=bytes.decode)
        lines = (line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: "))
        answers = [json.loads(line) for line in lines]
        for answer in answers:
            if answer.keys() == {"error"}:  # after the first answer, Triton can no longer send another status than 200
                raise TritonError(reason(answer["error"]), 500)
        return answers

    def call(self, path: str, body: Any = None, timeout: float = 30, read: Callable[[bytes], Any] = json.loads) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={ADMIN_HEADER: self.admin_key})
        try:
            with opener.open(request, timeout=timeout) as response:
                return read(response.read() or b"null")
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            try:
                text = json.loads(text)["error"]
            except (ValueError, KeyError, TypeError):
                text = text or error.reason
            raise TritonError(reason(str(text)), error.code) from None
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            kind = TimedOutError if isinstance(cause, TimeoutError) else TritonError
            raise kind(f"{self.url} does not answer: {cause}") from None
        except ValueError:
            raise TritonError(f"{self.url} is not a Triton server: it did not answer {path} with JSON") from None


def accepts_connections(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
            return True
    except (OSError, ValueError):
        return False


def field(number: int, data: bytes) -> bytes:
    """Return a field of a protobuf message. make's own environment lacks Triton's message classes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(number: int) -> bytes:
    head = b""
    while number > 0x7F:
        head += bytes([number & 0x7F | 0x80])
        number >>= 7
    return head + bytes([number])
