"""`make status`, `logs` and `down` while nothing runs; which systems the other commands assemble, serve and unload."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import ClassVar

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.stack import __main__ as commands
from scripts.stack.local.stack import LocalStack
from triton_transformers import settings as settings_module
from triton_transformers.prometheus import Prometheus
from triton_transformers.settings import ROOT, Settings, UserError


@pytest.mark.parametrize("target", ["status", "logs", "down"])
@pytest.mark.parametrize("runtime", ["docker", "local"])
def test_without_packages_the_stack_is_not_running(tmp_path, target, runtime):
    """Report only this runtime: a stack of the other one may have run."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "scripts/make", tmp_path / "scripts/make")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", target, f"RUNTIME={runtime}"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "not running: 'make up' starts the stack\n")


def test_status_and_logs_of_a_stopped_stack(tmp_path, capsys):
    stack = LocalStack(Settings(Settings.load() | {"LOCAL_STATE": str(tmp_path), "RUNTIME": "local"}))
    assert stack.status()
    stack.logs(follow=False)
    assert capsys.readouterr().out.splitlines() == [
        "not running (RUNTIME=local): `make up` starts it",
        f"no logs: nothing has run without Docker in {tmp_path} yet (`make up`)",
    ]


def test_status_names_settings_that_the_running_stack_lacks(tmp_path, capsys, monkeypatch):
    own = {"LOCAL_STATE": str(tmp_path), "RUNTIME": "local"}
    LocalStack(Settings(Settings.load() | own | {"TRITON_HTTP_PORT": "8010"})).write_record(programs=[])
    monkeypatch.setattr(LocalStack, "running", lambda stack: True)
    monkeypatch.setattr(LocalStack, "print_models", lambda stack: True)
    stack = LocalStack(Settings(Settings.load() | own))
    assert stack.status()
    assert "The stack runs with other values of TRITON_HTTP_PORT." in capsys.readouterr().out
    stack.write_record(programs=[])
    assert stack.status()
    assert "other values" not in capsys.readouterr().out


def test_status_names_the_alerts_that_fire(tmp_path, capsys, monkeypatch):
    answer = {
        "alerts": [alert("TargetDown", "pending", "triton does not answer"), alert("Full", "firing", "[no] space")]
    }
    monkeypatch.setattr(Prometheus, "_call", lambda prometheus, path: answer if path == "alerts" else None)
    monkeypatch.setattr(LocalStack, "running", lambda stack: True)
    monkeypatch.setattr(LocalStack, "print_models", lambda stack: True)
    stack = LocalStack(Settings(Settings.load() | {"LOCAL_STATE": str(tmp_path), "RUNTIME": "local"}))
    stack.write_record(programs=[])
    assert stack.status()
    printed = capsys.readouterr().out
    assert "alert Full: [no] space (docs/alerts.md#full)\n" in printed
    assert "TargetDown" not in printed


def alert(name: str, state: str, summary: str) -> dict:
    return {"labels": {"alertname": name}, "annotations": {"summary": summary}, "state": state}


def test_down_works_in_a_read_only_checkout(tmp_path, monkeypatch, capsys):
    def refuse(*arguments, **keywords):
        raise OSError("Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    LocalStack(Settings(Settings.load() | {"LOCAL_STATE": str(tmp_path / "state"), "RUNTIME": "local"})).down()
    assert capsys.readouterr().out == "not running\n"


def test_up_lists_what_is_to_be_served_before_it_starts_anything(monkeypatch, tmp_path):
    """The gateway then answers 503 for these systems, not 404, also if this command is killed halfway."""

    def killed(stack, systems):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStack, "start", killed)
    monkeypatch.setattr(LocalStack, "running", lambda stack: True)
    own = {"LOCAL_STATE": str(tmp_path), "RUNTIME": "local", "MODEL_REPOSITORY": str(tmp_path)}
    stack = LocalStack(Settings(Settings.load() | own))
    for name in ("spam", "ham"):
        (tmp_path / name).mkdir()
    stack.served.write(["spam", "ham"])
    with pytest.raises(KeyboardInterrupt):
        stack.up(["ham", "egg"], unload=["spam"])
    assert stack.served.requested_path.read_text().split() == ["spam", "ham", "egg"]


