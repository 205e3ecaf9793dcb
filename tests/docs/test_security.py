"""docs/security.md: each line of its tables has a test, and the files that a stack is made of keep its promises."""

from __future__ import annotations

import ast
import configparser
import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from gateway.app import ROUTES
from loadtest.load import locust_page
from loadtest.load.examples import Examples
from triton_transformers.settings import DEFAULTS, ROOT, Settings, UserError, pins

PAGE = (ROOT / "docs/security.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not set(line) <= set("|-: ")
]
LINES = [row for row in ROWS if row[-1] != "test"]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0][:60])
def test_each_line_of_the_page_has_a_test(line):
    named = re.findall(r"`([\w/]*test_\w+\.py)::(test_\w+)`", line[-1])
    assert named
    assert line[-1].count("::") == len(named)
    assert [(file, name) for file, name in named if name not in functions_of(ROOT / "tests" / file)] == []


def test_page_has_its_tables():
    assert len(ROWS) - len(LINES) == PAGE.count("| test |") == 3
    assert len(LINES) > 40


def test_page_names_the_ports_of_the_settings():
    ports = {value for name, value in DEFAULTS.items() if name.endswith("_PORT")}
    assert {port for line in LINES for port in re.findall(r"\b\d{4,5}\b", line[0])} == ports


# --- containers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPOSE)
def test_service_has_least_privilege(name):
    service = COMPOSE[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "mem_limit" in service
    assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}
    assert not service.keys() & {"privileged", "cap_add", "pid", "network_mode"}
    assert "docker.sock" not in str(service)


def test_compose_publishes_ports_on_the_addresses_of_the_settings():
    published = [port for service in COMPOSE.values() for port in service.get("ports", [])]
    assert published
    bound = re.compile(r"\$\{(GATEWAY_BIND:-\$\{)?BIND_ADDRESS:-127\.0\.0\.1\}")
    assert [port for port in published if not bound.match(port)] == []


def test_images_and_packages_are_pinned():
    for name, image in pins().items():
        assert re.search(r"(:v?\d[\w.]*[\w.-]*|@sha256:[0-9a-f]{64})$", image), f"{name}={image}"
    for file in ROOT.glob("images/*/Dockerfile*"):
        text = file.read_text()
        stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)) | {"scratch"}
        bases = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) - stages
        assert bases <= {f"${{{name}}}" for name in pins()}, file
        assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] == "1000:1000", file
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    sources = {package["source"].get("registry") for package in packages if package["name"] != "triton-transformers"}
    assert sources == {"https://pypi.org/simple"}  # a lock must not name the mirror of its author
    assert all(file["hash"].startswith("sha256:") for package in packages for file in package.get("wheels", []))


# --- programs ---------------------------------------------------------------------------------------------------------


def test_gateway_has_no_route_to_model_control():
    paths = {route.path for route in ROUTES} - {"/v2/chat", "/v2/embed", "/v2/rerank"}  # Cohere's
    assert [path for path in paths if re.search(r"repository|load|shared|trace|logging|/v2", path)] == []


def test_grafana_lets_everybody_view_and_only_the_password_change():
    grafana = configparser.ConfigParser(strict=True, interpolation=None)
    grafana.read(ROOT / "monitoring/grafana/grafana.ini")
    assert grafana["auth.anonymous"]["org_role"] == "Viewer"
    assert grafana["users"]["allow_sign_up"] == "false"
    assert "admin_password" not in (ROOT / "monitoring/grafana/grafana.ini").read_text()


def test_locust_page_listens_on_the_bind_address(monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setenv("BIND_ADDRESS", "127.0.0.3")
    monkeypatch.setattr(locust_page, "check_free", lambda *_: None)
    monkeypatch.setattr(Examples, "from_server", lambda *_: None)
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command))
    locust_page.main()
    (command,) = started
    assert command[command.index("--web-host") + 1] == "127.0.0.3"


def test_shared_memory_is_not_opened_to_other_machines(monkeypatch):
    monkeypatch.setenv("TRITON_SHARED_MEMORY", "1")
    Settings.load()
    monkeypatch.setenv("BIND_ADDRESS", "0.0.0.0")
    with pytest.raises(UserError, match=r"^TRITON_SHARED_MEMORY=1 opens this machine's memory"):
        Settings.load()
