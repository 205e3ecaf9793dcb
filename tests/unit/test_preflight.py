"""The errors on a machine that cannot run a profile, with Docker and without."""

import ctypes
import json
import os
import socket
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.stack.docker import preflight
from scripts.stack.local import preflight as local_preflight
from scripts.stack.local.stack import LocalStack
from tests.support.certificates import save_certificate
from triton_transformers.ports import check_free, free_ports, outgoing_ports
from triton_transformers.settings import Settings, UserError


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a machine that has every requirement, for tests to remove one. A stand-in replaces the docker command."""
    state = SimpleNamespace(
        info={"Runtimes": {"runc": {}, "nvidia": {}}, "DockerRootDir": str(tmp_path)},
        compose="2.26.1",
        buildx=True,
        free_gb=100,
        has_image=False,
    )

    def run(*command, timeout=60):
        output, code = "", 0
        if command[1] == "info":
            output = json.dumps(state.info)
        elif command[1] == "compose":
            output, code = state.compose, int(not state.compose)
        elif command[1] == "buildx":
            code = int(not state.buildx)
        elif command[1] == "image":
            code = int(not state.has_image)
        return subprocess.CompletedProcess(command, code, output, "")

    monkeypatch.setattr(preflight, "run", run)
    monkeypatch.setattr(preflight.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(preflight, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(free=state.free_gb * 2**30))
    return state


def check(**settings):
    complete = Settings(Settings.load() | {"PROFILE": "cuda"} | settings)
    preflight.check_device(complete, preflight.check_build(complete, "nvidia/triton:1"))


def test_complete_machine_passes(machine):
    check()
    check(PROFILE="cpu")


def test_missing_docker_is_an_error(machine, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="docker is not installed"):
        check()


def test_engine_that_does_not_answer_is_an_error(machine):
    machine.info = {"ServerErrors": ["Cannot connect to the Docker daemon"]}
    with pytest.raises(UserError, match=r"does not answer \(Cannot connect to the Docker daemon\)"):
        check()


@pytest.mark.parametrize(
    ("version", "message"),
    [("", "no compose plugin"), ("2.20.1", "2.20.1 is too old: install 2.26"), ("1.29.2", "too old")],
)
def test_missing_or_old_compose_is_an_error(machine, version, message):
    machine.compose = version
    with pytest.raises(UserError, match=message):
        check()


@pytest.mark.parametrize("version", ["v2.26.0", "5.0.1"])
def test_new_enough_compose_passes(machine, version):
    machine.compose = version
    check()


def test_missing_nvidia_runtime_is_an_error_for_cuda_only(machine):
    machine.info["Runtimes"] = {"runc": {}}
    with pytest.raises(UserError, match="no NVIDIA runtime"):
        check()
    check(PROFILE="cpu")


@pytest.mark.parametrize("settings", [{"PROFILE": "cuda"}, {"PROFILE": "cpu", "TRITON_SOURCE": "ngc"}])
def test_disk_too_small_for_nvidias_image_is_an_error(machine, settings):
    machine.free_gb = 20
    with pytest.raises(UserError, match=r"45 GB, and .* has 20 GB free"):
        check(**settings)
    machine.has_image = True
    check(**settings)


def make_devices(count):
    preflight.DEVICES.mkdir()
    for number in range(count):
        (preflight.DEVICES / f"neuron{number}").touch()


def test_missing_neuron_device_is_an_error(machine):
    message = "there is no /dev/neuron0 here. .*`sudo scripts/neuron/setup-host.sh` installs .*, else set PROFILE=cpu"
    with pytest.raises(UserError, match=message):
        check(PROFILE="neuron")


@pytest.mark.parametrize("count", [1, 2])
def test_enough_neuron_devices_pass(machine, count):
    make_devices(2)
    check(PROFILE="neuron", NEURON_DEVICES=str(count))


def test_too_few_neuron_devices_are_an_error(machine):
    make_devices(2)
    message = (
        "NEURON_DEVICES=4: there is no /dev/neuron2 here, only /dev/neuron0, /dev/neuron1. Set NEURON_DEVICES=2, or run"
    )
    with pytest.raises(UserError, match=message):
        check(PROFILE="neuron", NEURON_DEVICES="4")


@pytest.mark.parametrize(
    ("number", "message"),
    [("0", "NEURON_DEVICES=0 is for `make models` alone"), ("-1", "at least 0"), ("two", "must be a whole number")],
)
def test_serving_on_no_neuron_device_is_an_error(machine, number, message):
    with pytest.raises(UserError, match=message):
        check(PROFILE="neuron", NEURON_DEVICES=number)


def check_compiling(**settings):
    preflight.check_compiling(Settings(Settings.load() | {"PROFILE": "neuron"} | settings))


def test_compiling_needs_a_device_or_no_check(machine):
    check_compiling(NEURON_DEVICES="0")
    with pytest.raises(
        UserError, match=r"no /dev/neuron0 here. .*, else set NEURON_DEVICES=0 to compile without a device"
    ):
        check_compiling()
    with pytest.raises(UserError, match="NEURON_CHIP=inf1: `make models` compiles for inf2 and trn1"):
        check_compiling(NEURON_CHIP="inf1", NEURON_DEVICES="0")
    make_devices(1)
    check_compiling()


def test_compose_that_builds_only_through_buildx_needs_buildx(machine):
    machine.buildx = False
    check()
    machine.compose = "2.37.0"
    with pytest.raises(UserError, match="no buildx plugin"):
        check()


def test_checkout_of_a_strict_umask_is_an_error(tmp_path):
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder/prometheus.yml"
    file.touch(mode=0o644)
    tmp_path.chmod(0o755)
    preflight.check_readable(tmp_path / "not assembled yet")
    preflight.check_readable(tmp_path)
    file.chmod(0o600)
    with pytest.raises(UserError, match=r"only its owner may read .*prometheus.yml, .* chmod -R a\+rX"):
        preflight.check_readable(tmp_path)


def test_certificate_that_the_container_may_not_read_is_an_error(tmp_path):
    cert, key = save_certificate(tmp_path)
    settings = Settings.load().replace(TLS_CERT=str(cert), TLS_KEY=str(key))
    cert.chmod(0o644)
    key.chmod(0o600)
    preflight.check_tls(Settings.load(), 12345)
    preflight.check_tls(settings, key.stat().st_uid)
    with pytest.raises(UserError, match=rf"^TLS_KEY={key}: .*user 12345, .*\(`install -m 400 -o 12345 {key} COPY`\)"):
        preflight.check_tls(settings, 12345)


@pytest.mark.parametrize("has_image", [False, True])
def test_unreachable_torch_index_is_a_warning_before_the_first_build(machine, capsys, has_image):
    machine.has_image = has_image
    with socket.socket() as closed:  # bound, and not listening
        closed.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{closed.getsockname()[1]}/whl/cpu"
        preflight.warn_of_torch_index(index, "an-image")
    warned = f"TORCH_INDEX={index} does not answer here" in capsys.readouterr().err.replace("\n", "")
    assert warned is not has_image


# --- without Docker ---------------------------------------------------------------------------------------------------


class SupervisorStandIn:
    """Stands in for a supervisord whose programs run; stopping them fails the test."""

    def running(self) -> bool:
        return True

    def answers(self) -> bool:
        return True

    def stop(self) -> None:
        raise AssertionError("the running stack was stopped")


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("cuda", "PROFILE=cuda: CUDA finds no GPU on this machine. Install NVIDIA's driver .*, or set PROFILE=cpu"),
        ("neuron", "PROFILE=neuron: Python finds neither torch_neuronx nor torch_neuron here"),
        ("tpu", "PROFILE=tpu: must be one of cpu, cuda, neuron"),
    ],
)
def test_local_profile_without_its_device_restarts_nothing(monkeypatch, tmp_path, profile, message):
    monkeypatch.setattr(local_preflight, "gpu_count", lambda: 0)
    settings = Settings(Settings.load() | {"LOCAL_STATE": str(tmp_path), "PROFILE": profile})
    stack = LocalStack(settings)
    stack.supervisor = SupervisorStandIn()
    (tmp_path / "run").mkdir()
    stack.record.write_text(json.dumps({"settings": dict(settings) | {"PROFILE": "cpu"}, "programs": ["triton"]}))
    with pytest.raises(UserError, match=message):
        stack.up(["embedding"])


@pytest.mark.parametrize(
    ("packages", "passes"),
    [
        ({"torch": "2.13.0+cpu"}, False),
        ({}, False),
        ({"torch": "2.13.0+rocm7.1"}, False),
        ({"torch": "2.13.0"}, True),
        ({"torch": "2.13.0+cu130"}, True),
        ({"torch": "2.13.0+cpu", "onnxruntime-gpu": "1.31.1"}, True),
    ],
)
def test_local_cuda_needs_a_build_for_it(monkeypatch, packages, passes):
    monkeypatch.setattr(local_preflight, "gpu_count", lambda: 1)
    monkeypatch.setattr(local_preflight, "installed_version", lambda package: packages.get(package, ""))
    refused = pytest.raises(UserError, match="neither ONNX Runtime nor PyTorch is installed with CUDA here")
    with nullcontext() if passes else refused:
        local_preflight.check_device(Settings(Settings.load() | {"PROFILE": "cuda"}))


def test_installed_package_has_a_version():
    assert local_preflight.installed_version("pytest") == pytest.__version__
    assert local_preflight.installed_version("no-such-package") == ""


def test_local_profile_with_its_device_passes(monkeypatch):
    monkeypatch.setattr(local_preflight, "gpu_count", lambda: 1)
    monkeypatch.setattr(local_preflight, "has_cuda_build", lambda: True)
    monkeypatch.setattr(local_preflight.importlib.util, "find_spec", lambda name: object())
    for profile in ("cpu", "cuda", "neuron"):
        local_preflight.check_device(Settings(Settings.load() | {"PROFILE": profile}))


@pytest.mark.parametrize(("init", "count"), [(0, 2), (100, 0)])
def test_gpu_count_asks_the_driver(monkeypatch, init, count):
    """Read the driver's return code; 100 is CUDA_ERROR_NO_DEVICE."""

    def count_devices(reference):
        reference._obj.value = 2
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: init, cuDeviceGetCount=count_devices)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert local_preflight.gpu_count() == count


