"""Records, and all else that release 0.2.0 left: its models, measurements and lists of systems.

`recorded/release_0_2_0.sh` made `recorded/release_0_2_0.zip`: mood classifies texts, story continues them.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from export.assemble import assemble_all
from export.check.served import served_system
from export.record import Record, read_record, read_records
from export.removal import removable, remove
from export.selection import all_in_place, missing_systems
from scripts.stack.systems import ServedSystems
from tests.support.served import request
from triton_transformers.settings import Settings, UserError

RECORDED = Path(__file__).with_name("recorded") / "release_0_2_0.zip"


@pytest.fixture
def older(tmp_path) -> Settings:
    with zipfile.ZipFile(RECORDED) as recorded:
        recorded.extractall(tmp_path)
    return Settings.load().replace(MODEL_REPOSITORY=str(tmp_path / "models"), SYSTEMS="mood story")


def test_record_survives_writing_and_reading(tmp_path):
    files, neuron = ("pets/1/a",), {"lengths": [32]}
    record = Record("pets", ("p",), "fill-mask", "onnx", "1", files, "a/b@1", "a/b@123", neuron, facts={"x": 0.5})
    record.write(tmp_path)
    assert read_records(tmp_path) == [record]


def test_lists_of_the_older_release_are_read(older, tmp_path):
    served = ServedSystems(tmp_path / "state")
    assert (served.read(), served.requested(), served.damaged()) == (["mood", "story"], ["mood", "story"], [])


def test_text_system_of_the_older_release_is_served_as_it_is(older, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_ENGINE_CACHE", str(tmp_path / "state/serving/engines"))
    assert all_in_place(older, ["mood"])
    recorded = json.loads((tmp_path / "mood.json").read_text())
    with served_system("mood", older.model_repository, "auto") as system:
        (answer,) = system.alone([request(recorded["texts"])])
    assert [label.decode() for label in answer["label"].ravel()] == recorded["labels"]
    np.testing.assert_allclose(answer["scores"], recorded["scores"], atol=0.01)  # perhaps on another engine


def test_language_model_of_the_older_release_is_assembled_again_from_its_weights(older, tmp_path):
    story = older.replace(SYSTEMS="story")
    with pytest.raises(UserError, match=r"story is incomplete, or of another release, .*make add SYSTEM=story SOURCE="):
        missing_systems(older, ["mood", "story"])
    assemble_all(story.replace(SOURCE=str(tmp_path / "story")))
    assert all_in_place(older, ["mood", "story"])
    record = read_record("story", older.model_repository)
    assert record and record.models == ("story", "story_stream")


def test_system_of_the_older_release_is_removed_with_all_its_files(older):
    repository = older.model_repository
    remove(removable("mood", repository), repository)
    assert sorted(path.name for path in repository.iterdir()) == ["story", "story_stream"]
