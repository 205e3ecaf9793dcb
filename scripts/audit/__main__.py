"""make audit: compare the packages of uv.lock and the pinned releases of Triton with known vulnerabilities."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import tomllib
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from rich.markup import escape

from triton_transformers.cli import err, out, print_table, run
from triton_transformers.settings import ROOT, Settings, UserError, pins

KNOWN = Path(__file__).with_name("known.toml")
LOCK = ROOT / "uv.lock"
# NVIDIA's wheel of Triton is in no such database, so known.toml has it.
DATABASE = "https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip"
# Exit code if a check could not be made.
UNKNOWN = 2


@dataclass(frozen=True)
class Finding:
    """A known vulnerability of something that is pinned, or all of one bulletin."""

    pin: str
    version: str
    label: str
    ids: frozenset[str]
    fixed: str

    def accepted(self, known: Mapping[str, Any]) -> str:
        """Return why it is accepted, or nothing."""
        entries = (entry for entry in known["accepted"] if entry["pin"] == self.pin)
        return next((entry["reason"] for entry in entries if self.ids & {*map(str, entry["ids"])}), "")


def locked(lock: Path = LOCK) -> dict[str, str]:
    """Return the version of each pinned package, by the name in its normal form."""
    packages = tomllib.loads(lock.read_text())["package"]
    return {package["name"]: package["version"] for package in packages if "registry" in package["source"]}


def releases(images: Mapping[str, str], packages: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, str]:
    """Return the release of each pinned Triton, such as 26.08. Raise UserError if a pin does not show it."""
    tritons = {}
    for name in (name for name in images if name.startswith("TRITON_")):
        match = re.search(r":(\d\d\.\d\d)(-|$)", images[name])
        if not match:
            raise UserError(f"{name}={images[name]}: the tag has no release of Triton, such as 26.08")
        tritons[name] = match[1]
    wheel = f"nvidia-pytriton=={packages['nvidia-pytriton']}"
    if wheel not in known["releases"]:
        raise UserError(f"scripts/audit/known.toml does not list the release of Triton that {wheel} contains: add it")
    return tritons | {"nvidia-pytriton": known["releases"][wheel]}


def bulletins(tritons: Mapping[str, str], known: Mapping[str, Any]) -> list[Finding]:
    """Return NVIDIA's bulletins that affect these releases of Triton. Releases compare as text: yy.mm."""
    findings = []
    for pin, release in tritons.items():
        for bulletin in known["bulletins"]:
            cves = [cve for fixed, cves in bulletin["fixed"].items() if release < fixed for cve in cves]
            if cves and release >= bulletin.get("since", ""):
                label = f"NVIDIA {bulletin['id']}: {len(cves)} CVE{'s' * (len(cves) > 1)}, worst {bulletin['worst']}"
                ids = frozenset([str(bulletin["id"]), *cves])
                findings.append(Finding(pin, release, label, ids, max(bulletin["fixed"])))
    return findings


def packages(pinned: Mapping[str, str], database: Path) -> list[Finding]:
    """Return the known vulnerabilities of the packages."""
    merged: list[Finding] = []
    for name, ids, fixed in vulnerabilities(database, pinned):
        # Several advisories describe the same vulnerability.
        same = [finding for finding in merged if finding.pin == name and finding.ids & {*ids}]
        all_ids = frozenset(ids).union(*(finding.ids for finding in same))
        merged = [finding for finding in merged if finding not in same]
        merged.append(Finding(name, pinned[name], min(all_ids), all_ids, ", ".join(fixed) or "-"))
    return merged


@contextlib.contextmanager
def osv_database(own: Path | None) -> Iterator[Path]:
    """Yield the user's database, or else the one that OSV publishes now."""
    if own:
        yield own
        return
    with NamedTemporaryFile(prefix="osv-", suffix=".zip") as file:
        try:
            with err.status("downloading OSV's database"), urllib.request.urlopen(DATABASE, timeout=60) as response:
                shutil.copyfileobj(response, file)
                file.flush()
        except (OSError, http.client.HTTPException) as error:
            raise UserError(
                f"{DATABASE} cannot be downloaded ({error}): if this machine does not reach it, download it elsewhere "
                "and set OSV_DATABASE=all.zip"
            ) from None
        yield Path(file.name)


# --- OSV's database: the file all.zip of the ecosystem PyPI -----------------------------------------------------------


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


# --- the command ------------------------------------------------------------------------------------------------------


def show(findings: list[Finding], known: Mapping[str, Any]) -> None:
    columns = ("pinned", "version", "known vulnerability", "fixed in", "accepted")
    rows = []
    reasons: dict[str, None] = {}
    for finding in findings:
        if reason := finding.accepted(known):
            reasons[f"{finding.pin}: {reason}"] = None
        accepted = "yes" if reason else "[red]no[/]"
        rows.append([finding.pin, finding.version, finding.label, finding.fixed, accepted])
    if rows:
        print_table(columns, rows, text_columns=columns)
    else:
        out.print("no known vulnerability")
    out.print(*(f"accepted: {escape(reason)}" for reason in reasons), sep="\n")


def main() -> int:
    settings = Settings.load()
    known = tomllib.loads(KNOWN.read_text())
    pinned, images = locked(), pins()
    problem = ""
    tritons = releases(images, pinned, known)
    findings = bulletins(tritons, known)
    try:
        with osv_database(settings.osv_database) as database:
            findings += packages(pinned, database)
    except UserError as error:
        problem = str(error)
    show(findings, known)
    if not problem:
        out.print("compared: the packages of uv.lock")
    out.print(f"NVIDIA's bulletins: as of {known['checked']}, in scripts/audit/known.toml")
    unknown = ", ".join(f"{name}={image}" for name, image in images.items() if name not in tritons)
    out.print(f"not compared: {unknown}, and Debian's packages in all images. An image scanner knows them")
    if problem:
        err.print(f"[red]error:[/] packages were not compared: {escape(problem)}")
    if any(not finding.accepted(known) for finding in findings):
        err.print("[red]error:[/] update what is not accepted, or add it to scripts/audit/known.toml with the reason")
        return 1
    return UNKNOWN if problem else 0


if __name__ == "__main__":
    run(main)
