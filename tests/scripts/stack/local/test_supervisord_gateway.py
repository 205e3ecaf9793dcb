"""The gateway as a program of the local runtime: its settings, its secrets, and what restarts it alone."""

from __future__ import annotations

import configparser
import shlex
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from scripts.stack.base import GATEWAY_SETTINGS
from scripts.stack.local.stack import LocalStack
from scripts.stack.local.supervisor import CONF
from tests.support import promql
from tests.support.certificates import save_certificate
from tests.support.stacks import own_ports
from triton_transformers import settings as settings_module
from triton_transformers.certificate import DAY_S, WARNING_DAYS, expiry
from triton_transformers.settings import SECRETS, Settings, UserError

KEY = "a-key-of-the-tests"
# Names of the environment that hold a secret -> the program that needs it.
NEEDED_BY = {"API_KEYS": "gateway", "TRITON_ADMIN_KEY": "triton", "GF_SECURITY_ADMIN_PASSWORD": "grafana"}


class SupervisorStandIn:
    """Stands in for a supervisord whose programs run. It records its calls; one that stops all fails the test."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def running(self) -> bool:
        return True

    def answers(self) -> bool:
        return True

    def process(self) -> None: ...

    def ports(self) -> set[int]:
        return set()

    def check(self) -> None: ...

    def program(self, name: str) -> dict[str, str]:
        return {"statename": "STOPPED"}

    def stop_program(self, name: str) -> None:
        self.calls.append(("stop", name))

    def start_program(self, name: str) -> None:
        self.calls.append(("start", name))

    def stop(self) -> None:
        raise AssertionError("the running stack was stopped")


@pytest.fixture
def stack(tmp_path):
    """Return a function that makes a stack of these settings. The first one is the stack that runs."""
    ports = own_ports()

    def make(**values: object) -> LocalStack:
        own = {"LOCAL_STATE": tmp_path / "state", "REPORTS": tmp_path / "reports", "RUNTIME": "local"}
        changed = {name: str(value) for name, value in (own | ports | values).items()}
        stack = LocalStack(Settings.load().replace(GRAFANA_HOME="none", **changed))
        stack.supervisor = SupervisorStandIn()
        if not stack.record.exists():
            stack.write_record(programs=["gateway", "triton"])
            (stack.state / "prometheus").mkdir()
        return stack

    return make


def test_gateway_reads_its_settings_from_a_private_file(stack, monkeypatch):
    values = {"API_KEYS": f"{KEY} another-key-of-the-tests", "REPORTS": "it's a \\ path", "GATEWAY_PORT": "8100"}
    running = stack(TRITON_ADMIN_KEY="the-admin-key", **values)
    running.write_gateway_settings()
    file = running.state / "run/gateway.env"
    assert file.stat().st_mode & 0o077 == 0
    assert "the-admin-key" not in file.read_text()
    monkeypatch.setattr(settings_module, "DOTENV", file)
    read = Settings.load()
    assert {name: read[name] for name in (*values, "BIND_ADDRESS", "TRITON_GRPC_PORT")} == {
        **values,
        "BIND_ADDRESS": "127.0.0.1",
        "TRITON_GRPC_PORT": running.settings["TRITON_GRPC_PORT"],
    }
    assert [read[name] for name in SECRETS] == ["", ""]


def test_no_program_gets_the_secret_of_another():
    config = configparser.RawConfigParser(strict=True)
    config.read(CONF)
    sections = {name.removeprefix("program:"): config[name] for name in config if name.startswith("program:")}
    commands = {name: shlex.split(section["command"]) for name, section in sections.items()}
    assert set(commands) == {"gateway", "triton", "prometheus", "grafana", "traces"}
    # The gateway starts with an empty environment, and reads the file that it alone gets.
    assert commands["gateway"][:2] == ["env", "-i"]
    assert "TRITON_SETTINGS_FILE=%(ENV_STATE)s/run/gateway.env" in commands.pop("gateway")
    for secret, program in NEEDED_BY.items():
        gets = {name for name, words in commands.items() if words[1] != "-i" and f"-u {secret} " not in " ".join(words)}
        assert (secret, gets) == (secret, {program} - {"gateway"})


@pytest.mark.parametrize(("name", "value"), [("API_KEYS", KEY), ("GATEWAY_IN_FLIGHT", "8"), ("GATEWAY_TIMEOUT", "5")])
def test_setting_of_the_gateway_restarts_it_alone(stack, capsys, name, value):
    stack()
    changed = stack(**{name: value})
    changed.start(["embedding"])
    assert changed.supervisor.calls == [("stop", "gateway"), ("start", "gateway"), ("start", "triton")]
    printed = capsys.readouterr().out
    assert f"settings changed ({name}): restarting the gateway" in printed
    assert KEY not in printed
    assert f"{name}='{value}'" in (changed.state / "run/gateway.env").read_text()
    again = stack(**{name: value})
    again.start(["embedding"])
    assert again.supervisor.calls == [("start", "gateway"), ("start", "triton")]


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ({}, "Page        http://127.0.0.1:"),
        ({}, "loopback only: set API_KEYS and GATEWAY_BIND to open it"),
        ({"API_KEYS": KEY, "GATEWAY_BIND": "0.0.0.0"}, "open to other machines on 0.0.0.0, with a key of API_KEYS"),
        ({"API_KEYS": KEY, "GATEWAY_BIND": "0.0.0.0"}, "without TLS"),
    ],
)
def test_addresses_are_printed_with_who_reaches_the_gateway(stack, capsys, values, note):
    stack(**values).print_urls()
    printed = capsys.readouterr().out
    assert note in printed
    assert KEY not in printed


def test_renewed_certificate_restarts_the_gateway(stack, tmp_path, capsys):
    cert, key = save_certificate(tmp_path)
    stack(TLS_CERT=cert, TLS_KEY=key)
    assert stack(TLS_CERT=cert, TLS_KEY=key).changed_gateway() == []
    save_certificate(tmp_path)
    stack(TLS_CERT=cert, TLS_KEY=key).start(["embedding"])
    assert "settings changed (TLS_CERT): restarting the gateway" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("days", "state"),
    [
        (-1, "expired on {}, so clients refuse it"),
        *((days, "expires on {}. Renew it, then run `make up`") for days in (0.5, 13)),
        (15, ""),
        (None, "not a certificate in PEM"),
    ],
)
def test_certificate_that_expires_soon_gets_a_warning(stack, tmp_path, capsys, days, state):
    cert, key = save_certificate(tmp_path, lifetime=timedelta(days=days or 30))
    date = f"{datetime.fromtimestamp(expiry(cert), UTC):%Y-%m-%d}"
    if days is None:
        cert.write_text("damaged")
    stack(TLS_CERT=cert, TLS_KEY=key).print_urls()
    printed = " ".join(capsys.readouterr().out.split())
    assert (f"TLS_CERT={cert}: " in printed) == bool(state)
    assert state.format(date) in printed


def test_alert_of_the_certificate_begins_with_the_warning():
    (rule,) = (rule for rule in promql.rules() if rule.get("alert") == "CertificateExpires")
    assert rule["expr"].endswith(f"< {WARNING_DAYS} * {DAY_S}")


def broken_settings(folder: Path, port: int) -> dict[str, dict[str, object]]:
    """Return wrong settings by a part of the message about them."""
    cert, key = save_certificate(folder, password=b"secret")
    return {
        f"port {port} cannot be opened on 127.0.0.1": {"GATEWAY_PORT": port},
        "set another GATEWAY_METRICS_PORT in .env": {"GATEWAY_METRICS_PORT": port},
        "this machine has no address 192.0.2.1": {"GATEWAY_BIND": "192.0.2.1", "API_KEYS": KEY},
        "API_KEYS is empty": {"GATEWAY_BIND": "0.0.0.0"},
        "no such file, or you may not read it": {"TLS_CERT": folder / "x", "TLS_KEY": key},
        "the key without a password": {"TLS_CERT": cert, "TLS_KEY": key},
        "not a certificate and its key": {"TLS_CERT": key, "TLS_KEY": cert},
    }


def test_up_refuses_wrong_settings_of_the_gateway_before_anything(stack, tmp_path):
    stack()
    with socket.create_server(("127.0.0.1", 0)) as holder:
        for message, settings in broken_settings(tmp_path, holder.getsockname()[1]).items():
            refused = stack(**settings)
            for start in refused.check, refused.start:
                with pytest.raises(UserError, match=message):
                    start(["embedding"])
            assert refused.supervisor.calls == []


def test_every_setting_of_the_gateway_is_known():
    names = {name for name in Settings.load() if name.startswith(("GATEWAY_", "TLS_", "API_", "IMAGE_", "TOOL_"))}
    assert names == set(GATEWAY_SETTINGS)
