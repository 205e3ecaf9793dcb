"""The gateway's configuration, from the settings. Tests build it without them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from triton_transformers.settings import Settings


@dataclass(frozen=True)
class Limits:
    """Bounds of one request, and of all requests at a time."""

    in_flight: int = 256  # requests
    texts: int = 2048  # of one request
    body: int = 4 << 20  # bytes
    timeout: float = 60.0  # seconds for the body to arrive, then for the answer, and between two pieces of a stream


@dataclass(frozen=True)
class Config:
    """The gateway's configuration."""

    host: str = "127.0.0.1"
    port: int = 8080
    metrics_host: str = "127.0.0.1"
    triton: str = "127.0.0.1:8001"  # its gRPC address
    systems: tuple[str, ...] = ()  # without a systems_file
    systems_file: Path | None = None  # the list that `make up` keeps of what it was asked to serve
    keys: tuple[bytes, ...] = ()  # SHA-256 digests; none: no key is required
    origins: frozenset[bytes] = frozenset()  # of pages of other sites that may send requests
    tls: tuple[Path, Path] | None = None  # certificate and private key
    image_urls: bool = False  # fetch the images of chats from addresses of the web
    tool_parser: str = ""  # the form of all models' calls of tools, instead of the one in their configurations
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def from_settings(cls, settings: Settings) -> Config:
        """Read the settings. Raise UserError if they would open the gateway to everybody."""
        file = os.environ.get("SYSTEMS_FILE")
        return cls(
            host=settings.gateway_listen(),
            port=settings.gateway_port,
            metrics_host=settings.gateway_listen("GATEWAY_METRICS_PORT"),
            triton=settings.url("TRITON_GRPC_PORT").removeprefix("http://"),
            systems=tuple(settings.systems),
            systems_file=Path(file) if file else None,
            keys=settings.gateway_keys(),
            origins=frozenset(settings.gateway_origins),
            tls=settings.tls(),
            image_urls=settings.image_urls,
            tool_parser=settings.tool_parser or "",
            limits=Limits(
                in_flight=settings.gateway_in_flight,
                texts=settings.gateway_texts,
                body=settings.gateway_body,
                timeout=settings.gateway_timeout,
            ),
        )
