"""The files of systems in the model repository: those that `make remove` deletes, and those that git shows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from export.assemble import put_in_place
from export.catalogue import RECIPES, Job, Outcome
from export.record import Record, read_record
from export.removal import removable, remove
from export.sources.source import Weights
from scripts.stack.local.stack import LocalStack
from tests.support.model_control import READY, ControlledModels
from triton_transformers.model_config import CONFIGS, DIGEST, digest_line
from triton_transformers.settings import Settings, UserError

ENSEMBLE = 'platform: "ensemble"\nensemble_scheduling {{ step [ {{ model_name: "{step}" model_version: -1 }} ] }}\n'


def written(path: Path, text: str = "max_batch_size: 8" + " " * 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def assemble(repository: Path, system: str, parts: tuple[str, ...] = ("encoder",)) -> Record:
    """Write what `make models` writes for a system: an ensemble, its parts, and the record."""
    also = tuple(f"{system}_{part}" for part in parts)
    (repository / system / "1").mkdir(parents=True)
    files = [written(repository / system / "config.pbtxt", ENSEMBLE.format(step=also[0]))]
    for model in also:
        files += [written(repository / model / name) for name in ("config.pbtxt", "1/model.onnx")]
    task = "text-classification"
    names = tuple(str(file.relative_to(repository)) for file in files)
    record = Record(system, also, task, "onnx", RECIPES[task].version, names, "tests/model", "tests/model@1")
    record.write(repository)
    for model in record.models:
        written(repository / model / ".gitignore", "*\n")
    return record


def tree(repository: Path) -> set[str]:
    return {str(path.relative_to(repository)) for path in repository.rglob("*")}


def test_removal_leaves_only_the_users_files_and_other_systems(tmp_path):
    assemble(tmp_path, "spam_v2")
    written(tmp_path / "spam_of_mine/config.pbtxt", 'backend: "python"')
    before = tree(tmp_path)
    assemble(tmp_path, "spam")
    written(tmp_path / "spam_encoder/configs/cpu.pbtxt", DIGEST)  # of `make tune`
    written(tmp_path / "spam_encoder/1/notes.txt")  # the user's own
    assert remove(removable("spam", tmp_path), tmp_path) > 200
    assert tree(tmp_path) == before | {"spam_encoder", "spam_encoder/1", "spam_encoder/1/notes.txt"}


def test_interrupted_removal_can_be_repeated(tmp_path, monkeypatch):
    assemble(tmp_path, "spam", ("encoder", "tokenizer"))
    deleted = []
    unlink = Path.unlink

    def unlink_until_interrupted(path: Path) -> None:
        if len(deleted) == 5:
            raise KeyboardInterrupt
        deleted.append(path)
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_until_interrupted)
        with pytest.raises(KeyboardInterrupt):
            remove(removable("spam", tmp_path), tmp_path)
    remove(removable("spam", tmp_path), tmp_path)
    assert tree(tmp_path) == set()


def test_removal_unloads_parts_of_a_system_that_did_not_load(tmp_path, monkeypatch):
    assemble(tmp_path / "models", "spam", ("encoder", "tokenizer"))
    paths = {"LOCAL_STATE": "state", "MODEL_REPOSITORY": "models", "REPORTS": "reports"}
    stack = LocalStack(Settings.load().replace(**{name: str(tmp_path / path) for name, path in paths.items()}))
    triton = ControlledModels()
    triton.states = {"spam_tokenizer": READY}
    monkeypatch.setattr(LocalStack, "running", lambda self: True)
    stack.__dict__["triton"] = triton
    stack.remove("spam")
    assert triton.calls == [("unload", "spam_tokenizer")]
    assert tree(tmp_path / "models") == set()


def test_removal_takes_copies_of_gits_configurations_along(tmp_path):
    """A repository elsewhere gets copies, which no record lists."""
    config = (CONFIGS / "embedding/config.pbtxt").read_text()
    for edited in (False, True):
        written(tmp_path / "embedding/config.pbtxt", config + "# mine\n" * edited)
        record = Record("embedding", (), "sentence-similarity", "onnx", "1", (), "PyPI: x", "PyPI: x")
        record.write(tmp_path)
        remove(record, tmp_path)
        assert tree(tmp_path) == ({"embedding", "embedding/config.pbtxt"} if edited else set())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("spam_encoder", "spam_encoder is a part of spam: `make remove SYSTEM=spam` removes spam and spam_encoder"),
        ("mine", "mine is your own model, which make never deletes: delete"),
        ("falcon7b", "falcon7b is not assembled in"),
        ("nonsense", "no system 'nonsense' in .*; assembled: spam"),
        ("../spam", "SYSTEM=../spam: not a valid name"),
        ("spam", "caller runs the model 'spam_encoder' of spam: remove caller first"),
    ],
)
def test_model_that_cannot_be_removed_is_refused(tmp_path, name, message):
    assemble(tmp_path, "spam")
    written(tmp_path / "mine/config.pbtxt", 'backend: "python"')
    written(tmp_path / "caller/config.pbtxt", ENSEMBLE.format(step="spam_encoder"))
    before = tree(tmp_path)
    with pytest.raises(UserError, match=message):
        removable(name, tmp_path)
    assert tree(tmp_path) == before


def test_system_behind_a_link_is_refused(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    assemble(elsewhere, "spam")
    repository = tmp_path / "models"
    repository.mkdir()
    for model in ("spam", "spam_encoder"):
        (repository / model).symlink_to(elsewhere / model)
    with pytest.raises(UserError, match=re.escape(f"is a link into {elsewhere}")):
        removable("spam", repository)
    assert (elsewhere / "spam_encoder/1/model.onnx").exists()


# --- models that git shows --------------------------------------------------------------------------------------------

CONFIG = 'backend: "packed_onnx"'


@pytest.fixture
def repository(tmp_path) -> Path:
    folder = tmp_path / "model_repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    return folder


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def shown(repository: Path) -> list[str]:
    return git(repository, "status", "--porcelain").splitlines()


def put(repository: Path, *models: str, files: tuple[str, ...] = ("config.pbtxt", "1/model.onnx")) -> None:
    made = repository.parent / "made"
    for path in (made / model / file for model in models for file in files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CONFIG)
    job = Job(models[0], "text-classification", "onnx", made, False, made)
    put_in_place(job, Weights(made, "tests/model", "tests/model@1"), Outcome(), repository)


def test_git_ignores_added_systems_and_shows_the_users_own_models(repository):
    put(repository, "spam", "spam_encoder")
    assert shown(repository) == []
    (repository / "mine").mkdir()
    (repository / "mine/config.pbtxt").write_text(CONFIG)
    assert shown(repository) == ["?? mine/"]
    record = read_record("spam", repository)
    assert record
    remove(record, repository)
    assert {path.name for path in repository.iterdir()} == {".git", "mine"}


def test_changed_configuration_of_a_committed_model_stays_visible(repository):
    put(repository, "embedding", files=("1/model.onnx",))
    config = repository / "embedding/config.pbtxt"
    assert config.is_file()
    assert not (repository / "embedding/.gitignore").exists()
    git(repository, "add", "embedding/config.pbtxt")
    git(repository, "commit", "--quiet", "-m", "models")
    config.write_text(CONFIG)
    assert " M embedding/config.pbtxt" in shown(repository)


def test_another_model_deletes_the_configuration_that_was_tuned_for_the_one_before(repository, capsys):
    put(repository, "spam", "spam_encoder")
    for model in ("spam", "spam_encoder"):
        (repository / model / "configs").mkdir()
        (repository / model / "configs/cpu.pbtxt").write_text(digest_line(repository / model))
    put(repository, "spam", "spam_encoder")
    assert len([*repository.glob("*/configs/cpu.pbtxt")]) == 2
    (repository / "spam/config.pbtxt").write_text("of another model")  # overwritten below
    (repository / "spam/configs/cpu.pbtxt").write_text(digest_line(repository / "spam"))
    put(repository, "spam", "spam_encoder")
    assert [path.parents[1].name for path in repository.glob("*/configs/cpu.pbtxt")] == ["spam_encoder"]
    assert "spam/configs/cpu.pbtxt: deleted, because `make tune` made it" in capsys.readouterr().out
