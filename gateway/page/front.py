"""The page at /: what is served, how it is doing, and boxes to try it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from google.protobuf.json_format import MessageToDict
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from tritonclient.grpc.model_config_pb2 import ModelConfig

from gateway.edge.errors import ApiError, shown
from gateway.edge.monitoring import PERIOD_S, REPORTS, RecentFigures
from gateway.page import boxes
from gateway.triton.context import Gateway, gateway_of
from gateway.triton.inference import Inference
from gateway.triton.served import System
from triton_transformers.files import Measurement
from triton_transformers.pages import page
from triton_transformers.triton import batching, generates, is_front

TRITON_S = 2.0
STATIC = Path(__file__).parent / "static"
SCRIPTS = "page.js", "page_answers.js", "page_requests.js"
MEDIA_TYPES = {"page.css": "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}
# No other site may show a page and have its buttons clicked.
CLOSED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# The page runs only its own script and style.
HEADERS = {
    "content-security-policy": (
        f"{CLOSED}; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "media-src data: blob:; connect-src 'self'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
# A report is one file, with its style and images inside.
REPORT_HEADERS = HEADERS | {"content-security-policy": f"{CLOSED}; style-src 'unsafe-inline'; img-src data:"}
HOST = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:\d+)?")
PERIOD = f"last {PERIOD_S} s"
# Backends of the steps before and after a model.
STEP_BACKENDS = ("tokenizer", "detokenizer", "image_processor", "postprocessor", "text_or_image")
NOT_LOADED = "is not loaded: it is loading, or failed to load. `make status` shows its state, `make logs` why."


@dataclass(frozen=True)
class Loaded:
    """A system as Triton has it. Without `system` it is not loaded; with a reason it is not ready."""

    name: str
    reason: str
    system: System | None = None
    configs: dict[str, ModelConfig] = field(default_factory=dict)  # its own, and those of its steps and of `stream`
    stream: str = ""  # the loaded model that streams its responses
    switches: bool = False  # a comparison is loading it in another mode

    @property
    def state(self) -> str:
        return "switching" if self.switches else "not ready" if self.reason else "ready"


class Figure(NamedTuple):
    """A number with its label, and the period that it was counted in."""

    label: str
    value: str
    unit: str = ""
    is_bad: bool = False
    period: str = PERIOD


# --- routes -----------------------------------------------------------------------------------------------------------


async def index(request: Request) -> Response:
    gateway = gateway_of(request)
    host, port = host_of(request)
    (figures, links), is_ready, systems = await asyncio.gather(
        gateway.monitoring.read(host), triton_is_ready(gateway.inference), read_all(gateway)
    )
    measurement = gateway.monitoring.measurement()
    complaints = []
    if is_ready is None:
        complaints.append("Triton does not answer. `make status` shows its state, `make logs` why.")
        systems = [Loaded(name, "Triton does not answer.") for name in gateway.served.names()]
    else:
        systems = [switching(system, measurement) for system in systems]
        missing = [system for system in systems if system.reason and not system.switches]
        if not is_ready and (missing or not measurement):
            complaints.append(readiness_complaint(missing))
    if figures is None:
        complaints.append("Prometheus does not answer, so the figures of the last minute are missing.")
    needs_key = bool(gateway.config.keys)
    url = f"{request.url.scheme}://{host}{port}"
    # The first page compiles the template for 60 ms, so do it in a thread.
    html = await asyncio.to_thread(
        page,
        "gateway.page",
        "page.html.j2",
        summary=summary(systems),
        needs_key=needs_key,
        links=links,
        measurement=measurement and str(measurement),
        complaints=complaints,
        totals=totals(figures) if figures else [],
        period=PERIOD,
        systems=[card(gateway, loaded, figures, url) for loaded in systems],
        body_limit=gateway.config.limits.body,
        url=url,
    )
    return Response(html, headers=HEADERS, media_type="text/html")


async def asset(request: Request) -> Response:
    """Return the page's style or script."""
    name = request.url.path.lstrip("/")
    return FileResponse(STATIC / name, headers=HEADERS, media_type=MEDIA_TYPES[name])


