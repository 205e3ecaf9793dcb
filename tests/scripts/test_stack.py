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


@pytest.mark.parametrize(("target", "runtime"), [("status", "docker"), ("logs", "local"), ("down", "docker")])
def test_without_packages_the_stack_is_not_running(tmp_path, target, runtime):
    """Report only this runtime: a stack of the other one may have run."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "scripts/make", tmp_path / "scripts/make")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", target, f"RUNTIME={runtime}"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "not running: 'make up' starts the stack\n")


def test_status_down_and_logs_of_a_stopped_stack_work_in_a_read_only_checkout(tmp_path, capsys, monkeypatch):
    tmp_path /= "state"
    stack = LocalStack(Settings.load().replace(LOCAL_STATE=str(tmp_path), RUNTIME="local"))

    def refuse(*arguments, **keywords):
        raise OSError("Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert stack.status()
    stack.down()
    stack.logs(follow=False)
    assert capsys.readouterr().out.splitlines() == [
        "not running (RUNTIME=local): `make up` starts it",
        "not running",
        f"no logs: nothing has run without Docker in {tmp_path} yet (`make up`)",
    ]


def test_status_names_other_settings_and_firing_alerts(tmp_path, capsys, monkeypatch):
    alerts = [
        {"labels": {"alertname": name}, "annotations": {"summary": "[no] space"}, "state": state}
        for name, state in (("TargetDown", "pending"), ("Full", "firing"))
    ]
    monkeypatch.setattr(Prometheus, "call", lambda prometheus, path: {"alerts": alerts} if path == "alerts" else None)
    monkeypatch.setattr(LocalStack, "running", lambda stack: True)
    monkeypatch.setattr(LocalStack, "print_models", lambda stack: True)
    stack = LocalStack(Settings.load().replace(LOCAL_STATE=str(tmp_path), RUNTIME="local"))
    for port, differs in (("8010", True), ("8000", False)):
        LocalStack(stack.settings.replace(TRITON_HTTP_PORT=port)).write_record(programs=[])
        assert stack.status()
        printed = capsys.readouterr().out
        assert ("The stack runs with other values of TRITON_HTTP_PORT." in printed) == differs
        assert "alert Full: [no] space (docs/monitoring.md#full)\n" in printed
        assert "TargetDown" not in printed


def test_up_lists_what_is_to_be_served_before_it_starts_anything(monkeypatch, tmp_path):
    """The gateway then answers 503 for these systems, not 404, also if this command is killed halfway."""

    def killed(stack, systems):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStack, "start", killed)
    monkeypatch.setattr(LocalStack, "running", lambda stack: True)
    own = Settings.load().replace(LOCAL_STATE=str(tmp_path), RUNTIME="local", MODEL_REPOSITORY=str(tmp_path))
    stack = LocalStack(own)
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

    def run(self, program: str) -> int:
        self.calls.append((program,))
        return 1  # APPLY=1 then does nothing

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
        return [call for call in StackStandIn.calls if call[0] not in ("print_urls", "print_first_request")]

    run.saved = lambda: settings_module.saved("SYSTEMS")
    return run


def test_up_serves_exactly_the_systems_that_the_user_set_or_keeps_those_of_the_server(calls):
    assert calls("up", served="spam ham", dotenv="SYSTEMS='ham egg'\n") == [
        ("check",),
        ("check_no_comparison",),
        ("assemble", "ham egg"),
        ("serve", "ham egg", "spam"),
    ]
    assert calls("up", served="spam ham", dotenv="")[-1] == ("serve", "spam ham", "")
    assert calls("up")[-1] == ("serve", "embedding", "")


@pytest.mark.parametrize("command", ["loadtest", "tune"])
def test_load_serves_its_system_beside_the_others(calls, command):
    own = calls(command, served="ham", dotenv="SYSTEMS=egg\n", SYSTEM="spam", HF_MODEL="tests/spam", P95="100")
    assert own == [("check_comparison",), ("check",), ("assemble", "spam"), ("serve", "ham spam", ""), (command,)]
    assert calls(command, dotenv="SYSTEMS=egg\n")[-2] == ("serve", "egg spam", "")
    assert calls(command)[-2] == ("serve", "spam", "")


def test_refused_format_leaves_a_sentence_about_those_on_disk(calls, monkeypatch, capsys):
    def refuse(stack, systems):
        sys.exit(1)  # as if the second format were below its bound

    monkeypatch.setattr(StackStandIn, "models", refuse)
    monkeypatch.setattr(commands, "check_formats", lambda settings: None)
    monkeypatch.setattr(commands, "read_record", lambda name, repository: name == "spam.onnx")
    with pytest.raises(SystemExit):
        calls("loadtest", SYSTEM="spam", FORMATS="onnx int8")
    printed = " ".join(capsys.readouterr().err.split())
    assert "spam.onnx stays on disk for the next comparison: `make remove SYSTEM=spam.onnx`" in printed
    assert "spam.int8" not in printed


DIGEST_ALONE = {"PROTOCOL": "openai", "API_KEYS": f"sha256:{'0' * 64}"}


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        ("loadtest", {"USERS": "abc"}, "USERS=abc: "),
        ("loadtest", {"WORKERS": "99"}, "WORKERS=99: "),
        ("tune", {"P95": "0"}, "P95=0: "),
        ("loadtest", {"SYSTEM": "spam ham"}, "SYSTEM=spam ham: SYSTEM takes one system"),
        ("add", {"SYSTEM": "spam ham"}, "SYSTEM=spam ham: SYSTEM takes one system"),
        ("tune", {}, "^set either P95, .* or RATE"),
        ("tune", {"P95": "100", "RATE": "200"}, "^set either P95, .* or RATE"),
        ("up", {"USERS": "abc"}, "USERS=abc: "),
        ("add", {"GRAFANA_PORT": "0"}, "GRAFANA_PORT=0: "),
        ("loadtest", DIGEST_ALONE, "^PROTOCOL=openai: API_KEYS has only digests"),
        ("tune", {"P95": "100"} | DIGEST_ALONE, "^PROTOCOL=openai: API_KEYS has only digests"),
    ],
)
def test_wrong_setting_is_refused_before_anything_happens(calls, command, settings, message):
    with pytest.raises(UserError, match=message):
        calls(command, served="ham", **settings)
    assert StackStandIn.calls == []


@pytest.mark.parametrize("command", ["add", "remove"])
def test_add_and_remove_need_a_system_on_the_command_line(calls, command):
    with pytest.raises(UserError, match=f"name one system: make {command} SYSTEM=name"):
        calls(command, dotenv="SYSTEM=spam\n")


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


def test_remove_takes_the_system_out_of_dotenv(calls, capsys):
    assert calls("remove", dotenv="SYSTEMS='ham spam spam_stream'\n", SYSTEM="spam") == [("remove", "spam")]
    assert calls.saved() == "ham"
    calls("remove", dotenv="SYSTEMS=spam\n")
    assert calls.saved() == "embedding"
    assert "SYSTEMS is empty: `make up` starts with the default" in capsys.readouterr().out


COMMANDS = {
    # A host with Docker installs no other package.
    "tools": """
import export.package, scripts.stack.__main__, scripts.stack.docker.stack
import scripts.stack.generate, scripts.stack.smoke
""",
    "stack": """
import loadtest.__main__, loadtest.load.locust_page, loadtest.tune.__main__
import loadtest.drills.__main__, gateway.__main__, export.__main__, export.package
import monitoring.drawing.page, monitoring.traces
import scripts.stack.__main__, scripts.stack.local.stack
import supervisor.supervisord, scripts.stack.generate, scripts.stack.smoke
""",
}


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# uv installs these requirements of a package in place of those in its own metadata.
REPLACED = {package["name"]: package["requires-dist"] for package in PYPROJECT["tool"]["uv"]["dependency-metadata"]}


def requirements_of(group):
    """Return the requirements of a dependency group and of those that it includes."""
    lines = PYPROJECT["dependency-groups"][group]
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
        name = requirement.name
        needs = REPLACED[name] if name in REPLACED else importlib.metadata.requires(name) or []
        for needed in map(Requirement, needs):
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
