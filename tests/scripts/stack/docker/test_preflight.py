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
from tests.support.stacks import own_ports
from triton_transformers.ports import check_free, free_ports, outgoing_ports
from triton_transformers.settings import Settings, UserError


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a machine that has every requirement, for tests to remove one. A stand-in replaces the docker command."""
    info = {"Runtimes": {"runc": {}, "nvidia": {}}, "DockerRootDir": str(tmp_path)}
    state = SimpleNamespace(installed=True, info=info, compose="2.26.1", buildx=True, free_gb=100, has_image=False)

    def run(*command, timeout=60):
        output, succeeds = {
            "info": (json.dumps(state.info), True),
            "compose": (state.compose, state.compose),
            "buildx": ("", state.buildx),
            "image": ("", state.has_image),
        }[command[1]]
        return subprocess.CompletedProcess(command, int(not succeeds), output, "")

    monkeypatch.setattr(preflight, "run", run)
    monkeypatch.setattr(preflight.shutil, "which", lambda name: f"/usr/bin/{name}" if state.installed else None)
    monkeypatch.setattr(preflight, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(free=state.free_gb * 2**30))
    return state


def check(**settings):
    complete = Settings.load().replace(**{"PROFILE": "cuda"} | settings)
    preflight.check_device(complete, preflight.check_build(complete, "nvidia/triton:1"))


def make_devices(count):
    preflight.DEVICES.mkdir()
    for number in range(count):
        (preflight.DEVICES / f"neuron{number}").touch()


NEURON = {"PROFILE": "neuron"}
SETUP = "there is no /dev/neuron0 here. .*`sudo scripts/neuron/setup-host.sh` installs .*, else set PROFILE=cpu"
TOO_FEW = "there is no /dev/neuron2 here, only /dev/neuron0, /dev/neuron1. Set NEURON_DEVICES=2, or run"


@pytest.mark.parametrize(
    ("machine_has", "devices", "settings", "message"),
    [
        ({}, 0, {}, ""),
        ({}, 0, {"PROFILE": "cpu"}, ""),
        ({"installed": False}, 0, {}, "docker is not installed"),
        ({"info": {"ServerErrors": ["Cannot connect"]}}, 0, {}, r"does not answer \(Cannot connect\)"),
        ({"compose": ""}, 0, {}, "no compose plugin"),
        ({"compose": "2.20.1"}, 0, {}, "2.20.1 is too old: install 2.26"),
        ({"compose": "1.29.2"}, 0, {}, "too old"),
        ({"compose": "v2.26.0"}, 0, {}, ""),
        ({"compose": "5.0.1"}, 0, {}, ""),
        ({"buildx": False}, 0, {}, ""),
        ({"buildx": False, "compose": "2.37.0"}, 0, {}, "no buildx plugin"),
        ({"info": {"Runtimes": {"runc": {}}}}, 0, {}, "no NVIDIA runtime"),
        ({"info": {"Runtimes": {"runc": {}}}}, 0, {"PROFILE": "cpu"}, ""),
        ({"free_gb": 20}, 0, {}, "45 GB, and .* has 20 GB free"),
        ({"free_gb": 20}, 0, {"PROFILE": "cpu", "TRITON_SOURCE": "ngc"}, "45 GB, and .* has 20 GB free"),
        ({"free_gb": 20, "has_image": True}, 0, {}, ""),
        ({}, 0, NEURON, SETUP),
        ({}, 2, NEURON, ""),
        ({}, 2, NEURON | {"NEURON_DEVICES": "2"}, ""),
        ({}, 2, NEURON | {"NEURON_DEVICES": "4"}, f"NEURON_DEVICES=4: {TOO_FEW}"),
        ({}, 2, NEURON | {"NEURON_DEVICES": "0"}, "NEURON_DEVICES=0 is for `make models` alone"),
    ],
)
def test_missing_requirement_of_docker_is_one_sentence(machine, machine_has, devices, settings, message):
    vars(machine).update(machine_has)
    make_devices(devices)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check(**settings)


@pytest.mark.parametrize(
    ("devices", "settings", "message"),
    [
        (0, {"NEURON_DEVICES": "0"}, ""),
        (0, {}, "no /dev/neuron0 here. .*, else set NEURON_DEVICES=0 to compile without a device"),
        (0, {"NEURON_CHIP": "inf1", "NEURON_DEVICES": "0"}, "NEURON_CHIP=inf1: `make models` compiles for inf2"),
        (1, {}, ""),
    ],
)
def test_compiling_needs_a_device_or_no_check(machine, devices, settings, message):
    make_devices(devices)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        preflight.check_compiling(Settings.load().replace(PROFILE="neuron", **settings))


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


@pytest.mark.parametrize(
    ("profile", "gpus", "packages", "message"),
    [
        ("cuda", 0, {}, "PROFILE=cuda: CUDA finds no GPU on this machine. Install NVIDIA's .*, or set PROFILE=cpu"),
        ("cuda", 1, {}, "neither ONNX Runtime nor PyTorch is installed with CUDA here"),
        ("cuda", 1, {"torch": "2.13.0+cpu"}, "neither ONNX Runtime nor PyTorch"),
        ("cuda", 1, {"torch": "2.13.0+rocm7.1"}, "neither ONNX Runtime nor PyTorch"),
        ("cuda", 1, {"torch": "2.13.0"}, ""),
        ("cuda", 1, {"torch": "2.13.0+cu130"}, ""),
        ("cuda", 1, {"torch": "2.13.0+cpu", "onnxruntime-gpu": "1.31.1"}, ""),
        ("neuron", 0, {}, "PROFILE=neuron: Python finds neither torch_neuronx nor torch_neuron here"),
        ("neuron", 0, {"torch_neuron": "1"}, ""),
        ("cpu", 0, {}, ""),
    ],
)
def test_missing_device_without_docker_is_one_sentence(monkeypatch, profile, gpus, packages, message):
    monkeypatch.setattr(local_preflight, "gpu_count", lambda: gpus)
    monkeypatch.setattr(local_preflight, "installed_version", lambda package: packages.get(package, ""))
    monkeypatch.setattr(local_preflight.importlib.util, "find_spec", packages.get)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        local_preflight.check_device(Settings.load().replace(PROFILE=profile))


def test_profile_without_its_device_restarts_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(local_preflight, "gpu_count", lambda: 0)
    settings = Settings.load().replace(LOCAL_STATE=str(tmp_path), PROFILE="cuda", **own_ports())
    stack = LocalStack(settings)
    stack.supervisor = SimpleNamespace(running=lambda: True, answers=lambda: True)  # it cannot be stopped
    (tmp_path / "run").mkdir()
    stack.record.write_text(json.dumps({"settings": dict(settings) | {"PROFILE": "cpu"}, "programs": ["triton"]}))
    with pytest.raises(UserError, match="PROFILE=cuda: CUDA finds no GPU"):
        stack.up(["embedding"])


def test_installed_package_has_a_version():
    assert local_preflight.installed_version("pytest") == pytest.__version__
    assert local_preflight.installed_version("no-such-package") == ""


@pytest.mark.parametrize(("init", "count"), [(0, 2), (100, 0), (None, 0)])
def test_gpu_count_asks_the_driver(monkeypatch, init, count):
    """Read the driver's return code; 100 is CUDA_ERROR_NO_DEVICE. None: there is no driver."""

    def count_devices(reference):
        reference._obj.value = 2
        return 0

    def load(name):
        if init is None:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuInit=lambda flags: init, cuDeviceGetCount=count_devices)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert local_preflight.gpu_count() == count


