"""What is missing on this machine before compose would only fail on it, in plain words."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from scripts.settings import Settings, UserError

LEAST_COMPOSE = (2, 20)  # depends_on with required: false
# NVIDIA's image is 15 GB, its layers as they are downloaded as much again, and torch comes on top.
NVIDIA_IMAGE_GB = 45


def check(settings: Settings, pins: dict[str, str]) -> None:
    engine = check_engine()
    check_compose()
    profile = settings["PROFILE"]
    if profile == "cuda" and "nvidia" not in engine.get("Runtimes", {}):
        raise UserError(
            "PROFILE=cuda: this Docker engine has no NVIDIA runtime; install the NVIDIA Container Toolkit, "
            "or say PROFILE=cpu"
        )
    if profile == "neuron" and not Path("/dev/neuron0").exists():
        raise UserError(
            "PROFILE=neuron: there is no /dev/neuron0 here; the Neuron driver is not loaded, or PROFILE=cpu"
        )
    if profile != "cpu" or settings["TRITON_SOURCE"] == "ngc":
        check_disk(Path(engine.get("DockerRootDir", "")), pins["TRITON_IMAGE"])


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
    if tuple(map(int, found.groups())) < LEAST_COMPOSE:
        least = ".".join(map(str, LEAST_COMPOSE))
        raise UserError(f"docker compose {done.stdout.strip()} is too old: {least} is the least, or say RUNTIME=local")


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


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
