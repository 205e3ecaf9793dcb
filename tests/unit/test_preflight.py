"""What is said of a machine that Docker, or a profile, cannot run on. `run` stands in for the docker command."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from scripts.docker import preflight
from scripts.settings import Settings, UserError

PINS = {"TRITON_IMAGE": "nvidia/triton:1"}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine on which all is well; a test says what is not."""
    state = SimpleNamespace(
        info={"Runtimes": {"runc": {}, "nvidia": {}}, "DockerRootDir": str(tmp_path)},
        compose="2.26.1",
        free_gb=100,
        image_is_there=False,
    )

    def run(*command):
        said, code = "", 0
        if command[1] == "info":
            said = json.dumps(state.info)
        elif command[1] == "compose":
            said, code = state.compose, int(not state.compose)
        elif command[1] == "image":
            code = int(not state.image_is_there)
        return subprocess.CompletedProcess(command, code, said, "")

    monkeypatch.setattr(preflight, "run", run)
    monkeypatch.setattr(preflight.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(free=state.free_gb * 2**30))
    return state


def check(**settings):
    preflight.check(Settings(Settings.load() | {"PROFILE": "cuda"} | settings), PINS)


def test_a_machine_on_which_all_is_well(machine):
    check()
    check(PROFILE="cpu")


def test_no_docker(machine, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="docker is not installed"):
        check()


def test_an_engine_that_does_not_answer(machine):
    machine.info = {"ServerErrors": ["Cannot connect to the Docker daemon"]}
    with pytest.raises(UserError, match=r"does not answer \(Cannot connect to the Docker daemon\)"):
        check()


@pytest.mark.parametrize(
    ("version", "said"), [("", "no compose plugin"), ("2.19.1", "2.19.1 is too old: 2.20"), ("1.29.2", "too old")]
)
def test_compose(machine, version, said):
    machine.compose = version
    with pytest.raises(UserError, match=said):
        check()


@pytest.mark.parametrize("version", ["v2.20.0", "5.0.1"])
def test_compose_that_will_do(machine, version):
    machine.compose = version
    check()


def test_no_nvidia_runtime(machine):
    machine.info["Runtimes"] = {"runc": {}}
    with pytest.raises(UserError, match="no NVIDIA runtime"):
        check()
    check(PROFILE="cpu")


@pytest.mark.parametrize("settings", [{"PROFILE": "cuda"}, {"PROFILE": "cpu", "TRITON_SOURCE": "ngc"}])
def test_a_disk_too_small_for_nvidias_image(machine, settings):
    machine.free_gb = 20
    with pytest.raises(UserError, match=r"45 GB, and .* has 20 GB free"):
        check(**settings)
    machine.image_is_there = True
    check(**settings)


def test_no_neuron_device(machine):
    with pytest.raises(UserError, match="there is no /dev/neuron0"):
        check(PROFILE="neuron")
