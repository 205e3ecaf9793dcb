"""Start the gateway: python -m gateway."""

from __future__ import annotations

import logging
import signal
import sys

import prometheus_client

from gateway.app import build
from gateway.edge.config import Config
from gateway.edge.server import listen, server, unusable_port
from triton_transformers.cli import run
from triton_transformers.settings import Settings


def main() -> None:
    settings = Settings.load()
    config = Config.from_settings(settings)
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
    # After SIGTERM, uvicorn shuts down in order and raises the signal again: exit with 0 then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    app = build(config, settings)
    listener = listen(config)
    metrics_port = settings.gateway_metrics_port
    try:
        prometheus_client.start_http_server(metrics_port, config.metrics_host, app.counters.registry)
    except OSError as error:
        raise unusable_port("GATEWAY_METRICS_PORT", metrics_port, config.metrics_host, error) from None
    if not config.keys:
        print("no API_KEYS: only this machine reaches the gateway", flush=True)
    server(app, config).run([listener])


if __name__ == "__main__":
    run(main)
