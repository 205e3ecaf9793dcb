"""Write the bill of materials of an image, in CycloneDX's JSON: its base images, packages, and Triton's binaries."""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.component_evidence import ComponentEvidence, Occurrence
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from scripts.stack.docker import preflight
from triton_transformers.files import write_atomically
from triton_transformers.settings import UserError

INVENTORY = Path(__file__).with_name("inventory.py")
# Reading an image must not give its programs anything.
SEALED = ("--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
SUBJECT = "image"


def write(folder: Path, image: str, built_on: Sequence[str]) -> Path:
    """Write the bill of materials of an image. The same image gets the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^a-z0-9._-]+', '-', image, flags=re.IGNORECASE)}.cdx.json"
    write_atomically(path, JsonV1Dot6(bill(image, built_on)).output_as_string(indent=2) + "\n")
    return path


def bill(image: str, built_on: Sequence[str]) -> Bom:
    record = inspect(image)
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"docker:{image}@{record['Id']}"))
    # The time of the image, not of this file, so that the same image gets the same file.
    bom.metadata.timestamp = datetime.fromisoformat(re.sub(r"\.\d+", "", record["Created"]))
    subject = Component(type=ComponentType.CONTAINER, name=image, version=record["Id"], bom_ref=SUBJECT)
    bom.metadata.component = subject
    bom.components.update(components(inventory(image)), map(base_image, built_on))
    bom.register_dependency(subject, bom.components)
    return bom


def inspect(image: str) -> dict[str, Any]:
    done = preflight.run("docker", "image", "inspect", image)
    if done.returncode:
        raise UserError(f"there is no image {image}: {done.stderr.strip()}")
    return json.loads(done.stdout)[0]


def inventory(image: str) -> dict[str, Any]:
    """Return what inventory.py finds in the image."""
    command = ["docker", "run", "--rm", "--interactive", *SEALED, "--entrypoint", "python3", image, "-I", "-"]
    done = subprocess.run(command, input=INVENTORY.read_text(), capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the contents of {image} could not be listed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def components(contents: dict[str, Any]) -> Iterator[Component]:
    system, version = contents["release"]["ID"], contents["release"]["VERSION_ID"]
    yield Component(
        type=ComponentType.OPERATING_SYSTEM, name=system, version=version, bom_ref=f"system:{system}@{version}"
    )
    for package in contents["debian"]:
        qualifiers = {"arch": package["architecture"], "distro": f"{system}-{version}"}
        yield library(PackageURL("deb", system, package["name"], package["version"], qualifiers))
    locations: dict[PackageURL, list[str]] = {}
    for package in contents["python"]:
        url = PackageURL("pypi", None, package["name"], package["version"])
        locations.setdefault(url, []).append(package["location"])
    yield from (library(url, places) for url, places in locations.items())
    for binary in contents["binaries"]:
        sha256 = HashType(alg=HashAlgorithm.SHA_256, content=binary["sha256"])
        yield Component(type=ComponentType.FILE, name=binary["path"], bom_ref=binary["path"], hashes=[sha256])


def library(url: PackageURL, locations: Iterable[str] = ()) -> Component:
    occurrences = [Occurrence(location=location, bom_ref=f"{url}#{location}") for location in locations]
    return Component(
        type=ComponentType.LIBRARY,
        name=url.name,
        version=url.version,
        purl=url,
        bom_ref=str(url),
        evidence=ComponentEvidence(occurrences=occurrences) if occurrences else None,
    )


def base_image(image: str) -> Component:
    """Return the component for an image that another one is built on, with its digest in the registry.

    An image that came from no registry has the digest of its configuration.
    """
    record = inspect(image)
    digests = [name.partition("@")[2] for name in record.get("RepoDigests") or []]
    digest = digests[0] if digests else record["Id"]
    return Component(
        type=ComponentType.CONTAINER,
        name=image,
        version=digest,
        bom_ref=f"base:{image}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest.partition(":")[2])],
        description="the image that this one is built on" + ("" if digests else ", which came from no registry"),
    )