class StackStandIn:
    """A stack that records what commands do with it. `served` are the systems of the running server."""

    served: ClassVar[list[str]] = []
    calls: ClassVar[list[tuple]] = []

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def running(self) -> bool:
        return bool(self.served)

    def served_now(self) -> list[str]:
        return list(self.served)

    def models(self, systems) -> None:
        self.calls.append(("assemble", " ".join(systems)))

    def up(self, systems, unload, refresh) -> None:
        self.calls.append(("serve", " ".join(systems), " ".join(unload)))

    def remove(self, system: str) -> tuple[str, ...]:
        self.calls.append(("remove", system))
        return (system, f"{system}_stream")

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name,))


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Return a function that runs a command, with these systems served and this .env, and returns what it did."""
    monkeypatch.setattr(commands, "stack", StackStandIn)
    monkeypatch.setattr(settings_module, "DOTENV", tmp_path / ".env")

    def run(command, served="", dotenv="", **environment):
        monkeypatch.setattr(StackStandIn, "served", served.split())
        monkeypatch.setattr(StackStandIn, "calls", [])
        (tmp_path / ".env").write_text(f"TRITON_ADMIN_KEY=k\nGRAFANA_ADMIN_PASSWORD=p\n{dotenv}")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        commands.COMMANDS[command]()
        assert StackStandIn.calls
        return [call for call in StackStandIn.calls if call[0] != "print_urls"]

    run.saved = lambda: settings_module.saved("SYSTEMS")
    return run


def test_up_serves_exactly_the_systems_that_the_user_set(calls):
    assert calls("up", served="spam ham", dotenv="SYSTEMS='ham egg'\n") == [
        ("check",),
        ("check_no_comparison",),
        ("assemble", "ham egg"),
        ("serve", "ham egg", "spam"),
    ]


def test_up_without_systems_keeps_those_of_the_server(calls):
    assert calls("up", served="spam ham")[-1] == ("serve", "spam ham", "")
    assert calls("up")[-1] == ("serve", "embedding", "")


def test_loadtest_serves_its_system_beside_the_others(calls):
    own = calls("loadtest", served="ham", dotenv="SYSTEMS=egg\n", SYSTEM="spam", HF_MODEL="tests/spam")
    assert own == [("check_comparison",), ("check",), ("assemble", "spam"), ("serve", "ham spam", ""), ("loadtest",)]
    assert calls("loadtest", dotenv="SYSTEMS=egg\n", SYSTEM="spam")[-2] == ("serve", "egg spam", "")
    assert calls("loadtest", SYSTEM="spam")[-2] == ("serve", "spam", "")


def test_tune_serves_its_system_beside_the_others(calls):
    own = calls("tune", served="ham", SYSTEM="spam", P95="100")
    assert own == [("check_comparison",), ("check",), ("assemble", "spam"), ("serve", "ham spam", ""), ("tune",)]


@pytest.mark.parametrize("goal", [{}, {"P95": "100", "RATE": "200"}], ids=["none", "both"])
def test_tune_needs_one_goal(calls, goal):
    with pytest.raises(UserError, match=r"^set either P95, .* or RATE"):
        calls("tune", served="ham", **goal)
    assert StackStandIn.calls == []


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        *[("loadtest", "USERS", "abc"), ("loadtest", "ROUNDS", "1"), ("loadtest", "WORKERS", "99")],
        *[("tune", "P95", "0"), ("tune", "MINUTES", "0.5"), ("tune", "APPLY", "yes")],
        *[("up", "READY_TIMEOUT", "3m"), ("up", "USERS", "abc"), ("add", "GRAFANA_PORT", "0")],
    ],
)
def test_wrong_setting_is_refused_before_anything_happens(calls, command, name, value):
    with pytest.raises(UserError, match=f"{name}={value}: "):
        calls(command, served="ham", **{name: value})
    assert StackStandIn.calls == []


@pytest.mark.parametrize("command", ["loadtest", "tune"])
def test_load_without_a_plain_key_is_refused_before_anything_happens(calls, command):
    digest = f"sha256:{'0' * 64}"
    with pytest.raises(UserError, match=r"^PROTOCOL=openai: API_KEYS has only digests"):
        calls(command, served="ham", P95="100", PROTOCOL="openai", API_KEYS=digest)
    assert StackStandIn.calls == []


def test_add_serves_a_system_and_saves_it(calls):
    assert calls("add", served="ham", SYSTEM="spam") == [
        ("check_no_comparison",),
        ("check",),
        ("assemble", "spam"),
        ("serve", "ham spam", ""),
    ]
    assert calls.saved() == "ham spam"  # or the next `make up` would unload ham
    calls("add", SYSTEM="spam")
    assert calls.saved() == "embedding spam"
    assert calls("add", dotenv="SYSTEMS=ham\n", SYSTEM="spam") == [("assemble", "spam")]
    assert calls.saved() == "ham spam"


def test_add_names_the_command_that_serves_streams(calls, capsys):
    calls("add", SYSTEM="falcon7b")
    assert "`make add SYSTEM=falcon7b_stream` also serves its texts as streams." in capsys.readouterr().out
    calls("add", SYSTEM="falcon7b", dotenv="SYSTEMS=falcon7b_stream\n")
    assert "streams" not in capsys.readouterr().out


def test_remove_takes_the_system_out_of_dotenv(calls):
    assert calls("remove", dotenv="SYSTEMS='ham spam spam_stream'\n", SYSTEM="spam") == [("remove", "spam")]
    assert calls.saved() == "ham"


def test_remove_of_the_only_system_returns_to_the_default(calls, capsys):
    calls("remove", dotenv="SYSTEMS=spam\n", SYSTEM="spam")
    assert calls.saved() == "embedding"
    assert "SYSTEMS is empty: `make up` starts with the default" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["add", "remove"])
@pytest.mark.parametrize("environment", [{}, {"SYSTEM": "spam ham"}])
def test_add_and_remove_need_one_system_on_the_command_line(calls, command, environment):
    with pytest.raises(UserError, match=f"name one system: make {command} SYSTEM=name"):
        calls(command, dotenv="SYSTEM=spam\n", **environment)


COMMANDS = {
    # A host with Docker installs no other package.
    "tools": """
