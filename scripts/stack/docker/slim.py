"""Build one image with only what SYSTEMS need (make build TAG=), for a registry or a cloud that limits its size."""

from __future__ import annotations

import subprocess

from scripts.common.cli import out
from scripts.common.settings import ROOT, Settings, UserError
from scripts.models.backends import ENSEMBLE, by_model
from scripts.models.package import assembled_models

PROFILES = ("cpu", "cuda")
# `make deploy-oci` reads these labels, because it cannot look into the image.
LABEL = "io.triton-transformers.backends"
PROFILE_LABEL = "io.triton-transformers.profile"
# Nearly every cloud machine has this platform, whatever this machine has.
PLATFORM = "linux/amd64"
# Oracle Cloud checks a container's health by calling curl inside.
TOOLS = "curl"
OURS = ROOT / "images/triton/backends"
# The backends that run on torch and transformers, and on Python's ONNX Runtime.
TORCH = {"image_processor", "transformers"}
ONNX = {"packed_onnx"}
ARGUMENTS = (
    "DEBIAN_IMAGE",
    "TRITON_IMAGE",
    "TRITON_MIN_IMAGE",
    "TRANSFORMERS",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)


def build(settings: Settings, environment: dict[str, str]) -> None:
    profile = settings.choice("PROFILE", PROFILES)
    repository = settings.path("MODEL_REPOSITORY")
    for name in settings.words("SYSTEMS"):
        assembled_models(name, repository)  # before its export, a config need not name the backend
    backends = checked(by_model(settings.words("SYSTEMS"), repository, profile), profile, environment)
    if subprocess.run(command(settings["TAG"], profile, backends, environment), env=environment, cwd=ROOT).returncode:
        raise UserError("the build failed; Docker's message is above")
    out.print(f"{settings['TAG']}: {', '.join(backends)}")


def checked(models: dict[str, str], profile: str, environment: dict[str, str]) -> list[str]:
    """Return the models' backends; raise if one does not exist. The build itself checks those of NVIDIA's image."""
    for model, backend in models.items():
        if not backend:
            raise UserError(
                f"{model}: its config.pbtxt names no backend, and Triton cannot choose one by its files: add one"
            )
        known = backend in (ENSEMBLE, "python") or (OURS / backend).is_dir()
        if not known and base(profile, environment["TRITON_SOURCE"]) != "nvidia":
            raise UserError(f"{model} runs on the backend {backend}, which PyPI's Triton lacks: set TRITON_SOURCE=ngc")
    backends = sorted(set(models.values()) - {ENSEMBLE})
    if not backends:
        raise UserError("SYSTEMS names nothing that runs on a backend: name the systems that the image is to serve")
    return backends


def base(profile: str, source: str) -> str:
    """Return which Dockerfile.* builds this Triton."""
    return "nvidia" if profile == "cuda" or source == "ngc" else "debian"


def command(tag: str, profile: str, backends: list[str], environment: dict[str, str]) -> list[str]:
    source = environment["TRITON_SOURCE"]
    nvidia = base(profile, source) == "nvidia"
    arguments = {"BACKENDS": " ".join(backends), "TOOLS": TOOLS}
    if nvidia:
        arguments["PACKAGES"] = " ".join(packages(set(backends), profile, environment["TRANSFORMERS"]))
    names = [*ARGUMENTS, "TORCH_INDEX"] if profile == "cpu" else ARGUMENTS
    arguments |= {name: environment[name] for name in names if environment.get(name)}
    line = ["docker", "build", "--file", f"images/triton/Dockerfile.{base(profile, source)}", "--tag", tag]
    line += ["--target", "slim" if nvidia else f"cpu-{source}"]
    # DOCKER_DEFAULT_PLATFORM is Docker's own variable.
    line += ["--platform", environment.get("DOCKER_DEFAULT_PLATFORM") or PLATFORM]
    line += ["--label", f"{LABEL}={' '.join(backends)}", "--label", f"{PROFILE_LABEL}={profile}"]
    for name, value in arguments.items():
        line += ["--build-arg", f"{name}={value}"]
    for name, secret in (("BUILD_PIP_CONF", "pip_conf"), ("BUILD_CA", "ca")):
        if environment[name] != "/dev/null":
            line += ["--secret", f"id={secret},src={environment[name]}"]
    return [*line, "."]


def packages(backends: set[str], profile: str, transformers: str) -> list[str]:
    """Return the Python packages that these backends import."""
    names = ["numpy", "tokenizers"]
    if backends & ONNX:
        names += ["onnxruntime-gpu"] if profile == "cuda" else ["onnxruntime", "openvino"]
    if backends & TORCH:
        names += ["torch", "pillow", transformers]
    return names
