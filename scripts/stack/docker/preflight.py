"""Checks before compose runs: whatever this machine lacks becomes one sentence with the remedy."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from triton_transformers.cli import err
from triton_transformers.settings import Settings, UserError

MIN_COMPOSE = (2, 26)  # the oldest release that we tried
# Since this release compose builds only through buildx.
COMPOSE_NEEDS_BUILDX = (2, 37)
# NVIDIA's image is 15 GB, its downloaded layers as much again, and torch comes on top. The one with vLLM is larger, has
# torch, and is downloaded as 10.65 GB.
NVIDIA_IMAGE_GB = 45
DEVICES = Path("/dev")


def check_build(settings: Settings, nvidia_image: str) -> dict:
    """Raise if the images of the profile cannot be built here; return what `docker info` reports."""
    engine = check_engine()
    check_compose()
    if settings.profile != "cpu" or settings.triton_source == "ngc":
        check_disk(Path(engine.get("DockerRootDir", "")), nvidia_image)
    return engine


def check_device(settings: Settings, engine: dict) -> None:
    if settings.profile == "cuda" and "nvidia" not in engine.get("Runtimes", {}):
        raise UserError(
            "PROFILE=cuda: this Docker engine has no NVIDIA runtime. Install the NVIDIA Container Toolkit, "
            "or set PROFILE=cpu"
        )
    if settings.profile == "neuron":
        if not settings.neuron_devices:
            raise UserError("NEURON_DEVICES=0 is for `make models` alone: serving needs at least one device")
        check_neuron_devices(settings, "set PROFILE=cpu")


def check_compiling(settings: Settings) -> None:
    """Raise if `make models PROFILE=neuron` cannot compile."""
    if settings.neuron_chip == "inf1":
        raise UserError(
            "NEURON_CHIP=inf1: `make models` compiles for inf2 and trn1. For a model that you compiled with "
            "torch.neuron.trace, use scripts/neuron/gen_triton_model.py (docs/accelerators.md)"
        )
    check_neuron_devices(settings, "set NEURON_DEVICES=0 to compile without a device")


def check_neuron_devices(settings: Settings, otherwise: str) -> None:
    required = neuron_devices(settings)
    present = [device for device in required if (DEVICES / Path(device).name).exists()]
    missing = [device for device in required if device not in present]
    if missing and not present:
        raise UserError(
            f"PROFILE=neuron: there is no {missing[0]} here. On an Inf1, Inf2 or Trn1 instance "
            f"`sudo scripts/neuron/setup-host.sh` installs the driver, else {otherwise}"
        )
    if missing:
        raise UserError(
            f"NEURON_DEVICES={len(required)}: there is no {missing[0]} here, only {', '.join(present)}. Set "
            f"NEURON_DEVICES={len(present)}, or run `sudo scripts/neuron/setup-host.sh`, which reports on the driver"
        )


def neuron_devices(settings: Settings) -> list[str]:
    """Return the devices that the containers get."""
    return [f"/dev/neuron{number}" for number in range(settings.neuron_devices)]


def check_engine() -> dict:
    if not shutil.which("docker"):
        raise UserError("docker is not installed: install Docker Engine with compose v2, or set RUNTIME=local")
    done = run("docker", "info", "--format", "{{json .}}")
    info = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    if done.returncode or info.get("ServerErrors"):
        why = "; ".join(info.get("ServerErrors") or []) or done.stderr.strip()
        raise UserError(f"the Docker engine does not answer ({why}): start it, or set RUNTIME=local")
    return info


def check_compose() -> None:
    done = run("docker", "compose", "version", "--short")
    match = re.match(r"v?(\d+)\.(\d+)", done.stdout)
    if done.returncode or not match:
        raise UserError("docker has no compose plugin: install docker-compose-plugin (v2), or set RUNTIME=local")
    version = tuple(map(int, match.groups()))
    if version < MIN_COMPOSE:
        minimum = ".".join(map(str, MIN_COMPOSE))
        raise UserError(
            f"docker compose {done.stdout.strip()} is too old: install {minimum} or later, or set RUNTIME=local"
        )
    if version >= COMPOSE_NEEDS_BUILDX and run("docker", "buildx", "version").returncode:
        raise UserError("docker has no buildx plugin: install docker-buildx-plugin, or set RUNTIME=local")


def check_readable(folder: Path) -> None:
    """Raise if another user, as the containers are, cannot read the folder: a strict umask makes such checkouts."""
    for path in (folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):  # not assembled yet, or `make models` just moved it
            if path.stat().st_mode & 0o004 == 0:
                raise UserError(f"only its owner may read {path}, and containers must, too: chmod -R a+rX {folder}")


def check_tls(settings: Settings, user: int) -> None:
    """Raise if the gateway's container, which runs as this user, cannot read the certificate or its key."""
    if not settings.tls():
        return
    for name in ("TLS_CERT", "TLS_KEY"):
        path = settings.value(name)
        status = path.stat()
        if not status.st_mode & 0o004 and not (status.st_uid == user and status.st_mode & 0o400):
            raise UserError(
                f"{name}={settings[name]}: the gateway's container runs as user {user}, which may not read this file. "
                f"Make a copy for it (`install -m 400 -o {user} {path} COPY`), and set {name} to the copy"
            )


def check_disk(folder: Path, image: str) -> None:
    """Raise if NVIDIA's image does not fit. A remote engine, and an image that is already there, pass."""
    if not folder.is_dir() or run("docker", "image", "inspect", image).returncode == 0:
        return
    free = shutil.disk_usage(folder).free / 2**30
    if free < NVIDIA_IMAGE_GB:
        raise UserError(
            f"{image} and what is built on it take {NVIDIA_IMAGE_GB} GB, and {folder} has {free:.0f} GB free: "
            "free some disk, or use PROFILE=cpu with TRITON_SOURCE=pypi"
        )


def warn_of_torch_index(index: str, image: str) -> None:
    """Warn if the index does not answer: the build would take PyTorch from PyPI.

    Only a warning, because the build may reach what this shell does not.
    """
    if run("docker", "image", "inspect", image).returncode == 0:
        return
    try:
        urllib.request.urlopen(index, timeout=5).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        if not isinstance(getattr(error, "reason", error), ssl.SSLError):  # BUILD_CA may know its certificate
            err.print(
                f"[yellow]TORCH_INDEX={index} does not answer here.[/] If it does not answer in the build either, "
                "PyTorch comes from PyPI, perhaps with CUDA (3 GB more): set TORCH_INDEX to a mirror"
            )


def run(*command: str, timeout: float | None = 60) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"`{' '.join(command[:3])}` did not end within {timeout:.0f} s: check the Docker engine with `docker info`"
        ) from None
