"""Today's commands over what release 0.2.0 left: its models and their records, measurements and lists of systems.

`tests/export/recorded/release_0_2_0.sh` made the file: mood classifies texts, story continues them.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.stacks import TestStack, stacks
from triton_transformers.settings import ROOT

RECORDED = ROOT / "tests/export/recorded/release_0_2_0.zip"


@pytest.fixture(scope="module")
def older() -> Iterator[TestStack]:
    with stacks(lambda: TestStack(Path(tempfile.mkdtemp(prefix="stack-")))) as create:
        stack = create()
        with zipfile.ZipFile(RECORDED) as recorded:
            recorded.extractall(stack.folder)
        stack.environment |= {"SYSTEMS": "mood story", "TRITON_ENGINE": "auto", "GRAFANA_HOME": "none"}
        yield stack


def run(stack: TestStack, target: str) -> str:
    done = stack.make(target)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_systems_whose_weights_are_gone_are_named(older):
    """Language models were made otherwise in that release, from a folder that is not there any more."""
    done = older.make("up")
    assert done.returncode
    sentence = " ".join(done.stderr.split())
    assert "story is incomplete, or of another release, and must be assembled again, but its weights are no" in sentence
    assert "make add SYSTEM=story SOURCE=folder" in sentence


def test_other_models_of_the_older_release_are_served_as_they_are(older):
    before = {path: path.stat().st_mtime_ns for path in older.folder.glob("models/mood*/**/*") if path.is_file()}
    run(older, f"add SYSTEM=story SOURCE={older.folder}/story")
    assert "mood: in place" in run(older, "up")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    recorded = json.loads((older.folder / "mood.json").read_text())
    answer = older.ask("mood", input_text=recorded["texts"])
    assert answer["label"].ravel().tolist() == recorded["labels"]
    np.testing.assert_allclose(answer["scores"], recorded["scores"], atol=0.01)  # perhaps on another engine
    assert older.post("/v1/completions", model="story", prompt="It", max_tokens=8)["choices"][0]["text"]


def test_status_and_smoke_know_its_systems(older):
    for target in ("status", "smoke"):
        printed = run(older, target)
        assert "mood" in printed and "story" in printed


def test_its_system_is_removed_with_all_its_files(older):
    run(older, "remove SYSTEM=mood")
    assert sorted(path.name for path in (older.folder / "models").iterdir()) == ["story", "story_stream"]
