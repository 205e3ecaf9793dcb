"""Bills of materials of images: a folder stands in for the file system of an image, and a dictionary for Docker."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts.stack.docker import containers, preflight, sboms
from scripts.stack.docker.inventory import inventory
from triton_transformers.settings import UserError

LIBRARY = b"\x7fELF, a library"
DIGEST = f"sha256:{'d' * 64}"
RECORDS: dict[str, dict[str, Any]] = {
    "triton:cpu": {"Id": f"sha256:{'1' * 64}", "Created": "2026-11-23T19:36:51.123456789Z", "RepoDigests": []},
    "debian:12": {"Id": f"sha256:{'2' * 64}", "RepoDigests": [f"debian@{DIGEST}"]},
    "own:1": {"Id": f"sha256:{'3' * 64}", "RepoDigests": None},
}
STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u13
Description: GNU C Library
 Version: no field, but a line of the description
 .

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1.0
"""


def save_package(folder: Path, name: str, version: str) -> None:
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    (folder / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    files = {
        "etc/os-release": b'ID=debian\nVERSION_ID="12"\n',
        "var/lib/dpkg/status": STATUS.encode(),
        "opt/pytriton/tritonserver/lib/libtriton.so": LIBRARY,
        "opt/pytriton/tritonserver/backends/model.py": b"a program of Python",
        "opt/venv/lib/site-packages/numpy/core.so": LIBRARY,
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "opt/tritonserver").symlink_to("pytriton/tritonserver")
    (root / "opt/tritonserver/lib/libtriton.so.2").symlink_to("libtriton.so")
    save_package(root / "opt/venv/lib/site-packages", "numpy", "1.26.4")
    save_package(root / "opt/packages", "numpy", "1.26.4")
    save_package(root / "opt/packages", "torch", "2.13.0+cpu")
    save_package(root / "usr/lib/python3/dist-packages", "of_debian", "1")
    save_package(root / "proc/1/root", "not_in_the_image", "1")
    (root / "opt/venv/lib/site-packages/vendored-1.dist-info").mkdir()
    return root


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Stand in for an engine with images that hold the files of the root."""

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        record = RECORDS.get(command[-1])
        return subprocess.CompletedProcess(command, not record, json.dumps([record]), f"No such image: {command[-1]}")

    monkeypatch.setattr(preflight, "run", run)
    monkeypatch.setattr(sboms, "inventory", lambda _: inventory(root))


def test_inventory_has_packages_and_binaries(root):
    contents = inventory(root)
    assert contents["release"] == {"ID": "debian", "VERSION_ID": "12"}
    assert contents["debian"] == [{"name": "libc6", "version": "2.36-9+deb12u13", "architecture": "amd64"}]
    places = {(p["name"], p["version"], p["location"]) for p in contents["python"]}
    assert places == {
        ("numpy", "1.26.4", "/opt/venv/lib/site-packages"),
        ("numpy", "1.26.4", "/opt/packages"),
        ("torch", "2.13.0+cpu", "/opt/packages"),
    }
    digest = hashlib.sha256(LIBRARY).hexdigest()
    assert contents["binaries"] == [{"path": "/opt/pytriton/tritonserver/lib/libtriton.so", "sha256": digest}]


def test_bill_is_valid_and_lists_everything_once(engine, tmp_path):
    path = sboms.write(tmp_path / "sboms", "triton:cpu", ["debian:12", "own:1"])
    assert path.name == "triton-cpu.cdx.json"
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(path.read_text()) is None
    bill = json.loads(path.read_text())
    assert (bill["metadata"]["timestamp"], bill["metadata"]["component"]["version"]) == (
        "2026-11-23T19:36:51+00:00",
        RECORDS["triton:cpu"]["Id"],
    )
    components = {component["bom-ref"]: component for component in bill["components"]}
    assert set(components) == {
        "system:debian@12",
        "base:debian:12",
        "base:own:1",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64&distro=debian-12",
        "pkg:pypi/numpy@1.26.4",
        "pkg:pypi/torch@2.13.0%2Bcpu",
        "/opt/pytriton/tritonserver/lib/libtriton.so",
    }
    places = components["pkg:pypi/numpy@1.26.4"]["evidence"]["occurrences"]
    assert {place["location"] for place in places} == {"/opt/packages", "/opt/venv/lib/site-packages"}
    assert components["base:debian:12"]["version"] == DIGEST
    assert components["base:own:1"]["version"] == RECORDS["own:1"]["Id"]
    assert "came from no registry" in components["base:own:1"]["description"]
    (image,) = [entry for entry in bill["dependencies"] if entry["ref"] == sboms.SUBJECT]
    assert set(image["dependsOn"]) == set(components)


def test_same_image_gets_the_same_file(engine, tmp_path):
    one, two = (sboms.write(tmp_path / name, "triton:cpu", ["debian:12"]).read_bytes() for name in ("one", "two"))
    assert one == two


def test_missing_image_is_one_sentence(engine, tmp_path):
    with pytest.raises(UserError, match=r"^there is no image triton:none: No such image: triton:none$"):
        sboms.write(tmp_path, "triton:none", [])


def test_images_of_a_build_are_those_of_its_arguments():
    arguments = {"DEBIAN_IMAGE": "debian:12", "TRITON_IMAGE": "triton:1", "TORCH_INDEX": "https://torch"}
    assert containers.base_images_of("images/gateway/Dockerfile", arguments) == ["debian:12"]
    nvidia = "images/triton/Dockerfile.nvidia"
    assert containers.base_images_of(nvidia, arguments) == ["triton:1"]
    assert containers.base_images_of(nvidia, arguments | {"TRITON_MIN_IMAGE": "triton:1-min"}) == [
        "triton:1",
        "triton:1-min",
    ]


def test_only_missing_images_are_pulled(engine, monkeypatch):
    pulled: list[str] = []

    def call(command: list[str]) -> subprocess.CompletedProcess[str]:
        pulled.append(command[-1])
        return subprocess.CompletedProcess(command, command[-1] == "nowhere:1")

    monkeypatch.setattr(subprocess, "run", call)
    containers.pull(["debian:12", "prom:1"])
    assert pulled == ["prom:1"]
    with pytest.raises(UserError, match=r"^nowhere:1 cannot be pulled"):
        containers.pull(["nowhere:1"])
