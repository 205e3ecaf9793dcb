"""What is said of a machine that Docker, or a profile, cannot run on. `run` stands in for the docker command."""

import json
import socket
import subprocess
from types import SimpleNamespace

import pytest

from scripts.common.settings import Settings, UserError
from scripts.stack.docker import preflight


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine on which all is well; a test says what is not."""
    state = SimpleNamespace(
        info={"Runtimes": {"runc": {}, "nvidia": {}}, "DockerRootDir": str(tmp_path)},
        compose="2.26.1",
        buildx=True,
        free_gb=100,
        image_is_there=False,
    )

    def run(*command, timeout=60):
        said, code = "", 0
        if command[1] == "info":
            said = json.dumps(state.info)
        elif command[1] == "compose":
            said, code = state.compose, int(not state.compose)
        elif command[1] == "buildx":
            code = int(not state.buildx)
        elif command[1] == "image":
            code = int(not state.image_is_there)
        return subprocess.CompletedProcess(command, code, said, "")

    monkeypatch.setattr(preflight, "run", run)
    monkeypatch.setattr(preflight.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(preflight, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(free=state.free_gb * 2**30))
    return state


def check(**settings):
    filled = Settings(Settings.load() | {"PROFILE": "cuda"} | settings)
    preflight.check_device(filled, preflight.check_build(filled, "nvidia/triton:1"))


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
    ("version", "said"), [("", "no compose plugin"), ("2.20.1", "2.20.1 is too old: 2.26"), ("1.29.2", "too old")]
)
def test_compose(machine, version, said):
    machine.compose = version
    with pytest.raises(UserError, match=said):
        check()


@pytest.mark.parametrize("version", ["v2.26.0", "5.0.1"])
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


def make_devices(count):
    preflight.DEVICES.mkdir()
    for number in range(count):
        (preflight.DEVICES / f"neuron{number}").touch()


def test_no_neuron_device(machine):
    said = "there is no /dev/neuron0 here; .*`sudo scripts/neuron/setup-host.sh` installs .*, else say PROFILE=cpu"
    with pytest.raises(UserError, match=said):
        check(PROFILE="neuron")


@pytest.mark.parametrize("wanted", [1, 2])
def test_as_many_neuron_devices_as_wanted(machine, wanted):
    make_devices(2)
    check(PROFILE="neuron", NEURON_DEVICES=str(wanted))


def test_too_few_neuron_devices(machine):
    make_devices(2)
    said = (
        "NEURON_DEVICES=4: there is no /dev/neuron2 here, only /dev/neuron0, /dev/neuron1; say NEURON_DEVICES=2, or see"
    )
    with pytest.raises(UserError, match=said):
        check(PROFILE="neuron", NEURON_DEVICES="4")


@pytest.mark.parametrize(
    ("number", "said"),
    [("0", "NEURON_DEVICES=0 is for `make models` alone"), ("-1", "at least 0"), ("two", "must be a whole number")],
)
def test_no_number_of_devices_to_serve_on(machine, number, said):
    with pytest.raises(UserError, match=said):
        check(PROFILE="neuron", NEURON_DEVICES=number)


def compiling(**settings):
    preflight.check_compiling(Settings(Settings.load() | {"PROFILE": "neuron"} | settings))


def test_compiling_for_neuron(machine):
    compiling(NEURON_DEVICES="0")
    with pytest.raises(
        UserError, match=r"no /dev/neuron0 here; .*, else say NEURON_DEVICES=0 to compile without a device"
    ):
        compiling()
    with pytest.raises(UserError, match="NEURON_CHIP=inf1: `make models` compiles for inf2 and trn1"):
        compiling(NEURON_CHIP="inf1", NEURON_DEVICES="0")
    make_devices(1)
    compiling()


def test_a_compose_that_builds_through_buildx_alone(machine):
    machine.buildx = False
    check()
    machine.compose = "2.37.0"
    with pytest.raises(UserError, match="no buildx plugin"):
        check()


def test_a_checkout_made_under_a_strict_umask(tmp_path):
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder/prometheus.yml"
    file.touch(mode=0o644)
    tmp_path.chmod(0o755)
    preflight.check_readable(tmp_path)
    file.chmod(0o600)
    with pytest.raises(UserError, match=r"prometheus.yml may be read by its owner only, .* chmod -R a\+rX"):
        preflight.check_readable(tmp_path)


@pytest.mark.parametrize("there", [False, True])
def test_an_unreachable_index_of_torch_is_said(machine, capsys, there):
    machine.image_is_there = there
    with socket.socket() as nobody:  # bound, and not listening
        nobody.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{nobody.getsockname()[1]}/whl/cpu"
        preflight.warn_of_torch_index(index, "an-image")
    assert (f"TORCH_INDEX={index} does not answer here" in capsys.readouterr().err.replace("\n", "")) is not there
