"""make build TAG=: one image of Triton with just what SYSTEMS need, for a registry or a cloud that bounds its size."""

from __future__ import annotations

import subprocess

from scripts.common.cli import out
from scripts.common.settings import ROOT, Settings, UserError
from scripts.models.backends import ENSEMBLE, by_model
from scripts.models.package import assembled

PROFILES = ("cpu", "cuda")
# Read by whoever deploys the image, who cannot look into it.
LABEL = "io.triton-transformers.backends"
PROFILE_LABEL = "io.triton-transformers.profile"
# What nearly every cloud machine is, whatever this one is.
PLATFORM = "linux/amd64"
# Asked for by those who run the image: Oracle Cloud's own check of a container's health is a call of it.
TOOLS = "curl"
OURS = ROOT / "images/triton/backends"
# The backends that run on torch and transformers, and on Python's ONNX Runtime.
TORCH = {"image_processor", "transformers"}
ONNX = {"packed_onnx"}


def build(settings: Settings, environment: dict[str, str]) -> None:
    profile = settings.choice("PROFILE", PROFILES)
    repository = settings.path("MODEL_REPOSITORY")
    for name in settings.words("SYSTEMS"):
        assembled(name, repository)  # what an exported model runs on, its config may not say
    backends = checked(by_model(settings.words("SYSTEMS"), repository), profile, environment)
    done = subprocess.run(command(settings["TAG"], profile, backends, environment), env=environment, cwd=ROOT)
    if done.returncode:
        raise UserError("the build failed; what it said is above")
    out.print(f"{settings['TAG']}: {', '.join(backends)}")


def checked(models: dict[str, str], profile: str, environment: dict[str, str]) -> list[str]:
    """The backends of the models, all of which there are. What NVIDIA's image has, the build finds out."""
    for model, backend in models.items():
        if not backend:
            raise UserError(f"{model} does not say which backend it runs on, and has no file that Triton knows it by")
        if backend not in (ENSEMBLE, "python") and not (OURS / backend).is_dir() and not nvidias(profile, environment):
            raise UserError(
                f"{model} runs on the backend {backend}, which PyPI's Triton has not got: say TRITON_SOURCE=ngc"
            )
    found = sorted(set(models.values()) - {ENSEMBLE})
    if not found:
        raise UserError("SYSTEMS names nothing that runs on a backend: name what the image is to serve")
    return found


def nvidias(profile: str, environment: dict[str, str]) -> bool:
    return profile == "cuda" or environment["TRITON_SOURCE"] == "ngc"


def command(tag: str, profile: str, backends: list[str], environment: dict[str, str]) -> list[str]:
    nvidia = nvidias(profile, environment)
    arguments = {"BACKENDS": " ".join(backends), "TOOLS": TOOLS}
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
    # The variable is Docker's own.
    line += ["--platform", environment.get("DOCKER_DEFAULT_PLATFORM") or PLATFORM]
    line += ["--label", f"{LABEL}={' '.join(backends)}", "--label", f"{PROFILE_LABEL}={profile}"]
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
