"""Check the limits of Oracle Cloud before anything is uploaded: the service itself reports most of them late."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile, is_zipfile

from oci.exceptions import ServiceError
from rich.filesize import decimal

from deploy.oci import requests as bodies
from deploy.oci.client import Service, list_all
from deploy.oci.container_image import Image
from deploy.oci.deployment import Deployment
from export.backends import GENERATION
from export.package import TOP
from triton_transformers.engines import TEXT_ENGINES, TRANSFORMERS, titles
from triton_transformers.settings import UserError

# Documented by Oracle.
IMAGE_BYTES = 16 * 1000**3
COMMAND_BYTES = 2048  # entrypoint and cmd together
ENVIRONMENT_BYTES = 2048
ARTIFACT_BYTES = 400 * 1000**3
DIRECT_BYTES = 2 * 1000**3  # an artifact without a bucket
REQUEST_BYTES = 10 * 1000**2
START_SECONDS = 600
READ_BYTES_PER_SECOND = 10 * 1000**2  # every shape reads at least this
# The service sets these itself.
RESERVED = ("CONTAINER_CUSTOM_IMAGE", "MODEL_DEPLOYMENT_OCID", "MODEL_SERVING_PYTHON_VERSION", "TENANCY_OCID")
NAME = re.compile(r"[A-Za-z]\w{0,29}[A-Za-z0-9]", re.ASCII)


def check(deployment: Deployment, image: Image | None, artifact: Path | None, backends: set[str]) -> None:
    """Raise for everything that exceeds a limit, at once; an image or artifact that is None is not checked."""
    problems = [*check_environment(deployment), *check_command(deployment, image)]
    problems += check_image(deployment, image, backends) if image else []
    problems += check_artifact(deployment, artifact) if artifact else []
    if problems:
        raise UserError("Oracle Cloud would not run this deployment:\n" + "\n".join(f"  {line}" for line in problems))


def check_environment(deployment: Deployment) -> Iterator[str]:
    for name in deployment.container.environment:
        if name in RESERVED:
            yield f"container.environment.{name} is reserved by Oracle: remove it"
        elif name in bodies.own_environment(deployment):
            yield f"container.environment.{name} is set by make deploy-oci: remove it"
        elif not NAME.fullmatch(name):
            yield (
                f"container.environment.{name}: a name must have 2 to 31 letters, digits and '_', begin with a letter "
                "and not end with '_'"
            )
    size = sum(len(f"{name}{value}".encode()) for name, value in bodies.environment(deployment).items())
    if size >= ENVIRONMENT_BYTES:
        yield (
            f"the container's environment has {size} bytes, and must have fewer than {ENVIRONMENT_BYTES}: shorten "
            "container.environment or models.systems"
        )


def check_command(deployment: Deployment, image: Image | None) -> Iterator[str]:
    container = deployment.container
    command = container.entrypoint + container.cmd
    origin = "container.entrypoint and container.cmd"
    if not command and image:
        command, origin = image.command, f"ENTRYPOINT and CMD of {image.name}"
    size = sum(len(word.encode()) for word in command)
    if size >= COMMAND_BYTES:
        yield f"{origin} have {size} bytes, and must have fewer than {COMMAND_BYTES}: shorten them"


def check_image(deployment: Deployment, image: Image, backends: set[str]) -> Iterator[str]:
    profile, shape = deployment.container.profile, deployment.instances.shape
    # Ampere's processors and Grace are arm64; all others are Intel's and AMD's.
    required = "arm64" if re.search(r"\.(Standard\.A|GPU\.GB)\d", shape) else "amd64"
    if image.architecture not in ("", required):
        yield (
            f"{image.name} is for {image.architecture}, and '{shape}' runs {required}: build it with "
            f"`DOCKER_DEFAULT_PLATFORM=linux/{required} make build TAG=`"
        )
    if image.profile == "cpu" and profile == "cuda":
        yield (
            f"{image.name} was built with PROFILE=cpu, and container.profile is '{profile}': build it with `make build "
            f"PROFILE={profile} TAG=`"
        )
    if image.size > IMAGE_BYTES:
        remedy = "build it with `make build TAG=`, which leaves out what SYSTEMS do not need"
        if profile == "cuda" and GENERATION in backends:
            whole = titles([engine for engine in TEXT_ENGINES if engine.image])
            form = TRANSFORMERS.formats[0]
            remedy = f"assemble generating systems with FORMAT={form}, because the image with {whole} cannot be cut"
        yield (
            f"{image.name} has {decimal(image.size)} unpacked, and must have at most {decimal(IMAGE_BYTES)}: {remedy}"
        )
    if image.backends is not None and (missing := backends - {*image.backends, "python"}):
        yield (
            f"{image.name} has no backend {', '.join(sorted(missing))}, which models.systems need: build it for them "
            "with `make build SYSTEMS= TAG=`"
        )


def check_artifact(deployment: Deployment, artifact: Path) -> Iterator[str]:
    if not is_zipfile(artifact):
        yield f"{artifact} is not a zip: write it with `make package`"
        return
    with ZipFile(artifact) as packed:
        names = set(packed.namelist())
    for system in deployment.models.systems:
        if f"{TOP}/{system}/config.pbtxt" not in names:
            yield f"{artifact} has no {TOP}/{system}/config.pbtxt: add it with `make package SYSTEMS={system}`"
    size = artifact.stat().st_size
    if size > ARTIFACT_BYTES:
        yield f"{artifact} has {decimal(size)}, and the model catalogue takes at most {decimal(ARTIFACT_BYTES)}"
    elif size > DIRECT_BYTES and not deployment.models.bucket:
        yield (
            f"{artifact} has {decimal(size)}: over {decimal(DIRECT_BYTES)} it must go through a bucket of Object "
            "Storage. Set models.bucket"
        )
    instances = deployment.instances
    if instances.flexible and size > instances.memory_gb * 2**30:
        yield f"the models have {decimal(size)}, more than instances.memory_gb = {instances.memory_gb:g} holds"


def check_shape(service: Service, deployment: Deployment) -> None:
    """Raise if the region does not have the shape, as far as the account may list them."""
    shape, compartment = deployment.instances.shape, deployment.deployment.compartment_id
    try:
        shapes = list_all(service.data_science.list_model_deployment_shapes, compartment)
        known = sorted(listed.name for listed in shapes)
    except ServiceError as error:
        if error.status != 404:
            raise
        return
    if known and shape not in known:
        raise UserError(f"instances.shape = '{shape}': must be one that {service.region} has: {', '.join(known)}")


def startup_warning(artifact: Path) -> str:
    """Return how fast a container must read its models to start in time, or an empty text if any shape can."""
    size = artifact.stat().st_size
    if size < READ_BYTES_PER_SECOND * START_SECONDS:
        return ""
    return (
        f"a container has {START_SECONDS // 60} minutes to start: it must read {decimal(size)} of models at "
        f"{decimal(size // START_SECONDS)}/s or more"
    )
