"""Git ignores the models that `make models` wrote, and shows the user's own and changes of the committed ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from triton_transformers.model_config import digest_line
from triton_transformers.models.assemble import put_in_place
from triton_transformers.models.catalogue import Job, Outcome
from triton_transformers.models.record import read_record
from triton_transformers.models.removal import remove
from triton_transformers.models.sources import Weights

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
