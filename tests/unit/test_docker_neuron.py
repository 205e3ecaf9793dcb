"""PROFILE=neuron under Docker: devices, images and exporter, as compose reads them. No engine is asked."""

import contextlib
import json
import os
import shutil
import signal
import subprocess

import pytest

from scripts.common.settings import ROOT, Settings, UserError
from scripts.stack.docker.stack import NEURON_SERVICES, DockerStack

PINS = {"inf2": "TRITON_IMAGE", "trn1": "TRITON_IMAGE", "inf1": "TRITON_INF1_IMAGE"}


@pytest.fixture
def stack(tmp_path, monkeypatch):
    """Makes one, with settings. A rootful engine of this machine is taken for granted."""
    monkeypatch.setattr("scripts.stack.docker.preflight.check_engine", dict)

    def make(**settings):
        for name in Settings.load():
            monkeypatch.delenv(name, raising=False)
        state = {"PROFILE": "neuron", "LOCAL_STATE": str(tmp_path / "state"), "MODEL_REPOSITORY": str(tmp_path)}
        return DockerStack(Settings(Settings.load() | state | settings))

    return make


@pytest.fixture
def composed():
    """The services as compose understands what it is given."""
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed here")

    def services(stack):
        line = stack.command("config", "--format", "json", profile="*")
        nowhere = {"DOCKER_HOST": "unix:///nowhere.sock"}
        done = subprocess.run(line, env=stack.environment | nowhere, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)["services"]

    return services


@pytest.mark.parametrize("count", [0, 1, 2, 12])
def test_as_many_devices_as_are_said(stack, composed, count):
    services = composed(stack(NEURON_DEVICES=str(count)))
    expected = [f"/dev/neuron{number}" for number in range(count)]
    for service in NEURON_SERVICES:
        devices = services[service].get("devices") or []
        assert [each["source"] for each in devices] == [each["target"] for each in devices] == expected
    assert [name for name, service in services.items() if service.get("devices") and name not in NEURON_SERVICES] == []


def test_the_limits_are_for_neuron_alone(stack, composed):
    services = composed(stack())
    limited = {name: service["ulimits"] for name, service in services.items() if service.get("ulimits")}
    limits = {"memlock": -1, "stack": 67108864}
    assert limited == {"triton-neuron": limits, "exporter-neuron": limits}


@pytest.mark.parametrize("chip", PINS)
def test_each_chip_has_its_image(stack, composed, chip):
    made = stack(NEURON_CHIP=chip)
    services = composed(made)
    target = "neuron-inf1" if chip == "inf1" else "neuron"
    triton = services["triton-neuron"]
    assert triton["image"] == services["neuron-monitor"]["image"] == f"triton-transformers:{target}"
    assert triton["build"]["target"] == target
    assert triton["build"]["args"]["TRITON_IMAGE"] == made.pins[PINS[chip]]
    assert f"AS {target}\n" in (ROOT / "images/triton/Dockerfile").read_text()
    assert made.environment["TRITON_IMAGE_BUILT"] == triton["image"]


def test_other_profiles_are_left_to_compose(stack, composed):
    made = stack(PROFILE="cuda", NEURON_CHIP="inf1")
    assert "--file" not in made.command("up")
    assert composed(made)["triton-cuda"]["build"]["args"]["TRITON_IMAGE"] == made.pins["TRITON_IMAGE"]
    assert not made.state.exists()


def test_a_chip_that_there_is_not(stack):
    with pytest.raises(UserError, match="NEURON_CHIP=inf3: must be one of inf1, inf2, trn1"):
        stack(NEURON_CHIP="inf3").environment  # noqa: B018


def test_what_the_exporter_is_told(stack, composed):
    made = stack(NEURON_DEVICES="0", NEURON_LENGTHS="16 64")
    services = composed(made)
    plain, neuron = services["exporter"], services["exporter-neuron"]
    told = {name: value for name, value in made.settings.items() if name == "PROFILE" or name.startswith("NEURON_")}
    assert neuron["environment"] == plain["environment"] | told
    for same in ("volumes", "user", "read_only", "cap_drop", "restart"):
        assert neuron[same] == plain[same]
    assert neuron["build"]["target"] == "neuron-exporter"


@pytest.mark.parametrize(
    ("settings", "exporter"),
    [({}, "exporter-neuron"), ({"LIST": "1"}, "exporter"), ({"PROFILE": "cpu"}, "exporter")],
)
def test_who_makes_the_models(stack, settings, exporter):
    assert stack(**settings).exporter == exporter


@pytest.mark.parametrize(
    ("monitor", "exporter"),
    [("exit 0", "while read -r; do :; done; sleep 60"), ("while echo a line; do sleep 0.01; done", "exit 0")],
    ids=["the monitor ends", "what tells Prometheus ends"],
)
def test_the_monitor_ends_with_either_of_its_two(stack, composed, tmp_path, monitor, exporter):
    """Stand-ins for AWS's programs: one that ends and one that would not."""
    command = composed(stack())["neuron-monitor"]["entrypoint"]
    for name, does in (("neuron-monitor", monitor), ("python3", exporter)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, process_group=0) as process:
        try:
            process.wait(timeout=10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
