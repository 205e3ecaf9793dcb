"""The Makefile: its help, the sources of settings, when it detects the runtime, and the messages of an install."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts.audit.__main__ import locked
from tests.support.supervisord_stand_in import supervisord_stand_in
from triton_transformers.settings import ROOT

# Stands in for the virtual environment's Python: prints the settings that our commands would load.
PRINT_SETTINGS = """#!/bin/sh
exec {python} -c 'from triton_transformers.settings import Settings
for name, value in Settings.load().items(): print(name, value, sep="=")'
"""


class Machine:
    """A machine with a Docker engine, its own virtual environment and its own state: no stack runs there."""

    def __init__(self, folder):
        self.folder = folder
        self.dotenv = folder / ".env"
        self.docker_calls = folder / "docker-calls"
        self.docker_calls.touch()
        self.write_program("docker", f"#!/bin/sh\necho $@ >>{self.docker_calls}\n")

    def write_program(self, name, text):
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def install(self):
        self.write_program("python", PRINT_SETTINGS.format(python=sys.executable))
        for marker in (f".installed-{group}" for group in ("all", "stack", "tools", "oci")):
            (self.folder / marker).touch()

    def run(self, *command, **exported):
        # `make test SLOW=2 TENSORFLOW=folder OPENAI_CLIENTS=folder` contains these tests.
        of_make = ("MAKE", "MFLAGS", "SLOW", "TENSORFLOW", "OPENAI_CLIENTS")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(of_make)}
        own = {"TRITON_SETTINGS_FILE": str(self.dotenv), "TRITON_SETTINGS_NAMES": ""}
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        return subprocess.run(
            command, cwd=ROOT, env=inherited | own | exported | {"PATH": path}, capture_output=True, text=True
        )

    def make(self, *arguments, **exported):
        done = self.run("make", f"venv={self.folder}", f"LOCAL_STATE={self.folder}/state", *arguments, **exported)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def settings(self, *arguments, **exported):
        return dict(line.split("=", 1) for line in self.make("dashboards", *arguments, **exported).splitlines())


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def installed_machine(machine):
    machine.install()
    return machine


def test_help_is_the_default_and_lists_every_target(machine):
    phony = re.search(r"^\.PHONY: (up .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    printed = machine.make()
    assert sorted(re.findall(r"^  make (\S+)", printed, re.MULTILINE)) == sorted(phony)
    assert max(map(len, printed.splitlines())) <= 100


def test_dry_run_writes_nothing(machine):
    machine.make("--dry-run", "loadtest")
    assert {path.name for path in machine.folder.iterdir()} == {"bin", "docker-calls"}


def test_exported_variables_are_not_settings(installed_machine):
    exported = {"USERS": "abc", "TAG": "t", "TASK": "t", "SOURCE": "/s", "WINDOW": "3", "RUNTIME": "podman"}
    settings = installed_machine.settings(**exported)
    assert {name: settings[name] for name in exported} == dict.fromkeys(exported, "") | {"RUNTIME": "docker"}


def test_command_line_wins_over_exported_variable_and_dotenv(installed_machine):
    installed_machine.dotenv.write_text("USERS=5\nROUNDS=7\n")
    settings = installed_machine.settings("USERS=8", "PROMPT=it's a 'b', c=$$d", USERS="abc")
    assert (settings["USERS"], settings["ROUNDS"]) == ("8", "7")
    assert settings["PROMPT"] == "it's a 'b', c=$d"


def test_exported_names_of_this_stack_are_settings(installed_machine):
    assert installed_machine.settings(TRITON_HTTP_PORT="8100", HF_TOKEN="hf")["TRITON_HTTP_PORT"] == "8100"


def test_profile_target_sets_the_profile(installed_machine):
    assert "PROFILE=neuron" in installed_machine.make("build-neuron", PROFILE="cuda").splitlines()


NEED_NO_RUNTIME = ("help", "lint", "test", "test-unit", "test-docker", "dashboards-json", "bench", "lock", "version")


def test_targets_without_a_runtime_query_no_engine(machine):
    machine.make("--dry-run", *NEED_NO_RUNTIME, "clean", "status", "down", "logs")
    assert machine.docker_calls.read_text() == ""


@pytest.mark.parametrize("target", ["loadtest", "build-cuda", "deploy-oci", "clean", "status"])
def test_engine_is_queried_once(installed_machine, target):
    installed_machine.make("--dry-run", target)
    assert installed_machine.docker_calls.read_text() == "info\n"


@pytest.mark.parametrize("line", ["LOCAL_STATE={}", "export LOCAL_STATE = '{}'  # elsewhere", 'LOCAL_STATE="{}"\r'])
def test_running_local_stack_is_found_in_local_state_of_dotenv(machine, line):
    state = machine.folder / "the state"
    machine.dotenv.write_text(f"RUNTIME=\n{line.format(state)}\n")
    with supervisord_stand_in(state):
        assert machine.run("scripts/make/runtime.sh").stdout == "local\n"
    assert machine.run("scripts/make/runtime.sh").stdout == "docker\n"


def test_runtime_of_dotenv_needs_no_engine(machine):
    machine.dotenv.write_text("RUNTIME=docker\nRUNTIME=local # for now\n")
    assert machine.run("scripts/make/runtime.sh").stdout == "local\n"
    assert machine.docker_calls.read_text() == ""


def test_runtime_of_the_command_line_needs_no_engine(installed_machine):
    installed_machine.dotenv.write_text("RUNTIME=docker\n")
    assert installed_machine.settings("RUNTIME=local")["RUNTIME"] == "local"
    assert installed_machine.docker_calls.read_text() == ""


@pytest.mark.parametrize("arguments", [["test-stack"], ["test-stack", "SLOW=1"], ["test-stack", "SYSTEMS=falcon7b"]])
def test_tests_assemble_the_default_system(installed_machine, arguments):
    installed_machine.dotenv.write_text("SYSTEMS=falcon7b\n")
    assembled, *_ = re.findall("^SYSTEMS=(.*)$", installed_machine.make(*arguments), re.MULTILINE)
    assert assembled == "embedding"


@pytest.mark.parametrize(
    ("arguments", "left_out"),
    [([], "not slowest and not slow"), (["SLOW=1"], "not slowest"), (["SLOW=2"], "")],
)
def test_slow_tests_run_if_the_user_asks_for_them(machine, arguments, left_out):
    parts = re.findall("-m tests.rerun (.*)", machine.make("--dry-run", "test", *arguments))
    chosen = f' -m "{left_out}"' if left_out else ""
    assert [part.split()[0] for part in parts] == ["tests", "tests/stack"]
    assert [part.partition(" --no-loadscope-reorder")[2].rstrip() for part in parts] == [chosen, chosen]


def test_ci_runs_the_tests_that_contributing_names():
    named = re.search(r"^(make \w+) +# lint, unit tests", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)[1]
    assert f"\n{named} SLOW=1 " in (ROOT / ".ci/run").read_text()


def install(folder: Path, group: str, python: str = "no-such-python") -> str:
    """Run the install in a folder, and return the message of its error."""
    done = subprocess.run(
        [ROOT / "scripts/make/install.sh", folder / "venv", group],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHON": python},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    return done.stderr


def test_install_names_what_the_machine_lacks(tmp_path):
    message = "error: no-such-python is not installed (Debian: apt install python3 python3-venv)\n"
    assert install(tmp_path, "stack") == message


@pytest.mark.parametrize("name", ["two words", "prüfung"])
def test_install_refuses_a_path_from_which_no_model_starts(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    message = f"error: {folder}: Triton's Python processes do not start from such a path. Move this checkout to a path"
    assert install(folder, "stack").startswith(message)
    assert "is not installed" in install(folder, "tools")  # with Docker, the path does not matter


def test_version_is_printed_before_anything_is_installed(machine):
    printed = machine.make("version")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert printed.startswith(f"triton-transformers {project['version']}")
    assert f"\ntransformers {locked()['transformers']}\n" in printed
    assert re.search(r"^Triton \d\d\.\d\d \(nvidia-pytriton ", printed, re.MULTILINE)


def test_runtime_is_found_without_home(machine):
    machine.dotenv.write_text("RUNTIME=\nLOCAL_STATE=~/a-state-of-the-tests\n")
    done = machine.run("env", "-u", "HOME", "scripts/make/runtime.sh")
    assert (done.stdout, done.stderr) == ("docker\n", "")
