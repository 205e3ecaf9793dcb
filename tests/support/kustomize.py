"""Render deploy/kubernetes with the real kubectl, and validate objects against the schemas of Kubernetes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from triton_transformers.settings import ROOT

FOLDER = ROOT / "deploy/kubernetes"
# The oldest that is supported, the newest, and the one in between.
VERSIONS = ("1.35", "1.36", "1.37")
SCHEMAS = ROOT / ".local/kubernetes-validate"

Object = dict[str, Any]


@functools.cache
def kubectl() -> str:
    """Return a kubectl. Unpack Debian's if the machine has none."""
    return _output(ROOT / "tests/kubectl.sh", ROOT / ".local/kubectl").strip()


def render(folder: Path) -> list[Object]:
    """Return the objects of a kustomization."""
    return list(yaml.load_all(_output(kubectl(), "kustomize", folder), yaml.CSafeLoader))


def render_with(overlay: str, components: Iterable[str] = (), **fields: Any) -> list[Object]:
    """Return the objects of an overlay with components, as a user's own kustomization.yaml puts them together."""
    with tempfile.TemporaryDirectory() as folder:
        kustomization = {
            "resources": [os.path.relpath(FOLDER / "overlays" / overlay, folder)],
            "components": [os.path.relpath(FOLDER / "components" / name, folder) for name in components],
            **fields,
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return render(Path(folder))


def schema_error(content: Object, version: str) -> str:
    """Return why Kubernetes would refuse the object; empty if it would not. An unknown field is an error."""
    validator = _validator()
    try:
        validator.validate(content, version, strict=True)
    except validator.ValidationError as error:
        return f"{error.json_path}: {error.message}"
    return ""


def is_custom(content: Object) -> bool:
    """Return whether the kind is a custom resource, whose schema is not part of Kubernetes."""
    group = content["apiVersion"].rpartition("/")[0]
    return ("." in group and not group.endswith(".k8s.io")) or group == "gateway.networking.k8s.io"


def pods(objects: Iterable[Object]) -> Iterator[tuple[str, Object]]:
    """Yield the name of each workload, and the specification of its pods."""
    for content in objects:
        if template := content.get("spec", {}).get("template", {}).get("spec"):
            yield f"{content['kind']} {content['metadata']['name']}", template


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", []), *pod["containers"]]


@functools.cache
def _validator() -> Any:
    _output(ROOT / "tests/packages.sh", ROOT / "tests/kubernetes.lock", SCHEMAS)
    # Last, so that packages of uv.lock win.
    sys.path.append(str(SCHEMAS))
    import kubernetes_validate

    # It would parse all schemas of a release for each object.
    kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
    return kubernetes_validate


def _output(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
