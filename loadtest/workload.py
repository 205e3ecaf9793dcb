"""What is sent by how many users, and the requests made of it, encoded once before the load begins."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.examples import Tensor
from scripts.common.settings import Settings, UserError

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Workload:
    """Texts and how they are sent. `wait` is the think time, least and most; `spawn_rate` None is all at once."""

    name: str
    file: str
    users: int
    spawn_rate: float | None = None
    wait: tuple[float, float] = (0.0, 0.0)
    max_batch: int | None = None

    @property
    def texts(self) -> list[str]:
        return (FOLDER / self.file).read_text(encoding="utf-8").splitlines()

    @property
    def sha256(self) -> str:
        return hashlib.sha256((FOLDER / self.file).read_bytes()).hexdigest()

    @classmethod
    def of(cls, settings: Settings) -> Workload:
        """The named one, with what the settings say otherwise."""
        workload = WORKLOADS[settings.choice("WORKLOAD", tuple(WORKLOADS))]
        changes: dict = {}
        if settings["USERS"]:
            changes["users"] = settings.integer("USERS", minimum=1)
        if settings["SPAWN_RATE"]:
            changes["spawn_rate"] = settings.number("SPAWN_RATE", minimum=0.1)
        if settings["WAIT"]:
            changes["wait"] = _range(settings["WAIT"])
        if settings["MAX_BATCH"]:
            changes["max_batch"] = settings.integer("MAX_BATCH", minimum=1)
        return replace(workload, **changes)


WORKLOADS = {
    w.name: w
    for w in (
        Workload("mixed", "texts.txt", users=32),
        # The published test this project answers: three texts over and over, by many users who think.
        Workload("published", "published.txt", users=300, spawn_rate=3, wait=(0.1, 0.4), max_batch=8),
    )
}


@dataclass(frozen=True)
class HttpRequest:
    """A KServe v2 request with binary tensors: a JSON header, then the tensors as they are in memory."""

    body: bytes
    header_length: int


def http_request(tensors: list[Tensor]) -> HttpRequest:
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": tensor.name,
                    "shape": tensor.shape,
                    "datatype": tensor.datatype,
                    "parameters": {"binary_data_size": len(tensor.data)},
                }
                for tensor in tensors
            ],
            "parameters": {"binary_data_output": True},
        },
        separators=(",", ":"),
    ).encode()
    return HttpRequest(header + b"".join(tensor.data for tensor in tensors), len(header))


def grpc_request(model: str, tensors: list[Tensor]):
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model)
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.data)
    return request


def _range(text: str) -> tuple[float, float]:
    try:
        least, *rest = (float(part) for part in text.split(","))
        (most,) = rest or (least,)
    except ValueError:
        raise UserError(f"WAIT={text}: one number of seconds, or least and most as in 0.1,0.4") from None
    if not 0 <= least <= most < float("inf"):
        raise UserError(f"WAIT={text}: the least must not be negative nor above the most")
    return least, most
