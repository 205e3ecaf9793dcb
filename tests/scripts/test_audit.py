"""make audit: databases of OSV that the tests make, and the committed table of NVIDIA."""

from __future__ import annotations

import json
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.audit import __main__ as audit
from scripts.audit.__main__ import is_affected, vulnerabilities
from triton_transformers.ports import free_ports
from triton_transformers.settings import UserError, pins

KNOWN = tomllib.loads(audit.KNOWN.read_text())
TRITONS = audit.releases(pins(), audit.locked(), KNOWN)
JINJA = audit.locked()["jinja2"]


def advisory(id: str, package: str = "jinja2", ecosystem: str = "PyPI", **more: Any) -> dict[str, Any]:
    return {"id": id, "affected": [affected(package, JINJA, ecosystem)], **more}


def affected(package: str, version: str, ecosystem: str = "PyPI") -> dict[str, Any]:
    return {"package": {"ecosystem": ecosystem, "name": package}, "versions": [version]}


@pytest.fixture
def database(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a database of these advisories."""

    def write(*advisories: dict[str, Any]) -> Path:
        path = tmp_path / "all.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for number, content in enumerate(advisories):
                archive.writestr(f"{number}.json", json.dumps(content))
        return path

    return write


@pytest.mark.parametrize(
    ("version", "events", "expected"),
    [
        ("1.9", [{"introduced": "0"}, {"fixed": "1.10"}], True),
        ("1.10", [{"introduced": "0"}, {"fixed": "1.10"}], False),
        ("1.10rc1", [{"introduced": "0"}, {"fixed": "1.10"}], True),
        ("1.9", [{"introduced": "1.10"}], False),
        ("2.0", [{"introduced": "1.0"}, {"last_affected": "2.0"}], True),
        ("2.0.1", [{"introduced": "1.0"}, {"last_affected": "2.0"}], False),
        ("3.1", [{"fixed": "1.5"}, {"introduced": "3.0"}, {"introduced": "0"}], True),
        ("2.0", [{"fixed": "1.5"}, {"introduced": "3.0"}, {"introduced": "0"}], False),
        ("1.0", [{"introduced": "2004d"}], True),
    ],
)
def test_range_has_the_versions_between_its_events(version, events, expected):
    assert is_affected(version, {"ranges": [{"type": "ECOSYSTEM", "events": events}]}) is expected
    commits = {"ranges": [{"type": "GIT", "events": events}], "versions": ["1.9"]}  # commits are no versions
    assert is_affected(version, commits) is (version == "1.9")


def test_only_advisories_that_hold_for_pypi_are_found(database):
    ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "999"}]}]
    path = database(
        {"id": "PYSEC-1", "affected": [affected("Zope.Interface", JINJA) | {"ranges": ranges}]},
        advisory("PYSEC-2", "zope-interface", withdrawn="2026-01-01T00:00:00Z"),
        advisory("PYSEC-3", "zope-interface", ecosystem="npm"),
        advisory("PYSEC-4", "zope-interfaces"),
    )
    assert list(vulnerabilities(path, {"zope-interface": JINJA})) == [("zope-interface", ["PYSEC-1"], ["999"])]


def test_advisories_about_the_same_vulnerability_are_one_finding(database):
    path = database(
        advisory("PYSEC-1", aliases=["CVE-1"]), advisory("CVE-2"), advisory("GHSA-1", aliases=["CVE-1", "PYSEC-1"])
    )
    findings = audit.packages({"jinja2": JINJA}, path)
    assert [(finding.pin, finding.label, finding.ids) for finding in findings] == [
        ("jinja2", "CVE-2", {"CVE-2"}),
        ("jinja2", "CVE-1", {"CVE-1", "GHSA-1", "PYSEC-1"}),
    ]


def corrupt(path: Path) -> None:
    content = path.read_bytes()
    middle = content.index(b"affected")
    path.write_bytes(content[:middle] + b"*" + content[middle + 1 :])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (Path.unlink, "cannot be read"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-30]), "cannot be read"),
        (corrupt, "cannot be read"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "no advisory for PyPI"),
        (lambda path: zipfile.ZipFile(path, "w").writestr("1.json", "{"), "cannot be read"),
    ],
    ids=["missing", "empty file", "truncated", "corrupt", "empty", "no JSON"],
)
def test_broken_database_is_one_sentence_and_code_2(database, monkeypatch, capsys, damage, reason):
    path = database(advisory("PYSEC-1"))
    damage(path)
    monkeypatch.setenv("OSV_DATABASE", str(path))
    assert audit.main() == audit.UNKNOWN
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"OSV_DATABASE={path}" in error
    assert reason in error


def test_exit_code_is_1_if_a_vulnerability_is_not_accepted(database, monkeypatch, capsys):
    monkeypatch.setenv("OSV_DATABASE", str(database(advisory("PYSEC-1", "a-package-that-is-not-pinned"))))
    assert audit.main() == 0
    assert "PYSEC-1" not in capsys.readouterr().out
    database(advisory("PYSEC-1"))
    assert audit.main() == 1
    assert "PYSEC-1" in capsys.readouterr().out


def test_accepted_vulnerability_has_a_reason():
    finding = audit.Finding("jinja2", JINJA, "CVE-1", frozenset(["CVE-1", "PYSEC-1"]), "-")
    known = {"accepted": [{"pin": "jinja2", "ids": ["PYSEC-1"], "reason": "unused"}]}
    assert finding.accepted(known) == "unused"
    assert finding.accepted({"accepted": [known["accepted"][0] | {"pin": "other"}]}) == ""


def test_database_of_osv_is_downloaded_if_the_user_has_none(database, monkeypatch, capsys):
    path = database(advisory("PYSEC-1"))
    monkeypatch.setattr(audit, "DATABASE", path.as_uri())
    assert audit.main() == 1
    assert "PYSEC-1" in capsys.readouterr().out
    monkeypatch.setattr(audit, "DATABASE", f"http://127.0.0.1:{free_ports(1)[0]}/all.zip")
    assert audit.main() == audit.UNKNOWN
    error = capsys.readouterr().err
    assert "cannot be downloaded" in error
    assert error.endswith("download it elsewhere and set OSV_DATABASE=all.zip\n")


# --- NVIDIA's bulletins -----------------------------------------------------------------------------------------------


def test_every_bulletin_that_affects_a_pin_is_accepted_and_nothing_else():
    affecting = {(finding.pin, finding.label.split()[1].rstrip(":")) for finding in audit.bulletins(TRITONS, KNOWN)}
    tritons = [entry for entry in KNOWN["accepted"] if entry["pin"] in TRITONS]
    assert affecting == {(entry["pin"], str(id)) for entry in tritons for id in entry["ids"]}
    assert all(entry["reason"] for entry in KNOWN["accepted"])


@pytest.mark.parametrize(
    ("release", "expected"), [("26.06", ["NVIDIA 5875: 1 CVE, worst 7.5"]), ("26.07", []), ("24.11", None)]
)
def test_release_is_compared_with_the_fixes(release, expected):
    labels = [finding.label for finding in audit.bulletins({"TRITON_IMAGE": release}, KNOWN)]
    assert labels == expected if expected is not None else len(labels) == len(KNOWN["bulletins"])


def test_bulletins_begin_with_their_first_release():
    assert not any("5612" in finding.label for finding in audit.bulletins({"TRITON_IMAGE": "24.10"}, KNOWN))


def test_digest_may_follow_the_tag():
    pin = f"nvcr.io/nvidia/tritonserver:26.08-py3@sha256:{'0' * 64}"
    assert audit.releases({"TRITON_IMAGE": pin}, audit.locked(), KNOWN)["TRITON_IMAGE"] == "26.08"


def test_pin_without_a_release_is_refused():
    with pytest.raises(UserError, match=r"^TRITON_IMAGE=mirror/triton@sha256:12: the tag has no release"):
        audit.releases({"TRITON_IMAGE": "mirror/triton@sha256:12"}, audit.locked(), KNOWN)
    with pytest.raises(UserError, match=r"the release of Triton that nvidia-pytriton==9 contains"):
        audit.releases({}, {"nvidia-pytriton": "9"}, KNOWN)
