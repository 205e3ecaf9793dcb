"""The stack under Docker, on a stand-in for the commands of Docker: no engine is asked."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import yaml
from dotenv import dotenv_values

from scripts.stack.base import Process
from scripts.stack.docker import containers, preflight
from scripts.stack.docker.stack import DockerStack
from triton_transformers.settings import DEFAULTS, ROOT, TABLE, VERSIONS, Settings, UserError, restarting

COMPOSE = (ROOT / "compose.yaml").read_text()
# These are paths on this machine and in a container.
PATHS = {"MODEL_REPOSITORY", "REPORTS"}


# --- compose.yaml without make ----------------------------------------------------------------------------------------


def test_every_variable_of_the_compose_file_has_the_default_of_its_setting():
    defaults = {**DEFAULTS, **dotenv_values(VERSIONS)}
    used = re.findall(r"\$\{(\w+)(?:(:?[-+])([^{}]*|\$\{.*?\}))?\}", COMPOSE)
    assert {name for name, operator, _ in used if not operator} == set()
    for name, operator, default in used:
        if operator == "+" or "-" not in operator or default.startswith("${"):
            continue
        expected = defaults.get(name)
        if name in PATHS:
            assert default in (f"./{expected}", f"/app/{expected}"), name
        elif expected:
            assert default == expected, name


def test_services_get_the_settings_that_they_read():
    services = yaml.safe_load(COMPOSE)["services"]
    shown = {name for name, row in TABLE.items() if row.shown}
    # make sets TRITON_SOURCE to the one that it chose.
    assert shown - {"TRITON_SOURCE"} <= services["loadtest"]["environment"].keys()
    read = {*re.findall(r"\$\{(\w+)", (ROOT / "images/triton/serve.sh").read_text())} & TABLE.keys()
    ports = {name for name in TABLE if name.endswith("_PORT")}
    assert read - ports - {"MODEL_REPOSITORY"} <= services["triton-cpu"]["environment"].keys()
    assert {*restarting("gateway")} - ports <= services["gateway"]["environment"].keys()


@pytest.mark.parametrize("base", ["debian", "nvidia", "neuron"])
def test_code_is_copied_after_the_packages(base):
    """An edit of a backend must not make another layer of the packages."""
    stages = (ROOT / f"images/triton/Dockerfile.{base}").read_text().split("\nFROM ")
    with_packages = [stage for stage in stages if re.search(r"COPY --from=\S+ /opt/venv", stage)]
    assert len(with_packages) >= 2
    for stage in with_packages:
        *_, packages = re.finditer(r"COPY --from=\S+ /opt/venv\S*", stage)
        assert re.search(r"COPY --from=(code|backends|slim-files) ", stage[packages.end() :]), stage
        assert not re.search(r"COPY .*(code|backends|/slim) ", stage[: packages.start()]), stage


# --- replacing Triton -------------------------------------------------------------------------------------------------


class Engine:
    """A stand-in for `docker` and `docker compose`: containers with their image and definition, and what was called."""

    def __init__(self) -> None:
        self.containers = {"old": ("triton-cpu", "image-1", "definition-1")}
        self.living = {"old"}
        self.created = ("image-1", "definition-2")
        self.folders = {"old": str(ROOT)}
        self.start_fails = self.create_fails = False
        self.exit_codes = ""
        self.calls: list[str] = []

    def run(self, *command: str, timeout: float | None = 60) -> subprocess.CompletedProcess[str]:
        _, action, *arguments = command
        self.calls.append(" ".join([action, *(word for word in arguments if word in self.containers)]))
        output, code = "", 0
        if action == "ps":
            shown = self.containers if "--all" in arguments else self.living
            output = "".join(f"{c}\t{self.containers[c][0]}\t{self.folders[c]}\n" for c in shown)
            self.calls.pop()
        elif action == "inspect":
            records = [{"Image": image, "Config": {"Labels": {containers.DEFINITION: definition}}}
                       for _, image, definition in map(self.containers.__getitem__, arguments)]  # fmt: skip
            output = json.dumps(records)
            self.calls.pop()
        elif action == "rm":
            for name in self.containers.keys() & {*arguments}:
                del self.containers[name]
                self.living.discard(name)
        elif action == "events":
            output = self.exit_codes
        elif action == "stop":
            self.living -= {*arguments}
        elif action == "restart":
            self.living |= {*arguments}
        elif action == "start":
            code = int(self.start_fails)
            self.living |= set() if code else {*arguments}
        return subprocess.CompletedProcess(command, code, output, "no such device" if code else "")

    def compose(self, *arguments: str, profile: str | None = None) -> str:
        self.calls.append(" ".join(arguments))
        if self.create_fails:
            raise UserError("docker compose create failed:\nno space left on device")
        self.containers["new"] = (arguments[-1], *self.created)
        self.folders["new"] = str(ROOT)
        return ""


CREATE = "create --no-build --no-recreate --scale triton-cpu=2 triton-cpu"


@pytest.fixture
def engine(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(preflight, "run", engine.run)
    return engine


@pytest.fixture
def stack(engine, monkeypatch, tmp_path):
    settings = Settings(DEFAULTS | {"LOCAL_STATE": str(tmp_path), "RUNTIME": "docker"})
    stack = DockerStack(settings)
    monkeypatch.setattr(stack.compose, "run", engine.compose)
    stack.write_record(image_tag="cpu-pypi")
    return stack


def test_changed_triton_is_created_before_the_old_one_is_drained(stack, engine, capsys):
    stack.settings["TRITON_MEMORY"] = "6g"
    stack.replace_triton()
    assert engine.calls == [CREATE, "exec old", "stop old", "start new", "rm old"]
    assert (engine.living, {*engine.containers}) == ({"new"}, {"new"})
    assert capsys.readouterr().out == "settings changed (TRITON_MEMORY): restarting Triton\n"


def test_new_image_and_an_edited_compose_file_are_named(stack, engine, capsys):
    engine.created = ("image-2", "definition-1")
    stack.replace_triton()
    engine.containers["old"] = engine.containers.pop("new")
    engine.living, engine.created = {"old"}, ("image-2", "definition-3")
    stack.replace_triton()
    assert re.findall(r"\((.*)\)", capsys.readouterr().out) == ["image", "compose.yaml"]


def test_unchanged_triton_is_left_alone(stack, engine, capsys):
    engine.created = ("image-1", "definition-1")
    stack.replace_triton()
    assert engine.calls == [CREATE, "rm new"]
    assert (engine.living, {*engine.containers}, capsys.readouterr().out) == ({"old"}, {"old"}, "")


def test_triton_serves_on_if_an_image_or_its_successor_cannot_be_made(stack, engine, monkeypatch):
    engine.create_fails = True
    engine.containers["left"], engine.folders["left"] = engine.containers["old"], str(ROOT)  # of an interrupted `up`
    with pytest.raises(UserError, match="no space left on device"):
        stack.replace_triton()
    assert engine.calls == ["rm left", CREATE]

    def fail(images):
        raise UserError(f"{next(iter(images))} cannot be pulled")

    monkeypatch.setattr(DockerStack, "check", lambda stack, systems: None)
    monkeypatch.setattr("scripts.stack.docker.compose.Compose.environment", {"PROMETHEUS_IMAGE": "no/such:image"})
    monkeypatch.setattr("scripts.stack.docker.containers.pull", fail)
    with pytest.raises(UserError, match="no/such:image cannot be pulled"):
        stack.start(["embedding"])
    assert engine.calls[2:] == []


def test_only_missing_images_are_pulled(monkeypatch):
    pulled = []

    def call(command):
        pulled.append(command[-1])
        return subprocess.CompletedProcess(command, command[-1] == "nowhere:1")

    def inspect(*command):
        return subprocess.CompletedProcess(command, command[-1] != "here:1")

    monkeypatch.setattr(preflight, "run", inspect)
    monkeypatch.setattr(subprocess, "run", call)
    containers.pull(["here:1", "prom:1"])
    assert pulled == ["prom:1"]
    with pytest.raises(UserError, match=r"^nowhere:1 cannot be pulled"):
        containers.pull(["nowhere:1"])


def test_triton_serves_again_if_its_successor_does_not_start(stack, engine):
    engine.start_fails = True
    with pytest.raises(UserError, match="the new Triton did not start, so the old one goes on: no such device"):
        stack.replace_triton()
    assert engine.calls[-2:] == ["rm new", "restart old"]
    assert (engine.living, {*engine.containers}) == ({"old"}, {"old"})


# --- checkouts --------------------------------------------------------------------------------------------------------


def test_stack_of_another_checkout_is_refused_with_two_ways_out(stack, engine, tmp_path):
    engine.folders["old"] = str(tmp_path)
    assert not stack.running()
    message = f"belongs to the checkout {tmp_path}: run `make down` there, or set another COMPOSE_PROJECT_NAME and oth"
    with pytest.raises(UserError, match=message):
        stack.check_checkout()
    for service, folder in (("triton-cpu", "moved away"), ("exporter", ".")):
        engine.containers["old"] = (service, "image-1", "definition-1")
        engine.folders["old"] = str(tmp_path / folder)
        stack.check_checkout()
        assert stack.running()


# --- crashes ----------------------------------------------------------------------------------------------------------


def record(oom_killed: bool = False) -> dict:
    return {"Id": "old", "State": {"OOMKilled": oom_killed}, "HostConfig": {"Memory": 300 * 2**20}}


def test_crash_without_memory_names_the_limit_instead_of_the_log(stack, engine, monkeypatch):
    stack.settings["TRITON_MEMORY"] = "300m"
    stack.write_record()
    assert stack.cause("triton", record()) == ""
    assert stack.cause("triton", record(oom_killed=True)) != ""
    engine.exit_codes = "1\n137\n"
    expected = "It was killed (exit code 137). Memory may have run out: its limit is 314.6 MB"
    assert stack.cause("triton", record()) == f"{expected}, TRITON_MEMORY=300m: raise it in .env"
    assert stack.cause("gateway", record()) == expected
    crashed = Process("restarting", running=False, gave_up=True, seconds=0, crashes=3, cause=expected)
    monkeypatch.setattr(DockerStack, "process", lambda stack, program: crashed)
    with pytest.raises(UserError, match=rf"^gateway does not stay up\. {re.escape(expected)}$"):
        stack.wait(lambda: "Triton does not answer yet")


def test_piped_logs_have_no_terminal_codes(stack, monkeypatch, capfd):
    lines = "\\x1b[2K| encoder | \\x1b[31mUNAVAILABLE\\x1b[0m |\\x1b]0;title\\x07\\r\\n"
    command = [sys.executable, "-c", f"print('{lines}end')"]
    monkeypatch.setattr(DockerStack, "log_command", lambda stack, follow: command)
    monkeypatch.setattr("scripts.stack.base.signal.signal", lambda *arguments: None)
    stack.logs(follow=False)
    assert capfd.readouterr().out == "| encoder | UNAVAILABLE |\nend\n"


def test_build_that_fails_ends_the_command(stack, monkeypatch):
    command = [sys.executable, "-c", "import sys; sys.exit('gateway' in sys.argv)"]
    monkeypatch.setattr(stack.compose, "command", lambda *arguments, profile: [*command, *arguments])
    stack.build_services("triton-cpu", "exporter")
    with pytest.raises(UserError, match="the build failed; Docker's message is above"):
        stack.build_services("triton-cpu", "gateway")