async def report(request: Request) -> Response:
    """Return the newest report."""
    name = request.path_params["name"]
    path = gateway_of(request).monitoring.report(name) if name in REPORTS else None
    if path is None:
        raise ApiError(404, f"There is no report {shown(name)}: `make loadtest` and `make tune` write them.")
    return FileResponse(path, headers=REPORT_HEADERS, media_type="text/html")


# --- what Triton has --------------------------------------------------------------------------------------------------


async def triton_is_ready(inference: Inference) -> bool | None:
    """Return whether all of Triton's models are ready, or None if Triton does not answer."""
    try:
        return await asyncio.wait_for(inference.server_ready(), TRITON_S)
    except (grpc.RpcError, TimeoutError):
        return None


async def read_all(gateway: Gateway) -> list[Loaded]:
    """Return the served systems and their loaded companions; a model that streams another's responses is part of it."""
    names = gateway.served.names()
    all_names = dict.fromkeys([*names, *gateway.served.companions()])
    systems = await asyncio.gather(*(read(gateway, name) for name in all_names))
    streams = {system.stream for system in systems if system.stream != system.name}
    return [
        system
        for system in systems
        if system.name not in streams and (system.system is not None or system.name in names)
    ]


async def read(gateway: Gateway, name: str) -> Loaded:
    """Return the system as Triton has it. Never raise: the page shows the reason."""
    missing = Loaded(name, f"{name} {NOT_LOADED}")
    try:
        async with asyncio.timeout(TRITON_S):
            system = await gateway.served.lookup(name)
            if system is None:
                return missing
            configs = dict(system.parts)
            if system.missing:
                return Loaded(name, f"its model {system.missing[0]} {NOT_LOADED}", system, configs)
            stream = await gateway.served.stream_of(system) if system.kind == "generation" else None
            if stream:
                configs[stream.name] = stream.config
            reason = "" if await gateway.inference.ready(name) else missing.reason
            return Loaded(name, reason, system, configs, stream.name if stream else "")
    except (ApiError, grpc.RpcError, TimeoutError):
        return missing


# --- what the page shows ----------------------------------------------------------------------------------------------


def card(gateway: Gateway, loaded: Loaded, figures: RecentFigures | None, url: str) -> dict[str, Any]:
    """Return one system as the page shows it. The answer to a command for /try is shortened."""
    fields: dict[str, Any] = {
        "name": loaded.name,
        "reason": loaded.reason,
        "state": loaded.state,
        "purpose": "",
        "figures": [],
        "models": [],
        "box": None,
    }
    if (system := loaded.system) is None:
        return fields | {"command": ""}
    routes, configs = gateway.served.routes_of(system), loaded.configs
    return fields | {
        "purpose": boxes.purpose(system) + with_adapters(system),
        "routes": routes,
        "figures": system_figures(loaded, figures) if figures else [],
        "models": [row(one, figures) for one in configs.values() if not one.HasField("ensemble_scheduling")],
        "box": boxes.box(system, bool(loaded.stream)),
        "command": boxes.command(system, url, bool(gateway.config.keys)),
    }


def with_adapters(system: System) -> str:
    names = ", ".join(f"{system.name}:{adapter}" for adapter in system.adapters)
    return f"; with adapters as {names}" if names else ""


def switching(system: Loaded, measurement: Measurement | None) -> Loaded:
    """Return the system, with another reason if it is not ready because a comparison loads it in another mode."""
    if not (measurement and measurement.reloads and system.reason and system.name == measurement.system):
        return system
    return replace(system, reason=f"A {measurement.kind} is loading {system.name} in another mode.", switches=True)


