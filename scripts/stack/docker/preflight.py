"""What is missing on this machine before compose would only fail on it, in plain words."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from scripts.common.cli import err
from scripts.common.settings import Settings, UserError

LEAST_COMPOSE = (2, 26)  # the oldest that this was tried with
# From here on compose builds through buildx alone.
COMPOSE_WANTS_BUILDX = (2, 37)
# NVIDIA's image is 15 GB, its layers as they are downloaded as much again, and torch comes on top.
NVIDIA_IMAGE_GB = 45
DEVICES = Path("/dev")


def check_build(settings: Settings, nvidia_image: str) -> dict:
    """Can the images of the profile be built here? What the engine says of itself."""
    engine = check_engine()
    check_compose()
    if settings["PROFILE"] != "cpu" or settings["TRITON_SOURCE"] == "ngc":
        check_disk(Path(engine.get("DockerRootDir", "")), nvidia_image)
    return engine


def check_device(settings: Settings, engine: dict) -> None:
    if settings["PROFILE"] == "cuda" and "nvidia" not in engine.get("Runtimes", {}):
        raise UserError(
            "PROFILE=cuda: this Docker engine has no NVIDIA runtime; install the NVIDIA Container Toolkit, "
            "or say PROFILE=cpu"
        )
    if settings["PROFILE"] == "neuron":
        if not settings.integer("NEURON_DEVICES"):
            raise UserError("NEURON_DEVICES=0 is for `make models` alone: serving takes at least one device")
        check_neuron_devices(settings, "say PROFILE=cpu")


def check_compiling(settings: Settings) -> None:
    """For `make models` with PROFILE=neuron."""
    if settings["NEURON_CHIP"] == "inf1":
        raise UserError(
            "NEURON_CHIP=inf1: `make models` compiles for inf2 and trn1; what torch.neuron.trace made elsewhere, "
            "scripts/neuron/gen_triton_model.py makes a model of (docs/neuron.md)"
        )
    check_neuron_devices(settings, "say NEURON_DEVICES=0 to compile without a device")


def check_neuron_devices(settings: Settings, otherwise: str) -> None:
    wanted = neuron_devices(settings)
    there = [device for device in wanted if (DEVICES / Path(device).name).exists()]
    missing = [device for device in wanted if device not in there]
    if missing and not there:
        raise UserError(
            f"PROFILE=neuron: there is no {missing[0]} here; on an Inf1, Inf2 or Trn1 instance "
            f"`sudo scripts/neuron/setup-host.sh` installs the driver, else {otherwise}"
        )
    if missing:
        raise UserError(
            f"NEURON_DEVICES={len(wanted)}: there is no {missing[0]} here, only {', '.join(there)}; "
            f"say NEURON_DEVICES={len(there)}, or see what `sudo scripts/neuron/setup-host.sh` says of the driver"
        )


def neuron_devices(settings: Settings) -> list[str]:
    """Those the containers are to get."""
    return [f"/dev/neuron{number}" for number in range(settings.integer("NEURON_DEVICES"))]


def check_engine() -> dict:
    if not shutil.which("docker"):
        raise UserError("docker is not installed: install Docker Engine with compose v2, or say RUNTIME=local")
    done = run("docker", "info", "--format", "{{json .}}")
    info = json.loads(done.stdout or "{}") if done.stdout.startswith("{") else {}
    if done.returncode or info.get("ServerErrors"):
        why = "; ".join(info.get("ServerErrors") or []) or done.stderr.strip()
        raise UserError(f"the Docker engine does not answer ({why}): start it, or say RUNTIME=local")
    return info


def check_compose() -> None:
    done = run("docker", "compose", "version", "--short")
    found = re.match(r"v?(\d+)\.(\d+)", done.stdout)
    if done.returncode or not found:
        raise UserError("docker has no compose plugin: install docker-compose-plugin (v2), or say RUNTIME=local")
    version = tuple(map(int, found.groups()))
    if version < LEAST_COMPOSE:
        least = ".".join(map(str, LEAST_COMPOSE))
        raise UserError(f"docker compose {done.stdout.strip()} is too old: {least} is the least, or say RUNTIME=local")

    if version >= COMPOSE_WANTS_BUILDX and run("docker", "buildx", "version").returncode:
        raise UserError("docker has no buildx plugin: install docker-buildx-plugin, or say RUNTIME=local")


def check_readable(folder: Path) -> None:
    """What containers of another user are to read, of a checkout made under a strict umask."""
    for path in (folder, *folder.rglob("*")):
        if path.stat().st_mode & 0o004 == 0:
            raise UserError(f"{path} may be read by its owner only, and not in containers: chmod -R a+rX {folder}")


def check_disk(folder: Path, image: str) -> None:
    """Only where the engine is this machine's and the image is yet to come."""
    if not folder.is_dir() or run("docker", "image", "inspect", image).returncode == 0:
        return
    free = shutil.disk_usage(folder).free / 2**30
    if free < NVIDIA_IMAGE_GB:
        raise UserError(
            f"{image} and what is built on it take {NVIDIA_IMAGE_GB} GB, and {folder} has {free:.0f} GB free: "
            "make room, or use PROFILE=cpu with TRITON_SOURCE=pypi"
        )


def warn_of_torch_index(index: str, image: str) -> None:
    """pip asks one that does not answer for minutes, at each package. Only said: the build may have ways of its own."""
    if run("docker", "image", "inspect", image).returncode == 0:
        return
    try:
        urllib.request.urlopen(index, timeout=5).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        if not isinstance(getattr(error, "reason", error), ssl.SSLError):  # BUILD_CA may know its certificate
            err.print(
                f"[yellow]TORCH_INDEX={index} does not answer here.[/] If it does not in the build either, that takes "
                "long and may fail: set TORCH_INDEX to a mirror of it, or to PyPI's (for CUDA, 3 GB more)"
            )


def run(*command: str, timeout: float | None = 60) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"`{' '.join(command[:3])}` did not end within {timeout:.0f} s: is the Docker engine well?"
        ) from None
