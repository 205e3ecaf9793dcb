"""What Oracle Cloud would refuse, most of it after minutes: said before anything is uploaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile, is_zipfile

from oci.exceptions import ServiceError
from rich.filesize import decimal

from deploy.oci import requests as bodies
from deploy.oci.client import Service, every
from deploy.oci.container_image import Image
from deploy.oci.deployment import Deployment
from scripts.common.settings import UserError
from scripts.models.package import TOP

# Documented, of: an image, entrypoint and cmd, the environment, an artifact, one without a bucket, a request.
IMAGE_BYTES = 16 * 1000**3
COMMAND_BYTES = 2048
ENVIRONMENT_BYTES = 2048
ARTIFACT_BYTES = 400 * 1000**3
DIRECT_BYTES = 2 * 1000**3
REQUEST_BYTES = 10 * 1000**2
START_SECONDS = 600
READ_BYTES = 10 * 1000**2  # a second: what is never too much
# The service's own, which a deployment cannot set.
RESERVED = ("CONTAINER_CUSTOM_IMAGE", "MODEL_DEPLOYMENT_OCID", "MODEL_SERVING_PYTHON_VERSION", "TENANCY_OCID")
NAME = re.compile(r"[A-Za-z]\w{0,29}[A-Za-z0-9]", re.ASCII)


def check(deployment: Deployment, image: Image | None, artifact: Path | None, backends: set[str]) -> None:
    """All that exceeds a limit, at once. Of an image or an artifact that is not here, nothing."""
    found = [*of_environment(deployment), *of_command(deployment, image)]
    found += of_image(deployment, image, backends) if image else []
    found += of_artifact(deployment, artifact) if artifact else []
    if found:
        raise UserError("Oracle Cloud would not run this deployment:\n" + "\n".join(f"  {each}" for each in found))


def of_environment(deployment: Deployment) -> Iterator[str]:
    for name in deployment.container.environment:
        if name in RESERVED:
            yield f"container.environment.{name} is Oracle's own"
        elif name in bodies.own_environment(deployment):
            yield f"container.environment.{name} is what the deployment itself sets"
        elif not NAME.fullmatch(name):
            yield (
                f"container.environment.{name}: a name has 2 to 31 letters, digits and '_', begins with a letter and "
                "does not end with '_'"
            )
    size = sum(len(f"{name}{value}".encode()) for name, value in bodies.environment(deployment).items())
    if size >= ENVIRONMENT_BYTES:
        yield (
            f"the container's environment has {size} bytes, and must have less than {ENVIRONMENT_BYTES}: shorten "
            "container.environment or models.systems"
        )


def of_command(deployment: Deployment, image: Image | None) -> Iterator[str]:
    container = deployment.container
    command = container.entrypoint + container.cmd
    of_what = "container.entrypoint and container.cmd"
    if not command and image:
        command, of_what = image.command, f"ENTRYPOINT and CMD of {image.name}"
    size = sum(len(word.encode()) for word in command)
    if size >= COMMAND_BYTES:
        yield f"{of_what} have {size} bytes, and must have less than {COMMAND_BYTES}"


def of_image(deployment: Deployment, image: Image, backends: set[str]) -> Iterator[str]:
    profile, shape = deployment.container.profile, deployment.instances.shape
    # Ampere's processors and Grace; all the others are Intel's and AMD's.
    wanted = "arm64" if re.search(r"\.(Standard\.A|GPU\.GB)\d", shape) else "amd64"
    if image.architecture not in ("", wanted):
        yield (
            f"{image.name} is for {image.architecture}, and '{shape}' runs {wanted}: build it for that, "
            f"`DOCKER_DEFAULT_PLATFORM=linux/{wanted} make build TAG=`"
        )
    if image.profile == "cpu" and profile == "cuda":
        yield (
            f"{image.name} was built with PROFILE=cpu, and container.profile is '{profile}': `make build "
            f"PROFILE={profile} TAG=`"
        )
    if image.size > IMAGE_BYTES:
        yield (
            f"{image.name} has {decimal(image.size)}, unpacked, and {decimal(IMAGE_BYTES)} is the most: "
            "`make build TAG=` leaves out what SYSTEMS do not need"
        )
    if image.backends is not None and (missing := backends - {*image.backends, "python"}):
        yield (
            f"{image.name} has no backend {', '.join(sorted(missing))}, which models.systems need: build it for them, "
            "`make build SYSTEMS= TAG=`"
        )


def of_artifact(deployment: Deployment, artifact: Path) -> Iterator[str]:
    if not is_zipfile(artifact):
        yield f"{artifact} is no zip: make package"
        return
    with ZipFile(artifact) as packed:
        names = set(packed.namelist())
    for system in deployment.models.systems:
        if f"{TOP}/{system}/config.pbtxt" not in names:
            yield f"{artifact} has no {TOP}/{system}/config.pbtxt: make package SYSTEMS={system}"
    size = artifact.stat().st_size
    if size > ARTIFACT_BYTES:
        yield f"{artifact} has {decimal(size)}, and the model catalogue takes {decimal(ARTIFACT_BYTES)} at most"
    elif size > DIRECT_BYTES and not deployment.models.bucket:
        yield (
            f"{artifact} has {decimal(size)}: over {decimal(DIRECT_BYTES)} it goes through a bucket of Object Storage, "
            "and models.bucket names none"
        )
    instances = deployment.instances
    if instances.flexible and size > instances.memory_gb * 2**30:
        yield f"the models have {decimal(size)}, and instances.memory_gb = {instances.memory_gb:g} cannot hold them"


def check_shape(service: Service, deployment: Deployment) -> None:
    """Where it may be asked which there are."""
    shape, compartment = deployment.instances.shape, deployment.deployment.compartment_id
    try:
        there = sorted(each.name for each in every(service.data_science.list_model_deployment_shapes, compartment))
    except ServiceError as error:
        if error.status != 404:
            raise
        return
    if there and shape not in there:
        raise UserError(f"instances.shape = '{shape}': {service.region} has {', '.join(there)}")


def start_up(artifact: Path) -> str:
    """How long a start takes is not to be known here; how fast it must be is. Nothing, where that is slow."""
    size = artifact.stat().st_size
    if size < READ_BYTES * START_SECONDS:
        return ""
    return (
        f"a container has {START_SECONDS // 60} minutes to start: it must read its {decimal(size)} of models at "
        f"{decimal(size // START_SECONDS)}/s or more"
    )
