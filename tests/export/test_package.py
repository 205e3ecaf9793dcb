"""`make package`: the files of the zip, and equal bytes for equal models."""

from __future__ import annotations

import json
import os
import shutil
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZIP_STORED, ZipFile

import pytest

from export.package import package
from triton_transformers.settings import Settings, UserError

ENSEMBLE = """
platform: "ensemble"  # model_name: "commented"
ensemble_scheduling { step [
  { model_name: "first" model_version: -1 },
  { model_name: 'second' model_version: -1 }
] }
"""


def written(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def record(system: str, *also: str, files: tuple[str, ...] = ()) -> str:
    facts = {"system": system, "also": also, "files": files, "identity": "tests/model@1", "source": "tests/model@1"}
    return json.dumps(facts | {"task": "sentence-similarity", "format": "onnx", "recipe": "1"})


@pytest.fixture
def repository(tmp_path) -> Path:
    """Return a repository with an assembled system of two models, and an ensemble of the user's own."""
    root, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    written(root / "served/config.pbtxt", 'platform: "ensemble"')
    written(root / "served/1/assembled.json", record("served", "encoder", files=("encoder/1/model.onnx",)))
    written(root / "encoder/config.pbtxt", 'backend: "onnxruntime"')
    written(elsewhere / "model.onnx", "weights")
    (root / "encoder/1").symlink_to(elsewhere)
    written(root / "encoder/1/.cache/notes", "no")
    written(root / "encoder/1/__pycache__/model.pyc", "no")
    written(root / "encoder/.hidden", "no")
    written(root / "own/config.pbtxt", ENSEMBLE)
    (root / "own/1").mkdir()
    for name in ("first", "second"):
        written(root / name / "config.pbtxt")
        written(root / name / "1/model.py", name)
    written(root / "other/config.pbtxt")
    return root


@pytest.fixture
def pack(repository, tmp_path):
    def run(systems: str = "served") -> ZipFile:
        target = tmp_path / "out/package.zip"
        package(Settings({"MODEL_REPOSITORY": str(repository), "PACKAGE": str(target), "SYSTEMS": systems}))
        return ZipFile(target)

    return run


def test_package_holds_all_models_of_a_system_and_no_records(pack):
    with pack() as archive:
        assert archive.namelist() == [
            "model_repository/encoder/",
            "model_repository/encoder/1/",
            "model_repository/encoder/1/model.onnx",
            "model_repository/encoder/config.pbtxt",
            "model_repository/served/",
            "model_repository/served/1/",
            "model_repository/served/config.pbtxt",
        ]
        assert archive.read("model_repository/encoder/1/model.onnx") == b"weights"
        assert {entry.compress_type for entry in archive.infolist()} == {ZIP_STORED}
        assert archive.testzip() is None


def test_any_model_of_a_system_packs_the_system(pack):
    assert pack("encoder").namelist() == pack("served").namelist()


def test_own_ensemble_is_packed_with_its_steps(pack):
    names = {name.split("/")[1] for name in pack("own").namelist()}
    assert names == {"own", "first", "second"}


def test_unpacked_files_equal_the_packed_ones(pack, tmp_path):
    with pack("served own") as archive:
        archive.extractall(tmp_path / "unpacked")
    root = tmp_path / "unpacked/model_repository"
    assert (root / "served/1").is_dir()
    assert (root / "second/1/model.py").read_text() == "second"
    with pack() as archive:
        assert {entry.external_attr >> 16 & 0o777 for entry in archive.infolist()} == {0o644, 0o755}


def test_same_models_give_the_same_bytes(pack, repository, tmp_path):
    first = Path(pack().filename).read_bytes()
    (tmp_path / "out/package.zip").unlink()
    for path in repository.rglob("*"):
        path.chmod(0o700)
        os.utime(path, (1, 1))
    assert Path(pack().filename).read_bytes() == first


def test_package_is_rewritten_only_after_a_change(pack, repository):
    target = Path(pack().filename)
    newest = max(path.stat().st_ctime_ns for path in repository.rglob("*"))
    os.utime(target, ns=(newest + 20_000_000,) * 2)  # the files are older by more than a tick of the clock
    inode = target.stat().st_ino
    assert Path(pack().filename).stat().st_ino == inode
    time.sleep(0.1)  # times of files advance with the kernel's clock, in ticks of up to 10 ms
    older = written(repository / "encoder/new.onnx", "other weights")
    os.utime(older, (1, 1))
    os.replace(older, repository / "encoder/1/model.onnx")
    assert pack().read("model_repository/encoder/1/model.onnx") == b"other weights"


def test_large_file_is_packed_as_zip64(pack, repository, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    written(repository / "first/1/model.onnx", "x" * 2000)
    assert pack("first").read("model_repository/first/1/model.onnx") == b"x" * 2000


@pytest.mark.parametrize("systems", ["falcon7b", "nothing", "served nothing"])
def test_missing_system_is_named(pack, systems):
    name = systems.split()[-1]
    with pytest.raises(UserError, match=f"{name} is not assembled in .*: make models SYSTEMS={name}"):
        pack(systems)


def test_incomplete_system_is_not_packed(pack, repository, tmp_path):
    (tmp_path / "elsewhere/model.onnx").unlink()
    with pytest.raises(UserError, match="served is not assembled"):
        pack()


def test_broken_link_is_named(pack, repository):
    (repository / "own/1/model.onnx").symlink_to("/nowhere")
    with pytest.raises(UserError, match="there is no such file, or it is a link to none"):
        pack("own")


def test_full_disk_keeps_the_earlier_package(pack, repository, tmp_path, monkeypatch):
    before = Path(pack().filename).read_bytes()
    written(repository / "encoder/1/more.bin", "x" * 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=999))
    with pytest.raises(UserError, match=r"the package takes 1\.\d kB, but the disk of .* has only 999 bytes free"):
        pack()
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    monkeypatch.setattr("export.package.add", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        pack()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["package.zip"]
    assert (tmp_path / "out/package.zip").read_bytes() == before
