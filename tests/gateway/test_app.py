"""The gateway as a process of its own: its settings, TLS, metrics and end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from gateway.__main__ import main
from tests.support.certificates import save_certificate
from tests.support.triton_stand_in import TritonStandIn, embedding
from triton_transformers.certificate import expiry
from triton_transformers.ports import free_ports
from triton_transformers.settings import ROOT, Settings, UserError

START_S = 60


@contextlib.contextmanager
def process(**settings: str) -> Iterator[subprocess.Popen[str]]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TRITON_SETTINGS_NAMES": "*"}
    environment |= {"TRITON_SETTINGS_FILE": os.environ["TRITON_SETTINGS_FILE"], "SYSTEMS": "embedding"} | settings
    command = [sys.executable, "-m", "gateway"]
    with subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, cwd="/") as running:
        try:
            yield running
        finally:
            running.kill()


def wait_for(port: str, running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(port))) == 0:
                return
        assert running.poll() is None, running.stderr and running.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_process_serves_with_tls_and_a_key_and_ends_in_order(tmp_path: Path) -> None:
    port, metrics_port = map(str, free_ports(2))
    certificate, key = save_certificate(tmp_path, lifetime=timedelta(days=30))
    context = ssl.create_default_context(cafile=str(certificate))
    with TritonStandIn(embedding()) as triton:
        settings = {
            "GATEWAY_PORT": port,
            "GATEWAY_METRICS_PORT": metrics_port,
            "TRITON_GRPC_PORT": str(triton.port),
            "API_KEYS": "a-key-of-the-test",
            "TLS_CERT": str(certificate),
            "TLS_KEY": str(key),
        }
        with process(**settings) as running:
            wait_for(port, running)
            body = json.dumps({"model": "embedding", "input": "a"}).encode()
            headers = {"authorization": "Bearer a-key-of-the-test", "content-type": "application/json"}
            request = urllib.request.Request(f"https://127.0.0.1:{port}/v1/embeddings", body, headers)
            with urllib.request.urlopen(request, context=context, timeout=START_S) as response:
                assert json.load(response)["usage"]["total_tokens"] == 3
            # So that the first request is counted, which follows its response.
            urllib.request.urlopen(f"https://127.0.0.1:{port}/health", context=context, timeout=START_S).close()
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=START_S) as response:
                metrics = response.read().decode()
            assert 'gateway_requests_total{code="200",route="/v1/embeddings"} 1.0' in metrics
            assert "process_resident_memory_bytes" in metrics
            (expires,) = re.findall(r"^gateway_certificate_expiry_timestamp_seconds (\S+)$", metrics, re.MULTILINE)
            assert float(expires) == expiry(certificate)
            assert expiry(certificate) == pytest.approx(time.time() + timedelta(days=30).total_seconds(), abs=3600)
            running.send_signal(signal.SIGTERM)
            assert running.wait(START_S) == 0
            assert running.stderr and "a-key-of-the-test" not in running.stderr.read()


def test_process_refuses_to_listen_without_keys() -> None:
    with process(GATEWAY_BIND="0.0.0.0") as running:
        _, errors = running.communicate(timeout=START_S)
    assert running.returncode == 1
    assert "API_KEYS" in errors and "Traceback" not in errors


@pytest.mark.parametrize("name", ["GATEWAY_PORT", "GATEWAY_METRICS_PORT"])
def test_taken_port_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken, other = str(holder.getsockname()[1]), str(free_ports(1)[0])
        settings = Settings.load().replace(**{"GATEWAY_PORT": other, "GATEWAY_METRICS_PORT": other, name: taken})
        monkeypatch.setattr(Settings, "load", lambda: settings)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        with pytest.raises(UserError, match=f"{name}={taken} cannot be opened on 127.0.0.1"):
            main()