import triton_transformers.models.package, scripts.stack.__main__, scripts.stack.docker.stack
import scripts.stack.generate, scripts.stack.smoke
""",
    "stack": """
import loadtest.__main__, loadtest.locust_page, loadtest.tune.__main__
import drills.__main__, gateway.__main__, triton_transformers.models.__main__, triton_transformers.models.package
import triton_transformers.dashboards.render.page, triton_transformers.traces.receiver
import scripts.stack.__main__, scripts.stack.local.stack
import supervisor.supervisord, scripts.stack.generate, scripts.stack.smoke
""",
}


def requirements_of(group):
    """Return the requirements of a dependency group and of those that it includes."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"][group]
    return [
        requirement
        for line in lines
        for requirement in ([Requirement(line)] if isinstance(line, str) else requirements_of(line["include-group"]))
    ]


def packages_of(group):
    """Return the names of all packages that a dependency group installs."""
    waiting, read = requirements_of(group), set()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in read:
            continue
        read.add(str(requirement))
        for needed in map(Requirement, importlib.metadata.requires(requirement.name) or []):
            extras = requirement.extras or {""}
            if not needed.marker or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return {canonicalize_name(Requirement(line).name) for line in read}


@pytest.mark.parametrize("group", COMMANDS)
def test_commands_import_only_the_packages_of_their_group(group):
    script = f"""
import importlib.metadata, re, sys
names = {packages_of(group)}
for module, packages in importlib.metadata.packages_distributions().items():
    if not names & {{re.sub("[-_.]+", "-", package.lower()) for package in packages}} and module not in sys.modules:
        sys.modules[module] = None  # importing it raises ImportError
{COMMANDS[group]}"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