@pytest.mark.parametrize("path", ["/tmp/two words", "/tmp/prüfung", "/tmp/it's"])
def test_path_from_which_no_python_process_starts_is_an_error(monkeypatch, path):
    message = rf"{path}: Triton starts its Python .* {{}} to a path of ASCII letters"
    for name in ("LOCAL_STATE", "MODEL_REPOSITORY"):
        local_preflight.check_paths(Settings.load().replace(**{name: "/srv/models-1.0"}))
        with pytest.raises(UserError, match=f"^{name}=" + message.format(f"Set {name}")):
            local_preflight.check_paths(Settings.load().replace(**{name: path}))
    monkeypatch.setattr(local_preflight, "ROOT", Path(path))
    with pytest.raises(UserError, match="^" + message.format("Move this checkout")):
        local_preflight.check_paths(Settings.load())


def test_folder_that_cannot_be_written_is_an_error_with_its_setting(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    settings = Settings.load().replace(LOCAL_STATE=str(tmp_path / "state"), REPORTS=str(tmp_path / "file/reports"))
    with pytest.raises(UserError, match=r"^REPORTS=.*/file/reports cannot be used \(Not a directory\): set REPORTS to"):
        local_preflight.make_folders(settings, "LOCAL_STATE", "REPORTS")
    assert (tmp_path / "state").is_dir()
    monkeypatch.setattr(local_preflight.os, "access", lambda path, mode: False)  # it is another user's
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


# --- ports ------------------------------------------------------------------------------------------------------------


def test_free_ports_are_none_of_outgoing_connections():
    ports = free_ports(200)
    assert len(set(ports)) == 200
    assert 10_000 <= min(ports) <= max(ports) < outgoing_ports().start


def check_port(port: int) -> None:
    check_free(Settings.load().replace(PROMETHEUS_PORT=str(port)), ["PROMETHEUS_PORT"])


def test_port_of_a_connection_is_refused_with_the_cause_on_the_clients_side_alone():
    """Servers open a port of ended connections with SO_REUSEADDR, and so does the check."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        # Without an address of its own, it may share its port with a connection to elsewhere.
        client = socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0))
        accepted, _ = server.accept()
        port = client.getsockname()[1]
        first, last = outgoing_ports()[0], outgoing_ports()[-1]
        used = rf"\(an outgoing connection of .*, pid {os.getpid()} uses it\): set PROMETHEUS_PORT .* to a port outside"
        with accepted, client, pytest.raises(UserError, match=rf"{used} {first}-{last}, which the kernel gives"):
            check_port(port)
    # The client closed first, so its side waits for late packets.
    with pytest.raises(UserError, match=r"\(the kernel keeps it for a minute after an outgoing connection\): set PROM"):
        check_port(port)
    with socket.create_server(("127.0.0.1", 0)) as server:
        served = server.getsockname()[1]
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    accepted.close()
    assert client.recv(1) == b""  # the server closed first
    client.close()
    check_port(served)