def readiness_complaint(systems: Sequence[Loaded]) -> str:
    """Return why Triton answers that it is not ready, and what to do: during a load, or without these systems."""
    names = ", ".join(system.name for system in systems)
    model = f"a model of {names}" if names else "a model"
    return (
        f"Triton is not ready: {model} is loading, or failed to load. `make status` shows the state of each model, "
        "`make logs` why."
    )


def summary(systems: Sequence[Loaded]) -> str:
    ready = [system for system in systems if not system.reason]
    if not systems:
        return "No system is served"
    if len(systems) == 1:
        return f"{systems[0].name} is {systems[0].state}"
    return (
        f"{len(systems)} systems, all ready"
        if ready == systems
        else f"{len(ready)} of {len(systems)} systems are ready"
    )


def totals(figures: RecentFigures) -> list[Figure]:
    """Return what the API answered in the last minute, of all systems."""
    answers = figures.answers
    refused = answers.get("429", 0.0)
    failed = sum(rate for code, rate in answers.items() if code.startswith("5"))
    seconds = figures.totals.get("p95")
    return [
        Figure("requests/s through the gateway", decimal(sum(answers.values()))),
        Figure("95 % answered within", *duration(seconds)),
        Figure("refused/s with 429", decimal(refused), is_bad=refused > 0),
        Figure("failed/s", decimal(failed), is_bad=failed > 0),
        Figure("in flight", f"{figures.totals.get('in_flight', 0):.0f}", period="now"),
    ]


def system_figures(loaded: Loaded, figures: RecentFigures) -> list[Figure]:
    """Return the figures of the system, those of requests that stream included.

    An engine counts the requests that its front forwards, too.
    """
    names = [loaded.name, loaded.stream or loaded.name][bool(loaded.system and loaded.system.engine) :]
    counted = [figures.models.get(name, {}) for name in dict.fromkeys(names)]

    def total(figure: str) -> float:
        return sum(own.get(figure, 0.0) for own in counted)

    # Triton counts a failed request to an ensemble twice (docs/monitoring.md).
    failures = total("failures") / (2 if loaded.configs[loaded.name].HasField("ensemble_scheduling") else 1)
    model = next((name for name, config in loaded.configs.items() if is_model(config)), "")
    batch = figures.models.get(model, {}).get("batch")
    return [
        Figure("requests/s", decimal(total("successes") + failures)),
        Figure("mean latency", *duration(total("seconds") / timed if (timed := total("timed")) else None)),
        Figure("tokens/s", decimal(total("tokens")))
        if any("tokens" in own for own in counted)
        else Figure("mean batch", decimal(batch)),
        Figure("failed/s", decimal(failures), is_bad=failures > 0),
    ]


def is_model(config: ModelConfig) -> bool:
    """Return whether this is the step that computes, not one that prepares its input or reads its output."""
    return not config.HasField("ensemble_scheduling") and config.backend not in STEP_BACKENDS


def row(config: ModelConfig, figures: RecentFigures | None) -> dict[str, str]:
    own = figures.models.get(config.name, {}) if figures else {}
    backend = config.backend or config.platform
    fields = MessageToDict(config, preserving_proto_field_name=True)
    mean = None if is_front(fields) else own.get("together" if generates(fields) else "batch")
    engine = figures.engines.get(config.name, "") if figures else ""
    return {
        "name": config.name,
        "engine": ", ".join(name for name in (backend, engine) if name not in ("", config.name)),
        "batching": batching(fields, engine),
        "mean_batch": decimal(mean),
    }


def duration(seconds: float | None) -> tuple[str, str]:
    if seconds is None:
        return "–", ""
    return (decimal(seconds), "s") if seconds >= 1 else (decimal(seconds * 1000), "ms")


def decimal(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value == 0 or value >= 100 else f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"


def host_of(request: Request) -> tuple[str, str]:
    """Return the host and the port, with its colon, by which the client reached the gateway."""
    match = HOST.fullmatch(request.headers.get("host", ""))
    return (match[1], match[2] or "") if match else ("localhost", f":{request.url.port}" if request.url.port else "")