def test_gpu_count_is_zero_without_a_driver(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert local_preflight.gpu_count() == 0


@pytest.mark.parametrize("path", ["/tmp/two words", "/tmp/prüfung", "/tmp/it's"])
@pytest.mark.parametrize("name", ["LOCAL_STATE", "MODEL_REPOSITORY"])
def test_path_from_which_no_python_process_starts_is_an_error(name, path):
    local_preflight.check_paths(Settings.load().replace(**{name: "/srv/models-1.0"}))
    message = rf"^{name}={path}: Triton starts its Python .* Set {name} to a path of ASCII letters"
    with pytest.raises(UserError, match=message):
        local_preflight.check_paths(Settings.load().replace(**{name: path}))


def test_checkout_from_which_no_python_process_starts_is_an_error(monkeypatch):
    monkeypatch.setattr(local_preflight, "ROOT", Path("/tmp/prüfung"))
    with pytest.raises(UserError, match=r"^/tmp/prüfung: Triton starts .* Move this checkout to a path of ASCII"):
        local_preflight.check_paths(Settings.load())


def test_folder_that_cannot_be_written_is_an_error_with_its_setting(tmp_path):
    (tmp_path / "file").touch()
    settings = Settings.load().replace(LOCAL_STATE=str(tmp_path / "state"), REPORTS=str(tmp_path / "file/reports"))
    with pytest.raises(UserError, match=r"^REPORTS=.*/file/reports cannot be used \(Not a directory\): set REPORTS to"):
        local_preflight.make_folders(settings, "LOCAL_STATE", "REPORTS")
    assert (tmp_path / "state").is_dir()


def test_folder_of_another_user_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(local_preflight.os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"^REPORTS=.* cannot be used \(it is not writable\): set REPORTS to"):
        local_preflight.make_folders(Settings.load().replace(REPORTS=str(tmp_path)), "REPORTS")


def test_too_low_limit_of_open_files_is_an_error_with_the_limit(monkeypatch):
    def refuse(resource, limits):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(local_preflight.resource, "setrlimit", refuse)
    for limits in ((64, 1024), (-1, -1), (64, -1)):
        monkeypatch.setattr(local_preflight.resource, "getrlimit", lambda resource, now=limits: now)
        local_preflight.check_open_files()
    monkeypatch.setattr(local_preflight.resource, "getrlimit", lambda resource: (64, 64))
    with pytest.raises(UserError, match=r"allows a process 64 open files \(`ulimit -Hn`\), and the stack needs 1024"):
        local_preflight.check_open_files()


def test_free_ports_are_none_of_outgoing_connections():
    ports = free_ports(200)
    assert len(set(ports)) == 200
    assert 10_000 <= min(ports) <= max(ports) < outgoing_ports().start


def check_port(port: int) -> None:
    check_free(Settings.load().replace(PROMETHEUS_PORT=str(port)), ["PROMETHEUS_PORT"])


@pytest.fixture
def outgoing():
    """Return an outgoing connection, and the server's side of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client, accepted:
            yield client, accepted


def test_port_of_an_outgoing_connection_is_an_error_with_the_cause(outgoing):
    client, accepted = outgoing
    port = client.getsockname()[1]
    first, last = outgoing_ports()[0], outgoing_ports()[-1]
    with pytest.raises(
        UserError, match=rf"\(an outgoing connection of .*, pid {os.getpid()} uses it\): set PROM"
    ) as error:
        check_port(port)
    assert f"to a port outside {first}-{last}, which the kernel gives to outgoing connections" in str(error.value)
    client.close()
    assert accepted.recv(1) == b""  # the client closed first, so its side waits for late packets
    accepted.close()
    with pytest.raises(UserError, match=r"\(the kernel keeps it for a minute after an outgoing connection\): set PROM"):
        check_port(port)


def test_port_of_ended_connections_to_a_server_is_free():
    """The server's side waits for late packets. Servers open such a port with SO_REUSEADDR, and so does the check."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    accepted.close()
    assert client.recv(1) == b""
    client.close()
    check_port(port)
