"""A model from a stand-in of the Hub, served by Triton from its package. test_source.py has the Hub's errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from zipfile import ZipFile

import numpy as np
import pytest
import transformers

from tests.support.checkpoints import encoders
from tests.support.hub_stand_in import TOKEN, HubStandIn, Published, hub_stand_in
from tests.support.stacks import TestStack
from triton_transformers.corpus import MIXED

pytestmark = pytest.mark.slow

TEXTS = list(MIXED.texts[:8])


@pytest.fixture(scope="module")
def published(encoder_checkpoints) -> dict[str, Published]:
    model = encoder_checkpoints["mood"]
    return {"tests/mood": Published(model), "tests/private": Published(model, private=True)}


@pytest.fixture(scope="module")
def hub(published) -> Iterator[HubStandIn]:
    with hub_stand_in(published) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def assembled(new_stack, hub) -> TestStack:
    """Return a stack, not up, into whose repository `make models` has put the Hub's model."""
    stack = new_stack()
    stack.environment |= {"HF_ENDPOINT": hub.url, "SYSTEMS": "mood"}
    make(stack, "models", HF_MODEL="tests/mood")
    return stack


def make(stack: TestStack, target: str, **settings: object) -> str:
    done = stack.make(target, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_assembled_system_sends_the_hub_no_request(assembled, hub, published):
    record = json.loads((assembled.folder / "models/mood/1/assembled.json").read_text())
    assert record["identity"] == f"tests/mood@{published['tests/mood'].commit}"
    assert not (assembled.folder / "models/.downloads").exists()
    before = hub.requests
    assert make(assembled, "models") == make(assembled, "models", HF_MODEL="tests/mood") == "mood: in place\n"
    assert hub.requests == before


def test_private_model_needs_its_token_which_is_written_nowhere(assembled):
    printed = make(assembled, "models", SYSTEMS="mine", HF_MODEL="tests/private", HF_TOKEN=TOKEN)
    written = [path.read_bytes() for path in assembled.folder.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in [*written, printed.encode()])


def test_package_serves_the_answers_of_the_library(assembled, new_stack, published, tmp_path):
    """Serve on a stack whose repository is the unpacked package."""
    make(assembled, "package", PACKAGE=tmp_path / "mood.zip")
    with ZipFile(tmp_path / "mood.zip") as archive:
        archive.extractall(tmp_path)
    served = new_stack()
    served.environment |= {"MODEL_REPOSITORY": str(tmp_path / "model_repository"), "SYSTEMS": "mood"}
    make(served, "up")
    classify = transformers.pipeline("text-classification", str(published["tests/mood"].folder), top_k=None)
    expected = [{one["label"]: one["score"] for one in row} for row in classify(TEXTS, truncation=True)]
    scores = [[row[name] for name in encoders.MOODS] for row in expected]
    np.testing.assert_allclose(served.ask("mood", input_text=TEXTS)["scores"], scores, atol=1e-4)
