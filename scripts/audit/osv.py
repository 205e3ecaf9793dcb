"""Look packages up in a database of OSV: the file all.zip of the ecosystem PyPI, which osv.dev publishes."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from triton_transformers.settings import UserError


def vulnerabilities(database: Path, pinned: Mapping[str, str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the name, the ids and the fixed versions for each advisory that affects a pinned package."""
    is_for_pypi = False
    for advisory in _advisories(database):
        for affected in advisory.get("affected", []):
            package = affected.get("package", {})
            if package.get("ecosystem") != "PyPI":
                continue
            is_for_pypi = True
            name = canonicalize_name(package["name"])
            if name in pinned and is_affected(pinned[name], affected):
                yield name, [advisory["id"], *advisory.get("aliases", [])], _fixes(affected)
    if not is_for_pypi:
        raise UserError(f"OSV_DATABASE={database} has no advisory for PyPI: download its all.zip again")


def _advisories(database: Path) -> Iterator[dict[str, Any]]:
    """Yield each advisory that was not withdrawn. Raise UserError if the file is not such a database."""
    try:
        with zipfile.ZipFile(database) as archive:
            for name in archive.namelist():
                if name.endswith(".json"):
                    advisory = json.loads(archive.read(name))
                    if not advisory.get("withdrawn"):
                        yield advisory
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"OSV_DATABASE={database} cannot be read ({error}): download it again") from None


def is_affected(version: str, affected: dict[str, Any]) -> bool:
    """Return whether an advisory lists the version, or has it in a range."""
    if version in affected.get("versions", []):
        return True
    try:
        return any(_is_inside(Version(version), events) for events in _ranges(affected))
    except InvalidVersion:  # older than PEP 440: a false alarm is better than silence
        return True


def _is_inside(version: Version, events: list[dict[str, str]]) -> bool:
    inside = False
    for at, kind in sorted((Version(text), kind) for event in events for kind, text in event.items()):
        if kind == "introduced" and version >= at:
            inside = True
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            inside = False
    return inside


def _fixes(affected: dict[str, Any]) -> list[str]:
    return [event["fixed"] for events in _ranges(affected) for event in events if "fixed" in event]


def _ranges(affected: dict[str, Any]) -> list[list[dict[str, str]]]:
    """Return the events of each range of versions; other ranges name commits."""
    return [entry["events"] for entry in affected.get("ranges", []) if entry["type"] == "ECOSYSTEM"]
