"""Build one image with only what SYSTEMS need (make build TAG=), for a registry or a cloud that limits its size."""

from __future__ import annotations

import subprocess
from collections.abc import Collection

from export.backends import ENSEMBLE, by_model, engines
from export.package import assembled_models
from triton_transformers.cli import out
from triton_transformers.engines import TRANSFORMERS, TextEngine
from triton_transformers.settings import ROOT, Settings, UserError

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
TORCH = {"image_processor", "pipeline", "transformers"}
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
    """Build the image of TAG, and print the backends in it."""
    profile = settings.choice("PROFILE", PROFILES)
    repository = settings.model_repository
    for name in settings.systems:
        assembled_models(name, repository)  # raises: before its export, a config need not name the backend
    systems = settings.systems
    backends = checked(by_model(systems, repository, profile), profile, environment)
    used = engines(systems, repository, profile)
    line = command(settings.tag, profile, backends, environment, used)
    if subprocess.run(line, env=environment, cwd=ROOT).returncode:
        raise UserError("the build failed; Docker's message is above")
    out.print(f"{settings.tag}: {', '.join(backends)}")


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


def dockerfile(profile: str, source: str) -> str:
    return f"images/triton/Dockerfile.{base(profile, source)}"


def image_of(engines: Collection[TextEngine]) -> str:
    """Return the target of the only image that has one of these engines, if there is one."""
    return next((engine.image for engine in engines if engine.image), "")


def needs_torch(backends: Collection[str], engines: Collection[TextEngine]) -> bool:
    return bool(TORCH & {*backends}) or any(engine.needs_torch for engine in engines)


def target(profile: str, source: str, engines: Collection[TextEngine]) -> str:
    """Return the target of the Dockerfile."""
    if image := image_of(engines):
        return image
    return "slim" if base(profile, source) == "nvidia" else f"cpu-{source}"


def command(
    tag: str, profile: str, backends: list[str], environment: dict[str, str], engines: Collection[TextEngine] = ()
) -> list[str]:
    source = environment["TRITON_SOURCE"]
    chosen = target(profile, source, engines)
    arguments = {} if image_of(engines) else {"BACKENDS": " ".join(backends), "TOOLS": TOOLS}
    if chosen == "slim":
        arguments["PACKAGES"] = " ".join(packages({*backends}, engines, profile, environment["TRANSFORMERS"]))
    names = [*ARGUMENTS, "TORCH_INDEX"] if profile == "cpu" else ARGUMENTS
    arguments |= {name: environment[name] for name in names if environment.get(name)}
    line = ["docker", "build", "--file", dockerfile(profile, source), "--tag", tag, "--target", chosen]
    # DOCKER_DEFAULT_PLATFORM is Docker's own variable.
    line += ["--platform", environment.get("DOCKER_DEFAULT_PLATFORM") or PLATFORM]
    line += ["--label", f"{LABEL}={' '.join(backends)}", "--label", f"{PROFILE_LABEL}={profile}"]
    for name, value in arguments.items():
        line += ["--build-arg", f"{name}={value}"]
    for name, secret in (("BUILD_PIP_CONF", "pip_conf"), ("BUILD_CA", "ca")):
        if environment[name] != "/dev/null":
            line += ["--secret", f"id={secret},src={environment[name]}"]
    return [*line, "."]


def packages(backends: set[str], engines: Collection[TextEngine], profile: str, transformers: str) -> list[str]:
    """Return what to install for these backends and engines, as arguments of images/pip.sh."""
    names = ["numpy", "tokenizers"]
    if backends & ONNX:
        names += ["onnxruntime-gpu"] if profile == "cuda" else ["onnxruntime", "openvino"]
    if needs_torch(backends, engines):
        names += ["torch", "pillow", transformers]
    if "pipeline" in backends:
        names += ["--group", "media"]
    if "transformers" in backends:
        engines = [*engines, TRANSFORMERS]  # this backend may be asked to continue texts
    return [*dict.fromkeys([*names, *(package for engine in engines for package in engine.packages)])]
