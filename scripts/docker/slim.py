"""make build TAG=: one image of Triton with just what SYSTEMS need, for a registry or a cloud that bounds its size."""

from __future__ import annotations

import subprocess

from scripts.cli import out
from scripts.models.backends import needed
from scripts.models.package import assembled
from scripts.settings import ROOT, Settings, UserError

PROFILES = ("cpu", "cuda")
# Read by whoever deploys the image, who cannot look into it.
LABEL = "io.triton-transformers.backends"
# What the backends import that NVIDIA's images do not have.
TORCH = {"image_processor", "transformers"}
ONNX = {"packed_onnx"}


def build(settings: Settings, environment: dict[str, str]) -> None:
    profile = settings.choice("PROFILE", PROFILES)
    repository = settings.path("MODEL_REPOSITORY")
    for name in settings.words("SYSTEMS"):
        assembled(name, repository)  # what an exported model runs on, its config may not say
    backends = sorted(needed(settings.words("SYSTEMS"), repository))
    done = subprocess.run(command(settings["TAG"], profile, backends, environment), env=environment, cwd=ROOT)
    if done.returncode:
        raise UserError("the build failed; what it said is above")
    out.print(f"{settings['TAG']}: {', '.join(backends)}")


def command(tag: str, profile: str, backends: list[str], environment: dict[str, str]) -> list[str]:
    nvidia = profile == "cuda" or environment["TRITON_SOURCE"] == "ngc"
    arguments = {"BACKENDS": " ".join(backends)}
    if nvidia:
        arguments["PACKAGES"] = " ".join(packages(set(backends), profile, environment["TRANSFORMERS"]))
    names = [
        "DEBIAN_IMAGE",
        "TRITON_IMAGE",
        "TRITON_MIN_IMAGE",
        "TRANSFORMERS",
        "http_proxy",
        "https_proxy",
        "no_proxy",
    ]
    if profile == "cpu":
        names.append("TORCH_INDEX")
    arguments |= {name: environment[name] for name in names if environment.get(name)}
    line = ["docker", "build", "--file", "images/triton/Dockerfile", "--tag", tag]
    line += ["--target", "nvidia-slim" if nvidia else f"cpu-{environment['TRITON_SOURCE']}"]
    line += ["--label", f"{LABEL}={' '.join(backends)}"]
    for name, value in arguments.items():
        line += ["--build-arg", f"{name}={value}"]
    for name, secret in (("BUILD_PIP_CONF", "pip_conf"), ("BUILD_CA", "ca")):
        if environment[name] != "/dev/null":
            line += ["--secret", f"id={secret},src={environment[name]}"]
    return [*line, "."]


def packages(backends: set[str], profile: str, transformers: str) -> list[str]:
    found = ["numpy", "tokenizers"]
    if backends & ONNX:
        found.append("onnxruntime-gpu" if profile == "cuda" else "onnxruntime")
    if backends & TORCH:
        found += ["torch", "pillow", transformers]
    return found
